# SPDX-License-Identifier: Apache-2.0
"""List the checkpoints of other tools in a directory, and the runs in the folders below one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.filesystem import FileStatus, FileSystem
from ckptmgr.io.owners import about_stranger, is_of_stranger
from ckptmgr.maintenance.foreign.layouts import (
    HUB,
    LAYOUTS,
    Recognised,
    Recognition,
    is_hub_folder,
    recognise,
)
from ckptmgr.maintenance.foreign.model import ForeignCheckpoint, Pointer
from ckptmgr.store.listing import modified_time
from ckptmgr.store.manifest.codec import SUFFIX

_MOST_TEXT_BYTES = 16 << 20  # trainer_state.json grows with each logged step
_MOST_DEPTH = 4  # lightning_logs/version_0/checkpoints is at depth 3
_MOST_FOLDERS = 2000
_HEAD_BYTES = 4
_SNAPSHOTS = "snapshots"
_NO_POINTERS: Mapping[str, tuple[Pointer, ...]] = MappingProxyType({})


class DiskFolder:
    """A directory on a disk, read once; see `model.Folder`.

    `only` leaves out all directories but those of these names. `entries` are those of the
    directory, where the caller has them. A directory in it that this user may not read is as an
    empty one: it says nothing about the others.
    """

    def __init__(
        self,
        fs: FileSystem,
        path: Path,
        *,
        only: Collection[str] | None = None,
        is_there: bool = True,
        above: DiskFolder | None = None,
        tree: Path | None = None,
        entries: Mapping[str, FileStatus] | None = None,
    ) -> None:
        self._fs = fs
        self._path = path
        self._only = only
        self._is_there = is_there
        self._above = above
        self._tree: Path = (
            above._tree if above is not None else tree_of(path) if tree is None else tree
        )
        self._known = entries
        self._folders: dict[str, DiskFolder] = {}

    def entries(self) -> Mapping[str, FileStatus]:
        """Return its entries."""
        return self._entries

    @cached_property
    def _entries(self) -> Mapping[str, FileStatus]:
        if self._known is not None:
            return self._known
        if not self._is_there:
            return {}
        try:
            found = self._fs.list(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except PermissionError:
            if self._above is None:
                raise
            return {}
        if self._only is None:
            return found
        return {
            name: one for name, one in found.items() if not one.is_directory or name in self._only
        }

    def folder(self, name: str) -> DiskFolder:
        """Return the view of a directory in it; an empty one for a link."""
        if name not in self._folders:
            status = self._entries.get(name)
            is_there = status is not None and status.is_directory
            self._folders[name] = DiskFolder(
                self._fs, self._path / name, is_there=is_there, above=self
            )
        return self._folders[name]

    def know(self, name: str, entries: Mapping[str, FileStatus]) -> None:
        """Take the entries of a directory in it from the caller."""
        self._folders[name] = DiskFolder(self._fs, self._path / name, above=self, entries=entries)

    def file(self, name: str) -> FileStatus | None:
        """Return the status of a file, or of that in the same tree which a link leads to."""
        found = self.real_file(name)
        return None if found is None else found[1]

    def real_file(self, name: str) -> tuple[Path, FileStatus] | None:
        """Return the path and the status of a file, or of that which a link in the tree leads to.

        The cache of the Hub has only links; one that leads out of its tree is not followed.
        """
        path, status = self._path / name, self._entries.get(name)
        if status is not None and not (status.is_file or status.is_directory):
            path = Path(os.path.realpath(path))
            is_inside = path.is_relative_to(os.path.realpath(self._tree))
            status = self._fs.status(path) if is_inside else None
        return (path, status) if status is not None and status.is_file else None

    def text(self, name: str) -> str | None:
        """Return the text of a small file."""
        data = self._start_of(name, _MOST_TEXT_BYTES + 1)
        try:
            return None if data is None or len(data) > _MOST_TEXT_BYTES else data.decode()
        except ValueError:
            return None

    def head(self, name: str) -> bytes:
        """Return the first bytes of a file."""
        return self._start_of(name, _HEAD_BYTES) or b""

    def holds(self, name: str, text: bytes) -> bool:
        """Return whether some bytes occur in the first 16 MiB of a file."""
        return text in (self._start_of(name, _MOST_TEXT_BYTES) or b"")

    def link(self, name: str) -> str | None:
        """Return the target of a link: a name in this directory, else a path."""
        status = self._entries.get(name)
        if status is None or status.is_file or status.is_directory:
            return None
        target = Path(os.path.realpath(self._path / name))
        is_here = target.parent == Path(os.path.realpath(self._path))
        return target.name if is_here or not os.path.lexists(target) else str(target)

    def _start_of(self, name: str, most: int) -> bytes | None:
        found = self.real_file(name)
        if found is None:
            return None
        try:
            with contextlib.closing(self._fs.open(found[0])) as file:
                return read_bytes(file, 0, min(most, file.size))
        except (OSError, FormatError):
            return None


def tree_of(path: Path) -> Path:
    """Return the folder within which links of a directory are followed.

    In the cache of the Hub the files of `snapshots/REVISION/` are links into `blobs/`.
    """
    return path.parent if path.name == _SNAPSHOTS else path


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignListing:
    """The checkpoints of other tools in a directory.

    Attributes:
        checkpoints: Tool by tool, each oldest first.
        pointers: By tool, what points at them.
        is_itself: Whether the directory is itself one checkpoint, the only one of the listing.
    """

    checkpoints: tuple[ForeignCheckpoint, ...] = ()
    pointers: Mapping[str, tuple[Pointer, ...]] = field(default_factory=lambda: _NO_POINTERS)
    is_itself: bool = False

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools, in the order of the listing."""
        return tuple(dict.fromkeys(one.checkpoint.format for one in self.checkpoints))

    @property
    def paths(self) -> frozenset[Path]:
        """The paths of the checkpoints."""
        return frozenset(one.checkpoint.path for one in self.checkpoints)

    def has(self, one: Checkpoint) -> bool:
        """Return whether a checkpoint of the store is one of these, or a file of one."""
        is_weight = one.is_bare and HUB.tool in self.tools
        return self.is_itself or is_weight or one.path in self.paths


