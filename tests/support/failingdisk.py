# SPDX-License-Identifier: Apache-2.0
"""A disk that fails on demand: one call, all later calls, or when its space is used up.

```python
for failure in every_failure(disk, lambda disk: Store(disk, RUNS).save(...)):
    assert isinstance(failure.raised, SaveFailed), failure
    assert is_sound(Store(failure.disk, RUNS)), failure
```
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.io.files import FileHead
from ckptmgr.io.filesystem import FileStatus, FileSystem, InputFile, OutputFile

if TYPE_CHECKING:
    from tests.support.crashmodel import ModelDisk

POSSIBLE_ERRORS = {
    "change": (errno.EMFILE, errno.EROFS),
    "close": (errno.EIO,),
    "create": (errno.EMFILE, errno.ENOSPC, errno.EROFS),
    "free_bytes": (errno.EIO,),
    "hold_directory": (errno.EMFILE, errno.EIO),
    "free_inodes": (errno.EIO,),
    "is_moved": (errno.EIO,),
    "link": (errno.ENOSPC, errno.EIO),
    "list": (errno.EMFILE, errno.EIO),
    "lock": (errno.EMFILE, errno.EROFS),
    "make_directory": (errno.ENOSPC, errno.EROFS),
    "open": (errno.EMFILE, errno.EIO),
    "read_into": (errno.EIO,),
    "reserve": (errno.ENOSPC,),
    "remove_directory": (errno.EIO, errno.EROFS),
    "replace": (errno.ENOSPC, errno.EROFS, errno.EIO),
    "status": (errno.EIO,),
    "sync": (errno.EIO, errno.ENOSPC),
    "sync_directory": (errno.EIO, errno.EMFILE),
    "unlink": (errno.EROFS, errno.EIO),
    "write_at": (errno.ENOSPC, errno.EIO),
}
"""Which errors an operation can meet on a real disk."""


class FailingDisk:
    """A `FileSystem` around another one that raises an OSError at a chosen call.

    A failed operation leaves the harder of the legal outcomes: a failed write has written the first half, a
    failed sync has synced nothing, a failed close has closed; all others have done nothing.

    Args:
        disk: The real work is done there.
        error: The errno to raise.
        operation: Count only calls of this method (see POSSIBLE_ERRORS); None counts all.
        call: Fail at this call, from 1; None never fails.
        is_lasting: Whether all later calls that count fail too.
        space_bytes: How much may be written before `space_error`; None for no limit. Removed and replaced
            files give theirs back.
        space_error: The errno of a write without space: EDQUOT is a quota, which `free_bytes` does not show.

    Attributes:
        calls: Names of the operations so far.
        pauses_s: How long the code under test would have waited before it tried again.
    """

    def __init__(
        self,
        disk: FileSystem,
        *,
        error: int = errno.EIO,
        operation: str | None = None,
        call: int | None = None,
        is_lasting: bool = False,
        space_bytes: int | None = None,
        space_error: int = errno.ENOSPC,
    ) -> None:
        if operation is not None and operation not in POSSIBLE_ERRORS:
            raise ValueError(f"no such operation: {operation}")
        self.calls: list[str] = []
        self.pauses_s: list[float] = []
        self._disk = disk
        self._error = error
        self._operation = operation
        self._call = call
        self._is_lasting = is_lasting
        self._space_bytes = space_bytes
        self._space_error = space_error
        self._mutex = threading.Lock()

    @property
    def has_failed(self) -> bool:
        """Whether the chosen call has been reached."""
        return self._call is not None and self._counted() >= self._call

    def mend(self) -> None:
        """Fail no more."""
        self._call = None

    @contextlib.contextmanager
    def hold_directory(self, path: Path) -> Iterator[None]:
        """Hold a directory."""
        self._meet("hold_directory", path)
        with self._disk.hold_directory(path):
            yield

    def is_moved(self, path: Path) -> bool:
        """Return whether a held directory was moved."""
        self._meet("is_moved", path)
        return self._disk.is_moved(path)

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a new file."""
        self._meet("create", path)
        return _FailingOutput(self, self._disk.create(path, mode=mode, owner_of=owner_of), path)

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a file for reading."""
        self._meet("open", path)
        return _FailingInput(self, self._disk.open(path, is_uncached=is_uncached), path)

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        """Return the first bytes of a file; may fail as its open and as its read."""
        self._meet("open", directory / name)
        self._meet("read_into", directory / name)
        return self._disk.read_head(directory, name, most_bytes=most_bytes)

    def change(self, path: Path) -> OutputFile:
        """Open a file that exists, for writing."""
        self._meet("change", path)
        return _FailingOutput(self, self._disk.change(path), path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename."""
        self._meet("replace", source)
        freed = self._size_of(target) if source != target else 0
        self._disk.replace(source, target)
        self._give_back(freed)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name."""
        self._meet("link", source)
        self._disk.link(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a name."""
        self._meet("unlink", path)
        freed = self._size_of(path)
        self._disk.unlink(path)
        self._give_back(freed)

    def sync_directory(self, path: Path) -> None:
        """Make entries durable."""
        self._meet("sync_directory", path)
        self._disk.sync_directory(path)

    def make_directory(self, path: Path, *, mode: int | None) -> None:
        """Create a directory and its parents."""
        self._meet("make_directory", path)
        self._disk.make_directory(path, mode=mode)

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        self._meet("remove_directory", path)
        self._disk.remove_directory(path)

    def names(self, path: Path) -> Sequence[str]:
        """Return the names in a directory."""
        self._meet("list", path)
        return self._disk.names(path)

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return the entries of a directory."""
        self._meet("list", path)
        return self._disk.list(path)

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name."""
        self._meet("status", path)
        return self._disk.status(path)

    def free_bytes(self, path: Path) -> int | None:
        """Return the space that is left."""
        self._meet("free_bytes", path)
        really_free = self._disk.free_bytes(path)
        is_shown = self._space_bytes is not None and self._space_error == errno.ENOSPC
        return self._space_bytes if is_shown else really_free

    def free_inodes(self, path: Path) -> int | None:
        """Return how many files there may still be."""
        self._meet("free_inodes", path)
        return self._disk.free_inodes(path)

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        """Hold a lock."""
        self._meet("lock", path)
        with self._disk.lock(path, owner=owner) as holder:
            yield holder

    def pause(self, seconds: float) -> None:
        """Note that the code under test would wait."""
        self.pauses_s.append(seconds)

    def _counted(self) -> int:
        return len(self.calls) if self._operation is None else self.calls.count(self._operation)

    def _meet(self, operation: str, path: Path) -> None:
        with self._mutex:
            self.calls.append(operation)
            if self._call is None or self._operation not in (None, operation):
                return
            late = self._counted() - self._call
            if late == 0 or (late > 0 and self._is_lasting):
                raise OSError(self._error, os.strerror(self._error), str(path))

    def _take(self, size_bytes: int) -> int:
        with self._mutex:
            if self._space_bytes is None:
                return size_bytes
            taken = min(size_bytes, self._space_bytes)
            self._space_bytes -= taken
            return taken

    def _give_back(self, size_bytes: int) -> None:
        with self._mutex:
            if self._space_bytes is not None:
                self._space_bytes += size_bytes

    def _no_space(self, path: Path) -> OSError:
        return OSError(self._space_error, os.strerror(self._space_error), str(path))

    def _size_of(self, path: Path) -> int:
        status = self._disk.status(path)
        return status.size_bytes if status is not None and status.is_file else 0


