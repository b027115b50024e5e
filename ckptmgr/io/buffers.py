# SPDX-License-Identifier: Apache-2.0
"""Page-aligned buffers that are reused, and copies that do not hold the GIL.

Touching a fresh page costs more than encrypting it, and direct I/O needs aligned memory. So all
saves and loads of the process share a few buffers, which are made once.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.forks import reset_in_child
from ckptmgr.crypto.buffers import new_pages

GIL_FREE_COPY_BYTES = 1 << 16


class BufferPool:
    """At most `count` buffers of `size_bytes`, made when first needed.

    `take` waits until a buffer is free: a thread that has one must not wait for another of the same
    pool.
    """

    def __init__(self, count: int, size_bytes: int) -> None:
        self._count = count
        self._size_bytes = size_bytes
        self.forget_parent()
        _all.add(self)
        reset_in_child(self)

    def forget_parent(self) -> None:
        """Make all buffers again: in a forked child no thread gives back those that were lent."""
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._unmade = self._count
        self._lock = threading.Lock()
        self._taking_many = threading.Lock()

    @property
    def made_bytes(self) -> int:
        """Bytes of the buffers that exist."""
        return (self._count - self._unmade) * self._size_bytes

    def take(self) -> memoryview:
        """Return a buffer; wait for one if all are in use."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            pass
        with self._lock:
            must_make, self._unmade = self._unmade > 0, max(0, self._unmade - 1)
        if must_make:
            return new_pages(self._size_bytes)
        return self._free.get()

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
