# SPDX-License-Identifier: Apache-2.0
"""Descriptors of files, above those of the standard streams, and of directories that are held open.

In a process that was started without standard streams, descriptors 0 to 2 are free. Libraries still
print to them, and would print into the file or memory that gets the number.

The entries of a held directory are reached through its descriptor. A user with write permission on
the parent can replace a directory by a link between two calls. A call of root by path would then
reach the files behind the link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ckptmgr.core.contexts import contextmanager

_LAST_STANDARD_DESCRIPTOR = 2
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def above_standard_streams(descriptor: int) -> int:
    """Return a descriptor above 2 in place of one that is not."""
    if descriptor > _LAST_STANDARD_DESCRIPTOR:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_STANDARD_DESCRIPTOR + 1)
    finally:
        os.close(descriptor)


def open_entry(path: Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
    """Open a file by its path, or by its name in `dir_fd`; errors name the whole path."""
    if dir_fd is None:
        return os.open(path, flags, mode)
    try:
        return os.open(path.name, flags, mode, dir_fd=dir_fd)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Add the path of a file to errors of calls on its descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def reserve_standard_descriptors() -> Iterator[None]:
    """Occupy the free descriptors up to 2, so that no file opened within the block gets one."""
    with contextlib.ExitStack() as reserved:
        with contextlib.suppress(OSError):  # without /dev/null none is reserved
            descriptor = -1
            while descriptor <= _LAST_STANDARD_DESCRIPTOR:
                descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                reserved.callback(os.close, descriptor)
        yield


@dataclass(slots=True)
class _Held:
    descriptor: int
    figures: os.stat_result  # while it is held, device and inode are its own
    users: int = 0


class HeldDirectories:
    """The directories that one `FileSystem` holds. Safe to use from several threads."""

    def __init__(self) -> None:
        self._held: dict[Path, _Held] = {}
        self._mutex = threading.Lock()

    @contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        """Hold a directory; inside a held one it must be no link, and belong to a trusted user.

        Raises:
            NotADirectoryError: It is a link, or no directory.
            PermissionError: It belongs to an untrusted user.
        """
        with self._mutex:
            if path not in self._held:
                parent = self._held.get(path.parent)
                inside = None if parent is None else parent.descriptor
                self._held[path] = _opened(path, inside)
            held = self._use(path)
        try:
            yield
        finally:
            self.leave(path, held)

    def is_held(self, path: Path) -> bool:
        """Return whether a directory is held."""
        with self._mutex:
            return path in self._held

    def is_moved(self, path: Path) -> bool:
        """Return whether the path of a held directory leads elsewhere now; False if not held."""
        with self._mutex:
            held = self._use(path)
        if held is None:
            return False
        try:
            return not os.path.samestat(path.stat(), held.figures)
        except FileNotFoundError:
            return True
        finally:
            self.leave(path, held)

    def entry(self, path: Path) -> DirectoryEntry:
        """Return the entry for a path, to be used in a `with` block."""
        return self.entry_in(path.parent, path.name)

    def entry_in(self, directory: Path, name: str) -> DirectoryEntry:
        """As `entry`, for a name in a directory."""
        with self._mutex:
            held = self._use(directory)
        return DirectoryEntry(self, directory, name, held)

    @contextmanager
    def descriptor(self, path: Path) -> Iterator[int]:
        """Yield a descriptor of a directory, for calls that read no entries."""
        with self._mutex:
            held = self._use(path)
        if held is None:
            with self.opened(path) as descriptor:
                yield descriptor
            return
        try:
            yield held.descriptor
        finally:
            self.leave(path, held)

    @contextmanager
    def opened(self, path: Path) -> Iterator[int]:
        """Yield a new descriptor of a directory."""
        with self._mutex:
            held = self._use(path)
        if held is None:
            with self.entry(path) as at:
                nofollow = 0 if at.dir_fd is None else os.O_NOFOLLOW
                descriptor = os.open(at.name, _DIRECTORY | nofollow, dir_fd=at.dir_fd)
        else:
            try:
                # Not a duplicate: that would share the position of a listing.
                descriptor = os.open(".", _DIRECTORY, dir_fd=held.descriptor)
            finally:
                self.leave(path, held)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _use(self, path: Path) -> _Held | None:
        held = self._held.get(path)
        if held is not None:
            held.users += 1
        return held

    def leave(self, path: Path, held: _Held | None) -> None:
        """End a use of a directory; the last one closes its descriptor."""
        if held is None:
            return
        with self._mutex:
            held.users -= 1
            if not held.users:
                del self._held[path]
                os.close(held.descriptor)


class DirectoryEntry(AbstractContextManager["DirectoryEntry"]):
    """An entry of a directory, which stays held within a `with` block. No generator: listings make many.

    Errors within the block name the whole path.

    Attributes:
        name: Its name; the path where the directory is not held.
        dir_fd: The descriptor of the directory; None where that is not held.
    """

    __slots__ = ("_directories", "_directory", "_held", "dir_fd", "name")

    def __init__(
        self, directories: HeldDirectories, directory: Path, name: str, held: _Held | None
    ) -> None:
        self._directories = directories
        self._directory = directory
        self._held = held
        self.name = os.fspath(directory / name) if held is None else name
        self.dir_fd = None if held is None else held.descriptor

    def __enter__(self) -> DirectoryEntry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._held is None:
            return
        self._directories.leave(self._directory, self._held)
        if isinstance(error, OSError) and error.filename == self.name:
            error.filename = os.fspath(self._directory / self.name)


def _opened(path: Path, parent: int | None) -> _Held:
    nofollow = 0 if parent is None else os.O_NOFOLLOW
    descriptor = above_standard_streams(open_entry(path, _DIRECTORY | nofollow, dir_fd=parent))
    try:
        figures = os.fstat(descriptor)
        if parent is not None:
            check_owner(path, figures, os.fstat(parent))
    except BaseException:
        os.close(descriptor)
        raise
    return _Held(descriptor, figures)


def check_owner(path: Path, figures: os.stat_result, parent: os.stat_result) -> None:
    """Raise PermissionError if an untrusted user made an entry of a directory.

    In a directory that a group may write to, any member may have made it.
    """
    is_shared = parent.st_mode & _WRITABLE_BY_OTHERS and not parent.st_mode & stat.S_ISVTX
    if is_shared or figures.st_uid in (os.geteuid(), 0, parent.st_uid):
        return
    reason = (
        f"belongs to user {figures.st_uid}, who is neither you, nor root, nor the owner of the directory;"
        " move it away if you do not know why"
    )
    raise PermissionError(errno.EPERM, reason, os.fspath(path))
