# SPDX-License-Identifier: Apache-2.0
"""Digests of ranges whose pieces arrive in any order, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptmgr.io.digest import RANGE_BYTES, RangeReader, VerifyingSource


class RangeDigests:
    """Hashes ranges of a source, and checks each when it is complete.

    Attributes:
        checked_count: How many ranges were complete and right.
    """

    def __init__(self, source: VerifyingSource) -> None:
        self._source = source
        self._ranges: dict[int, _Range] = {}
        self._lock = threading.Lock()
        self.checked_count = 0

    def read(self, offset: int, view: memoryview) -> list[tuple[int, memoryview]]:
        """Fill `view` with unchecked bytes; return the pieces in which to hand it to `take`."""
        self._source.read_unchecked(offset, view)
        return self.pieces(offset, view)

    def pieces(self, offset: int, view: memoryview) -> list[tuple[int, memoryview]]:
        """Cut bytes, at most a range of them, at the end of the range in which they start."""
        room = RANGE_BYTES - offset % RANGE_BYTES
        pieces = [(offset, view[:room]), (offset + room, view[room:])]
        return [piece for piece in pieces if piece[1].nbytes]

    def next_in(self, index: int) -> int:
        """Return where the piece of a range starts that would be hashed at once."""
        return self._range(index).next

    def take(self, offset: int, view: memoryview, done: Callable[[], object]) -> None:
        """Take a piece of one range; call `done` when it was hashed, or found to have been hashed before.

        Raises:
            ChecksumMismatch: With this piece a range is complete, and is not what its digest says.
        """
        found = self._range(offset // RANGE_BYTES)
        if found.take(offset, view, done):
            found.reader.finish()
            with self._lock:
                self.checked_count += 1

    def _range(self, index: int) -> _Range:
        with self._lock:
            found = self._ranges.get(index)
            if found is None:
                reader = self._source.open_range(index)
                start = index * RANGE_BYTES
                stop = min(start + RANGE_BYTES, self._source.size)
                found = self._ranges[index] = _Range(reader, start, stop)
            return found


class _Range:
    def __init__(self, reader: RangeReader, start: int, stop: int) -> None:
        self.reader = reader
        self.next = start
        self._stop = stop
        self._early: dict[int, tuple[memoryview, Callable[[], object]]] = {}
        self._lock = threading.Lock()

    def take(self, offset: int, view: memoryview, done: Callable[[], object]) -> bool:
        """Hash what is next, if it has come; return whether that completes the range."""
        with self._lock:
            if offset < self.next:
                done()
                return False
            self._early[offset] = (view, done)
            while self.next in self._early:
                view, done = self._early.pop(self.next)
                self.reader.take(view)
                self.next += view.nbytes
                done()
            return self.next == self._stop
