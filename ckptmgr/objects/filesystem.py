# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of an object store as files of one directory, read-only.

`Store` then lists, proves and reads them as those on a disk. The name of a data file is in no key
alone: its manifest leads to it. A file that another tool put there has its own name, and is opened
by it, but not listed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.core.trust import Trust
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.io.files import FileHead
from ckptmgr.io.filesystem import FileStatus, InputFile, OutputFile
from ckptmgr.objects.directory import DATA, checkpoint_in, data_key, entries_of
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.ranged import ObjectFile
from ckptmgr.objects.requests import Objects, StoredObject
from ckptmgr.store.manifest.codec import (
    MAX_MANIFEST_BYTES,
    SUFFIX,
    Manifest,
    decode,
    manifest_name,
)
from ckptmgr.store.store import Store

_READERS = 8


def remote_store(objects: Objects, *, trust: Trust) -> Store:
    """Return the checkpoints below a prefix as a directory that can only be read."""
    return Store(UrlPath(objects.url), fs=RemoteFiles(objects), trust=trust)


class BytesFile(BytesSource):
    """The bytes of an object that were read already."""

    def close(self) -> None:
        """Do nothing."""


class RemoteFiles:
    """The objects below one prefix, as a file system with one directory."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._directory = UrlPath(objects.url)
        self._manifests: dict[str, tuple[StoredObject, bytes]] = {}
        self._opened: dict[str, bytes] = {}  # manifests, as they were when last opened

    def names(self, path: Path) -> Sequence[str]:
        """Return the names of manifests and data files."""
        return list(self.list(path))

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status of manifests, and of the data files that they name."""
        data = {one.key: one for one in self._objects.list(DATA)}
        found = {one.key: one for one in self._objects.list() if checkpoint_in(one.key) is not None}
        known = dict(self._manifests)  # another thread may list, too
        fresh = [
            one
            for one in found.values()
            if known.get(one.key, (None,))[0] != one and one.size_bytes <= MAX_MANIFEST_BYTES
        ]
        with ThreadPoolExecutor(_READERS) as pool:
            for one, content in zip(fresh, pool.map(self._get, fresh), strict=True):
                if content is None:
                    del found[one.key]  # removed meanwhile
                else:
                    known[one.key] = (one, content)
        manifests = {
            key: known[key] for key, one in found.items() if known.get(key, (None,))[0] == one
        }
        self._manifests = manifests
        entries = {key: _status(one) for key, one in found.items()}
        for key, (_, content) in manifests.items():
            entries |= self._data_of(key, content, data)
        return entries

    def status(self, path: Path) -> FileStatus | None:
        """Return the status of a manifest or data file; the directory itself always exists."""
        if path == self._directory:
            return FileStatus(0, 0.0, is_file=False, is_directory=True, identity=(0, 0))
        for key in self._keys(path):
            stored = self._objects.find(key)
            if stored is not None:
                return _status(stored)
        return None

    def open(self, path: Path, *, is_uncached: bool = False) -> InputFile:
        """Open an object, to be read by ranges of this version of it."""
        del is_uncached
        listed = self._manifests.get(path.name)
        if listed is not None:
            return BytesFile(listed[1])
        if path.name.endswith(SUFFIX):
            return self._open_manifest(path)
        for key in self._keys(path):
            with contextlib.suppress(FileNotFoundError):
                return ObjectFile(self._objects, key, name=str(path))
        raise FileNotFoundError(errno.ENOENT, "no such object", str(path))

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        """Return the first bytes of an object."""
        file = self.open(directory / name)
        return FileHead(read_bytes(file, 0, min(file.size, most_bytes)), file.size, (0, 0))

    def _open_manifest(self, path: Path) -> InputFile:
        file = ObjectFile(self._objects, path.name, name=str(path))
        if file.size > MAX_MANIFEST_BYTES:
            return file
        content = read_bytes(file, 0, file.size)
        self._opened[path.name] = content
        return BytesFile(content)

    @contextlib.contextmanager
    def hold_directory(self, path: Path) -> Iterator[None]:
        """Do nothing: there are no links."""
        yield

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        """Refuse: an object store has no locks."""
        _refuse(path)

    def is_moved(self, path: Path) -> bool:
        """Return False: an address stays where it is."""
        return False

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Refuse: objects are written by `RemoteDirectory`."""
        _refuse(path)

    def change(self, path: Path) -> OutputFile:
        """Refuse: objects are not changed."""
        _refuse(path)

    def replace(self, source: Path, target: Path) -> None:
        """Refuse: objects are not renamed."""
        _refuse(target)

    def link(self, source: Path, target: Path) -> None:
        """Refuse: objects have one name."""
        _refuse(target)

    def unlink(self, path: Path) -> None:
        """Refuse: objects are removed by `RemoteDirectory`."""
        _refuse(path)

    def sync_directory(self, path: Path) -> None:
        """Do nothing: an answered request is durable."""

    def make_directory(self, path: Path, *, mode: int | None) -> None:
        """Do nothing: a prefix exists with its first object."""

    def remove_directory(self, path: Path) -> None:
        """Refuse: there are no directories."""
        _refuse(path)

    def free_bytes(self, path: Path) -> int | None:
        """Return None: unknown."""
        return None

    def free_inodes(self, path: Path) -> int | None:
        """Return None: unknown."""
        return None

    def pause(self, seconds: float) -> None:
        """Do nothing: the library has tried again already."""

    def _get(self, one: StoredObject) -> bytes | None:
        try:
            return self._objects.get(one.key)
        except FileNotFoundError:
            return None

    def _data_of(
        self, key: str, content: bytes, data: Mapping[str, StoredObject]
    ) -> dict[str, FileStatus]:
        manifest = self._decoded(key, content)
        if manifest is None:
            return {}
        keys = {entry.name: data_key(manifest, entry) for entry in entries_of(manifest)}
        return {name: _status(data[one]) for name, one in keys.items() if one in data}

    def _decoded(self, key: str, content: bytes) -> Manifest | None:
        try:
            return decode(content, path=self._directory / key)  # its proofs are checked later
        except CkptmgrError:
            return None

    def _keys(self, path: Path) -> tuple[str, ...]:
        """Return the keys under which a manifest or data file may be, the first one first."""
        name = path.name
        if name.endswith(SUFFIX):
            return (name,)
        shard = parse_shard_name(name)
        owner = manifest_name(name if shard is None else shard.set_name)
        try:
            content = self._content_of(owner)
        except FileNotFoundError:
            return (name,)
        manifest = self._decoded(owner, content)
        entries = () if manifest is None else entries_of(manifest)
        for entry in entries:
            if manifest is not None and entry.name == name:
                return (data_key(manifest, entry), name)
        return (name,)

    def _content_of(self, key: str) -> bytes:
        if key in self._opened:
            return self._opened[key]
        listed = self._manifests.get(key)
        return self._objects.get(key) if listed is None else listed[1]


def _status(one: StoredObject) -> FileStatus:
    return FileStatus(
        one.size_bytes,
        one.modified_at.timestamp(),
        is_file=True,
        is_directory=False,
        identity=(0, hash(one.key)),
        changed_ns=int(one.modified_at.timestamp() * 1e9),
    )


def _refuse(path: Path) -> NoReturn:
    raise PermissionError(errno.EROFS, "an object store is only read in this way", str(path))
