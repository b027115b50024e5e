# SPDX-License-Identifier: Apache-2.0
"""The whole state of a model disk as one immutable value: contents, names, and path lookup as Linux does it."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from tests.support.diskstate import ROOT, Change, Entries, FileContent, Namespace, Order

_MAX_NAME_BYTES = 255

Inodes = tuple[int, ...]
Snapshot = frozenset[tuple[str, bytes | None]]
"""Absolute paths with their contents (None for directories)."""


@dataclass(frozen=True, kw_only=True)
class DiskImage:
    """Files and directories of a disk.

    Attributes:
        files: Inode to content; inodes that are not here are directories.
        tree: Which names lead to which inodes.
        last_inode: Newest inode in use.
    """

    files: Mapping[int, FileContent]
    tree: Namespace
    last_inode: int = ROOT

    @classmethod
    def empty(cls) -> DiskImage:
        """Return a disk with a root directory and nothing in it."""
        return cls(files={}, tree=Namespace.durable({ROOT: {}}))

    def names_in(self, directory: int) -> Mapping[str, int]:
        """Return name to inode."""
        return self.tree.visible.get(directory, {})

    def locate(self, path: Path) -> tuple[int, str, int | None]:
        """Return the directory a path lies in, its name there, and its inode when it exists."""
        try:
            directory = self.resolve_directory(path.parent)
            return directory, path.name, self._lookup(directory, path.name)
        except OSError as error:
            raise os_error(error.errno or errno.EIO, path) from None

    def resolve(self, path: Path) -> int:
        """Return the inode of an existing path."""
        if not path.is_absolute() or ".." in path.parts:
            raise ValueError(f"the model wants absolute paths without '..', not {path}")
        inode = ROOT
        for name in path.parts[1:]:
            if inode in self.files:
                raise os_error(errno.ENOTDIR, path)
            try:
                found = self._lookup(inode, name)
            except OSError as error:
                raise os_error(error.errno or errno.EIO, path) from None
            if found is None:
                raise os_error(errno.ENOENT, path)
            inode = found
        return inode

    def resolve_directory(self, path: Path) -> int:
        """Return the inode of an existing directory."""
        inode = self.resolve(path)
        if inode in self.files:
            raise os_error(errno.ENOTDIR, path)
        return inode

    def exists(self, path: Path) -> bool:
        """Return whether the path leads anywhere, as `Path.exists` does."""
        try:
            self.resolve(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def with_file(self, inode: int, content: FileContent) -> DiskImage:
        """Return the image with another content for an inode."""
        return replace(self, files={**self.files, inode: content})

    def with_entry(self, directory: int, name: str, inode: int | None) -> DiskImage:
        """Return the image after a name was set or (None) removed."""
        entries = ((directory, name, inode),)
        change = Change(sequence=self.tree.sequence + 1, directory=directory, entries=entries)
        last = max(self.last_inode, inode or 0)
        return replace(self, tree=self.tree.changed(change), last_inode=last)

    def renamed(self, source: Path, target: Path) -> DiskImage:
        """Return the image after a rename; the same image when both names are one file."""
        try:
            # Linux resolves both directories before it looks at either name.
            old_directory = self.resolve_directory(source.parent)
            new_directory = self.resolve_directory(target.parent)
            moved = self._lookup(old_directory, source.name)
            if moved is None:
                raise os_error(errno.ENOENT)
            replaced = self._lookup(new_directory, target.name)
        except OSError as error:
            raise os_error(error.errno or errno.EIO, source, target) from None
        if moved == replaced:
            return self
        self._check_rename(source, target, moved, replaced)
        sequence = self.tree.sequence + 1
        add, drop = (new_directory, target.name, moved), (old_directory, source.name, None)
        if old_directory == new_directory or moved not in self.files:
            change = Change(sequence=sequence, directory=new_directory, entries=(drop, add))
            return replace(self, tree=self.tree.changed(change))
        halves = (
            Change(sequence=sequence, directory=new_directory, entries=(add,)),
            Change(sequence=sequence, directory=old_directory, entries=(drop,), is_removal=True),
        )
        return replace(self, tree=self.tree.changed(*halves))

    def directory_synced(self, directory: int) -> DiskImage:
        """Return the image after a sync of one directory."""
        return replace(self, tree=self.tree.directory_synced(directory))

    def settled(self) -> DiskImage:
        """Return the image with everything durable."""
        files = {inode: content.synced() for inode, content in self.files.items()}
        return replace(self, files=files, tree=Namespace.durable(self.tree.visible))

    def after_power_cut(self, order: Order, tears: int) -> Iterator[DiskImage]:
        """Yield the distinct images a power cut may leave."""
        seen = set()
        for entries in self.tree.after_power_cut(order):
            files = self._reachable_files(entries)
            for contents in self._contents_after_cut(files, tears):
                tree = Namespace.durable(entries)
                image = DiskImage(files=contents, tree=tree, last_inode=self.last_inode)
                if (state := image.state()) not in seen:
                    seen.add(state)
                    yield image

    def state(self) -> Snapshot:
        """Return what tells two images apart."""
        return self._state

    def walk(self, entries: Entries) -> Iterator[tuple[str, int]]:
        """Yield every path below the root with its inode."""
        waiting = [("", ROOT)]
        while waiting:
            path, directory = waiting.pop()
            for name, inode in sorted(entries.get(directory, {}).items()):
                yield f"{path}/{name}", inode
                if inode not in self.files:
                    waiting.append((f"{path}/{name}", inode))

    # An image never changes, and the searches for distinct disks ask for its state again and again.
    @cached_property
    def _state(self) -> Snapshot:
        return frozenset(
            (path, self.files[inode].visible if inode in self.files else None)
            for path, inode in self.walk(self.tree.visible)
        )

    def _lookup(self, directory: int, name: str) -> int | None:
        if len(os.fsencode(name)) > _MAX_NAME_BYTES:
            raise os_error(errno.ENAMETOOLONG)
        return self.names_in(directory).get(name)

    def _reachable_files(self, entries: Entries) -> Inodes:
        return tuple(dict.fromkeys(i for _, i in self.walk(entries) if i in self.files))

    def _contents_after_cut(self, files: Inodes, tears: int) -> Iterator[dict[int, FileContent]]:
        """Yield contents: every file alike, and each one by itself with the others lost or whole."""
        choices = {inode: self.files[inode].after_power_cut(tears) for inode in files}
        torn = {inode: contents for inode, contents in choices.items() if len(contents) > 1}
        for kind in range(max((len(c) for c in torn.values()), default=1)):
            yield {inode: c[min(kind, len(c) - 1)] for inode, c in choices.items()}
        if len(torn) < 2:
            return
        lost = {inode: contents[0] for inode, contents in choices.items()}
        whole = {inode: self.files[inode].synced() for inode in files}
        for inode, contents in torn.items():
            for content, others in itertools.product(contents, (lost, whole)):
                yield {**others, inode: content}

    def _check_rename(self, source: Path, target: Path, moved: int, replaced: int | None) -> None:
        is_directory = moved not in self.files
        if is_directory and source in target.parents:
            raise os_error(errno.EINVAL, source, target)
        if target in source.parents:
            raise os_error(errno.ENOTEMPTY, source, target)
        if replaced is None:
            return
        if not is_directory and replaced not in self.files:
            raise os_error(errno.EISDIR, source, target)
        if is_directory and replaced in self.files:
            raise os_error(errno.ENOTDIR, source, target)
        if is_directory and self.names_in(replaced):
            raise os_error(errno.ENOTEMPTY, source, target)


def os_error(number: int, path: Path | None = None, target: Path | None = None) -> OSError:
    """Return the error a system call makes of `number`."""
    text = os.strerror(number)
    if path is None:
        return OSError(number, text)
    if target is None:
        return OSError(number, text, str(path))
    return OSError(number, text, str(path), None, str(target))
