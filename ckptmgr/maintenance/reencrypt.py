# SPDX-License-Identifier: Apache-2.0
"""Encrypt files anew, under a new data key, as a stream: constant memory, no plaintext on the disk, swapped like a save.

At every instant the file is the old or the new one, and its manifest can be checked by the old and the new keys until the new
one is durable. Whoever opened the old file and kept its data key has nothing of the new one. Compressed frames stay as they
are. For the files of many ranks see `reencrypt_set`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.keys.ring import KeyRing, Keys, block_key
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.files.load.container import format_in, kind_of, open_container_file
from ckptmgr.files.load.values import ReadOptions, open_source
from ckptmgr.files.save.pipeline import write_image
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.image import Image
from ckptmgr.formats.source import Source
from ckptmgr.io.digest import FileDigest, VerifyingSource
from ckptmgr.io.filesystem import OutputFile
from ckptmgr.io.source_image import SourceImage
from ckptmgr.maintenance.encrypt import CheckingSealer
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.keys import ManifestKey
from ckptmgr.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """What is written instead of a file.

    Attributes:
        image: The same content, read from the old file as it is written.
        sealer: Made for it.
        format: `ckpt` or `safetensors`.
        mode: The cipher mode.
    """

    image: Image
    sealer: BlockSealer | ContainerSealer
    format: str
    mode: str

    def write(self, file: OutputFile) -> FileDigest:
        """Write it into a new file, and return the digests of that."""
        return write_image(self.image, file, sealer=self.sealer).digest

    def entry(self, name: str, digest: FileDigest, *, new: KeyRing) -> FileEntry:
        """Return what a manifest says of the new file."""
        return FileEntry(
            name=name, digest=digest, format=self.format, cipher=self.mode, key_id=new.key_id
        )


def reencrypt_file(
    store: Store,
    checkpoint: Checkpoint,
    *,
    old: Keys,
    new: KeyRing,
    manifest: Manifest | None,
    auth: Callable[[ManifestKey | None], ManifestKey],
) -> None:
    """Replace an encrypted file by one with the same content and another data key, durably; the lease must be held.

    Args:
        store: Reads what old and new keys authenticate.
        checkpoint: Of one file.
        old: Opens it.
        new: Who opens it then.
        manifest: That of the file, or None; what is no checkpoint does not get one.
        auth: Given what authenticates the manifest, returns what old and new keys can check.

    Raises:
        KeyProblem: It does not open, or cannot have such keys.
        CorruptCheckpoint: It is damaged; nothing was changed.
        StoreFull, OSError: From the disk; the old file is intact, or the new one is there.
    """
    path = checkpoint.path
    with (
        translated_errors(str(path)),
        contextlib.closing(store.fs.open(path)) as raw,
    ):
        sealing = sealing_anew(raw, path, old=old, new=new, manifest=manifest)
        mode = mode_of(store, path.name) or 0o400
        if sealing.format == OPAQUE and manifest is None:
            store.place(
                path.name,
                size_bytes=sealing.sealer.sealed_size,
                write=sealing.write,
                mode=mode,
            )
            return
        draft = _draft(checkpoint, manifest, sealing, new)
        key = auth(None if manifest is None else manifest.auth)

        def describe(digest: FileDigest) -> Manifest:
            return replace(draft, file=replace(draft.file, digest=digest), auth=key)

        store.publish(
            path.name,
            series=draft.series,
            size_bytes=sealing.sealer.sealed_size,
            write=sealing.write,
            describe=describe,
            mode=mode,
            manifest_mode=mode_of(store, manifest_name(path.name)),
        )


def mode_of(store: Store, name: str) -> int | None:
    """Return the permission bits of a file, or None where there is none."""
    status = store.fs.status(store.directory / name)
    return None if status is None else status.mode


def sealing_anew(
    raw: Source, path: Path, *, old: Keys, new: KeyRing, manifest: Manifest | None
) -> Sealing:
    """Return what is written instead of an encrypted file; arguments and errors as of `reencrypt_file`."""
    if kind_of(raw, name=path.name) is Kind.MINDSPORE_ENCRYPTED:
        options = ReadOptions(trust=Trust(keys=old))
        opened = open_source(raw, path=str(path), options=options, manifest=manifest)
        mode = str(opened.cipher)
        blocks = CheckingSealer(opened, block_key(new), mode)
        image = SourceImage(opened.source, blocks.body_bytes, has_crc_trailer=blocks.has_crc)
        return Sealing(image=image, sealer=blocks, format="ckpt", mode=mode)
    checked: Source = raw
    if manifest is not None:
        checked = VerifyingSource(raw, manifest.file.digest, path=str(path))
    container = open_container_file(raw, checked, path=str(path), key=old, mode=None)
    is_framed = container.content is Content.FRAMES
    sealer = ContainerSealer(
        new.recipients,
        container.mode,
        plaintext_size=container.size,
        content=container.content,
        raw_size=container.unlocked.header.fixed.plaintext_size if is_framed else None,
    )
    image = SourceImage(container, container.size, window_bytes=container.block_bytes)
    return Sealing(image=image, sealer=sealer, format=format_in(container), mode=container.mode)


def _draft(
    checkpoint: Checkpoint, manifest: Manifest | None, sealing: Sealing, new: KeyRing
) -> Manifest:
    """Return the manifest of the new file but for its digest: the same save, with other keys."""
    entry = sealing.entry(checkpoint.path.name, FileDigest(size_bytes=0, ranges=()), new=new)
    if manifest is not None:
        return replace(manifest, file=entry, replaces=None)
    return Manifest(
        file=entry,
        series=checkpoint.series,
        run_id="",
        step=max(checkpoint.step, 0),
        epoch=checkpoint.epoch,
        sequence=0,
        saved_at=checkpoint.saved_at,
        why=checkpoint.why,
    )
