# SPDX-License-Identifier: Apache-2.0
"""Files of the real disk: read through the page cache or past it, written with direct I/O.

A new file is written whole; of a file that exists only the header of a container is overwritten.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ckptmgr.formats.errors import TruncatedError
from ckptmgr.io.byte_counters import count_bytes
from ckptmgr.io.descriptors import (
    DirectoryEntry,
    above_standard_streams,
    errors_naming,
    open_entry,
)
from ckptmgr.io.permissions import new_file_mode, set_file_mode

DIRECT_IO_ALIGNMENT = 4096
REFUSALS_OF_DIRECT_IO = (errno.EINVAL, errno.EOPNOTSUPP)
"""Unaligned memory, or a file system that accepts the flag but not the transfer."""


# O_NONBLOCK so that opening a FIFO with no writer does not hang; it means nothing for regular files.
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK


class FileHead(NamedTuple):
    """The first bytes of a file, and its size and identity (device, inode) when it was opened."""

    data: bytes
    size_bytes: int
    identity: tuple[int, int]


class NoRegularFile(OSError):
    """A link, a pipe or a directory is in the place of a file."""


def read_head(at: DirectoryEntry, most_bytes: int) -> FileHead:
    """Return the first bytes of a regular file, which is no link."""
    descriptor = _open_no_link(at.name, at.dir_fd)
    try:
        figures = _checked_figures(at.name, descriptor)
        wanted, data = min(figures.st_size, most_bytes), b""
        # A network file system may return fewer bytes; only none at all are the end of the file.
        while len(data) < wanted and (part := os.read(descriptor, wanted - len(data))):
            data += part
    finally:
        os.close(descriptor)
    count_bytes("read", len(data))
    return FileHead(data, figures.st_size, (figures.st_dev, figures.st_ino))


def _open_to_read(name: str, dir_fd: int | None) -> int:
    """Return a descriptor of a path, or of an entry of `dir_fd` that is no link."""
    return os.open(name, _READING) if dir_fd is None else _open_no_link(name, dir_fd)


def _open_no_link(name: str, dir_fd: int | None) -> int:
    try:
        return os.open(name, _READING | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise NoRegularFile(errno.EINVAL, "is a link, not a regular file", name) from None


def _checked_figures(name: str, descriptor: int) -> os.stat_result:
    figures = os.fstat(descriptor)
    if not stat.S_ISREG(figures.st_mode):
        raise NoRegularFile(errno.EINVAL, "not a regular file", name)
    return figures


class CachedFile:
    """A regular file, read through the page cache; with `dir_fd` an entry of it and no link."""

    def __init__(self, path: Path, *, dir_fd: int | None = None) -> None:
        name = os.fspath(path) if dir_fd is None else path.name
        self._descriptor = _open_to_read(name, dir_fd)
        try:
            figures = _checked_figures(name, self._descriptor)
        except BaseException:
            self.close()
            raise
        self._path = path
        self._size = figures.st_size

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        return self._size

    def status(self) -> os.stat_result:
        """Return the `fstat` of the open file."""
        return os.fstat(self._descriptor)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, or raise TruncatedError."""
        while buffer.nbytes:
            count = self._read_once(offset, buffer)
            if count == 0:
                raise TruncatedError(
                    f"{buffer.nbytes} bytes wanted, but the file ends here", offset=offset
                )
            count_bytes("read", count)
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
        """Return all bytes as read-only memory that outlives this object; not of an empty file.

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

    It is read with direct I/O if file system, offset, length and memory allow it. The rest is read
    through the page cache, from which the synced pages of the file are dropped first. (tmpfs has no
    disk; its page cache is the file.)
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
            if count:  # otherwise the read through the page cache shows whether the file ends here
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


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


_NO_SUCH_OWNER = (errno.EPERM, errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Root without the permission (NFS, containers); a user unknown in this container; no owners at all."""


def adopt_owner(descriptor: int, like: os.stat_result) -> None:
    """Give a new file that root made the owner and group of another one, if the file system can.

    An administrator who works in the directory of another user must not lock that user out. Files
    of other users stay as they are. Set the mode afterwards: a change of the owner can change it.
    """
    if os.geteuid() != 0:
        return
    figures = os.fstat(descriptor)
    if (figures.st_uid, figures.st_gid) == (like.st_uid, like.st_gid):
        return
    try:
        os.fchown(descriptor, like.st_uid, like.st_gid)
    except OSError as error:
        if error.errno not in _NO_SUCH_OWNER:
            raise


