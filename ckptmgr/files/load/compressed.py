# SPDX-License-Identifier: Apache-2.0
"""Read a compressed file into many arrays: frames in parallel, into the arrays if possible."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ckptmgr.formats.compressed.source import FramesSource
from ckptmgr.formats.file_crc import FileCrc
from ckptmgr.io.buffers import copy_into
from ckptmgr.io.scatter import Placement
from ckptmgr.io.threads import for_each_unit


def read_frames(
    source: FramesSource, placements: Sequence[Placement], *, crc: FileCrc | None = None
) -> None:
    """Fill the targets of placements in ascending order; pass `crc` every byte that it covers.

    Raises:
        CkptmgrError, FormatError, CryptoError, OSError: From the source; targets are then
            undefined.
    """
    _Reader(source, placements, crc).run()


def check_frames(source: FramesSource, *, crc: FileCrc | None = None) -> None:
    """Read and expand everything to have it checked; `crc` gets every byte."""
    units = range(len(source.table.frames))
    for_each_unit(units, _Reader(source, (), crc).read, has_latency=source.is_remote)


class _Reader:
    def __init__(
        self, source: FramesSource, placements: Sequence[Placement], crc: FileCrc | None
    ) -> None:
        self._source = source
        self._crc = crc
        self._placements = [one for one in placements if one.target.nbytes]
        self._starts = [one.offset for one in self._placements]
        self._stops = [one.stop for one in self._placements]

    def run(self) -> None:
        wanted: set[int] = set()
        if self._crc is not None and self._crc.stop:
            wanted.update(self._source.frames_of(0, self._crc.stop))
        for start, stop in zip(self._starts, self._stops, strict=True):
            wanted.update(self._source.frames_of(start, stop))
        for_each_unit(sorted(wanted), self.read, has_latency=self._source.is_remote)

    def read(self, index: int, buffer: memoryview) -> None:
        start, stop = self._source.frame_range(index)
        first = bisect_right(self._stops, start)
        parts = self._placements[first : bisect_left(self._starts, stop, lo=first)]
        if len(parts) == 1 and parts[0].offset <= start and stop <= parts[0].stop:
            at = start - parts[0].offset  # all of it is part of one array: no copy
            self._expand(index, start, parts[0].target[at : at + stop - start])
            return
        raw = buffer[: stop - start]
        self._expand(index, start, raw)
        for part in parts:
            low, high = max(start, part.offset), min(stop, part.stop)
            target = part.target[low - part.offset : high - part.offset]
            copy_into(target, raw[low - start : high - start])

    def _expand(self, index: int, start: int, view: memoryview) -> None:
        self._source.read_frame_into(index, view)
        if self._crc is not None:
            self._crc.add(start, view)