def list_foreign(
    fs: FileSystem,
    directory: Path,
    *,
    entries: Mapping[str, FileStatus] | None = None,
    with_hub: bool = False,
) -> ForeignListing:
    """Return the checkpoints of other tools in a directory, or the one that it is itself.

    `entries` are those of the directory, where the caller has just listed it. With `with_hub` it
    may be a folder of the Hub; otherwise the files in such a folder count by themselves.

    Raises:
        OSError: From the disk.
    """
    here = DiskFolder(fs, directory, entries=entries)
    listing = _listing(fs, directory, recognise(here))
    if with_hub and any(name.endswith(SUFFIX) for name in here.entries()):
        with_hub = False  # ours
    layouts = () if listing.checkpoints else LAYOUTS
    layouts += (HUB,) if with_hub else ()
    if not layouts:
        return listing
    with contextlib.suppress(OSError):  # the directory above may not be readable
        above = DiskFolder(fs, directory.parent, only=(directory.name,))
        above.know(directory.name, here.entries())
        around = _listing(fs, directory.parent, recognise(above, layouts))
        itself = tuple(one for one in around.checkpoints if one.checkpoint.path == directory)
        if listing.checkpoints:
            return replace(listing, checkpoints=(*listing.checkpoints, *itself))
        if itself:
            return ForeignListing(checkpoints=itself, pointers=around.pointers, is_itself=True)
    return listing


def _listing(
    fs: FileSystem, directory: Path, recognitions: Sequence[Recognition]
) -> ForeignListing:
    found: list[ForeignCheckpoint] = []
    for one in recognitions:
        named = [(pointer.target, pointer.source) for pointer in one.pointers]
        its = [
            _measured(fs, directory, item, tuple(source for to, source in named if to == item.name))
            for item in one.found
        ]
        found += sorted(
            its,
            key=lambda one: (not one.checkpoint.has_step, one.checkpoint.step, one.checkpoint.name),
        )
    pointers = {one.layout.tool: one.pointers for one in recognitions}
    return ForeignListing(checkpoints=tuple(found), pointers=pointers)


