# SPDX-License-Identifier: Apache-2.0
"""The disk of `tests.crashmodel`: an in-memory `FileSystem` that behaves as `OsFileSystem` does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmgr import TruncatedError
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.files import FileHead, NoRegularFile
from ckptmgr.io.filesystem import FileStatus, InputFile, OutputFile
from tests.support.diskimage import DiskImage, Snapshot, os_error
from tests.support.diskstate import FileContent, Order

_EPOCH_S = 1_700_000_000


class PowerCut(BaseException):
    """The machine went off; nothing that runs afterwards reaches the disk."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation as recorded; `kind` is the name of the method, or `mkdir` for a step of `make_directory`."""

    kind: str
    path: Path
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.path} {self.detail}".rstrip()


class ModelDisk:
    """An in-memory `FileSystem`. Safe to use from several threads.

    Attributes:
        operations: What changed the disk so far (and locks and closes), oldest first.
        acknowledged: The promises noted so far.
        available_bytes: What `free_bytes` answers.
        boot: Number of this boot; a power cut starts a new one.
        process: Number of this process; a power cut and a restart start a new one.
        has_change_times: Whether it tells when files changed; some file systems do not.
    """

    def __init__(self, *, available_bytes: int | None = 1 << 40) -> None:
        self.operations: tuple[Operation, ...] = ()
        self.acknowledged: tuple[str, ...] = ()
        self.available_bytes = available_bytes
        self.boot = 1
        self.process = 1
        self.has_change_times = True
        self._image = DiskImage.empty()
        self._clock = 0
        self._owners: dict[int, str] = {}
        self._operations_left: int | None = None
        self._before_operation: Callable[[], None] | None = None
        self._mutex = threading.RLock()

    @property
    def is_cut(self) -> bool:
        """Whether the power went off."""
        return self._operations_left == -1

    def cut_after(self, count: int) -> None:
        """Cut the power after `count` more operations: the next one, and all later ones, raise PowerCut."""
        self._operations_left = count

    def before_each_operation(self, call: Callable[[], None]) -> None:
        """Call `call` before each operation takes effect, with the disk locked."""
        self._before_operation = call

    def acknowledge(self, promise: str) -> None:
        """Note that the code under test has promised something."""
        with self._powered():
            self.acknowledged += (promise,)

    def copy(self) -> ModelDisk:
        """Return an independent disk in the same state: powered, the same locks held, nothing open."""
        with self._mutex:
            disk = self._successor(self._image)
            disk.operations, disk.boot, disk.process = self.operations, self.boot, self.process
            disk._owners = dict(self._owners)
            return disk

    def restart(self) -> ModelDisk:
        """Return the disk after the process died and the machine did not: all writes are there, locks are free."""
        disk = self._successor(self._image)
        disk.boot = self.boot
        return disk

    def settle(self) -> None:
        """Make everything durable, as sync(1) does."""
        with self._powered():
            self._image = self._image.settled()

    def crash_states(self, order: Order, *, tears: int = 2) -> Iterator[ModelDisk]:
        """Yield the distinct disks a power cut may leave at this moment, each freshly booted.

        Args:
            order: Which directory changes may survive without the others.
            tears: How many torn contents and holes to try for each unsynced file.
        """
        for image in self._image.after_power_cut(order, tears):
            yield self._successor(image)

    def state(self) -> Snapshot:
        """Return all paths with their contents (None for directories)."""
        return self._image.state()

    def tree(self) -> str:
        """Return one line for each entry, for failure messages; `*` marks unsynced content."""
        walk = self._image.walk(self._image.tree.visible)
        return "\n".join(_line(path, self._image.files.get(inode)) for path, inode in walk)

    def read_bytes(self, path: Path) -> bytes:
        """Return the whole content of a file, for tests."""
        return self._image.files[self._image.resolve(path)].visible

    @contextlib.contextmanager
    def hold_directory(self, path: Path) -> Iterator[None]:
        """Do nothing but look: in this model nobody swaps directories."""
        with self._powered():
            self._image.resolve_directory(path)
        yield

    def is_moved(self, path: Path) -> bool:
        """Return False."""
        del path
        return False

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken. Here nothing has an owner."""
        del owner_of
        with self._powered():
            directory, name, inode = self._image.locate(path)
            if inode is not None:
                raise os_error(errno.EEXIST, path)
            return _ModelOutput(self, path, self._create(directory, name, path, f"{mode:#o}"))

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open a regular file for reading; this disk has no cache to pass by."""
        del is_uncached
        with self._powered():
            inode = self._image.resolve(path)
            if inode not in self._image.files:
                raise NoRegularFile(errno.EINVAL, "not a regular file", str(path))
            return _ModelInput(self, inode)

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        """Return the first bytes of a file."""
        path = directory / name
        file = self.open(path)
        data = read_bytes(file, 0, min(file.size, most_bytes))
        return FileHead(data, file.size, (1, self._image.resolve(path)))

    def change(self, path: Path) -> OutputFile:
        """Open a regular file that exists, to overwrite some of its bytes."""
        with self._powered():
            inode = self._image.resolve(path)
            if inode not in self._image.files:
                raise NoRegularFile(errno.EINVAL, "not a regular file", str(path))
            return _ModelOutput(self, path, inode)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        with self._powered():
            renamed = self._image.renamed(source, target)
            if renamed is not self._image:
                self._record("replace", source, f"-> {target}")
                self._image = renamed

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name; FileExistsError when that is taken."""
        with self._powered():
            inode = self._image.resolve(source)
            directory, name, taken = self._image.locate(target)
            if taken is not None:
                raise os_error(errno.EEXIST, source, target)
            if inode not in self._image.files:
                raise os_error(errno.EPERM, source, target)
            self._record("link", source, f"-> {target}")
            self._image = self._image.with_entry(directory, name, inode)

    def unlink(self, path: Path) -> None:
        """Remove a name; FileNotFoundError when it is gone."""
        with self._powered():
            directory, name, inode = self._image.locate(path)
            if inode is None:
                raise os_error(errno.ENOENT, path)
            if inode not in self._image.files:
                raise os_error(errno.EISDIR, path)
            self._record("unlink", path)
            self._image = self._image.with_entry(directory, name, None)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        with self._powered():
            directory = self._image.resolve_directory(path)
            self._record("sync_directory", path)
            self._image = self._image.directory_synced(directory)

    def make_directory(self, path: Path, *, mode: int | None) -> None:
        """Create a directory and its missing parents durably, in the steps of `OsFileSystem`."""
        with self._powered():
            upwards = (path, *path.parents)
            missing = list(itertools.takewhile(lambda p: not self._image.exists(p), upwards))
            self.sync_directory(upwards[len(missing)].parent)
            for directory in reversed(missing):
                parent, name, _ = self._image.locate(directory)
                self._record("mkdir", directory, "as around it" if mode is None else f"{mode:#o}")
                inode = self._image.last_inode + 1
                self._image = self._image.with_entry(parent, name, inode)
                self.sync_directory(directory.parent)
            if self._image.resolve(path) in self._image.files:
                raise NotADirectoryError(errno.ENOTDIR, "exists and is not a directory", str(path))

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory; ENOTEMPTY when something is in it."""
        with self._powered():
            inode = self._image.resolve_directory(path)
            if self._image.names_in(inode):
                raise os_error(errno.ENOTEMPTY, path)
            directory, name, _ = self._image.locate(path)
            self._record("rmdir", path)
            self._image = self._image.with_entry(directory, name, None)

    def names(self, path: Path) -> Sequence[str]:
        """Return the names in a directory."""
        with self._powered():
            return [*self._image.names_in(self._image.resolve_directory(path))]

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status for a directory."""
        with self._powered():
            names = self._image.names_in(self._image.resolve_directory(path))
            return {name: self._status(inode) for name, inode in names.items()}

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name, or None when it is absent."""
        with self._powered():
            try:
                return self._status(self._image.resolve(path))
            except FileNotFoundError:
                return None

    def free_inodes(self, path: Path) -> int | None:
        """Return None: this disk counts none."""
        return None

    def free_bytes(self, path: Path) -> int | None:
        """Return `available_bytes`."""
        with self._powered():
            self._image.resolve(path)
            return self.available_bytes

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        """Hold an advisory lock on a file, or yield the text of its holder; its content never tears."""
        with self._powered():
            directory, name, inode = self._image.locate(path)
            if inode is None:
                inode = self._create(directory, name, path, "for a lock")
            if inode not in self._image.files:
                raise os_error(errno.EISDIR, path)
            self._record("lock", path)
            holder = self._owners.get(inode)
            if holder is None:
                self._owners[inode] = owner
                text = owner.encode()
                content = FileContent(durable=text, size_bytes=len(text), written_at=self._clock)
                self._image = self._image.with_file(inode, content)
        try:
            yield holder
        finally:
            if holder is None:
                self._owners.pop(inode)

    def pause(self, seconds: float) -> None:
        """Take no time."""

    @contextlib.contextmanager
    def _powered(self) -> Iterator[None]:
        with self._mutex:
            if self.is_cut:
                raise PowerCut
            yield

    def _record(self, kind: str, path: Path, detail: str = "") -> None:
        if self._before_operation is not None:
            self._before_operation()
        if self._operations_left is not None:
            self._operations_left -= 1
            if self.is_cut:
                raise PowerCut
        self._clock += 1
        self.operations += (Operation(kind, path, detail),)

    def _create(self, directory: int, name: str, path: Path, detail: str) -> int:
        self._record("create", path, detail)
        inode = self._image.last_inode + 1
        self._image = self._image.with_entry(directory, name, inode)
        self._image = self._image.with_file(inode, FileContent(written_at=self._clock))
        return inode

    def _successor(self, image: DiskImage) -> ModelDisk:
        disk = ModelDisk(available_bytes=self.available_bytes)
        disk.acknowledged, disk.boot, disk.process = (
            self.acknowledged,
            self.boot + 1,
            self.process + 1,
        )
        disk.has_change_times = self.has_change_times
        disk._image, disk._clock = image, self._clock
        return disk

    def _status(self, inode: int) -> FileStatus:
        content = self._image.files.get(inode)
        written_s = _EPOCH_S + (content.written_at if content else 0)
        return FileStatus(
            size_bytes=content.size_bytes if content else 4096,
            modified_at=float(written_s),
            is_file=content is not None,
            is_directory=content is None,
            identity=(1, inode),
            changed_ns=written_s * 10**9 if self.has_change_times else None,
        )


