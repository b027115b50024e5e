# SPDX-License-Identifier: Apache-2.0
"""Page-aligned buffers that are reused, and copies that do not hold the GIL.

Touching a fresh page costs more than encrypting it, and direct I/O needs aligned memory. So all
saves and loads of the process share a few buffers, which are made once.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Iterator

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.forks import reset_in_child
from ckptmgr.crypto.buffers import new_pages

GIL_FREE_COPY_BYTES = 1 << 16


class _Place:
    """Room for one buffer that is not made yet; one that is lost returns to its pool."""

    __slots__ = ("_free", "is_filled")

    def __init__(self, free: weakref.ref[_Free]) -> None:
        self._free = free
        self.is_filled = False

    def __del__(self) -> None:
        free = self._free()
        if free is not None and not self.is_filled:
            free.put(_Place(self._free))


_Free = queue.SimpleQueue["memoryview | _Place"]


class BufferPool:
    """At most `count` buffers of `size_bytes`, made when first needed.

    `take` waits until a buffer is free: a thread that has one must not wait for another of the same
    pool. Ctrl-C may come between the taking of a buffer and the block that gives it back: one that
    nothing refers to any more returns by itself, or the saves after it would wait for ever.
    """

    def __init__(self, count: int, size_bytes: int) -> None:
        self._count = count
        self._size_bytes = size_bytes
        self.forget_parent()
        _all.add(self)
        reset_in_child(self)

    def forget_parent(self) -> None:
        """Make all buffers again: in a forked child no thread gives back those that were lent."""
        self._free: _Free = queue.SimpleQueue()
        self._unmade: queue.SimpleQueue[_Place] = queue.SimpleQueue()
        self._made: dict[int, weakref.ref[memoryview]] = {}
        self._numbers = itertools.count()
        self._taking_many = threading.Lock()
        for _ in range(self._count):
            self._unmade.put(_Place(weakref.ref(self._free)))

    @property
    def made_bytes(self) -> int:
        """Bytes of the buffers that exist."""
        return len(self._made) * self._size_bytes

    def take(self) -> memoryview:
        """Return a buffer; wait for one if all are in use."""
        found: memoryview | _Place
        try:
            found = self._free.get_nowait()
        except queue.Empty:
            try:
                found = self._unmade.get_nowait()
            except queue.Empty:
                found = self._free.get()
        return self._fill(found) if isinstance(found, _Place) else found

    def _fill(self, place: _Place) -> memoryview:
        buffer = new_pages(self._size_bytes)
        number, made, free = next(self._numbers), self._made, weakref.ref(self._free)

        def lost(_: object) -> None:
            made.pop(number, None)
            _Place(free)  # which nothing refers to

        made[number] = weakref.ref(buffer, lost)
        place.is_filled = True
        return buffer

    def take_many(self, count: int) -> list[memoryview]:
        """Return several buffers, at most all of the pool; wait until they are free."""
        # One caller at a time: two callers that each hold a part would wait for each other forever.
        with self._taking_many:
            return [self.take() for _ in range(count)]

    def give_back(self, buffer: memoryview) -> None:
        """Return a buffer to the pool."""
        self._free.put(buffer)

    @contextmanager
    def lent(self) -> Iterator[memoryview]:
        """Lend a buffer for the time of a `with` block."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)


_all: weakref.WeakSet[BufferPool] = weakref.WeakSet()


def buffer_bytes() -> int:
    """Return the bytes of all buffers of this process, also the peak: none is ever freed."""
    return sum(buffers.made_bytes for buffers in list(_all))


def copy_into(target: memoryview, source: memoryview) -> None:
    """Copy bytes; release the GIL for large copies."""
    if target.nbytes >= GIL_FREE_COPY_BYTES:
        import numpy as np  # not above: listing a directory needs digests, but no arrays

        # NumPy releases the GIL while it copies; slice assignment does not.
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
    else:
        target[:] = source