class NewFile:
    """A new file with up to two descriptors: one for direct I/O, one through the page cache."""

    def __init__(
        self,
        path: Path,
        mode: int,
        *,
        dir_fd: int | None = None,
        owner: os.stat_result | None = None,
    ) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = path
        opened = open_entry(path, flags, new_file_mode(mode), dir_fd=dir_fd)
        self._buffered = self._direct = -1
        try:
            self._buffered = above_standard_streams(opened)
            with contextlib.suppress(OSError):
                # tmpfs before Linux 6.6, some FUSE and network file systems refuse O_DIRECT:
                # EINVAL. Opened before the mode is set: only root may open a read-only file for
                # writing.
                self._direct = above_standard_streams(
                    os.open(
                        f"/proc/self/fd/{self._buffered}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
                    )
                )
            if owner is not None:
                adopt_owner(self._buffered, owner)
            set_file_mode(self._buffered, mode, path)
        except BaseException:
            self.close()
            with contextlib.suppress(OSError):
                os.unlink(os.fspath(path) if dir_fd is None else path.name, dir_fd=dir_fd)
            raise

    def reserve(self, size_bytes: int) -> None:
        """Allocate `size_bytes` on the disk; raise ENOSPC before anything is written."""
        # Besides the early ENOSPC, direct writes below the file size run in parallel; the inode
        # lock serialises those that extend the file. posix_fallocate() is not used: where a file
        # system cannot allocate, glibc writes every block.
        if size_bytes and _LIBC.fallocate(self._buffered, 0, 0, size_bytes) != 0:
            number = ctypes.get_errno()
            # EINTR is not tried again (tmpfs frees everything then): a profiler sends a signal
            # every few ms.
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR):
                raise OSError(number, os.strerror(number), str(self._path))

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`."""
        _write_all(self._path, self._write_once, offset, data)

    def _write_once(self, offset: int, view: memoryview) -> int:
        # Of an unaligned length only the last bytes go through the page cache, in the next call.
        aligned = view.nbytes - view.nbytes % DIRECT_IO_ALIGNMENT
        if self._direct >= 0 and offset % DIRECT_IO_ALIGNMENT == 0 and aligned:
            try:
                return os.pwrite(self._direct, view[:aligned], offset)
            except OSError as error:
                if error.errno not in REFUSALS_OF_DIRECT_IO:
                    raise
        return os.pwrite(self._buffered, view, offset)

    def sync(self) -> None:
        """Make the content durable; an error is final."""
        os.fsync(self._buffered)

    def close(self) -> None:
        """Close the descriptors."""
        descriptors, self._buffered, self._direct = (self._direct, self._buffered), -1, -1
        failure = None
        for descriptor in descriptors:
            if descriptor >= 0:
                try:
                    os.close(descriptor)
                except OSError as error:
                    failure = error
        if failure is not None:
            raise failure


class ChangedFile:
    """A file that exists, opened for writing; its permission bits do not matter, and stay."""

    def __init__(self, path: Path, *, dir_fd: int | None = None) -> None:
        self._path = path
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        reading = open_entry(path, os.O_RDONLY | flags, dir_fd=dir_fd)
        try:
            figures = os.fstat(reading)
            if not stat.S_ISREG(figures.st_mode):
                raise NoRegularFile(errno.EINVAL, "not a regular file", str(path))
            if figures.st_nlink > 1:
                reason = "has other names, under which it would change as well; copy it first"
                raise OSError(errno.EMLINK, reason, str(path))
            self._descriptor = _reopened(reading, stat.S_IMODE(figures.st_mode))
        finally:
            os.close(reading)

    def reserve(self, size_bytes: int) -> None:
        """Do nothing: the space is allocated."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`."""
        try:  # each step of a training has its record written: `errors_naming` takes longer
            _write_all(self._path, self._write_once, offset, data)
        except OSError as error:
            error.filename = error.filename or os.fspath(self._path)
            raise

    def _write_once(self, offset: int, view: memoryview) -> int:
        return os.pwrite(self._descriptor, view, offset)

    def sync(self) -> None:
        """Make the content durable; an error is final."""
        with errors_naming(self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with errors_naming(self._path):
                os.close(descriptor)


def _write_all(
    path: Path,
    write_once: Callable[[int, memoryview], int],
    offset: int,
    data: memoryview | bytes,
) -> None:
    view = memoryview(data).cast("B")
    while view.nbytes:
        written = write_once(offset, view)
        if written == 0:
            raise OSError(errno.EIO, "a write wrote nothing", str(path))
        count_bytes("write", written)
        offset += written
        view = view[written:]


def _reopened(descriptor: int, mode: int) -> int:
    """Return another descriptor of the same file, for writing."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        return above_standard_streams(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    except PermissionError:
        # Checkpoints are read-only, for their owner too.
        os.fchmod(descriptor, mode | stat.S_IWUSR)
        try:
            return above_standard_streams(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        finally:
            os.fchmod(descriptor, mode)