class _ModelOutput:
    def __init__(self, disk: ModelDisk, path: Path, inode: int) -> None:
        self._disk, self._path, self._inode = disk, path, inode
        self._is_open = True

    def reserve(self, size_bytes: int) -> None:
        with self._disk._powered():
            if size_bytes:
                content = self._open_content(self._path).reserved(size_bytes)
                self._change("reserve", content, f"{size_bytes} bytes")

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        with self._disk._powered():
            if not memoryview(data).nbytes:
                return
            if offset < 0:
                raise os_error(errno.EINVAL)
            content = self._open_content()
            detail = f"{memoryview(data).nbytes} bytes at {offset}"
            self._change("write_at", content.written(offset, bytes(data)), detail)

    def sync(self) -> None:
        with self._disk._powered():
            if not self._is_open:
                raise ValueError("file descriptor cannot be a negative integer")
            self._change("sync", self._open_content().synced(), "")

    def close(self) -> None:
        with self._disk._powered():
            if self._is_open:
                self._disk._record("close", self._path)
            self._is_open = False

    def _open_content(self, named: Path | None = None) -> FileContent:
        if not self._is_open:
            raise os_error(errno.EBADF, named)
        return self._disk._image.files[self._inode]

    def _change(self, kind: str, content: FileContent, detail: str) -> None:
        self._disk._record(kind, self._path, detail)
        if kind != "sync":
            content = replace(content, written_at=self._disk._clock)
        self._disk._image = self._disk._image.with_file(self._inode, content)


class _ModelInput:
    def __init__(self, disk: ModelDisk, inode: int) -> None:
        self._disk, self._inode = disk, inode
        self._is_open = True
        self._size = disk._image.files[inode].size_bytes

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._disk._powered():
            if not buffer.nbytes:
                return
            if offset < 0:
                raise os_error(errno.EINVAL)
            if not self._is_open:
                raise os_error(errno.EBADF)
            content = self._disk._image.files[self._inode].visible
            data = content[offset : offset + buffer.nbytes]
            buffer[: len(data)] = data
            lacking = buffer.nbytes - len(data)
            if lacking:
                raise TruncatedError(
                    f"{lacking} bytes wanted, but the file ends here", offset=offset + len(data)
                )

    def close(self) -> None:
        self._is_open = False


def _line(path: str, content: FileContent | None) -> str:
    if content is None:
        return f"{path}/"
    mark = "*" if content.writes else ""
    shown = content.visible[:24].rstrip(b"\0")
    rest = content.visible[len(shown) :]
    end = "" if not rest else "..." if any(rest) else " then zeros"
    return f"{path} {content.size_bytes} bytes{mark} {shown!r}{end}"
