# SPDX-License-Identifier: Apache-2.0
"""A source as an image, to be written somewhere else."""

from __future__ import annotations

from ckptmgr.formats.image import Image, Segment
from ckptmgr.formats.source import Source


def image_of(source: Source, size: int, segment_bytes: int, has_crc: bool = False) -> Image:
    """Return an image whose segments are read when their turn comes."""

    def segment(start: int) -> Segment:
        length = min(segment_bytes, size - start)

        def content() -> memoryview:
            view = memoryview(bytearray(length))
            source.read_into(start, view)
            return view

        return Segment(content, 0, length)

    return Image(map(segment, range(0, size, segment_bytes)), has_crc_trailer=has_crc)
