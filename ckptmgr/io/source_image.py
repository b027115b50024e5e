# SPDX-License-Identifier: Apache-2.0
"""A source as an image to be written elsewhere, read once in windows of 4 MiB of reused memory.

Several threads make the ranges of the output in any order, and neighbours share a window. The first
thread that needs a window reads it; after its last use its memory is free for another. So the image
holds a few windows per thread, for a source of any size.

A digest covers several windows and is computed as they arrive, so damage may be found after other
bytes of its range were returned: an image must not be published before all of it was read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.formats.image import Image
from ckptmgr.formats.source import Source
from ckptmgr.io.digest import RANGE_BYTES, RangeDigests, VerifyingSource
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.io.unverified_reads import UnverifiedReads


@dataclass(slots=True)
class _Window:
    """Bytes of the source, in memory from the first use to the last.

    `unused` counts the bytes that were not released yet, and one for each digest that needs the
    window.
    """

    unused: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    buffer: memoryview | None = None
    view: memoryview | None = None


class SourceImage(Image):
    """The first `size` bytes of a source, of which at most a CRC trailer follows.

    Each byte is read once with `views`, and then given back with `release`. `window_bytes` is
    ignored if the source has digests; `unverified` reads must not cross windows.
    """

    def __init__(
        self,
        source: Source,
        size: int,
        *,
        window_bytes: int = PIECE_BYTES,
        has_crc_trailer: bool = False,
        unverified: UnverifiedReads | None = None,
    ) -> None:
        super().__init__((), has_crc_trailer=has_crc_trailer)
        self.body_size = size
        self._source = source
        self._digests: RangeDigests | None = None
        if isinstance(source, VerifyingSource) and source.range_bytes == RANGE_BYTES:
            self._digests, window_bytes = RangeDigests(source), PIECE_BYTES
        self._window_bytes = window_bytes
        self._unverified = unverified
        self._windows: dict[int, _Window] = {}
        self._lock = threading.Lock()
        self._buffers = SpareBuffers(window_bytes + source.size - size)

    def views(self, offset: int, length: int) -> Iterator[memoryview]:
        """Yield views of the bytes `[offset, offset + length)`, which are valid until `release`.

        Raises:
            CkptmgrError, FormatError, CryptoError, OSError: From the source.
        """
        for index, at, count in self._parts(offset, length):
            yield self._window(index)[at : at + count]

    def release(self, offset: int, length: int) -> None:
        """Give bytes back."""
        for index, _, count in self._parts(offset, length):
            self._used(index, count)

    def _parts(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        while length > 0:
            index, at = divmod(offset, self._window_bytes)
            count = min(length, self._window_bytes - at)
            yield index, at, count
            offset, length = offset + count, length - count

    def _window(self, index: int) -> memoryview:
        start = index * self._window_bytes
        with self._lock:
            unused = min(self._window_bytes, self.body_size - start)
            window = self._windows.setdefault(index, _Window(unused))
        with window.lock:
            if window.view is None:
                if window.buffer is None:
                    window.buffer = self._buffers.take()
                view = window.buffer[: self._end_of(index) - start]
                self._read(index, window, view)
                if self._unverified is not None:
                    self._unverified.check(index * self._window_bytes, view)
                window.view = view
            return window.view

    def _end_of(self, index: int) -> int:
        """Return the end of a window.

        The last one includes the bytes after the image, which the digests cover.
        """
        end = (index + 1) * self._window_bytes
        return end if end < self.body_size else self._source.size

    def _read(self, index: int, window: _Window, view: memoryview) -> None:
        start = index * self._window_bytes
        if self._digests is None:
            self._source.read_into(start, view)
            return
        parts = self._digests.read(start, view)
        with self._lock:
            window.unused += len(parts)
        for offset, part in parts:
            self._digests.take(offset, part, partial(self._used, index, 1))

    def _used(self, index: int, count: int) -> None:
        with self._lock:
            window = self._windows[index]
            window.unused -= count
            if window.unused:
                return
            del self._windows[index]
        if window.buffer is not None:
            self._buffers.give_back(window.buffer)
