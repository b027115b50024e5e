# SPDX-License-Identifier: Apache-2.0
"""Encrypt a plain checkpoint, or any other file, into a container."""

from __future__ import annotations

from collections.abc import Iterator

from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.container import header as container_header
from ckptmgr.crypto.keys.ring import Keys, ring_of
from ckptmgr.files.load.values import OpenCheckpoint, read_through
from ckptmgr.files.save.pipeline import container_for
from ckptmgr.formats.source import Source
from ckptmgr.io.source_image import SourceImage
from ckptmgr.maintenance.convert_target import Content

_CONTENTS = {
    "safetensors": container_header.Content.SAFETENSORS,
    "ckpt": container_header.Content.MINDSPORE_CKPT,
    OPAQUE: container_header.Content.OPAQUE,
}


def needs_container(key: Keys, mode: str) -> bool:
    """Return whether only a container has this mode, or opens with these keys."""
    return mode == "SM4-GCM" or ring_of(key).sole_key is None


def container_content(source: Source | OpenCheckpoint, *, key: Keys, mode: str) -> Content:
    """Return what goes into the container of a file.

    Args:
        source: An opened checkpoint, or any bytes.
        key: Who opens the container.
        mode: The cipher mode.

    Raises:
        ChecksumError: The CRC32 of the checkpoint is not the one it states: damage is never sealed over.
        UnsupportedSuiteError: There is no such mode.
    """
    image, format = _image_of(source)
    sealer = container_for(image, key, mode, content=_CONTENTS[format])
    return Content(image=image, format=format, mode=mode, key=key, sealer=sealer)


def container_chunks(
    source: Source | OpenCheckpoint, *, key: Keys, mode: str
) -> Iterator[memoryview]:
    """Yield the container of a file, in order; each view is valid until the next one.

    Raises:
        ChecksumError, UnsupportedSuiteError: As `container_content`.
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
    image = SourceImage(source.source, source.source.size, glimpses=source.glimpses)
    return image, source.format
