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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

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


class DirectoryEntry(NamedTuple):
    """A name and the descriptor of its directory; if that is not held, the path and None."""

    name: str
    dir_fd: int | None


@dataclass(slots=True)
class _Held:
    descriptor: int
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
                self._held[path] = _Held(_opened(path, inside))
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
            return not os.path.samestat(path.stat(), os.fstat(held.descriptor))
        except FileNotFoundError:
            return True
        finally:
            self.leave(path, held)

    def entry(self, path: Path) -> AbstractContextManager[DirectoryEntry]:
        """Return a context with the entry for a path; errors within the block name the whole path."""
        directory = path.parent
        with self._mutex:
            held = self._use(directory)
        if held is None:
            return nullcontext(DirectoryEntry(os.fspath(path), None))
        return _HeldEntry(self, path, directory, held)

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


class _HeldEntry(AbstractContextManager[DirectoryEntry]):
    """An entry of a held directory. No generator: listings make one for each file."""

    __slots__ = ("_directories", "_directory", "_held", "_path")

    def __init__(
        self, directories: HeldDirectories, path: Path, directory: Path, held: _Held
    ) -> None:
        self._directories = directories
        self._path = path
        self._directory = directory
        self._held = held

    def __enter__(self) -> DirectoryEntry:
        return DirectoryEntry(self._path.name, self._held.descriptor)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._directories.leave(self._directory, self._held)
        if isinstance(error, OSError) and error.filename == self._path.name:
            error.filename = os.fspath(self._path)


def _opened(path: Path, parent: int | None) -> int:
    if parent is None:
        return above_standard_streams(os.open(path, _DIRECTORY))
    try:
        descriptor = os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    try:
        _check_owner(path, os.fstat(descriptor), os.fstat(parent))
    except BaseException:
        os.close(descriptor)
        raise
    return above_standard_streams(descriptor)


def _check_owner(path: Path, figures: os.stat_result, parent: os.stat_result) -> None:
    """Raise PermissionError if an untrusted user made a directory inside another one.

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
