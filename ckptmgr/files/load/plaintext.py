# SPDX-License-Identifier: Apache-2.0
"""The plaintext of a checkpoint file: its kind, and the sources that check and decrypt it.

The kind is read from unchecked bytes, because to check them would read a whole range. This is safe:
the contents are checked later, and if the kind makes no sense the checked bytes are read for the
error.

The kind must also be the one in the manifest: digests do not cover the header copies of a
container, as a change of keys rewrites them, so a plain header over the same payload is found only
by the kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptmgr.core.errors import (
    ChecksumMismatch,
    CorruptCheckpoint,
    KeyProblem,
    TamperedCheckpoint,
    TruncatedCheckpoint,
    UnprovenCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
)
from ckptmgr.core.names import CONTAINER_SUFFIX
from ckptmgr.core.trust import ACCEPT_UNENCRYPTED_HINT
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.compressed.source import FramesSource, open_frames
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.io.digest import RANGE_BYTES, VerifyingSource
from ckptmgr.io.scatter import read_checked
from ckptmgr.io.threads import HASH_STEP_BYTES, PIECE_BYTES
from ckptmgr.io.unverified_reads import UnverifiedReads
from ckptmgr.store.manifest.codec import FileEntry, Manifest

if TYPE_CHECKING:  # slow to import, and needed for containers only
    from ckptmgr.crypto.container.source import ContainerSource

ENCRYPTED = (Kind.MINDSPORE_ENCRYPTED, Kind.CKPTMGR_CONTAINER)
"""The kinds of files that need a key."""

_PLAIN = {
    "ckpt": (Kind.MINDSPORE_CKPT,),
    "safetensors": (Kind.SAFETENSORS, Kind.COMPRESSED),
}
_DAMAGED = (Kind.UNKNOWN, Kind.EMPTY, Kind.ZIP_PICKLE)
_HINT = "the file was changed or replaced after it was saved; use an older checkpoint"


def kind_of(raw: Source, *, name: str) -> Kind:
    """Return the kind of a file; of a container by name the first header copy may be damaged."""
    kind = detect(raw)
    is_named = kind in (Kind.UNKNOWN, Kind.ZIP_PICKLE) and name.endswith(CONTAINER_SUFFIX)
    return Kind.CKPTMGR_CONTAINER if is_named else kind


def check_kind(kind: Kind, manifest: Manifest | None, *, path: str) -> None:
    """Raise TamperedCheckpoint unless its manifest allows the kind of a file.

    A kind that stands for damage passes: the parser or the digests refuse the file.
    """
    if manifest is None:
        return
    entry = manifest.file
    is_container = kind is Kind.CKPTMGR_CONTAINER
    # A placeholder has the kind by the name of the file only, and digests of all its bytes.
    is_known = not manifest.is_placeholder and kind not in _DAMAGED
    if (entry.digest.blank_bytes and not is_container) or (
        is_known and kind not in _allowed(entry)
    ):
        said = entry.format if entry.cipher is None else f"{entry.format}, {entry.cipher}"
        raise TamperedCheckpoint(
            f"begins like a file of the kind {kind.value!r}, but was saved as {said}",
            path=path,
            hint=_HINT,
        )


def _allowed(entry: FileEntry) -> Sequence[Kind]:
    if entry.cipher is None:
        return _PLAIN.get(entry.format, tuple(Kind))
    if entry.format not in _PLAIN:
        return tuple(Kind)
    is_block_file = entry.format == "ckpt" and not entry.digest.blank_bytes
    return (Kind.MINDSPORE_ENCRYPTED,) if is_block_file else (Kind.CKPTMGR_CONTAINER,)


def check_mode(mode: str, manifest: Manifest | None, *, path: str) -> None:
    """Raise TamperedCheckpoint unless an encrypted file has the cipher mode in its manifest."""
    if manifest is None or manifest.is_placeholder:
        return
    if mode != manifest.file.cipher:
        raise TamperedCheckpoint(
            f"says {mode}, but was saved with {manifest.file.cipher or 'no cipher'}",
            path=path,
            hint=_HINT,
        )


_HEAD_BYTES = 16
_READABLE = (
    Kind.MINDSPORE_CKPT,
    Kind.SAFETENSORS,
    Kind.MINDSPORE_ENCRYPTED,
    Kind.CKPTMGR_CONTAINER,
    Kind.COMPRESSED,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plaintext:
    """The plaintext of a file.

    Attributes:
        source: Its bytes, checked.
        cipher: The cipher mode, or None for a plain file.
        is_sealed: Whether the file as a whole is authenticated.
        unit_bytes: The number of bytes that the source checks at once; 0 if it is read tensor by
            tensor, or frame by frame.
        unverified: Reads it unchecked, for small reads of an index.
        format: The format in an authenticated header, or None.
    """

    source: Source
    cipher: str | None = None
    is_sealed: bool = False
    unit_bytes: int = PIECE_BYTES
    unverified: UnverifiedReads | None = None
    format: str | None = None


def refuse_unsigned(manifest: Manifest | None, *, path: str, options: ReadOptions) -> None:
    """Raise UnprovenCheckpoint if a signature is required, and none covers the file."""
    is_signed = manifest is not None and manifest.signed_by is not None
    if options.trust.needs_signature and not is_signed:
        raise UnprovenCheckpoint(
            "public keys to trust were given, but there is no manifest that one of them has signed",
            path=path,
            hint=options.trust.accept_hint,
        )


def plaintext_of(
    raw: Source, *, path: str, options: ReadOptions, manifest: Manifest | None
) -> Plaintext:
    """Return the plaintext of a file; check every byte that is read against the manifest.

    Raises:
        CkptmgrError, CryptoError: It cannot be read, or not with these options.
    """
    refuse_unsigned(manifest, path=path, options=options)
    if manifest is None:
        plain = Plaintext(source=raw)
    else:
        checked = VerifyingSource(raw, manifest.file.digest, path=path)
        plain = Plaintext(source=checked, unit_bytes=0)
        if manifest.file.digest.range_bytes == RANGE_BYTES:
            unverified = UnverifiedReads(
                raw.size, raw.read_into, piece_bytes=HASH_STEP_BYTES, path=path
            )
            plain = Plaintext(source=checked, unit_bytes=RANGE_BYTES, unverified=unverified)
    kind = kind_of(raw, name=path)
    if kind is not Kind.CKPTMGR_CONTAINER:
        kind = detect(plain.unverified or plain.source)
    if kind not in _READABLE:
        kind = detect(plain.source)  # another kind, or damage, which the checked bytes show
    check_kind(kind, manifest, path=path)
    if kind is Kind.MINDSPORE_ENCRYPTED:
        return _open_encrypted(raw, plain.source, path=path, options=options)
    if kind is Kind.CKPTMGR_CONTAINER:
        return _open_container(raw, plain.source, path=path, options=options)
    _refuse_unreadable(kind, path)
    if options.trust.needs_encryption:
        raise UnsealedCheckpoint(
            "a key was given, but the file is not encrypted, so nothing proves who wrote it",
            path=path,
            hint=ACCEPT_UNENCRYPTED_HINT,
        )
    if kind is Kind.COMPRESSED:
        # The table is checked against the manifest, and its digests check each frame that is read.
        return Plaintext(source=open_frames(raw, table_from=plain.source), unit_bytes=0)
    return plain


def _open_container(raw: Source, checked: Source, *, path: str, options: ReadOptions) -> Plaintext:
    from ckptmgr.crypto.container.header import Content
    from ckptmgr.files.load.container import format_in, open_container_file, unit_of

    container = open_container_file(
        raw, checked, path=path, key=options.trust.keys, mode=options.mode
    )
    if container.content is Content.FRAMES:
        frames = _frames_in(container, path)
        return Plaintext(source=frames, cipher=container.mode, is_sealed=True, unit_bytes=0)
    return Plaintext(
        source=container,
        cipher=container.mode,
        is_sealed=True,
        unit_bytes=unit_of(container),
        format=format_in(container),
    )


def _frames_in(container: ContainerSource, path: str) -> FramesSource:
    frames = open_frames(container)
    stated = container.unlocked.header.fixed.plaintext_size
    if frames.size != stated:
        raise CorruptCheckpoint(
            f"the frames expand to {frames.size} bytes, the header says {stated}", path=path
        )
    return frames


def _open_encrypted(raw: Source, checked: Source, *, path: str, options: ReadOptions) -> Plaintext:
    from ckptmgr.crypto.mindspore.blocks import open_blocks_with, sniff_mode

    mode = sniff_mode(read_bytes(raw, 0, min(_HEAD_BYTES, raw.size)))
    if options.trust.keys is None:
        raise KeyProblem(
            f"the file is encrypted ({mode}); a key is needed",
            path=path,
            hint="pass a key: enc_key of CheckpointConfig, dec_key of a load, --key of a command",
        )
    wanted = options.mode or str(mode)
    try:
        blocks = open_blocks_with(
            raw, options.trust.keys, wanted, allow_unsealed=options.trust.accepts_unsealed
        )
    except CryptoError:
        read_bytes(checked, 0, min(_HEAD_BYTES, raw.size))  # raises if the mode was changed
        raise
    if blocks.block_bytes is None:
        # Without a seal there are only the digests, which are checked below the decryption.
        blocks = open_blocks_with(checked, options.trust.keys, wanted, allow_unsealed=True)
        return Plaintext(source=blocks, cipher=mode, unit_bytes=0)
    # The seal authenticates every block. The manifest must be of the same save: its digests of the
    # end of the file must match the seal in use, not the bytes of a second read, which could
    # differ.
    seal = read_checked(checked, blocks.seal_offset, checked.size - blocks.seal_offset)
    if not blocks.is_sealed_by(seal):
        raise ChecksumMismatch("the file changed while it was being read", path=path)
    unit_bytes = PIECE_BYTES // blocks.block_bytes * blocks.block_bytes
    return Plaintext(
        source=blocks,
        cipher=mode,
        is_sealed=True,
        unit_bytes=unit_bytes,
        unverified=UnverifiedReads(blocks.size, blocks.peek_into, piece_bytes=unit_bytes, path=path)
        if unit_bytes
        else None,
    )


def _refuse_unreadable(kind: Kind, path: str) -> None:
    if kind is Kind.ZIP_PICKLE:
        raise UnsupportedCheckpoint(
            "this is a torch.save file (zip with pickled code), which is never loaded here",
            path=path,
            hint="convert it with torch.load(weights_only=True) and ckptmgr.save_checkpoint",
        )
    if kind is Kind.EMPTY:
        raise TruncatedCheckpoint("the file is empty", path=path, offset=0)
