# SPDX-License-Identifier: Apache-2.0
"""Encrypt a plain `.ckpt` into sealed records that MindSpore loads; any file into a container."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptmgr.core.errors import ChecksumMismatch
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.container import header as container_header
from ckptmgr.crypto.keys.ring import Keys, block_key, ring_of
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.files.load.bulk import read_through
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.files.save.pipeline import container_for
from ckptmgr.formats.file_crc import crc32
from ckptmgr.formats.source import Source
from ckptmgr.io.source_image import SourceImage
from ckptmgr.maintenance.convert_target import ConversionOutput


def sealed_content(opened: OpenCheckpoint, *, key: Keys, mode: str) -> ConversionOutput:
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
    return ConversionOutput(image=image, format="ckpt", mode=mode, key=key, sealer=sealer)


def sealed_chunks(opened: OpenCheckpoint, *, key: Keys, mode: str) -> Iterator[memoryview]:
    """Yield the sealed file of an opened `.ckpt`, in order; each view is valid until the next one.

    Raises:
        ChecksumMismatch: Its CRC32 is not the stated one; the seal is then missing.
    """
    sealer = CheckingSealer(opened, key, mode)
    crc = 0
    room = memoryview(bytearray(sealer.batch * sealer.largest_record))
    clear = memoryview(bytearray(room.nbytes))
    for first in range(0, sealer.block_count, sealer.batch):
        blocks = range(first, min(first + sealer.batch, sealer.block_count))
        plaintext = _joined(clear, map(sealer.plaintext_range, blocks))
        records = _joined(room, map(sealer.record_range, blocks))
        opened.source.read_into(sealer.plaintext_range(first)[0], plaintext.whole)
        crc = crc32(plaintext.whole, crc)
        sealer.seal_many(first, plaintext.parts, records.parts)
        yield records.whole
    yield memoryview(sealer.finish(crc=crc if sealer.has_crc else None))


class _Joined(NamedTuple):
    """Neighbouring pieces of one buffer, and all of them as one view."""

    whole: memoryview
    parts: list[memoryview]


def _joined(room: memoryview, ranges: Iterable[tuple[int, int]]) -> _Joined:
    parts, end = [], 0
    for _, length in ranges:
        parts.append(room[end : end + length])
        end += length
    return _Joined(room[:end], parts)


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

    @property
    def largest_record(self) -> int:
        """Bytes of the largest record; 0 where there is none."""
        return self.record_range(0)[1] if self.block_count else 0

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
    "safetensors": container_header.Content.SAFETENSORS,
    "ckpt": container_header.Content.MINDSPORE_CKPT,
    OPAQUE: container_header.Content.OPAQUE,
}


def needs_container(key: Keys, mode: str) -> bool:
    """Return whether only a container takes this mode and these keys."""
    return mode == "SM4-GCM" or ring_of(key).sole_key is None


def container_content(source: Source | OpenCheckpoint, *, key: Keys, mode: str) -> ConversionOutput:
    """Return the content of the container of an opened checkpoint or of any bytes.

    Raises:
        ChecksumError: The CRC32 of the checkpoint is not the stated one: damage is never sealed.
        UnsupportedSuiteError: There is no such mode.
    """
    image, format = _image_of(source)
    sealer = container_for(image, key, mode, content=_CONTENTS[format])
    return ConversionOutput(image=image, format=format, mode=mode, key=key, sealer=sealer)


def container_chunks(
    source: Source | OpenCheckpoint, *, key: Keys, mode: str
) -> Iterator[memoryview]:
    """Yield the container of a file, in order; each view is valid until the next one.

    Raises as `container_content`.
    """
    image, format = _image_of(source)
    sealer = container_for(image, key, mode, content=_CONTENTS[format])
    plain = source.source if isinstance(source, OpenCheckpoint) else source
    yield memoryview(sealer.head)
    clear = memoryview(bytearray(sealer.plaintext_range(0)[1]))
    room = memoryview(bytearray(sealer.record_range(0)[1]))
    for index in range(sealer.block_count):
        start, size = sealer.plaintext_range(index)
        segment = room[: sealer.record_range(index)[1]]
        plain.read_into(start, clear[:size])
        sealer.seal_into(index, clear[:size], segment)
        yield segment
    sealer.finish()


def _image_of(source: Source | OpenCheckpoint) -> tuple[SourceImage, str]:
    if not isinstance(source, OpenCheckpoint):
        return SourceImage(source, source.size), OPAQUE
    if source.index.crc is not None:
        read_through(source, check_crc=True)
    image = SourceImage(source.source, source.source.size, unverified=source.unverified)
    return image, source.format
