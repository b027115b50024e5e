# SPDX-License-Identifier: Apache-2.0
"""Download a checkpoint into a local directory: whole or not at all, and continued after a kill.

The data is written into hidden files, in ranges of which each is compared with its digest. A later
download of the same checkpoint keeps the ranges that are right. Then the names appear in the order
of a local save: the manifest, then the data; of a sharded checkpoint the data, then the manifest.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ckptmgr.core.errors import CheckpointNotFound, ChecksumMismatch, UnsafeWrite
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.core.shard_names import is_checkpoint_name
from ckptmgr.io.digest import check_range
from ckptmgr.io.filesystem import OutputFile, discard
from ckptmgr.io.owners import about_stranger, is_of_stranger
from ckptmgr.objects.comparison import Difference, Side
from ckptmgr.objects.directory import RemoteDirectory, data_key, entries_of
from ckptmgr.store.manifest.codec import FileEntry, Manifest, decode, manifest_name
from ckptmgr.store.store import Store

_READERS = 4


def download(
    source: RemoteDirectory, name: str, target: Store, *, damaged: Collection[str] = ()
) -> Checkpoint:
    """Download one checkpoint; the lease of its series in `target` must be held.

    `damaged` are ids of checkpoints in `target` that are known to be damaged: the same one from
    there takes their place.

    The keys of `target` must prove its manifest, which is stored as it is. Of one that is here
    already, pins, tags and metrics that were changed there later are taken.

    Raises:
        CheckpointNotFound: There is no such checkpoint.
        UnsafeWrite: The directory has another file of this name, or the same with older keys; or
            it is no name of a checkpoint.
        KeyProblem: The keys do not prove the manifest.
        CorruptCheckpoint: Manifest or data is damaged; no name has appeared.
        OSError: From the disk or the network.
    """
    if not is_checkpoint_name(name):
        raise UnsafeWrite(
            "is not downloaded: no checkpoint of a directory or prefix has such a name",
            path=source.path / name,
            hint=f"names end in {', '.join(DATA_SUFFIXES)}, and begin without a dot",
        )
    key = manifest_name(name)
    try:
        data = source.objects.get(key)
    except FileNotFoundError:
        raise CheckpointNotFound("no such checkpoint", path=source.path / name) from None
    manifest = decode(data, path=source.path / key, trust=target.trust)
    found = None if manifest.id in damaged else _whole(target, manifest)
    if found is not None:
        return _brought_up_to_date(source, Side(manifest, data), target, found)
    target.make_directory()
    entries = entries_of(manifest)
    target.publisher.check_space(sum(entry.digest.size_bytes for entry in entries))
    parts = [_fetched(source, manifest, entry, target) for entry in entries]
    if source.objects.get(key) != data:
        # Its keys may have changed meanwhile; the next call keeps all ranges that digests cover.
        raise ConnectionError(
            errno.EAGAIN,
            "its manifest was changed during the download; try again",
            str(source.path / key),
        )
    publish_manifest = partial(
        target.manifests.write,
        target.directory / key,
        data,
        series=manifest.series,
        mode=target.file_mode,
        is_durable=True,
    )
    fs, directory = target.fs, target.directory
    if not manifest.shards:
        publish_manifest()
        fs.sync_directory(directory)
    for part, entry in zip(parts, entries, strict=True):
        fs.replace(part, directory / entry.name)
    fs.sync_directory(directory)
    if manifest.shards:
        publish_manifest()
        fs.sync_directory(directory)
    return manifest.to_checkpoint(directory)


def _whole(target: Store, manifest: Manifest) -> Checkpoint | None:
    """Return the checkpoint if the directory has it; None if its name is free.

    Raises:
        UnsafeWrite: The name is taken.
    """
    found = target.look(manifest.name)
    if found is None and target.fs.status(target.directory / manifest.name) is None:
        return None
    if found is not None and found.id == manifest.id and found.state is State.OK:
        return found
    if found is not None and found.state is State.LEFTOVER:
        return None
    raise UnsafeWrite(
        "another file has this name here, or a damaged one",
        path=target.directory / manifest.name,
        hint="choose an empty directory, or move the file and its manifest away",
    )


def _brought_up_to_date(
    source: RemoteDirectory, there: Side, target: Store, found: Checkpoint
) -> Checkpoint:
    """Take the pins, tags and metrics of a checkpoint that is here if they were changed there later.

    Raises:
        UnsafeWrite: Its keys were, or both were changed.
    """
    difference = source.difference(target, found.name)
    if difference not in (Difference.THERE, Difference.BOTH):
        return found
    if difference is Difference.BOTH or not source.has_same_keys(target, found.name):
        raise UnsafeWrite(
            "its keys, pins, tags or metrics were changed there later than here"
            + (", and others here" if difference is Difference.BOTH else ""),
            path=target.directory / found.name,
            hint="to take it from there, move it and its manifest away first",
        )
    path = target.directory / manifest_name(found.name)
    status = target.fs.status(path)
    mode = target.file_mode if status is None else status.mode
    target.manifests.write(path, there.data, series=found.series, mode=mode, is_durable=True)
    target.fs.sync_directory(target.directory)
    return there.manifest.to_checkpoint(target.directory)


def _fetched(source: RemoteDirectory, manifest: Manifest, entry: FileEntry, target: Store) -> Path:
    """Write the data into its hidden file; return the path of that."""
    fs, digest = target.fs, entry.digest
    part = target.directory / f".{manifest.id[:32]}.{digest.total.hex()[:8]}.part"
    begun = fs.status(part)
    if begun is not None and is_of_stranger(begun, fs.status(target.directory)):
        raise UnsafeWrite(
            f"is the beginning of this download, but {about_stranger(begun)}",
            path=part,
            hint="choose a directory that others cannot write to",
        )
    is_begun = begun is not None and begun.size_bytes <= digest.size_bytes
    if begun is not None and not is_begun:
        discard(fs, part)
    good = _good_ranges(target, part, entry) if is_begun else set()
    file = fs.change(part) if is_begun else fs.create(part, mode=target.file_mode)
    try:
        missing = [index for index in range(len(digest.ranges)) if index not in good]
        key, path = data_key(manifest, entry), str(source.path / manifest.name)
        copy = partial(_copy_range, source, key, entry, file, path)
        with ThreadPoolExecutor(_READERS) as pool:
            for _ in pool.map(copy, missing):
                pass
        file.sync()
    finally:
        file.close()
    return part


def _copy_range(
    source: RemoteDirectory, key: str, entry: FileEntry, file: OutputFile, path: str, index: int
) -> None:
    digest = entry.digest
    start = index * digest.range_bytes
    data = source.objects.read(key, start, min(digest.range_bytes, digest.size_bytes - start))
    check_range(data, digest, index, path=path)
    file.write_at(start, data)


def _good_ranges(target: Store, part: Path, entry: FileEntry) -> set[int]:
    """Return the ranges that an earlier download has written; none of a file that is too long."""
    digest, good = entry.digest, set()
    with contextlib.closing(target.fs.open(part)) as file:
        # Digests leave out the header of a container, which may have changed since.
        for index in range(-(-digest.blank_bytes // digest.range_bytes), len(digest.ranges)):
            start = index * digest.range_bytes
            data = bytearray(min(digest.range_bytes, digest.size_bytes - start))
            if start + len(data) > file.size:
                break
            file.read_into(start, memoryview(data))
            with contextlib.suppress(ChecksumMismatch):
                check_range(data, digest, index, path=str(part))
                good.add(index)
    return good
