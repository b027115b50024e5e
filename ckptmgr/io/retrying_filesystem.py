# SPDX-License-Identifier: Apache-2.0
"""A disk that retries read calls after transient errors; writes fail at once.

An open file is not opened again: its name may be that of another file by now. `read_head` is one look at
a name, so it opens the file again.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.formats.source import is_remote
from ckptmgr.io.files import FileHead
from ckptmgr.io.filesystem import FileStatus, FileSystem, InputFile, OutputFile
from ckptmgr.io.passing_errors import PAUSES_S, may_pass

_Args = ParamSpec("_Args")
_Done = TypeVar("_Done")


class RetryingFileSystem:
    """A `FileSystem` around another one."""

    def __init__(self, disk: FileSystem) -> None:
        self.disk = disk
        # Errors that outlasted all attempts: do not wait again for each file of a failing disk.
        self._lasting: set[int | None] = set()

    @classmethod
    def wrapping(cls, disk: FileSystem) -> RetryingFileSystem:
        """Return a retrying file system around a disk, or the disk if it is one."""
        return disk if isinstance(disk, cls) else cls(disk)

    @contextmanager
    def hold_directory(self, path: Path) -> Iterator[None]:
        """Reach the entries of a directory through one descriptor of it."""
        with contextlib.ExitStack() as held:
            yield self.retry(lambda: held.enter_context(self.disk.hold_directory(path)))

    def is_moved(self, path: Path) -> bool:
        """Return whether the path of a held directory leads elsewhere now, or nowhere."""
        return self.retry(self.disk.is_moved, path)

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading."""
        file = self.retry(self.disk.open, path, is_uncached=is_uncached)
        return RetryingFile(file, self)

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        """Return the first bytes of a small file, which is opened again for each attempt."""
        return self.retry(self.disk.read_head, directory, name, most_bytes=most_bytes)

    def names(self, path: Path) -> Sequence[str]:
        """Return the names in a directory."""
        return self.retry(self.disk.names, path)

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status for a directory."""
        return self.retry(self.disk.list, path)

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name, or None when it is absent."""
        return self.retry(self.disk.status, path)

    @contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        """Hold an advisory lock on a file, or yield the text of its holder."""
        with contextlib.ExitStack() as held:
            yield self.retry(lambda: held.enter_context(self.disk.lock(path, owner=owner)))

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a new file for writing."""
        return self.disk.create(path, mode=mode, owner_of=owner_of)

    def change(self, path: Path) -> OutputFile:
        """Open a regular file that exists, to overwrite some of its bytes."""
        return self.disk.change(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        self.disk.replace(source, target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        self.disk.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        self.disk.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        self.disk.sync_directory(path)

    def make_directory(self, path: Path, *, mode: int | None) -> None:
        """Create a directory and its missing parents durably."""
        self.disk.make_directory(path, mode=mode)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        self.disk.remove_directory(path)

    def free_bytes(self, path: Path) -> int | None:
        """Return how many bytes an unprivileged writer may still use."""
        return self.disk.free_bytes(path)

    def free_inodes(self, path: Path) -> int | None:
        """Return how many files an unprivileged writer may still create."""
        return self.disk.free_inodes(path)

    def pause(self, seconds: float) -> None:
        """Wait."""
        self.disk.pause(seconds)

    def retry(
        self, call: Callable[_Args, _Done], *args: _Args.args, **options: _Args.kwargs
    ) -> _Done:
        """Return the result of a call, which is tried a few times on transient errors."""
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
                self.pause(pause_s)
        try:
            done = call(*args, **options)
        except (OSError, MemoryError):
            self._lasting.add(failed)
            raise
        self._lasting.discard(failed)
        return done


class RetryingFile:
    """An open file of a `RetryingFileSystem`."""

    def __init__(self, file: InputFile, disk: RetryingFileSystem) -> None:
        self.file = file
        self.is_remote = is_remote(file)
        self._disk = disk

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        return self.file.size

    def wrapping(self, file: InputFile) -> InputFile:
        """Return a retrying file around another open file."""
        return RetryingFile(file, self._disk)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, or raise TruncatedError."""
        self._disk.retry(self.file.read_into, offset, buffer)

    def close(self) -> None:
        """Release the descriptor."""
        self.file.close()
