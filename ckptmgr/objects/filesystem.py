# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of an object store as files of one directory, read-only.

`Store` then lists, proves and reads them as those on a disk. The name of a data file is in no key
alone: its manifest leads to it. A file that another tool put there has its own name, and is opened
by it, but not listed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, NoReturn

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint
from ckptmgr.core.shard_names import parse_shard_name
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
    decode,
    manifest_name,
)

_READERS = 8
_SMALL_BYTES = 1 << 20  # of a manifest that is kept, and read beside others
_MOST_KEPT_BYTES = 64 << 20
# The parts of a manifest: for each object beside it a name and the digests of its ranges, which
# are of 16 MiB; and beside them metrics, pins and a policy.
_BASE_BYTES = 4 << 20
_ENTRY_BYTES = 2 << 10
_RANGE_BYTES = 1 << 20
_DIGEST_BYTES = 80


class BytesFile(BytesSource):
    """The bytes of an object that were read already."""

    def close(self) -> None:
        """Do nothing."""


class _Manifest(NamedTuple):
    """A manifest as it was listed: its object, the keys of its data, its bytes if they are few."""

    stored: StoredObject
    keys: Mapping[str, str]
    content: bytes | None


class RemoteFiles:
    """The objects below one prefix, as a file system with one directory."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._directory = UrlPath(objects.url)
        self._manifests: dict[str, _Manifest] = {}
        self._opened: dict[str, Mapping[str, str]] = {}  # keys of data when last opened
        self._most_bytes = MAX_MANIFEST_BYTES

    def names(self, path: Path) -> Sequence[str]:
        """Return the names of manifests and data files."""
        return list(self.list(path))

    def list(self, path: Path) -> dict[str, FileStatus]:
        """Return name to status of manifests, and of the data files that they name."""
        data = {one.key: one for one in self._objects.list(DATA)}
        found = {one.key: one for one in self._objects.list() if checkpoint_in(one.key) is not None}
        self._most_bytes = _most_manifest_bytes(data.values())
        known = self._known(found)
        fresh = [
            one
            for key, one in found.items()
            if key not in known and one.size_bytes <= self._most_bytes
        ]
        kept_bytes = sum(len(one.content or b"") for one in known.values())
        for one, content in self._read(fresh):
            if content is None:
                del found[one.key]  # removed meanwhile
                continue
            is_kept = len(content) <= min(_SMALL_BYTES, _MOST_KEPT_BYTES - kept_bytes)
            kept_bytes += len(content) if is_kept else 0
            keys = self._data_keys(one.key, content)
            known[one.key] = _Manifest(one, keys, content if is_kept else None)
        self._manifests = known
        entries = {key: _status(one) for key, one in found.items()}
        for manifest in known.values():
            entries |= {
                name: _status(data[key]) for name, key in manifest.keys.items() if key in data
            }
        return entries

    def _known(self, found: Mapping[str, StoredObject]) -> dict[str, _Manifest]:
        """Return the manifests of the last listing that are there unchanged."""
        before = dict(self._manifests)  # another thread may list, too
        return {key: one for key, one in before.items() if found.get(key) == one.stored}

    def _read(
        self, manifests: Sequence[StoredObject]
    ) -> Iterator[tuple[StoredObject, bytes | None]]:
        """Yield manifests and their bytes: small ones are read side by side, large ones one by one."""
        small = [one for one in manifests if one.size_bytes <= _SMALL_BYTES]
        with ThreadPoolExecutor(_READERS) as pool:
            for at in range(0, len(small), _READERS):
                some = small[at : at + _READERS]
                yield from zip(some, pool.map(self._get, some), strict=True)
        for one in manifests:
            if one.size_bytes > _SMALL_BYTES:
                yield one, self._get(one)

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
        if listed is not None and listed.content is not None:
            self._opened[path.name] = listed.keys
            return BytesFile(listed.content)
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
        if file.size > self._most_bytes:
            raise CorruptCheckpoint(
                f"has {file.size} bytes, a manifest at most {self._most_bytes}",
                path=path,
                hint="it is something else; move it away",
            )
        content = read_bytes(file, 0, file.size)
        self._opened[path.name] = self._data_keys(path.name, content)
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

    def _data_keys(self, key: str, content: bytes) -> Mapping[str, str]:
        """Return name to key of the data of a manifest; nothing where it cannot be read."""
        try:
            manifest = decode(content, path=self._directory / key)  # its proofs are checked later
        except CkptmgrError:
            return {}
        return {entry.name: data_key(manifest, entry) for entry in entries_of(manifest)}

    def _keys(self, path: Path) -> tuple[str, ...]:
        """Return the keys under which a manifest or data file may be, the first one first."""
        name = path.name
        if name.endswith(SUFFIX):
            return (name,)
        shard = parse_shard_name(name)
        owner = manifest_name(name if shard is None else shard.set_name)
        key = self._keys_of(owner).get(name)
        return (name,) if key is None else (key, name)

    def _keys_of(self, owner: str) -> Mapping[str, str]:
        """Return name to key of the data of a manifest, as it was when it was last read."""
        if owner in self._opened:
            return self._opened[owner]
        listed = self._manifests.get(owner)
        if listed is not None:
            return listed.keys
        try:
            return self._data_keys(owner, self._objects.get(owner))
        except FileNotFoundError:
            return {}


def _most_manifest_bytes(data: Iterable[StoredObject]) -> int:
    """Return the size of the largest manifest that may describe all of these objects."""
    most = _BASE_BYTES
    for one in data:
        most += _ENTRY_BYTES + one.size_bytes // _RANGE_BYTES * _DIGEST_BYTES
    return min(most, MAX_MANIFEST_BYTES)


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
