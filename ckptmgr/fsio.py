# SPDX-License-Identifier: Apache-2.0
"""The only room that changes a disk: every open-for-write, fsync, rename, link and unlink lives here or in `output_files`.

Everything above works on a `FileSystem`, so that tests can put a model of a disk (every legal state after a power cut)
or a failing disk in its place. Rules:

* A file is created with `O_EXCL` under a name nobody else uses. The header of a container is all that is ever written into a
  file that exists (`change`), because it has two copies of which one is always whole.
* `sync` failing is final: the pages may be gone, so nothing is retried on that file (Linux marks them clean after EIO).
* A directory entry is durable only after `sync_directory`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple, Protocol

from ckptmgr.input_files import CachedFile, UncachedFile
from ckptmgr.lock_files import locked
from ckptmgr.output_files import ChangedFile, NewFile

_PRIVATE = 0o400


class FileStatus(NamedTuple):
    """What a directory says about one entry; a tuple, because a large directory has thousands at every save.

    Attributes:
        size_bytes: Size of the file.
        modified_at: Modification time in seconds since the epoch; for display, never for decisions.
        is_file: Whether it is a regular file (not a link, directory, FIFO or device).
        is_directory: Whether it is a directory.
        identity: Device and inode: two names with the same identity are the same file.
        mode: Permission bits; of a link, or anything else that is no file, those that a file in its place should have.
        changed_ns: When the disk last noted a change of the file, in nanoseconds since the epoch; None where it does not tell.
            Unlike `modified_at` nobody can choose it, except by the clock of the machine.
    """

    size_bytes: int
    modified_at: float
    is_file: bool
    is_directory: bool
    identity: tuple[int, int]
    mode: int = _PRIVATE
    changed_ns: int | None = None


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


def give_name(fs: FileSystem, temp: Path, path: Path) -> None:
    """Rename a temporary file to its name, replacing what has it; where that fails, remove the temporary file."""
    try:
        fs.replace(temp, path)
    except BaseException:
        discard(fs, temp)
        raise


def remove_name(fs: FileSystem, path: Path) -> None:
    """Remove a file that may be gone already."""
    with contextlib.suppress(FileNotFoundError):
        fs.unlink(path)


class OsFileSystem:
    """The real disk."""

    def create(self, path: Path, *, mode: int) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken."""
        return NewFile(path, mode)

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading; FIFOs and devices are refused, a final link is followed."""
        return UncachedFile(path) if is_uncached else CachedFile(path)

    def change(self, path: Path) -> OutputFile:
        """Open a regular file that exists, to overwrite some of its bytes; links are refused, also hard ones."""
        return ChangedFile(path)

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

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        """Hold an advisory lock (flock) on a file; yields the owner's text when a live process holds it."""
        return locked(path, owner=owner)


def _status(figures: os.stat_result) -> FileStatus:
    is_file = stat.S_ISREG(figures.st_mode)
    return FileStatus(
        size_bytes=figures.st_size,
        modified_at=figures.st_mtime,
        is_file=is_file,
        is_directory=stat.S_ISDIR(figures.st_mode),
        identity=(figures.st_dev, figures.st_ino),
        mode=stat.S_IMODE(figures.st_mode) if is_file else _PRIVATE,
        changed_ns=figures.st_ctime_ns,
    )
