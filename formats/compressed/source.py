# SPDX-License-Identifier: Apache-2.0
"""A source of the expanded bytes of a compressed file; a read expands only the frames it touches.

* Each frame is read, compared with its digest and expanded in one step, from the same bytes in
  memory.
* A frame that a buffer covers is expanded directly into it; other reads go through a small cache.
* For bulk reads, several threads may call `read_frame_into`.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict

from ..source import Source, check_range, is_remote
from .frames import check_frame, unpack_frame
from .table import FRAME_BYTES, STORED, FrameTable, read_table

_CACHED_FRAMES = 2


class FramesSource:
    """The bytes that the frames of a file expand to. Safe to read from several threads."""

    def __init__(self, source: Source, table: FrameTable) -> None:
        self._source = source
        self.is_remote = is_remote(source)
        self.table = table
        self._starts: list[int] = []
        start = 0
        for frame in table.frames:
            self._starts.append(start)
            start += frame.raw_bytes
        self._cache: OrderedDict[int, memoryview] = OrderedDict()
        self._spare: list[memoryview] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """The number of expanded bytes."""
        return self.table.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the compressed file."""
        return self._source.size

    def frame_range(self, index: int) -> tuple[int, int]:
        """Return start and stop of the expanded bytes of a frame."""
        start = self._starts[index]
        return start, start + self.table.frames[index].raw_bytes

    def frames_of(self, start: int, stop: int) -> range:
        """Return the indices of the frames of a non-empty range of expanded bytes."""
        return range(bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1))

    def read_frame_into(self, index: int, raw: memoryview) -> None:
        """Expand a frame into `raw` (flat, writable, format B, of the size of its expanded bytes).

        The content of `raw` is undefined after an error.
        """
        frame = self.table.frames[index]
        if frame.method == STORED:
            self._source.read_into(frame.offset, raw)
            check_frame(frame, raw)
            return
        buffer = self._take()
        try:
            stored = buffer[: frame.stored_bytes]
            self._source.read_into(frame.offset, stored)
            unpack_frame(frame, stored, raw)
        finally:
            self._give(buffer)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the expanded bytes from `offset` on.

        Raises:
            TruncatedError: The range reaches past the end.
            FormatError: A frame is damaged.
        """
        check_range(self, offset, buffer.nbytes)
        while buffer.nbytes:
            index = bisect_right(self._starts, offset) - 1
            start, stop = self.frame_range(index)
            part = buffer[: stop - offset]
            if part.nbytes == stop - start:
                self.read_frame_into(index, part)
            else:
                self._copy(index, offset - start, part)
            offset += part.nbytes
            buffer = buffer[part.nbytes :]

    def _copy(self, index: int, at: int, part: memoryview) -> None:
        with self._lock:
            raw = self._cache.get(index)
            if raw is not None:
                # Under the lock, because memory that leaves the cache is reused.
                self._cache.move_to_end(index)
                part[:] = raw[at : at + part.nbytes]
                return
        raw = self._take()
        try:
            self.read_frame_into(index, raw[: self.table.frames[index].raw_bytes])
        except BaseException:
            self._give(raw)
            raise
        part[:] = raw[at : at + part.nbytes]
        self._keep(index, raw)

    def _keep(self, index: int, raw: memoryview) -> None:
        with self._lock:
            evicted = [self._cache.pop(index)] if index in self._cache else []
            self._cache[index] = raw
            if len(self._cache) > _CACHED_FRAMES:
                evicted.append(self._cache.popitem(last=False)[1])
        for memory in evicted:
            self._give(memory)

    def _take(self) -> memoryview:
        with self._lock:
            if self._spare:
                return self._spare.pop()
        largest = max((frame.raw_bytes for frame in self.table.frames), default=0)
        return memoryview(bytearray(min(FRAME_BYTES, largest)))

    def _give(self, buffer: memoryview) -> None:
        with self._lock:
            self._spare.append(buffer)


def open_frames(source: Source, *, table_from: Source | None = None) -> FramesSource:
    """Open a compressed file.

    `table_from` is a verified source of the same file, from which the table is read. The digests in
    the table then authenticate the frames, so `source` needs no other check.

    Raises:
        FormatError: The table is damaged, or this is no compressed file.
    """
    return FramesSource(source, read_table(table_from or source))
