# SPDX-License-Identifier: Apache-2.0
"""Contents of rewritten files: a source as an image, plain, as sealed records, or in a container."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.errors import ChecksumMismatch
from ckptmgr.core.names import OPAQUE
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.keys.ring import Keys, block_key, ring_of
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.files.load.bulk import read_through
from ckptmgr.files.load.container import format_in, open_container_file
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import kind_of
from ckptmgr.files.save.pipeline import container_for, stream_of, write_image
from ckptmgr.files.save.streams import CHUNK_BYTES
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.image import Image
from ckptmgr.formats.source import Source
from ckptmgr.io.digest import FileDigest, VerifyingSource
from ckptmgr.io.filesystem import OutputFile
from ckptmgr.io.source_image import SourceImage
from ckptmgr.store.manifest.codec import FileEntry, Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class NewContent:
    """Plaintext of a new file, and its encryption; `mode` is None for a plain file."""

    image: Image
    format: str
    mode: str | None = None
    key: Keys | None = None
    sealer: BlockSealer | ContainerSealer | None = None

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.image.size if self.sealer is None else self.sealer.sealed_size

    @property
    def key_id(self) -> str | None:
        """Id of the key, or None."""
        return None if self.key is None else self.key.key_id

    def write(self, file: OutputFile) -> FileDigest:
        """Write the file, and return its digests."""
        return write_image(self.image, file, sealer=self.sealer).digest

    def chunks(self) -> Iterator[memoryview]:
        """Yield the file in order, for a pipe; each view is valid until the next one.

        Raises:
            ChecksumMismatch: The CRC32 of a `.ckpt` is not the stated one; its seal is then missing.
        """
        stream = stream_of(self.image, self.sealer)
        buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(stream.chunks_from(0))]
        offset = 0
        while offset < stream.tail_start:
            count = stream.produce(offset, buffers)
            starts = range(0, count, CHUNK_BYTES)
            yield from (buffers[turn][: count - start] for turn, start in enumerate(starts))
            offset += count
        yield memoryview(stream.tail())

    def entry(self, name: str, digest: FileDigest) -> FileEntry:
        """Return the manifest's entry of the file."""
        return FileEntry(
            name=name, digest=digest, format=self.format, cipher=self.mode, key_id=self.key_id
        )


class CheckingSealer(BlockSealer):
    """Sealer that refuses a body whose CRC32 is not the one that its file states."""

    def __init__(self, opened: OpenCheckpoint, key: Keys, mode: str) -> None:
        index = opened.index
        self._stated = index.crc
        self._path = opened.path
        self.has_crc = index.crc is not None
        self.body_bytes = getattr(index, "body_bytes", opened.source.size)
        super().__init__(
            block_key(key),
            mode,
            plaintext_size=self.body_bytes,
            has_crc_trailer=self.has_crc,
        )

    def finish(self, *, crc: int | None = None) -> bytes:
        """Return the seal.

        Raises:
            ChecksumMismatch: The body has another CRC32 than the file states.
        """
        if crc != self._stated:
            raise ChecksumMismatch(
                f"the CRC32 is {crc or 0:#010x}, but the file states {self._stated or 0:#010x}",
                path=self._path,
                hint="the input is damaged; nothing was written",
            )
        return super().finish(crc=crc)


_CONTENTS = {
    "safetensors": Content.SAFETENSORS,
    "ckpt": Content.MINDSPORE_CKPT,
    OPAQUE: Content.OPAQUE,
}


def sealed_content(opened: OpenCheckpoint, *, key: Keys, mode: str) -> NewContent:
    """Return the content of the sealed file of an opened `.ckpt`.

    Raises:
        KeySourceError, DecryptionError: Such a file does not take these keys or this mode.
    """
    sealer = CheckingSealer(opened, key, mode)
    image = SourceImage(
        opened.source,
        sealer.body_bytes,
        has_crc_trailer=sealer.has_crc,
        unverified=opened.unverified,
    )
    return NewContent(image=image, format="ckpt", mode=mode, key=key, sealer=sealer)


def container_content(source: Source | OpenCheckpoint, *, key: Keys, mode: str) -> NewContent:
    """Return the content of the container of an opened checkpoint or of any bytes.

    Raises:
        ChecksumError: The CRC32 of the checkpoint is not the stated one: damage is never sealed.
        UnsupportedSuiteError: There is no such mode.
    """
    if isinstance(source, OpenCheckpoint):
        if source.index.crc is not None:
            read_through(source, check_crc=True)
        image = SourceImage(source.source, source.source.size, unverified=source.unverified)
        format = source.format
    else:
        image, format = SourceImage(source, source.size), OPAQUE
    sealer = container_for(image, key, mode, content=_CONTENTS[format])
    return NewContent(image=image, format=format, mode=mode, key=key, sealer=sealer)


def needs_container(key: Keys, mode: str) -> bool:
    """Return whether only a container takes this mode and these keys."""
    return mode == "SM4-GCM" or ring_of(key).sole_key is None


def reencrypted_content(
    raw: Source, path: Path, *, old: Keys, new: Keys, manifest: Manifest | None
) -> NewContent:
    """Return the content of an encrypted file, to be encrypted with new keys.

    Raises:
        KeyProblem, CryptoError: It does not open, or cannot have such keys.
        CorruptCheckpoint: It is damaged.
    """
    if kind_of(raw, name=path.name) is Kind.MINDSPORE_ENCRYPTED:
        options = ReadOptions(trust=Trust(keys=old))
        opened = open_source(raw, path=str(path), options=options, manifest=manifest)
        return sealed_content(opened, key=new, mode=str(opened.cipher))
    checked: Source = raw
    if manifest is not None:
        checked = VerifyingSource(raw, manifest.file.digest, path=str(path))
    container = open_container_file(raw, checked, path=str(path), key=old, mode=None)
    is_framed = container.content is Content.FRAMES
    return NewContent(
        image=SourceImage(container, container.size, window_bytes=container.block_bytes),
        format=format_in(container),
        mode=container.mode,
        key=new,
        sealer=ContainerSealer(
            ring_of(new).recipients,
            container.mode,
            plaintext_size=container.size,
            content=container.content,
            raw_size=container.unlocked.header.fixed.plaintext_size if is_framed else None,
        ),
    )
