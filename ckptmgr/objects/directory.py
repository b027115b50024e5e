# SPDX-License-Identifier: Apache-2.0
"""One prefix of an object store as a directory of checkpoints: its objects and their order.

| object | holds |
|---|---|
| `NAME.manifest.json` | the manifest of a checkpoint, the same bytes as on a disk |
| `data/ID/FILE` | a data file; ID is the id of the checkpoint, which commits to the content |

* Publishing: the data, then the manifest, created on the condition that its key is free. Before
  that request the checkpoint does not exist, afterwards it is whole. Different checkpoints never
  have a data object in common, so no upload can damage another one.
* Removing: the manifest, then the data.
* Data without a manifest is a leftover of an interrupted upload or removal; `sweep` removes it when
  it is older than `LEFTOVER_AGE`. Other objects below `data/`, such as a data set, are not ours.

A crash between two requests leaves a whole checkpoint or leftovers. `docs/decisions/` has the
reasons.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, UnsafeWrite
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.core.shard_names import is_checkpoint_name
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.digest import checked_ranges
from ckptmgr.io.filesystem import InputFile
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.requests import Objects, StoredObject
from ckptmgr.store.manifest.codec import (
    MAX_MANIFEST_BYTES,
    SUFFIX,
    FileEntry,
    Manifest,
    decode,
    manifest_name,
)
from ckptmgr.store.store import Store

DATA = "data/"
LEFTOVER_AGE = timedelta(days=7)
"""Age of data without a manifest from which on no upload is expected to finish it."""

_REUSED_AGE = LEFTOVER_AGE / 2
_DATA_KEY = re.compile(r"data/([0-9a-f]{64})/[^/]+")


def data_key(manifest: Manifest, entry: FileEntry) -> str:
    """Return the key of a data file."""
    return f"{DATA}{manifest.id}/{entry.name}"


def id_in(key: str) -> str | None:
    """Return the id of the checkpoint whose data has this key; None for objects of others.

    >>> id_in("data/imagenet/train.tar")
    """
    found = _DATA_KEY.fullmatch(key)
    return found[1] if found is not None and key.endswith(DATA_SUFFIXES) else None


def checkpoint_in(key: str) -> str | None:
    """Return the name of the checkpoint whose manifest has this key; None for objects of others."""
    name = key.removesuffix(SUFFIX)
    return name if key.endswith(SUFFIX) and is_checkpoint_name(name) else None


def entries_of(manifest: Manifest) -> tuple[FileEntry, ...]:
    """Return the data files of a checkpoint."""
    return manifest.shards or (manifest.file,)


class RemoteDirectory:
    """The checkpoints below one prefix; `clock` returns seconds since the epoch."""

    def __init__(self, objects: Objects, *, clock: Callable[[], float]) -> None:
        self.objects = objects
        self.path = UrlPath(objects.url)
        self._clock = clock

    def names(self) -> list[str]:
        """Return the names of the checkpoints that have a manifest."""
        names = (checkpoint_in(one.key) for one in self.objects.list())
        return [name for name in names if name is not None]

    def manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a name without a check of its proofs, or None.

        Raises:
            CkptmgrError: It is damaged.
        """
        key = manifest_name(name)
        try:
            data = self.objects.get(key)
        except FileNotFoundError:
            return None
        return decode(data, path=self.path / key)

    def upload(self, store: Store, name: str) -> bool:
        """Upload a checkpoint of a local directory; return False if it was there already.

        The bytes are compared with the digests while they are sent, and encrypted ones stay as they
        are. Data that an interrupted upload of the same checkpoint left is used.

        Raises:
            UnsafeWrite: Another checkpoint has the name there.
            CkptmgrError: The manifest is damaged or not proven by the keys of `store`, or the data
                does not match it; nothing was published.
            FileNotFoundError: The files are gone.
            OSError: From the disk or the network.
        """
        data = _manifest_bytes(store, name)
        path = store.directory / manifest_name(name)
        manifest = decode(data, path=path, trust=store.trust)
        if manifest.replaces is not None:
            raise BlockingIOError(f"{path}: the checkpoint is being replaced")
        if self._is_there(manifest):
            return False
        entries = entries_of(manifest)
        with contextlib.ExitStack() as opened:  # all of them, before retention removes one
            files = [opened.enter_context(_opened(store, entry)) for entry in entries]
            for file, entry in zip(files, entries, strict=True):
                if not self._is_reusable(data_key(manifest, entry), entry):
                    self._put(manifest, entry, file)
            try:
                self.objects.create(manifest_name(name), data)
            except FileExistsError:
                # The answer to an attempt that succeeded may have been lost.
                if not self._is_there(manifest):
                    raise
            for file, entry in zip(files, entries, strict=True):
                # A sweep that listed before this upload may have removed leftovers of another.
                if self.objects.find(data_key(manifest, entry)) is None:
                    self._put(manifest, entry, file)
        return True

    def remove(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Remove checkpoints: first all manifests, then their data."""
        going = [one for one in checkpoints if one.id is not None]
        self.objects.delete([manifest_name(one.name) for one in going])
        self.objects.delete(
            [f"{DATA}{one.id}/{name}" for one in going for name in one.shards or (one.name,)]
        )

    def sweep(self) -> list[StoredObject]:
        """Remove old data that no manifest names; return it.

        Nothing is removed while a manifest cannot be read: it may name the data.
        """
        before = datetime.fromtimestamp(self._clock(), UTC) - LEFTOVER_AGE
        data = [(id_in(one.key), one) for one in self.objects.list(DATA)]
        old = [(id, one) for id, one in data if id is not None and one.modified_at < before]
        if not old:
            return []
        try:
            manifests = [self.manifest(name) for name in self.names()]
        except CkptmgrError:
            return []
        ids = {manifest.id for manifest in manifests if manifest is not None}
        left = [one for id, one in old if id not in ids]
        self.objects.delete([one.key for one in left])
        return left

    def _is_there(self, manifest: Manifest) -> bool:
        there = self.manifest(manifest.name)
        if there is not None and there.id != manifest.id:
            raise UnsafeWrite(
                f"another checkpoint has this name there: step {there.step} of run {there.run_id[:8]}, saved "
                f"{there.saved_at:%Y-%m-%d %H:%M} UTC; this one is step {manifest.step} of run {manifest.run_id[:8]}",
                path=self.path / manifest.name,
                hint="take another address for this run, or another prefix; remove the other one if it is not needed",
            )
        return there is not None

    def _is_reusable(self, key: str, entry: FileEntry) -> bool:
        """Return whether the data is there, and so new that no sweep removes it meanwhile."""
        found = self.objects.find(key)
        if found is None or found.size_bytes != entry.digest.size_bytes:
            return False
        return found.modified_at > datetime.fromtimestamp(self._clock(), UTC) - _REUSED_AGE

    def _put(self, manifest: Manifest, entry: FileEntry, file: InputFile) -> None:
        pieces = checked_ranges(file, entry.digest, path=entry.name)
        self.objects.put(data_key(manifest, entry), pieces, entry.digest.size_bytes)


def _manifest_bytes(store: Store, name: str) -> bytes:
    path = store.directory / manifest_name(name)
    with contextlib.closing(store.fs.open(path)) as file:
        if file.size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpoint(f"has {file.size} bytes, which no manifest has", path=path)
        return read_bytes(file, 0, file.size)


@contextlib.contextmanager
def _opened(store: Store, entry: FileEntry) -> Iterator[InputFile]:
    with contextlib.closing(store.open_data(store.directory / entry.name)) as file:
        yield file
