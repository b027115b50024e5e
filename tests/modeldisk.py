# SPDX-License-Identifier: Apache-2.0
"""The disk of `tests.crashmodel`: an in-memory `FileSystem` that behaves as `OsFileSystem` does."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.formats.errors import TruncatedError
from ckptmgr.fsio import FileStatus, InputFile, OutputFile
from tests.diskstate import ROOT, Change, Entries, FileContent, Namespace, Order, settled

_MAX_NAME_BYTES = 255
_EPOCH_S = 1_700_000_000
Inodes = tuple[int, ...]


class PowerCut(BaseException):
    """The machine went off; nothing that runs afterwards reaches the disk."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation on the disk, as recorded; `kind` is the name of the method (and `mkdir`)."""

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
    """

    def __init__(self, *, available_bytes: int | None = 1 << 40) -> None:
        self.operations: list[Operation] = []
        self.acknowledged: tuple[str, ...] = ()
        self.available_bytes = available_bytes
        self.boot = 1
        self.process = 1
        self._files: dict[int, FileContent] = {}
        self._modified_at: dict[int, int] = {}
        self._tree = Namespace.durable({ROOT: {}})
        self._last_inode = ROOT
        self._clock = 0
        self._locked: set[int] = set()
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

    def acknowledge(self, promise: str) -> None:
        """Note that the code under test has promised something."""
        with self._mutex:
            self.acknowledged += (promise,)

    def copy(self) -> ModelDisk:
        """Return an independent disk in the same state, powered, with the same locks held."""
        with self._mutex:
            disk = ModelDisk(available_bytes=self.available_bytes)
            disk.operations = list(self.operations)
            disk.acknowledged, disk.boot, disk.process = self.acknowledged, self.boot, self.process
            disk._files, disk._modified_at = dict(self._files), dict(self._modified_at)
            disk._tree, disk._last_inode, disk._clock = self._tree, self._last_inode, self._clock
            disk._locked = set(self._locked)
            return disk

    def restart(self) -> ModelDisk:
        """Return the disk after the process died and the machine did not: all writes are there, locks are free."""
        disk = self.copy()
        disk.process += 1
        disk.operations = []
        disk._locked = set()
        return disk

    def settle(self) -> None:
        """Make everything durable, as sync(1) does."""
        with self._mutex:
            self._files = {inode: content.synced() for inode, content in self._files.items()}
            self._tree = Namespace.durable(self._tree.visible)

    def crash_states(self, order: Order, *, tears: int = 2) -> Iterator[ModelDisk]:
        """Yield the distinct disks a power cut may leave at this moment, each freshly booted.

        Args:
            order: Which directory changes may survive without the others.
            tears: How many torn contents and holes to try for each unsynced file.
        """
        seen = set()
        for entries in self._tree.after_power_cut(order):
            files = self._reachable_files(entries)
            unsynced = tuple(inode for inode in files if self._files[inode].writes)
            for contents in self._contents_after_cut(unsynced, tears):
                disk = self._booted(entries, contents)
                if (state := disk._state()) not in seen:
                    seen.add(state)
                    yield disk

    def tree(self) -> str:
        """Return one line for each entry, for failure messages; `*` marks unsynced content."""
        lines = []
        for path, inode in self._walk(self._tree.visible):
            if (content := self._files.get(inode)) is None:
                lines.append(f"{path}/")
                continue
            mark = "*" if content.writes else ""
            shown = content.visible[:24].rstrip(b"\0")
            zeros = " then zeros" if not any(content.visible[len(shown) :]) else "..."
            rest = zeros if len(shown) < content.size_bytes else ""
            lines.append(f"{path} {content.size_bytes} bytes{mark} {shown!r}{rest}")
        return "\n".join(lines)

    def read_bytes(self, path: Path) -> bytes:
        """Return the whole content of a file, for tests."""
        return self._files[self._resolve(path)].visible

    def create(self, path: Path, *, mode: int) -> OutputFile:
        """Create a new file for writing; FileExistsError when the name is taken."""
        with self._powered():
            directory, name, inode = self._locate(path)
            if inode is not None:
                raise _error(errno.EEXIST, path)
            return _ModelOutput(self, path, self._create(directory, name, path, f"{mode:#o}"))

    def open(self, path: Path) -> InputFile:
        """Open a regular file for reading."""
        with self._powered():
            inode = self._resolve(path)
            if inode not in self._files:
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return _ModelInput(self, path, inode)

    def replace(self, source: Path, target: Path) -> None:
        """Rename, replacing the target atomically."""
        with self._powered():
            old_directory, old_name, moved = self._locate(source)
            new_directory, new_name, replaced = self._locate(target)
            if moved is None:
                raise _error(errno.ENOENT, source, target)
            if moved == replaced:
                return
            self._check_replace(source, target, moved, replaced)
            self._record("replace", source, f"-> {target}")
            sequence = self._tree.sequence + 1
            add, drop = (new_directory, new_name, moved), (old_directory, old_name, None)
            if old_directory == new_directory or moved not in self._files:
                change = Change(sequence=sequence, directory=new_directory, entries=(drop, add))
                self._tree = self._tree.changed(change)
                return
            self._tree = self._tree.changed(
                Change(sequence=sequence, directory=new_directory, entries=(add,)),
                Change(
                    sequence=sequence, directory=old_directory, entries=(drop,), is_removal=True
                ),
            )

    def unlink(self, path: Path) -> None:
        """Remove a name; FileNotFoundError when it is gone."""
        with self._powered():
            directory, name, inode = self._locate(path)
            if inode is None:
                raise _error(errno.ENOENT, path)
            if inode not in self._files:
                raise _error(errno.EISDIR, path)
            self._record("unlink", path)
            self._change(directory, name, None)

    def sync_directory(self, path: Path) -> None:
        """Make the entries of a directory durable."""
        with self._powered():
            inode = self._resolve_directory(path)
            self._record("sync_directory", path)
            self._tree = self._tree.directory_synced(inode)

    def make_directory(self, path: Path, *, mode: int) -> None:
        """Create a directory and its missing parents durably, in the steps of `OsFileSystem`."""
        with self._powered():
            missing = list(
                itertools.takewhile(lambda p: not self._exists(p), (path, *path.parents))
            )
            existing = missing[-1].parent if missing else path
            self.sync_directory(existing.parent)
            for directory in reversed(missing):
                parent, name, _ = self._locate(directory)
                self._record("mkdir", directory, f"{mode:#o}")
                self._change(parent, name, self._new_inode())
                self.sync_directory(directory.parent)
            if self._resolve(path) in self._files:
                raise NotADirectoryError(errno.ENOTDIR, "exists and is not a directory", str(path))

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status for a directory."""
        with self._powered():
            names = self._tree.visible.get(self._resolve_directory(path), {})
            return {name: self._status(inode) for name, inode in names.items()}

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a name, or None when it is absent."""
        with self._powered():
            try:
                return self._status(self._resolve(path))
            except FileNotFoundError:
                return None

    def free_bytes(self, path: Path) -> int | None:
        """Return `available_bytes`."""
        with self._powered():
            self._resolve(path)
            return self.available_bytes

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        """Hold an advisory lock on a file, or yield the text of its holder. The content of lock files never tears."""
        with self._powered():
            directory, name, inode = self._locate(path)
            if inode is None:
                inode = self._create(directory, name, path, "for a lock")
            if inode not in self._files:
                raise _error(errno.EISDIR, path)
            self._record("lock", path)
            holder = self._files[inode].visible.decode() if inode in self._locked else None
            if holder is None:
                self._locked.add(inode)
                self._files[inode] = settled(owner.encode())
        try:
            yield holder
        finally:
            if holder is None:
                self._locked.discard(inode)

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
        self.operations.append(Operation(kind, path, detail))

    def _create(self, directory: int, name: str, path: Path, detail: str) -> int:
        self._record("create", path, detail)
        inode = self._new_inode()
        self._files[inode] = FileContent()
        self._change(directory, name, inode)
        return inode

    def _new_inode(self) -> int:
        self._last_inode += 1
        self._modified_at[self._last_inode] = self._clock
        return self._last_inode

    def _change(self, directory: int, name: str, inode: int | None) -> None:
        entries = ((directory, name, inode),)
        change = Change(sequence=self._tree.sequence + 1, directory=directory, entries=entries)
        self._tree = self._tree.changed(change)

    def _locate(self, path: Path) -> tuple[int, str, int | None]:
        directory = self._resolve_directory(path.parent)
        if len(os.fsencode(path.name)) > _MAX_NAME_BYTES:
            raise _error(errno.ENAMETOOLONG, path)
        return directory, path.name, self._tree.visible.get(directory, {}).get(path.name)

    def _resolve(self, path: Path) -> int:
        if path == path.parent:
            return ROOT
        _, _, inode = self._locate(path)
        if inode is None:
            raise _error(errno.ENOENT, path)
        return inode

    def _resolve_directory(self, path: Path) -> int:
        if not path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the model wants absolute paths without '..', not {path}")
        inode = self._resolve(path)
        if inode in self._files:
            raise _error(errno.ENOTDIR, path)
        return inode

    def _exists(self, path: Path) -> bool:
        try:
            self._resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _check_replace(self, source: Path, target: Path, moved: int, replaced: int | None) -> None:
        is_directory = moved not in self._files
        if is_directory and source in target.parents:
            raise _error(errno.EINVAL, source, target)
        if target in source.parents:
            raise _error(errno.ENOTEMPTY, source, target)
        if replaced is None:
            return
        if not is_directory and replaced not in self._files:
            raise _error(errno.EISDIR, source, target)
        if is_directory and replaced in self._files:
            raise _error(errno.ENOTDIR, source, target)
        if is_directory and self._tree.visible.get(replaced):
            raise _error(errno.ENOTEMPTY, source, target)

    def _status(self, inode: int) -> FileStatus:
        content = self._files.get(inode)
        return FileStatus(
            size_bytes=content.size_bytes if content else 4096,
            modified_at=float(_EPOCH_S + self._modified_at.get(inode, 0)),
            is_file=content is not None,
            is_directory=content is None,
            identity=(1, inode),
        )

    def _write(self, inode: int, offset: int, data: bytes, path: Path) -> None:
        self._record("write_at", path, f"{len(data)} bytes at {offset}")
        self._files[inode] = self._files[inode].written(offset, data)
        self._modified_at[inode] = self._clock

    def _reserve(self, inode: int, size_bytes: int, path: Path) -> None:
        self._record("reserve", path, f"{size_bytes} bytes")
        self._files[inode] = self._files[inode].reserved(size_bytes)

    def _sync(self, inode: int, path: Path) -> None:
        self._record("sync", path)
        self._files[inode] = self._files[inode].synced()

    def _walk(self, entries: Entries) -> Iterator[tuple[Path, int]]:
        waiting = [(Path("/"), ROOT)]
        while waiting:
            path, directory = waiting.pop()
            for name, inode in sorted(entries.get(directory, {}).items()):
                yield path / name, inode
                if inode not in self._files:
                    waiting.append((path / name, inode))

    def _reachable_files(self, entries: Entries) -> Inodes:
        return tuple(dict.fromkeys(i for _, i in self._walk(entries) if i in self._files))

    def _contents_after_cut(self, unsynced: Inodes, tears: int) -> Iterator[dict[int, bytes]]:
        """Yield contents: every file alike, and each one by itself with the others lost or whole."""
        choices = {inode: self._files[inode].after_power_cut(tears) for inode in unsynced}
        for kind in range(max((len(c) for c in choices.values()), default=1)):
            yield {inode: c[min(kind, len(c) - 1)] for inode, c in choices.items()}
        if len(choices) < 2:
            return
        lost = {inode: self._files[inode].durable for inode in unsynced}
        whole = {inode: self._files[inode].visible for inode in unsynced}
        for inode, contents in choices.items():
            for content, others in itertools.product(contents, (lost, whole)):
                yield {**others, inode: content}

    def _booted(self, entries: Entries, contents: dict[int, bytes]) -> ModelDisk:
        disk = ModelDisk(available_bytes=self.available_bytes)
        disk.boot, disk.process = self.boot + 1, self.process + 1
        disk.acknowledged, disk._clock = self.acknowledged, self._clock
        disk._modified_at, disk._last_inode = dict(self._modified_at), self._last_inode
        disk._tree = Namespace.durable(entries)
        for inode in self._reachable_files(entries):
            content = contents.get(inode, self._files[inode].durable)
            disk._files[inode] = settled(content)
        return disk

    def _state(self) -> frozenset[tuple[Path, bytes | None]]:
        walk = self._walk(self._tree.visible)
        return frozenset(
            (path, self._files[inode].durable if inode in self._files else None)
            for path, inode in walk
        )


class _ModelOutput:
    def __init__(self, disk: ModelDisk, path: Path, inode: int) -> None:
        self._disk, self._path, self._inode = disk, path, inode
        self._is_open = True

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        with self._disk._powered():
            if not memoryview(data).nbytes:
                return
            self._check_open()
            if offset < 0:
                raise _error(errno.EINVAL, None)
            self._disk._write(self._inode, offset, bytes(data), self._path)

    def reserve(self, size_bytes: int) -> None:
        with self._disk._powered():
            if size_bytes:
                self._check_open()
                self._disk._reserve(self._inode, size_bytes, self._path)

    def sync(self) -> None:
        with self._disk._powered():
            self._check_open()
            self._disk._sync(self._inode, self._path)

    def close(self) -> None:
        with self._disk._powered():
            if self._is_open:
                self._disk._record("close", self._path)
            self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise _error(errno.EBADF, None)


class _ModelInput:
    def __init__(self, disk: ModelDisk, path: Path, inode: int) -> None:
        self._disk, self._path, self._inode = disk, path, inode
        self._is_open = True
        self._size = disk._files[inode].size_bytes

    @property
    def size(self) -> int:
        return self._size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        with self._disk._powered():
            if not buffer.nbytes:
                return
            if not self._is_open:
                raise _error(errno.EBADF, None)
            if offset < 0:
                raise _error(errno.EINVAL, None)
            data = self._disk._files[self._inode].visible[offset : offset + buffer.nbytes]
            buffer[: len(data)] = data
            if len(data) < buffer.nbytes:
                raise TruncatedError(
                    f"{buffer.nbytes - len(data)} bytes wanted, but the file ends here",
                    offset=offset + len(data),
                )

    def close(self) -> None:
        self._is_open = False


def _error(number: int, path: Path | None, target: Path | None = None) -> OSError:
    text = os.strerror(number)
    if path is None:
        return OSError(number, text)
    if target is None:
        return OSError(number, text, str(path))
    return OSError(number, text, str(path), None, str(target))
