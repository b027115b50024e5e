# SPDX-License-Identifier: Apache-2.0
"""One prefix of an object store as a directory of checkpoints: its objects and their order.

| object | holds |
|---|---|
| `NAME.manifest.json` | the manifest of a checkpoint, the same bytes as on a disk |
| `data/ID/FILE` | a data file; ID is the id of the checkpoint, which commits to the content |

* Publishing: the data, then the manifest, created on the condition that its key is free. Before
  that request the checkpoint does not exist, afterwards it is whole. Different checkpoints never
  have a data object in common, so no upload can damage another one.
* Changing what a save keeps outside of its id (keys, pins, tags, metrics): a plain PUT over its own
  manifest, which is read back. Where the keys of its files change, the files first open for old and
  new keys, and after the manifest for the new ones alone; until then `UNFINISHED` follows the
  manifest. Data that was encrypted again has another id: it is written beside the old, the manifest
  is replaced, and the old data is removed.
* Removing: the manifest, then the data.
* Data without a manifest is a leftover of an interrupted upload or removal; `sweep` removes it when
  it is older than `LEFTOVER_AGE`. Other objects below `data/`, such as a data set, are not ours.

A crash between two requests leaves a whole checkpoint or leftovers. `docs/decisions/` has the
reasons.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, UnsafeWrite
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.core.shard_names import is_checkpoint_name
from ckptmgr.formats.source import Source, read_bytes
from ckptmgr.io.digest import checked_ranges
from ckptmgr.io.filesystem import InputFile
from ckptmgr.objects.comparison import (
    UNFINISHED,
    Difference,
    Headers,
    Side,
    compare,
    copy_to_keep,
    slots_in,
)
from ckptmgr.objects.paths import UrlPath
from ckptmgr.objects.ranged import ObjectFile
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


class Uploaded(enum.IntEnum):
    """The outcome of an upload: the checkpoint was there, was new, or had changed here."""

    PRESENT = 0
    NEW = 1
    CHANGED = 2


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
        found = self._side(name)
        return None if found is None else found.manifest

    def _side(self, name: str) -> Side | None:
        key = manifest_name(name)
        try:
            data = self.objects.get(key)
        except FileNotFoundError:
            return None
        return Side(decode(data, path=self.path / key), data)

    def difference(self, store: Store, name: str) -> Difference | None:
        """Return which copy of a checkpoint is the later one; None if it is not there.

        Raises:
            CkptmgrError: A manifest is damaged, or the keys of `store` do not prove the one here.
            FileNotFoundError: The files here are gone.
            OSError: From the disk or the network.
        """
        here, there = local_side(store, name), self._side(name)
        if there is None:
            return None
        with _opened_files(store, here.manifest) as files:
            return compare(here, there, self._headers(here.manifest, files))

    def has_same_keys(self, store: Store, name: str) -> bool:
        """Return whether the files of a checkpoint have the same headers here and there."""
        manifest = local_side(store, name).manifest
        with _opened_files(store, manifest) as files:
            return all(one.here == one.there for one in self._headers(manifest, files))

    def upload(self, store: Store, name: str, *, reads_back: bool = False) -> Uploaded:
        """Upload a checkpoint of a local directory, or its changes since the upload.

        The bytes are compared with the digests while they are sent, and encrypted ones stay as they
        are. Data that an interrupted upload of the same checkpoint left is used. The manifest is
        read back, because a server may say that it wrote what it did not; with `reads_back` the
        data is, too, before there is a manifest.

        Raises:
            UnsafeWrite: Another checkpoint has the name there, or this one was changed there.
            CkptmgrError: The manifest is damaged or not proven by the keys of `store`, or the data
                does not match it; nothing was published.
            FileNotFoundError: The files are gone.
            OSError: From the disk or the network.
        """
        here = local_side(store, name)
        there = self._side(name)
        if there is not None and here.data == there.data:
            return Uploaded.PRESENT
        with _opened_files(store, here.manifest) as files:  # before retention removes one
            if there is None:
                self._create(here, files, reads_back=reads_back)
                return Uploaded.NEW
            found = compare(here, there, self._headers(here.manifest, files))
            if found is not Difference.HERE:
                raise self._taken(here.manifest, there.manifest, found)
            if here.manifest.id == there.manifest.id:
                self._amend(here, there, files)
            else:
                self._exchange(here, there.manifest, files)
        return Uploaded.CHANGED

    def _create(self, here: Side, files: Sequence[InputFile], *, reads_back: bool) -> None:
        """Upload a checkpoint that is not there."""
        manifest = here.manifest
        self._put_missing(manifest, files)
        if reads_back:
            self._check_data(manifest)
        # The answer to an attempt that succeeded may have been lost; and a server may say that it
        # created what another writer did.
        taken: FileExistsError | None = None
        try:
            self.objects.create(manifest_name(manifest.name), here.data)
        except FileExistsError as error:
            taken = error
        there = self._side(manifest.name)
        if there is None:
            raise taken or self._other_bytes(manifest)
        if there.manifest.id != manifest.id:
            raise self._taken(manifest, there.manifest, Difference.OTHER)
        if taken is None and there.data != here.data:
            raise self._other_bytes(manifest)
        self._put_swept(manifest, files)

    def _check_data(self, manifest: Manifest) -> None:
        """Read the data back; raise ChecksumMismatch if other bytes were sent."""
        for entry in entries_of(manifest):
            key, name = data_key(manifest, entry), str(self.path / manifest.name)
            try:
                with contextlib.closing(ObjectFile(self.objects, key, name=name)) as file:
                    for _ in checked_ranges(file, entry.digest, path=name):
                        pass
            except FileNotFoundError:
                raise ConnectionError(
                    errno.EIO, "the data that was sent is not there", f"{self.objects.url}/{key}"
                ) from None

    def _exchange(self, here: Side, old: Manifest, files: Sequence[InputFile]) -> None:
        """Replace a save by the same one with other data, such as under another data key."""
        self._put_missing(here.manifest, files)
        self._replace_manifest(here.manifest, here.data)
        self._put_swept(here.manifest, files)
        self.objects.delete([data_key(old, entry) for entry in entries_of(old)])

    def _amend(self, here: Side, there: Side, files: Sequence[InputFile]) -> None:
        """Replace the manifest of a save and the headers of its files."""
        manifest = here.manifest
        entries = entries_of(manifest)
        last: list[tuple[FileEntry, InputFile]] = []
        for entry, file, header in zip(entries, files, self._headers(manifest, files), strict=True):
            if header.here == header.there:
                continue
            old, new = slots_in(header.there), slots_in(header.here)
            if old <= new:  # the old keys open it, too
                self._put(manifest, entry, file)
                continue
            if not new <= old:
                kept = copy_to_keep(header.there, is_switched=there.is_unfinished)
                self._put(manifest, entry, _OpenForBoth(file, kept))
            last.append((entry, file))
        if last:
            self._replace_manifest(manifest, here.data + UNFINISHED)
        for entry, file in last:
            self._put(manifest, entry, file)
        self._replace_manifest(manifest, here.data)
        self._put_swept(manifest, files)

    def _replace_manifest(self, manifest: Manifest, data: bytes) -> None:
        """Write a manifest over that of the same save, and read it back."""
        key = manifest_name(manifest.name)
        self.objects.put(key, [data], len(data))
        if self.objects.get(key) != data:
            raise self._other_bytes(manifest)

    def _other_bytes(self, manifest: Manifest) -> ConnectionError:
        path = str(self.path / manifest_name(manifest.name))
        return ConnectionError(errno.EIO, "not the manifest that was written is read", path)

    def _put_missing(self, manifest: Manifest, files: Sequence[InputFile]) -> None:
        for file, entry in zip(files, entries_of(manifest), strict=True):
            if not self._is_reusable(manifest, entry, file):
                self._put(manifest, entry, file)

    def _put_swept(self, manifest: Manifest, files: Sequence[InputFile]) -> None:
        """Write data again that a sweep, which listed before this upload, took for a leftover."""
        for file, entry in zip(files, entries_of(manifest), strict=True):
            if self.objects.find(data_key(manifest, entry)) is None:
                self._put(manifest, entry, file)

    def _headers(self, manifest: Manifest, files: Sequence[InputFile]) -> Iterator[Headers]:
        """Yield the bytes of each file that digests leave out, here and there."""
        for file, entry in zip(files, entries_of(manifest), strict=True):
            yield self._header(manifest, entry, file)

    def _header(self, manifest: Manifest, entry: FileEntry, file: InputFile) -> Headers:
        count = min(entry.digest.blank_bytes, file.size)
        here, there = read_bytes(file, 0, count), b""
        if count:
            with contextlib.suppress(FileNotFoundError):
                there = self.objects.read(data_key(manifest, entry), 0, count)
        return Headers(here, there)

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

    def _taken(self, here: Manifest, there: Manifest, found: Difference) -> UnsafeWrite:
        """Return the error about a name that something later, or something else, has there."""
        path = self.path / here.name
        if found is Difference.OTHER:
            return UnsafeWrite(
                f"another checkpoint has this name there: step {there.step} of run {there.run_id[:8]}, saved "
                f"{there.saved_at:%Y-%m-%d %H:%M} UTC; this one is step {here.step} of run {here.run_id[:8]}",
                path=path,
                hint="take another address for this run, or another prefix; remove the other one if it is not needed",
            )
        what = "there" if found is Difference.THERE else "there, and in another way here"
        return UnsafeWrite(
            f"keys, pins, tags or metrics of this checkpoint were changed {what} (revision {there.revision}, here "
            f"{here.revision}); it stays as it is there",
            path=path,
            hint="another directory has this mirror, too: change them in that one, or remove the checkpoint in one place",
        )

    def _is_reusable(self, manifest: Manifest, entry: FileEntry, file: InputFile) -> bool:
        """Return whether the data is there, and so new that no sweep removes it meanwhile.

        Its keys may have changed here since the upload that left it.
        """
        found = self.objects.find(data_key(manifest, entry))
        if found is None or found.size_bytes != entry.digest.size_bytes:
            return False
        if found.modified_at <= datetime.fromtimestamp(self._clock(), UTC) - _REUSED_AGE:
            return False
        header = self._header(manifest, entry, file)
        return header.here == header.there

    def _put(self, manifest: Manifest, entry: FileEntry, file: Source) -> None:
        pieces = checked_ranges(file, entry.digest, path=entry.name)
        self.objects.put(data_key(manifest, entry), pieces, entry.digest.size_bytes)


class _OpenForBoth:
    """A container whose first header copy is the new one, and whose second is that of there.

    A local change of keys that is cut between its two writes leaves the same: the keys of both
    copies open it.
    """

    def __init__(self, file: InputFile, old: bytes) -> None:
        self.size = file.size
        self._file = file
        self._at, self._old = len(old), old

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from `offset` on."""
        self._file.read_into(offset, buffer)
        start, end = max(offset, self._at), min(offset + len(buffer), self._at + len(self._old))
        if start < end:
            buffer[start - offset : end - offset] = self._old[start - self._at : end - self._at]


def local_side(store: Store, name: str) -> Side:
    """Return the manifest of a checkpoint here; raises as `RemoteDirectory.difference`."""
    path = store.directory / manifest_name(name)
    with contextlib.closing(store.fs.open(path)) as file:
        if file.size > MAX_MANIFEST_BYTES:
            raise CorruptCheckpoint(f"has {file.size} bytes, which no manifest has", path=path)
        data = read_bytes(file, 0, file.size)
    manifest = decode(data, path=path, trust=store.trust)
    if manifest.replaces is not None:
        raise BlockingIOError(f"{path}: the checkpoint is being replaced")
    return Side(manifest, data)


@contextlib.contextmanager
def _opened_files(store: Store, manifest: Manifest) -> Iterator[list[InputFile]]:
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(contextlib.closing(store.open_data(store.directory / entry.name)))
            for entry in entries_of(manifest)
        ]
