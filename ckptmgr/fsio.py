# SPDX-License-Identifier: Apache-2.0
"""The only room that changes a disk: every open-for-write, fsync, rename, link and unlink lives here.

Everything above works on a `FileSystem`, so that tests can put a model of a disk (every legal state after a power cut)
or a failing disk in its place. Rules:

* A file is created with `O_EXCL` under a name nobody else uses. The header of a container is all that is ever written into a
  file that exists (`change`), because it has two copies of which one is always whole.
* `sync` failing is final: the pages may be gone, so nothing is retried on that file (Linux marks them clean after EIO).
* A directory entry is durable only after `sync_directory`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from ckptmgr.input_files import DIRECT_IO_ALIGNMENT, CachedFile, UncachedFile
from ckptmgr.transfers import note

_LAST_STANDARD_DESCRIPTOR = 2
_MAX_OWNER_BYTES = 4096
_PRIVATE = 0o400

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStatus:
    """What a directory says about one entry.

    Attributes:
        size_bytes: Size of the file.
        modified_at: Modification time in seconds since the epoch; for display, never for decisions.
        is_file: Whether it is a regular file (not a link, directory, FIFO or device).
        is_directory: Whether it is a directory.
        identity: Device and inode: two names with the same identity are the same file.
        mode: Permission bits; of a link, or anything else that is no file, those that a file in its place should have.
    """

    size_bytes: int
    modified_at: float
    is_file: bool
    is_directory: bool
    identity: tuple[int, int]
    mode: int = _PRIVATE


class OutputFile(Protocol):
    """A new file being written by offset. Safe to use from several threads."""

    def reserve(self, size_bytes: int) -> None:
        """Ask the file system to set aside `size_bytes`; the file then has that size and reads as zeros.

        Raises ENOSPC before anything is written; does nothing where the file system cannot reserve.
        """
        ...

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data` at `offset`.

        Direct I/O is used where the file system allows it and offset, length and memory are aligned; otherwise the page
        cache. Callers need not know.
        """
        ...

    def sync(self) -> None:
        """Make the content durable; an error is final."""
        ...

    def close(self) -> None:
        """Release the descriptor. Errors of close are errors of the save."""
        ...


