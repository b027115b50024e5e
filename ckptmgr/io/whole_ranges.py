# SPDX-License-Identifier: Apache-2.0
"""A source of high latency of which whole digest ranges are read, and the last ones kept.

A digest needs all of its range. Read at once, in several requests, it takes one round trip; step by
step it would take eight, and again as many for the next tensor in it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ckptmgr.crypto.buffers import new_pages
from ckptmgr.formats.source import Source
from ckptmgr.io.buffers import copy_into

_KEPT = 5
"""One for each thread of a load, and one more, so that none loses its range half-way."""


@dataclass(slots=True)
class _Range:
    lock: threading.Lock = field(default_factory=threading.Lock)
    data: memoryview | None = None


class WholeRanges:
    """A source over another one. Safe to use from several threads."""

    is_remote = True

    def __init__(self, source: Source, range_bytes: int) -> None:
        self._source = source
        self._range_bytes = range_bytes
        self._lock = threading.Lock()
        self._ranges: dict[int, _Range] = {}
        self.size = source.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on; raises as the source."""
        while buffer.nbytes:
            index, skip = divmod(offset, self._range_bytes)
            part = self._range(index)[skip : skip + buffer.nbytes]
            copy_into(buffer[: part.nbytes], part)
            offset += part.nbytes
            buffer = buffer[part.nbytes :]

    def _range(self, index: int) -> memoryview:
        with self._lock:
            one = self._ranges.pop(index, None) or _Range()
            self._ranges[index] = one
            if len(self._ranges) > _KEPT:
                del self._ranges[next(iter(self._ranges))]
        with one.lock:
            if one.data is None:
                start = index * self._range_bytes
                data = new_pages(min(self._range_bytes, self.size - start))
                self._source.read_into(start, data)
                one.data = data
            return one.data