def _measured(
    fs: FileSystem, directory: Path, one: Recognised, named_by: tuple[str, ...]
) -> ForeignCheckpoint:
    path = directory / one.name
    size_bytes, modified_at = _measure(fs, path, is_deep=one.layout is not HUB)
    state, problem = State.COMPLETE if one.problem is None else State.INCOMPLETE, one.problem
    status = fs.status(path)
    if status is not None and is_of_stranger(status, fs.status(directory)):
        state, problem = State.OTHER_OWNER, about_stranger(status)
    checkpoint = Checkpoint(
        path=path,
        series=one.layout.tool,
        format=one.layout.tool,
        step=one.step or 0,
        saved_at=modified_time(modified_at),
        size_bytes=size_bytes,
        state=state,
        problem=problem,
        metrics=one.metrics,
        has_step=one.step is not None,
    )
    return ForeignCheckpoint(checkpoint=checkpoint, named_by=named_by)


def _measure(fs: FileSystem, path: Path, *, is_deep: bool) -> tuple[int, float]:
    """Return the bytes of the files in a checkpoint, and when the newest of them was changed."""
    status = fs.status(path)
    if status is None or not status.is_directory:
        return (0, 0.0) if status is None else (status.size_bytes, status.modified_at)
    total, newest, folders = 0, 0.0, [DiskFolder(fs, path, tree=tree_of(path.parent))]
    while folders:
        folder = folders.pop()
        with contextlib.suppress(PermissionError):
            for name, one in folder.entries().items():
                if one.is_directory:
                    folders += [folder.folder(name)] if is_deep else []
                elif (file := folder.file(name)) is not None:
                    total, newest = total + file.size_bytes, max(newest, file.modified_at)
    return total, newest or status.modified_at


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """A directory with checkpoints, below the one that was asked about.

    Attributes:
        path: The directory.
        count: Its checkpoints, complete or not.
        tools: The other tools that wrote them; none for those of ckptmgr or MindSpore.
    """

    path: Path
    count: int
    tools: tuple[str, ...] = ()


def runs_below(
    fs: FileSystem,
    directory: Path,
    *,
    most_folders: int = _MOST_FOLDERS,
    most_depth: int = _MOST_DEPTH,
    unread: list[OSError] | None = None,
) -> tuple[list[FoundRun], bool]:
    """Return the runs in the folders of a directory, and whether all folders were looked at.

    A run is not searched for further runs; hidden folders and links are left out. The errors of
    folders that cannot be read are added to `unread`.
    """
    runs: list[FoundRun] = []
    waiting = [(directory, 0)]
    looked = 0
    while waiting and looked < most_folders:
        path, depth = waiting.pop(0)
        looked += 1
        try:
            folder = DiskFolder(fs, path)
            entries = folder.entries()
            run = None if depth == 0 else _run(path, folder)
        except OSError as error:
            if unread is not None:
                unread.append(error)
            continue
        if run is not None:
            runs.append(run)
        elif depth < most_depth:
            below = [n for n, one in entries.items() if one.is_directory and not n.startswith(".")]
            waiting += [(path / name, depth + 1) for name in sorted(below)]
    return sorted(runs, key=lambda run: run.path), not waiting


def _run(path: Path, folder: DiskFolder) -> FoundRun | None:
    own = {
        name.removesuffix(SUFFIX)
        for name in folder.entries()
        if name.endswith((SUFFIX, *DATA_SUFFIXES)) and not name.startswith(".")
    }
    theirs = recognise(folder)
    own -= {one.name for recognition in theirs for one in recognition.found}
    count = len(own) + sum(len(one.found) for one in theirs)
    tools = tuple(one.layout.tool for one in theirs)
    if not count and is_hub_folder(folder.entries()):
        count, tools = 1, (HUB.tool,)
    return FoundRun(path=path, count=count, tools=tools) if count else None
