# SPDX-License-Identifier: Apache-2.0
"""The limit of the disk, and what makes saves of other libraries comparable: the same sync, the same cold cache."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

_CHUNK_BYTES = 4 << 20
_THREADS = 4


def sync(path: Path) -> None:
    """Make a file and its directory entry durable."""
    for each in (path, path.parent):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_cache(path: Path) -> None:
    """Drop a synced file from the page cache, so that the next load is cold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


class RawDisk:
    """Writes and reads with direct I/O and nothing else: several requests in flight, memory that was touched before.

    No library can be faster than the best such loop, unless its file is smaller.
    """

    def __init__(self) -> None:
        self._buffers = [memoryview(mmap.mmap(-1, _CHUNK_BYTES)) for _ in range(_THREADS)]
        for buffer in self._buffers:
            buffer[:] = os.urandom(_CHUNK_BYTES)

    def write(self, path: Path, size_bytes: int) -> None:
        """Write a file of `size_bytes`, rounded up to 4 MiB, durably."""
        size_bytes = -(-size_bytes // _CHUNK_BYTES) * _CHUNK_BYTES
        descriptor = _open_direct(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            self._in_parallel(
                size_bytes, lambda buffer, offset: os.pwrite(descriptor, buffer, offset)
            )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync(path)

    def read(self, path: Path) -> None:
        """Read a file that `write` wrote, into the same buffers again and again."""
        descriptor = _open_direct(path, os.O_RDONLY)
        try:
            self._in_parallel(
                os.fstat(descriptor).st_size,
                lambda buffer, offset: os.preadv(descriptor, [buffer], offset),
            )
        finally:
            os.close(descriptor)

    def _in_parallel(self, size_bytes: int, transfer: Callable[[memoryview, int], int]) -> None:
        offsets = iter(range(0, size_bytes, _CHUNK_BYTES))
        lock = threading.Lock()
        short: list[int] = []

        def work(buffer: memoryview) -> None:
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                if transfer(buffer, offset) != _CHUNK_BYTES:
                    short.append(offset)

        threads = [threading.Thread(target=work, args=(buffer,)) for buffer in self._buffers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if short:
            raise OSError(f"a transfer at {short[0]} was short")


def _open_direct(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # tmpfs before Linux 6.6 refuses, but the file was created.
        return os.open(path, flags & ~os.O_EXCL, 0o600)
