# SPDX-License-Identifier: Apache-2.0
"""Write one file of a transformed checkpoint: durable when it returns, with a manifest, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.names import parse_name
from ckptmgr.core.trust import Trust
from ckptmgr.files.save.saver import SaveOptions, SaveOrder, save_items
from ckptmgr.formats.tensor import Item
from ckptmgr.io.filesystem import FileSystem, OsFileSystem, unlink_if_present
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.store.change_leases import lease_of_name
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.files import ManifestFiles
from ckptmgr.store.store import Store


class WrittenFiles(list[Path]):
    """The files that a call wrote, and what its caller must know about where they come from.

    Attributes:
        step: The training step that was taken, `20` or `3_40`; None where the names of the files say none.
        notes: Newer steps that were passed over, ranks that were left out.
    """

    def __init__(
        self, files: Iterable[Path], *, step: str | None = None, notes: Sequence[str] = ()
    ) -> None:
        super().__init__(files)
        self.step = step
        self.notes = tuple(notes)


def write_file(
    path: Path,
    items: Sequence[Item],
    *,
    options: SaveOptions,
    metadata: Mapping[str, str] | None = None,
    step: int | None = None,
    fs: FileSystem | None = None,
) -> Path:
    """Write a checkpoint file and return its path; directories are made, a file of that name is replaced.

    Args:
        path: Where to.
        items: What it holds; contents are asked for one after the other.
        options: Format and key.
        metadata: Strings kept in the file.
        step: The training step that it is of, where that is known.
        fs: The disk; None for the real one.

    Raises:
        UnsupportedCheckpoint: The format cannot hold an item; nothing was changed.
        StoreLocked: Another process writes this file now.
        StoreFull, OSError: From the disk; nothing was changed.
    """
    parsed = parse_name(path.name)

    def describe(entry: FileEntry, stats: Mapping[str, float]) -> Manifest:
        return Manifest(
            file=entry,
            series=path.stem if parsed is None else parsed.prefix,
            run_id="",
            step=step or 0,
            epoch=None if parsed is None else parsed.epoch,
            sequence=0,
            saved_at=datetime.fromtimestamp(time.time(), UTC),
            stats=stats,
        )

    disk = OsFileSystem(keeps_owner=True) if fs is None else fs
    trust = Trust(keys=options.key, allow_unencrypted=True)
    store = Store(path.parent, fs=disk, trust=trust)
    store.fs.make_directory(path.parent, mode=0o700)
    order = SaveOrder(
        name=path.name,
        items=items,
        options=options,
        series=path.name,
        describe=describe,
        metadata=metadata,
    )
    with lease_of_name(store, path.name):
        save_items(store, order)
    return path


def remove_file(path: Path) -> None:
    """Remove a checkpoint file that an earlier call may have written, and its manifest, durably.

    Raises:
        StoreLocked: Another process writes this file now.
        OSError: From the disk.
    """
    store = Store(path.parent)
    if store.fs.status(path) is None:
        return
    with lease_of_name(store, path.name):
        unlink_if_present(store.fs, path)
        unlink_if_present(store.fs, path.parent / manifest_name(path.name))
        store.fs.sync_directory(path.parent)


class Staging(NamedTuple):
    """A folder for files that are moved out of it together, and the disk that holds it."""

    fs: FileSystem
    path: Path


@contextmanager
def staging_folder(target: Path, name: str) -> Iterator[Staging]:
    """Yield an empty folder in a directory, for files that are to lie in it together; it is removed at the end.

    The directory and the folder are held: another user who may write to the directory cannot put a link in their place.

    Args:
        target: The directory; made where it does not exist.
        name: Of the work; two at once are refused.

    Raises:
        StoreLocked: Another process does this work now.
        OSError: From the disk.
    """
    fs, folder = OsFileSystem(keeps_owner=True), target / f".{name}.tmp"
    with lease_of_name(Store(target, fs=fs), name):
        fs.make_directory(folder, mode=0o700)
        with fs.hold_directory(folder):
            try:
                _empty(fs, folder)
                yield Staging(fs, folder)
            finally:
                with suppress(OSError):
                    _empty(fs, folder)
                    fs.remove_directory(folder)


def _empty(fs: FileSystem, folder: Path) -> None:
    for name in fs.list(folder):
        unlink_if_present(fs, folder / name)


def move_files(staging: Staging, names: Sequence[str]) -> list[Path]:
    """Move checkpoint files and their manifests out of a staging folder, durably; return their new paths.

    Raises:
        StoreLocked: Another process writes one of them in the target now; some are moved.
        OSError: From the disk; some are moved.
    """
    fs, source, target = staging.fs, staging.path, staging.path.parent
    for name in names:
        with lease_of_name(Store(target, fs=fs), name):
            fs.replace(source / manifest_name(name), target / manifest_name(name))
            fs.replace(source / name, target / name)
    fs.sync_directory(target)
    return [target / name for name in names]


def write_small_file(path: Path, data: bytes, *, is_beside_checkpoint: bool = False) -> None:
    """Replace a small file durably; directories are made.

    Args:
        path: Where to.
        data: The new content.
        is_beside_checkpoint: Whether the file belongs to a checkpoint, and so to the owner of its directory.

    Raises:
        OSError: From the disk; an older file of this name is intact.
    """
    fs = OsFileSystem(keeps_owner=not is_beside_checkpoint)
    fs.make_directory(path.parent, mode=0o700)
    files = ManifestFiles(path.parent, fs=fs, trust=Trust(), processes=ProcProcesses())
    with fs.hold_directory(path.parent):
        files.write(path, data, series=path.name, mode=0o600, is_durable=True)
        fs.sync_directory(path.parent)
