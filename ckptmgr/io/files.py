# SPDX-License-Identifier: Apache-2.0
"""Files of the real disk, opened for reading: through the page cache, or past it to see what the disk itself holds."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from pathlib import Path

from ckptmgr.formats.errors import TruncatedError
from ckptmgr.io.byte_counters import note
from ckptmgr.io.descriptors import open_entry

DIRECT_IO_ALIGNMENT = 4096
REFUSALS_OF_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
"""Unaligned memory, or a file system that accepts the flag but not the transfer."""


class CachedFile:
    """A regular file, read through the page cache; with `dir_fd`, an entry of that directory, and no link."""

    def __init__(self, path: Path, *, dir_fd: int | None = None) -> None:
        # O_NONBLOCK so that opening a FIFO with no writer does not hang; it means nothing for regular files.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self._descriptor = open_entry(
                path, flags if dir_fd is None else flags | os.O_NOFOLLOW, dir_fd=dir_fd
            )
        except OSError as error:
            if dir_fd is None or error.errno != errno.ELOOP:
                raise
            raise OSError(errno.EINVAL, "is a link, not a regular file", str(path)) from None
        figures = os.fstat(self._descriptor)
        if not stat.S_ISREG(figures.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self._path = path
        self._size = figures.st_size

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        return self._size

    def status(self) -> os.stat_result:
        """Return owner, mode and the like of the open file."""
        return os.fstat(self._descriptor)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, or raise TruncatedError."""
        while buffer.nbytes:
            count = self._read_once(offset, buffer)
            if count == 0:
                raise TruncatedError(
                    f"{buffer.nbytes} bytes wanted, but the file ends here", offset=offset
                )
            note("read", count)
            offset += count
            buffer = buffer[count:]

    def _read_once(self, offset: int, buffer: memoryview) -> int:
        return os.preadv(self._descriptor, [buffer], offset)

    def will_need(self, offset: int, length: int) -> None:
        """Ask the kernel to start reading bytes into the page cache."""
        os.posix_fadvise(self._descriptor, offset, length, os.POSIX_FADV_WILLNEED)

    def reopen(self, flags: int) -> int:
        """Return another descriptor of the same file, for reading."""
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC | flags)

    def map(self) -> mmap.mmap:
        """Return all bytes as read-only memory, which outlives this object; the file must not be empty.

        Raises:
            TruncatedError: The file has become shorter.
        """
        if os.fstat(self._descriptor).st_size < self._size:
            raise TruncatedError("the file has become shorter", offset=self._size)
        return mmap.mmap(self._descriptor, self._size, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Release the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class UncachedFile(CachedFile):
    """A regular file whose bytes come from the disk.

    Direct I/O where file system, offset, length and memory allow it. The rest is read through the page cache, from which
    the file is dropped first: that works for what was synced. (tmpfs has no disk; its page cache is the file.)
    """

    def __init__(self, path: Path, *, dir_fd: int | None = None) -> None:
        self._direct = -1
        super().__init__(path, dir_fd=dir_fd)
        try:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            with contextlib.suppress(OSError):
                self._direct = self.reopen(os.O_DIRECT)
        except BaseException:
            self.close()
            raise

    def _read_once(self, offset: int, buffer: memoryview) -> int:
        aligned = buffer.nbytes - buffer.nbytes % DIRECT_IO_ALIGNMENT
        if self._direct >= 0 and offset % DIRECT_IO_ALIGNMENT == 0 and aligned:
            try:
                count = os.preadv(self._direct, [buffer[:aligned]], offset)
            except OSError as error:
                if error.errno not in REFUSALS_OF_DIRECT_IO:
                    raise
                count = 0
            if count:  # where nothing comes, whoever reads through the page cache sees whether the file ends there
                return count
        return super()._read_once(offset, buffer)

    def close(self) -> None:
        """Release the descriptors."""
        descriptor, self._direct = self._direct, -1
        try:
            super().close()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
