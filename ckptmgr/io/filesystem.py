# SPDX-License-Identifier: Apache-2.0
"""The disk: open-for-write, fsync, rename, link and unlink are only here, in `files` and `locks`.

The other modules use a `FileSystem`, so that tests can put a model of a disk (every legal state
after a power cut) or a failing disk in its place. Rules:

* A file is created with `O_EXCL` under a unique name. Of a file that exists only the header of a
  container is overwritten (`change`), because it has two copies of which one is always intact.
* A failed `sync` is final, and nothing is retried on that file: Linux marks the pages clean after
  EIO, so they may be lost.
* A directory entry is durable only after `sync_directory`.
* Files are removed, moved and written in a held directory (`hold_directory`): another user with
  write permission on its parent could replace it by a link at any moment.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from ckptmgr.core.contexts import contextmanager
from ckptmgr.io.descriptors import HeldDirectories, errors_naming
from ckptmgr.io.files import (
    CachedFile,
    ChangedFile,
    FileHead,
    NewFile,
    UncachedFile,
    adopt_owner,
    read_head,
)
from ckptmgr.io.locks import locked
from ckptmgr.io.permissions import inherit_directory_mode, set_directory_mode

_PRIVATE = 0o400
_SHARED = stat.S_IWGRP | stat.S_IWOTH


class FileStatus(NamedTuple):
    """Status of one directory entry; a tuple, because a large directory has thousands of them.

    Attributes:
        size_bytes: Size of the file.
        modified_at: Modification time in seconds since the epoch; for display, never for decisions.
        is_file: Whether it is a regular file (not a link, directory, FIFO or device).
        is_directory: Whether it is a directory.
        identity: Device and inode: two names with the same identity are the same file.
        mode: Permission bits; of a link, or another entry that is no file, those for a file in its
            place.
        changed_ns: Time of the last change of the inode in nanoseconds since the epoch; None if the
            disk has none. Unlike `modified_at` it can only be set by changing the clock of the
            machine.
        owner: User id of the owner; None if the disk has none.
        is_sticky: Whether it is a directory in which users may add files, but not remove those of
            others.
    """

    size_bytes: int
    modified_at: float
    is_file: bool
    is_directory: bool
    identity: tuple[int, int]
    mode: int = _PRIVATE
    changed_ns: int | None = None
    owner: int | None = None
    is_sticky: bool = False


class OutputFile(Protocol):
    """A new file being written by offset. Safe to use from several threads."""

    def reserve(self, size_bytes: int) -> None:
        """Allocate `size_bytes`, which then read as zeros; raise ENOSPC before anything is written.

        Does nothing if the file system cannot allocate.
        """
        ...

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write `data` at `offset`, with direct I/O if file system and alignment allow it."""
        ...

    def sync(self) -> None:
        """Make the content durable; an error is final."""
        ...

    def close(self) -> None:
        """Release the descriptor. Errors of close are errors of the save."""
        ...


class InputFile(Protocol):
    """An open file as a source, read through one descriptor: a swapped name cannot mix files."""

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
    """The operations of a disk. Paths are absolute."""

    def hold_directory(self, path: Path) -> contextlib.AbstractContextManager[None]:
        """Reach the entries of a directory through one descriptor, even if its path changes.

        No link in it is followed. A directory in a held one must be no link, and must not belong to
        an untrusted user. A directory that is held twice has one descriptor.
        """
        ...

    def is_moved(self, path: Path) -> bool:
        """Return whether the path of a held directory leads elsewhere now, or nowhere."""
        ...

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken.

        A file that root creates gets the owner of the file `owner_of` in the same directory, which
        it will replace, or of the directory if there is none; with None it stays root's.
        """
        ...

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading; refuse FIFOs and devices, and in a held directory links.

        With `is_uncached`, read past the page cache if possible.
        """
        ...

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        """Return the first bytes of a small file of a directory; refuse what `open` refuses."""
        ...

    def change(self, path: Path) -> OutputFile:
        """Open an existing regular file to overwrite bytes; refuse symbolic and hard links."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        ...

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; raise FileExistsError if it is taken."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a name; raise FileNotFoundError if it is gone."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        ...

    def make_directory(self, path: Path, *, mode: int | None) -> None:
        """Create a directory and its missing parents durably, unless it exists.

        They get exactly this mode, beside an inherited setgid bit. With None, a directory in a held
        one gets the permissions of that one, without w for others, and any other those that the
        umask allows. A directory that root creates in a held one gets the owner of that directory.
        """
        ...

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory; an OSError when something is in it."""
        ...

    def names(self, path: Path) -> Sequence[str]:
        """Return the names in a directory."""
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

    def free_inodes(self, path: Path) -> int | None:
        """Return how many files an unprivileged writer may create; None if unknown or unlimited."""
        ...

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        """Hold an advisory lock on a file, without waiting.

        Yields None while this process holds it; its end or its death releases it. If another
        process holds it, yields the `owner` text of that process.
        """
        ...

    def pause(self, seconds: float) -> None:
        """Wait before a call is tried again that failed with a transient error."""
        ...


