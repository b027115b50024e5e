# SPDX-License-Identifier: Apache-2.0
"""Encrypt a plain safetensors file into a container."""

from __future__ import annotations

from collections.abc import Iterator

from ckptmgr.convert_target import Content
from ckptmgr.crypto.keyring import Keys
from ckptmgr.formats import safetensors_file
from ckptmgr.formats.image import Image
from ckptmgr.formats.index import check_crc
from ckptmgr.formats.safetensors_file import SafetensorsIndex
from ckptmgr.glimpses import Glimpses
from ckptmgr.loader import OpenCheckpoint
from ckptmgr.pipeline import container_for
from ckptmgr.source_image import SourceImage


def container_content(opened: OpenCheckpoint, *, key: Keys, mode: str) -> Content:
    """Return what goes into the container of an opened safetensors file.

    Raises:
        ChecksumError: Its CRC32 is not the one it states: damage is never sealed over.
        UnsupportedSuiteError: There is no such mode.
    """
    image = _checked_image(opened, opened.glimpses)
    sealer = container_for(image, key, mode)
    return Content(image=image, format="safetensors", mode=mode, key=key, sealer=sealer)


def container_chunks(opened: OpenCheckpoint, *, key: Keys, mode: str) -> Iterator[memoryview]:
    """Yield the container of an opened safetensors file, in order; each view is valid until the next one.

    Raises:
        ChecksumError, UnsupportedSuiteError: As `container_content`.
    """
    sealer = container_for(_checked_image(opened), key, mode)
    yield memoryview(sealer.head)
    clear = memoryview(bytearray(sealer.plaintext_range(0)[1]))
    room = memoryview(bytearray(sealer.record_range(0)[1]))
    for index in range(sealer.block_count):
        start, size = sealer.plaintext_range(index)
        segment = room[: sealer.record_range(index)[1]]
        opened.source.read_into(start, clear[:size])
        sealer.seal_into(index, clear[:size], segment)
        yield segment
    sealer.finish()


def _checked_image(opened: OpenCheckpoint, glimpses: Glimpses | None = None) -> Image:
    index = opened.index
    if isinstance(index, SafetensorsIndex) and index.crc is not None:
        check_crc(index.crc, safetensors_file.crc_of(opened.source, index))
    return SourceImage(opened.source, opened.source.size, glimpses=glimpses)
