# SPDX-License-Identifier: Apache-2.0
"""The limit of the disk: direct I/O and nothing else, with the number and size of requests that is fastest here.

A virtual disk depends on how much memory its requests cover, in either direction, so that the best loop is searched once.
Who has to find the memory, or looks at the bytes that were read, cannot be as fast; the least cost of that is measured, too.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from ckptmgr.crypto.buffers import new_pages
from ckptmgr.io.digest import RANGE_BYTES
from ckptmgr.io.threads import HASH_STEP_BYTES
from tools.bench.contestant import PAGE_BYTES
from tools.bench.disk import remove, sync

MIB = 1 << 20
_THREADS = (2, 4, 8)
_CHUNKS_BYTES = (1 * MIB, 2 * MIB, 4 * MIB)
_LARGEST_BYTES = max(_CHUNKS_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How many requests of which size are in flight."""

    threads: int
    chunk_bytes: int

    def __str__(self) -> str:
        return f"{self.threads} x {self.chunk_bytes // MIB} MiB"


_SHAPES = [
    Shape(threads=threads, chunk_bytes=chunk)
    for threads, chunk in itertools.product(_THREADS, _CHUNKS_BYTES)
]
# Whoever finds memory or digests has no request in flight meanwhile: with two of them a disk would wait.
_WITH_WORK = Shape(threads=4, chunk_bytes=4 * MIB)


class RawDisk:
    """Writes and reads with direct I/O: several requests in flight, memory that was touched before.

    No library can be faster than the best such loop, unless its file is smaller.
    """

    def __init__(self) -> None:
        # In huge pages: in others, which lie anywhere, a virtual disk may need twice the time.
        self._buffers = [new_pages(_LARGEST_BYTES) for _ in range(max(_THREADS))]
        for buffer in self._buffers:
            buffer[:] = os.urandom(_LARGEST_BYTES)
        self._kept = memoryview(b"")
        self.write_shape = self.read_shape = Shape(threads=4, chunk_bytes=4 * MIB)

    def tune(self, path: Path, size_bytes: int, rest: Callable[[], object]) -> None:
        """Try every shape once with a file of `size_bytes`, and keep the best for writing and for reading."""
        write_s: dict[Shape, float] = {}
        read_s: dict[Shape, float] = {}
        for shape in _SHAPES:
            self.write_shape = self.read_shape = shape
            write_s[shape] = _seconds(lambda: self.write(path, size_bytes), rest)
            read_s[shape] = _seconds(lambda: self.read(path), rest)
            remove(path)
        self.write_shape = min(write_s, key=write_s.__getitem__)
        self.read_shape = min(read_s, key=read_s.__getitem__)

    def write(self, path: Path, size_bytes: int) -> None:
        """Write a file of `size_bytes`, rounded up to 4 MiB, durably."""
        size_bytes = _whole(size_bytes)
        with _open_direct(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as descriptor:
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._in_parallel(
                self.write_shape,
                size_bytes,
                lambda buffer, offset: os.pwrite(descriptor, buffer, offset),
            )
            os.fsync(descriptor)
        sync(path)

    def read(self, path: Path) -> None:
        """Read a file that `write` wrote, into the same buffers again and again."""
        with _open_direct(path, os.O_RDONLY) as descriptor:
            self._in_parallel(
                self.read_shape,
                os.fstat(descriptor).st_size,
                lambda buffer, offset: os.preadv(descriptor, [buffer], offset),
            )

    def read_digested(self, path: Path) -> None:
        """Read it and digest every piece with BLAKE3; keep neither."""
        with _open_direct(path, os.O_RDONLY) as descriptor:

            def transfer(buffer: memoryview, offset: int) -> int:
                done = os.preadv(descriptor, [buffer], offset)
                blake3(buffer).digest()
                return done

            self._in_parallel(_WITH_WORK, os.fstat(descriptor).st_size, transfer)

    def read_new(self, path: Path) -> None:
        """Read it into memory of its size that was never touched."""
        with _open_direct(path, os.O_RDONLY) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            memory = new_pages(size_bytes)
            self._in_parallel(
                _WITH_WORK,
                size_bytes,
                lambda buffer, offset: os.preadv(
                    descriptor, [memory[offset : offset + len(buffer)]], offset
                ),
            )

    def read_new_digested(self, path: Path) -> None:
        """Read it into memory of its size that was never touched, and digest it there."""
        with _open_direct(path, os.O_RDONLY) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            self._read_digested_into(descriptor, new_pages(size_bytes))

    def read_again_digested(self, path: Path) -> None:
        """Read it into memory of its size that is kept from one call to the next, and digest it there."""
        with _open_direct(path, os.O_RDONLY) as descriptor:
            size_bytes = os.fstat(descriptor).st_size
            if self._kept.nbytes != size_bytes:
                self._kept = new_pages(size_bytes)
                np.frombuffer(self._kept, np.uint8)[::PAGE_BYTES] = 1
            self._read_digested_into(descriptor, self._kept)

    def read_cached_digested(self, path: Path) -> None:
        """Read it through the page cache into memory that was never touched, and digest it there."""
        with path.open("rb", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            self._read_digested_into(file.fileno(), new_pages(size_bytes))

    def _read_digested_into(self, descriptor: int, memory: memoryview) -> None:
        """Fill memory and digest ranges of 16 MiB, as a load does, in pieces of 2 MiB, while they are in the cache."""
        ranges = iter(range(0, memory.nbytes, RANGE_BYTES))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    start = next(ranges, None)
                if start is None:
                    return
                hasher = blake3()
                for offset in range(
                    start, min(start + RANGE_BYTES, memory.nbytes), HASH_STEP_BYTES
                ):
                    view = memory[offset : offset + HASH_STEP_BYTES]
                    if os.preadv(descriptor, [view], offset) != view.nbytes:
                        raise OSError(f"a transfer at {offset} was short")
                    hasher.update(view)
                hasher.digest()

        with ThreadPoolExecutor(_WITH_WORK.threads) as pool:
            for done in [pool.submit(work) for _ in range(_WITH_WORK.threads)]:
                done.result()

    def touch_new(self, size_bytes: int) -> None:
        """Touch every page of as much new memory, and read nothing."""
        memory = np.frombuffer(new_pages(_whole(size_bytes)), np.uint8)

        def transfer(buffer: memoryview, offset: int) -> int:
            memory[offset : offset + len(buffer) : PAGE_BYTES] = 1
            return len(buffer)

        self._in_parallel(_WITH_WORK, memory.size, transfer)

    def _in_parallel(
        self, shape: Shape, size_bytes: int, transfer: Callable[[memoryview, int], int]
    ) -> None:
        offsets = iter(range(0, size_bytes, shape.chunk_bytes))
        lock = threading.Lock()

        def work(buffer: memoryview) -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                if transfer(buffer, offset) != shape.chunk_bytes:
                    raise OSError(f"a transfer at {offset} was short")

        buffers = [buffer[: shape.chunk_bytes] for buffer in self._buffers[: shape.threads]]
        with ThreadPoolExecutor(shape.threads) as pool:
            for done in [pool.submit(work, buffer) for buffer in buffers]:
                done.result()


def _whole(size_bytes: int) -> int:
    return -(-size_bytes // _LARGEST_BYTES) * _LARGEST_BYTES


def _seconds(work: Callable[[], object], rest: Callable[[], object]) -> float:
    rest()
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def _open_direct(path: Path, flags: int) -> Iterator[int]:
    try:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # tmpfs before Linux 6.6 refuses, but the file was created.
        descriptor = os.open(path, flags & ~os.O_EXCL, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
