# SPDX-License-Identifier: Apache-2.0
"""Digests of ranges whose pieces arrive in any order, from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptmgr.digest import RANGE_BYTES, RangeReader, VerifyingSource


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

    def is_next(self, offset: int) -> bool:
        """Return whether a piece that starts here would be hashed at once."""
        return self._range(offset // RANGE_BYTES).next == offset

    def take(self, offset: int, view: memoryview, done: Callable[[], object]) -> None:
        """Take a piece of one range; call `done` when it was hashed.

        Raises:
            ChecksumMismatch: With this piece a range is complete, and is not what its digest says.
        """
        index = offset // RANGE_BYTES
        found = self._range(index)
        stop = min((index + 1) * RANGE_BYTES, self._source.size)
        if found.take(offset, view, done) == stop:
            with self._lock:
                del self._ranges[index]
            found.reader.finish()
            with self._lock:
                self.checked_count += 1

    def _range(self, index: int) -> _Range:
        with self._lock:
            found = self._ranges.get(index)
            if found is None:
                reader = self._source.open_range(index)
                found = self._ranges[index] = _Range(reader, index * RANGE_BYTES)
            return found


class _Range:
    def __init__(self, reader: RangeReader, start: int) -> None:
        self.reader = reader
        self.next = start
        self._early: dict[int, tuple[memoryview, Callable[[], object]]] = {}
        self._lock = threading.Lock()

    def take(self, offset: int, view: memoryview, done: Callable[[], object]) -> int:
        """Hash what is next, if it has come; return where that ends."""
        with self._lock:
            self._early[offset] = (view, done)
            while self.next in self._early:
                view, done = self._early.pop(self.next)
                self.reader.take(view)
                self.next += view.nbytes
                done()
            return self.next