class InputFile(Protocol):
    """An open file as a source: everything is read through one descriptor, so a swapped name cannot mix two files."""

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, or raise TruncatedError."""
        ...

    def close(self) -> None:
        """Release the descriptor."""
        ...


class FileSystem(Protocol):
    """What the store asks of a disk. Paths are absolute."""

    def create(self, path: Path, *, mode: int) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken."""
        ...

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading; FIFOs and devices are refused, a final link is followed.

        With `is_uncached`, what the disk holds is read, as far as the page cache lets itself be passed by.
        """
        ...

    def change(self, path: Path) -> OutputFile:
        """Open a regular file that exists, to overwrite some of its bytes; links are refused, also hard ones."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError when that is taken."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name; FileNotFoundError when it is gone."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        ...

    def make_directory(self, path: Path, *, mode: int) -> None:
        """Create a directory and its missing parents durably; no error when it exists."""
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory; an OSError when something is in it."""
        ...

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status for a directory."""
        ...

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name without following links, or None when it is absent."""
        ...

    def free_bytes(self, path: Path) -> int | None:
        """Return how many bytes an unprivileged writer may still use, or None when unknown."""
        ...

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        """Hold an advisory lock on a file, without waiting.

        Yields None when it is held, and is then released at the end or by the death of the process. When somebody else
        holds it, yields the text that they gave as `owner`.
        """
        ...


def discard(fs: FileSystem, path: Path) -> None:
    """Remove a file that nobody needs, as far as the disk lets us."""
    with contextlib.suppress(OSError):
        fs.unlink(path)


def remove_name(fs: FileSystem, path: Path) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(path)


class OsFileSystem:
    """The real disk."""

    def create(self, path: Path, *, mode: int) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken."""
        return _OsOutputFile(path, mode)

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading; FIFOs and devices are refused, a final link is followed."""
        return UncachedFile(path) if is_uncached else CachedFile(path)

    def change(self, path: Path) -> OutputFile:
        """Open a regular file that exists, to overwrite some of its bytes; links are refused, also hard ones."""
        return _ChangedFile(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        os.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError when that is taken."""
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync directories and say so; there is nothing better to do there.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path, *, mode: int) -> None:
        """Create a directory and its missing parents durably."""
        missing = []
        current = path
        while not current.exists():
            missing.append(current)
            current = current.parent
        # The deepest one that exists may be the work of a process that died before it synced the parent.
        with contextlib.suppress(PermissionError):
            self.sync_directory(current.parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, mode)
            self.sync_directory(directory.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "exists and is not a directory", str(path))

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory; an OSError when something is in it."""
        os.rmdir(path)

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status for a directory; entries that vanish meanwhile are left out."""
        entries = {}
        with os.scandir(path) as scan:
            for entry in scan:
                with contextlib.suppress(FileNotFoundError):
                    entries[entry.name] = _status(entry.stat(follow_symlinks=False))
        return entries

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name without following links, or None when it is absent."""
        try:
            return _status(os.stat(path, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def free_bytes(self, path: Path) -> int | None:
        """Return how many bytes an unprivileged writer may still use."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        """Hold an advisory lock (flock) on a file; yields the owner's text when a live process holds it."""
        descriptor, is_held = _open_lock(path)
        with contextlib.closing(_LockFile(descriptor, path if is_held else None)):
            if not is_held:
                yield os.pread(descriptor, _MAX_OWNER_BYTES, 0).decode(errors="replace")
                return
            os.ftruncate(descriptor, 0)
            _write_owner(descriptor, owner)
            yield None


class _LockFile:
    """An open lock file. Forked children close theirs at once: a data loader must not keep the lock of a dead trainer."""

    _open: ClassVar[set[_LockFile]] = set()

    def __init__(self, descriptor: int, held: Path | None) -> None:
        self._descriptor = descriptor
        self._held = held
        self._open.add(self)

    def close(self) -> None:
        self._open.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @classmethod
    def close_inherited(cls) -> None:
        for file in list(cls._open):
            file.close()

    @classmethod
    def descriptor_of(cls, path: Path) -> int | None:
        return next((file._descriptor for file in list(cls._open) if file._held == path), None)


def lock_descriptor(path: Path) -> int | None:
    """Return the descriptor of a lock that `OsFileSystem` holds, or None.

    A worker process that has a copy of it holds the lock, too: it is free only when both are gone.
    """
    return _LockFile.descriptor_of(path)


os.register_at_fork(after_in_child=_LockFile.close_inherited)


