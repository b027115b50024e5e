# SPDX-License-Identifier: Apache-2.0
"""A disk that retries read calls after transient errors; writes fail at once.

An open file is not opened again: its name may be that of another file by now. `read_head` is one look at
a name, so it opens the file again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.formats.source import is_remote
from ckptmgr.io.filesystem import FileSystem, InputFile
from ckptmgr.io.passing_errors import PAUSES_S, may_pass

_Args = ParamSpec("_Args")
_Done = TypeVar("_Done")


class Retries:
    """Decorates calls so that they are tried a few times on transient errors."""

    def __init__(self, pause: Callable[[float], None]) -> None:
        self._pause = pause
        # Errors that outlasted all attempts: do not wait again for each file of a failing disk.
        self._lasting: set[int | None] = set()

    def of(self, call: Callable[_Args, _Done]) -> Callable[_Args, _Done]:
        """Return a call with retries."""

        def tried(*args: _Args.args, **options: _Args.kwargs) -> _Done:
            failed: int | None = None
            for pause_s in PAUSES_S:
                try:
                    done = call(*args, **options)
                except (OSError, MemoryError) as error:
                    if not may_pass(error):
                        raise
                    failed = error.errno if isinstance(error, OSError) else errno.ENOMEM
                else:
                    self._lasting.discard(failed)
                    return done
                if failed not in self._lasting:
                    self._pause(pause_s)
            try:
                done = call(*args, **options)
            except (OSError, MemoryError):
                self._lasting.add(failed)
                raise
            self._lasting.discard(failed)
            return done

        return tried


class RetryingFileSystem:
    """A `FileSystem` around another one."""

    def __init__(self, disk: FileSystem) -> None:
        self.disk = disk
        self._retries = Retries(disk.pause)
        self.is_moved = self._retries.of(disk.is_moved)
        self.read_head = self._retries.of(disk.read_head)
        self.names = self._retries.of(disk.names)
        self.list = self._retries.of(disk.list)
        self.status = self._retries.of(disk.status)
        self.create, self.change = disk.create, disk.change
        self.replace, self.link, self.unlink = disk.replace, disk.link, disk.unlink
        self.sync_directory = disk.sync_directory
        self.make_directory, self.remove_directory = disk.make_directory, disk.remove_directory
        self.free_bytes, self.free_inodes = disk.free_bytes, disk.free_inodes
        self.pause = disk.pause

    @classmethod
    def wrapping(cls, disk: FileSystem) -> RetryingFileSystem:
        """Return a retrying file system around a disk, or the disk if it is one."""
        return disk if isinstance(disk, cls) else cls(disk)

    @contextmanager
    def hold_directory(self, path: Path) -> Iterator[None]:
        """Reach the entries of a directory through one descriptor of it."""
        with contextlib.ExitStack() as held:
            hold = self._retries.of(lambda: held.enter_context(self.disk.hold_directory(path)))
            yield hold()

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading."""
        file = self._retries.of(self.disk.open)(path, is_uncached=is_uncached)
        return RetryingFile(file, self._retries)

    @contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        """Hold an advisory lock on a file, or yield the text of its holder."""
        with contextlib.ExitStack() as held:
            lock = self._retries.of(lambda: held.enter_context(self.disk.lock(path, owner=owner)))
            yield lock()


class RetryingFile:
    """An open file of a `RetryingFileSystem`."""

    def __init__(self, file: InputFile, retries: Retries) -> None:
        self.file = file
        self.is_remote = is_remote(file)
        self._retries = retries
        self.read_into = retries.of(file.read_into)

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        return self.file.size

    def wrapping(self, file: InputFile) -> InputFile:
        """Return a retrying file around another open file."""
        return RetryingFile(file, self._retries)

    def close(self) -> None:
        """Release the descriptor."""
        self.file.close()