class _FailingOutput:
    def __init__(self, disk: FailingDisk, file: OutputFile, path: Path) -> None:
        self._disk, self._file, self._path = disk, file, path
        self._size_bytes = 0

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        try:
            self._disk._meet("write_at", self._path)
        except OSError:
            self._file.write_at(offset, view[: view.nbytes // 2])
            raise
        lacking = self._grow(offset + view.nbytes)
        self._file.write_at(offset, view[: max(0, view.nbytes - lacking)])
        if lacking:
            raise self._disk._no_space(self._path)

    def reserve(self, size_bytes: int) -> None:
        self._disk._meet("reserve", self._path)
        before = self._size_bytes
        if self._grow(size_bytes):
            self._disk._give_back(self._size_bytes - before)
            self._size_bytes = before
            raise self._disk._no_space(self._path)
        self._file.reserve(size_bytes)

    def _grow(self, size_bytes: int) -> int:
        """Take space up to `size_bytes` and return how much of it there was not."""
        growth = max(0, size_bytes - self._size_bytes)
        granted = self._disk._take(growth)
        self._size_bytes += granted
        return growth - granted

    def sync(self) -> None:
        self._disk._meet("sync", self._path)
        self._file.sync()

    def close(self) -> None:
        try:
            self._disk._meet("close", self._path)
        finally:
            self._file.close()


class _FailingInput:
    def __init__(self, disk: FailingDisk, file: InputFile, path: Path) -> None:
        self._disk, self._file, self._path = disk, file, path

    @property
    def size(self) -> int:
        return self._file.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._disk._meet("read_into", self._path)
        self._file.read_into(offset, buffer)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One run with one failed call.

    Attributes:
        call: Number of the failed call, from 1.
        operation: Its name.
        error: The errno it raised.
        raised: The error of the run, or None when it returned.
        disk: The disk afterwards; its process is still alive.
    """

    call: int
    operation: str
    error: int
    raised: Exception | None
    disk: ModelDisk

    def __str__(self) -> str:
        name = errno.errorcode[self.error]
        outcome = f"raised {self.raised!r}" if self.raised else "returned"
        what = f"{name} from {self.operation}, call {self.call}: the run {outcome}"
        return f"{what}\n{self.disk.tree()}"


def every_failure(
    disk: ModelDisk, run: Callable[[FailingDisk], object], *, is_lasting: bool = False
) -> Iterator[Failure]:
    """Run once for each call the run makes and each error that call can meet, each on a fresh copy of `disk`."""
    counting = FailingDisk(disk.copy())
    run(counting)
    for call, operation in enumerate(counting.calls, 1):
        for error in POSSIBLE_ERRORS[operation]:
            model = disk.copy()
            failing = FailingDisk(model, error=error, call=call, is_lasting=is_lasting)
            raised = _raised_by(run, failing)
            yield Failure(call=call, operation=operation, error=error, raised=raised, disk=model)


def _raised_by(run: Callable[[FailingDisk], object], disk: FailingDisk) -> Exception | None:
    try:
        run(disk)
    except Exception as error:  # whatever it is, the test judges it
        return error
    return None