def _open_lock(path: Path) -> tuple[int, bool]:
    """Return a descriptor of a lock file, and whether the lock is ours."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            named = os.stat(path, follow_symlinks=False)
        except BlockingIOError:
            return descriptor, False
        except FileNotFoundError:
            os.close(descriptor)
            continue
        except BaseException:
            os.close(descriptor)
            raise
        # Its last holder may remove the file before letting go: a lock on a file without a name keeps nobody out.
        if os.path.samestat(named, os.fstat(descriptor)):
            return descriptor, True
        os.close(descriptor)


def _write_owner(descriptor: int, owner: str) -> None:
    try:
        os.pwrite(descriptor, owner.encode()[:_MAX_OWNER_BYTES], 0)
    except OSError as error:
        # The lock holds without the text, and whoever wants to free space on a full disk needs the lock.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _beyond_standard(descriptor: int) -> int:
    """Return a descriptor above 2 in place of one that is not.

    Those are free in a process that was started without standard streams, where libraries still print to them.
    """
    if descriptor > _LAST_STANDARD_DESCRIPTOR:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD_DESCRIPTOR + 1)
    finally:
        os.close(descriptor)


class _OsOutputFile:
    """A new file with up to two descriptors: one for direct I/O, one through the page cache."""

    def __init__(self, path: Path, mode: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._path = path
        self._buffered = _beyond_standard(os.open(path, flags, 0o600))
        self._direct = -1
        try:
            with contextlib.suppress(OSError):
                # tmpfs before Linux 6.6, some FUSE and network file systems refuse O_DIRECT: EINVAL. Opened before the
                # mode is set: only root may open a read-only file for writing.
                self._direct = _beyond_standard(
                    os.open(
                        f"/proc/self/fd/{self._buffered}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC
                    )
                )
            os.fchmod(self._buffered, mode)
        except BaseException:
            self.close()
            raise

    def reserve(self, size_bytes: int) -> None:
        # Besides the early ENOSPC, direct writes below the file size run in parallel; extending ones are serialised by
        # the inode lock. posix_fallocate() is not used: where it is missing, glibc emulates it by writing every block.
        if size_bytes and _LIBC.fallocate(self._buffered, 0, 0, size_bytes) != 0:
            number = ctypes.get_errno()
            if number not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise OSError(number, os.strerror(number), str(self._path))

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            written = self._write_once(offset, view)
            if written == 0:
                raise OSError(errno.EIO, "a write wrote nothing", str(self._path))
            note("write", written)
            offset += written
            view = view[written:]

    def _write_once(self, offset: int, view: memoryview) -> int:
        # Of an unaligned length only the last bytes go through the page cache; write_at comes back for them.
        aligned = view.nbytes - view.nbytes % DIRECT_IO_ALIGNMENT
        if self._direct >= 0 and offset % DIRECT_IO_ALIGNMENT == 0 and aligned:
            try:
                return os.pwrite(self._direct, view[:aligned], offset)
            except OSError as error:
                # Unaligned memory, or a file system that accepts the flag but not the write.
                if error.errno != errno.EINVAL:
                    raise
        return os.pwrite(self._buffered, view, offset)

    def sync(self) -> None:
        os.fsync(self._buffered)

    def close(self) -> None:
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


class _ChangedFile:
    """A file that exists, opened for writing whatever its permission bits, which stay."""

    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        reading = os.open(path, os.O_RDONLY | flags)
        try:
            figures = os.fstat(reading)
            if not stat.S_ISREG(figures.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            if figures.st_nlink > 1:
                reason = "has other names, under which it would change as well; copy it first"
                raise OSError(errno.EMLINK, reason, str(path))
            self._descriptor = _reopened(reading, stat.S_IMODE(figures.st_mode))
        finally:
            os.close(reading)

    def reserve(self, size_bytes: int) -> None:
        """Do nothing: the space is there."""

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        while view.nbytes:
            written = os.pwrite(self._descriptor, view, offset)
            if written == 0:
                raise OSError(errno.EIO, "a write wrote nothing", str(self._path))
            note("write", written)
            offset += written
            view = view[written:]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _reopened(descriptor: int, mode: int) -> int:
    """Return another descriptor of the same file, for writing."""
    path = f"/proc/self/fd/{descriptor}"
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except PermissionError:
        # Checkpoints are read-only, for their owner too.
        os.fchmod(descriptor, mode | stat.S_IWUSR)
        try:
            return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        finally:
            os.fchmod(descriptor, mode)


def _status(figures: os.stat_result) -> FileStatus:
    is_file = stat.S_ISREG(figures.st_mode)
    return FileStatus(
        size_bytes=figures.st_size,
        modified_at=figures.st_mtime,
        is_file=is_file,
        is_directory=stat.S_ISDIR(figures.st_mode),
        identity=(figures.st_dev, figures.st_ino),
        mode=stat.S_IMODE(figures.st_mode) if is_file else _PRIVATE,
    )