def discard(fs: FileSystem, path: Path) -> None:
    """Remove a file that is not needed; ignore errors of the disk."""
    with contextlib.suppress(OSError):
        fs.unlink(path)


def rename_temp(fs: FileSystem, temp: Path, path: Path) -> None:
    """Rename a temporary file to its final name over an older file; remove it if that fails."""
    try:
        fs.replace(temp, path)
    except BaseException:
        discard(fs, temp)
        raise


def unlink_if_present(fs: FileSystem, path: Path) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(path)


class OsFileSystem:
    """The real disk.

    With `keeps_owner`, files that root creates stay root's: for outputs that no run reads.
    """

    def __init__(self, *, keeps_owner: bool = False) -> None:
        self._directories = HeldDirectories()
        self._keeps_owner = keeps_owner

    def hold_directory(self, path: Path) -> contextlib.AbstractContextManager[None]:
        """Reach the entries of a directory through one descriptor, even if its path changes."""
        return self._directories.hold(path)

    def is_moved(self, path: Path) -> bool:
        """Return whether the path of a held directory leads elsewhere now, or nowhere."""
        return self._directories.is_moved(path)

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken."""
        with self._directories.entry(path) as at:
            owner = None
            if owner_of is not None and not self._keeps_owner and os.geteuid() == 0:
                owner = self._owner(owner_of)
            return NewFile(path, mode, dir_fd=at.dir_fd, owner=owner)

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading; refuse FIFOs, devices, and links in held directories."""
        kind = UncachedFile if is_uncached else CachedFile
        with self._directories.entry(path) as at:
            return kind(path, dir_fd=at.dir_fd)

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        """Return the first bytes of a small file of a directory; refuse what `open` refuses."""
        with self._directories.entry_in(directory, name) as at:
            return read_head(at, most_bytes)

    def change(self, path: Path) -> OutputFile:
        """Open an existing regular file to overwrite bytes; refuse symbolic and hard links."""
        with self._directories.entry(path) as at:
            return ChangedFile(path, dir_fd=at.dir_fd)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        with self._directories.entry(source) as old, self._directories.entry(target) as new:
            try:
                os.replace(old.name, new.name, src_dir_fd=old.dir_fd, dst_dir_fd=new.dir_fd)
            except OSError as error:
                raise _renamed(error, source, target) from None

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError when that is taken."""
        with self._directories.entry(source) as old, self._directories.entry(target) as new:
            try:
                os.link(old.name, new.name, src_dir_fd=old.dir_fd, dst_dir_fd=new.dir_fd)
            except OSError as error:
                raise _renamed(error, source, target) from None

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        with self._directories.entry(path) as at:
            os.unlink(at.name, dir_fd=at.dir_fd)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        with self._directories.descriptor(path) as descriptor:
            try:
                with errors_naming(path):
                    os.fsync(descriptor)
            except OSError as error:
                # Some network file systems cannot sync directories, and there is no substitute.
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                    raise

    def make_directory(self, path: Path, *, mode: int | None) -> None:
        """Create a directory and its missing parents durably; None: see `FileSystem`."""
        if self._directories.is_held(path):
            return
        with self._directories.entry(path) as at:
            if at.dir_fd is not None:
                self._make_inside(path, at.name, at.dir_fd, mode)
                return
        missing = []
        current = path
        while not current.exists():
            missing.append(current)
            current = current.parent
        # A process may have made the deepest existing one, and died before it synced the parent.
        with contextlib.suppress(PermissionError):
            self.sync_directory(current.parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o777 if mode is None else mode)
                if mode is not None:
                    _make_exact(directory, mode)
            self.sync_directory(directory.parent)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "exists and is not a directory", str(path))

    def _make_inside(self, path: Path, name: str, dir_fd: int, mode: int | None) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700 if mode is None else mode, dir_fd=dir_fd)
            with self._directories.opened(path) as descriptor:
                if _is_own_and_empty(descriptor):
                    parent = os.fstat(dir_fd)
                    adopt_owner(descriptor, parent)
                    if mode is None:
                        inherit_directory_mode(descriptor, parent)
                    else:
                        set_directory_mode(descriptor, mode)
        self.sync_directory(path.parent)
        with self._directories.hold(path):
            pass

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory; an OSError when something is in it."""
        with self._directories.entry(path) as at:
            os.rmdir(at.name, dir_fd=at.dir_fd)

    def names(self, path: Path) -> Sequence[str]:
        """Return the names in a directory."""
        with self._directories.opened(path) as descriptor:
            return os.listdir(descriptor)

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status for a directory, without entries that vanish meanwhile."""
        entries = {}
        with self._directories.opened(path) as descriptor, os.scandir(descriptor) as scan:
            for entry in scan:
                try:
                    entries[entry.name] = _status(entry.stat(follow_symlinks=False))
                except FileNotFoundError:  # `suppress` costs more
                    continue
                except OSError as error:
                    error.filename = os.fspath(path / entry.name)
                    raise
        return entries

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name without following links, or None when it is absent."""
        try:
            with self._directories.entry(path) as at:
                return _status(os.stat(at.name, dir_fd=at.dir_fd, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def _owner(self, path: Path) -> os.stat_result:
        """Return the status of a regular file, or that of its directory if there is none."""
        with self._directories.entry(path) as at, contextlib.suppress(FileNotFoundError):
            figures = os.stat(at.name, dir_fd=at.dir_fd, follow_symlinks=False)
            if stat.S_ISREG(figures.st_mode):
                return figures
        with self._directories.descriptor(path.parent) as descriptor:
            return os.fstat(descriptor)

    def free_bytes(self, path: Path) -> int | None:
        """Return how many bytes an unprivileged writer may still use."""
        figures = os.statvfs(path)
        return figures.f_bavail * figures.f_frsize

    def free_inodes(self, path: Path) -> int | None:
        """Return how many files an unprivileged writer may create; None on btrfs and others."""
        figures = os.statvfs(path)
        return figures.f_favail if figures.f_files else None

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        """Hold an advisory lock (flock) on a file, or yield the owner text of its holder."""
        return self._locked(path, owner)

    @contextmanager
    def _locked(self, path: Path, owner: str) -> Iterator[str | None]:
        with (
            self._directories.entry(path) as at,
            locked(path, owner=owner, dir_fd=at.dir_fd) as holder,
        ):
            yield holder

    def pause(self, seconds: float) -> None:
        """Wait before a call is tried again that failed with a transient error."""
        time.sleep(seconds)


def _make_exact(directory: Path, mode: int) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if _is_own_and_empty(descriptor):
            set_directory_mode(descriptor, mode)
    finally:
        os.close(descriptor)


def _is_own_and_empty(descriptor: int) -> bool:
    """Return whether this is a new directory; another user may have put one in use in its place."""
    return os.fstat(descriptor).st_uid == os.geteuid() and not os.listdir(descriptor)


def _renamed(error: OSError, source: Path, target: Path) -> OSError:
    """Return the error of a rename or link with the whole paths."""
    return OSError(error.errno, error.strerror, os.fspath(source), None, os.fspath(target))


def _status(figures: os.stat_result) -> FileStatus:
    mode = figures.st_mode
    is_file = stat.S_ISREG(mode)
    return FileStatus(
        figures.st_size,
        figures.st_mtime,
        is_file,
        not is_file and stat.S_ISDIR(mode),
        (figures.st_dev, figures.st_ino),
        stat.S_IMODE(mode) if is_file else _PRIVATE,
        figures.st_ctime_ns,
        figures.st_uid,
        not is_file and bool(mode & stat.S_ISVTX and mode & _SHARED),
    )
