# SPDX-License-Identifier: Apache-2.0
"""Write one file of a transformed checkpoint: durable when it returns, with a manifest, whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.formats.tensor import Item
from ckptmgr.fsio import OsFileSystem, remove_name
from ckptmgr.lease import ProcProcesses
from ckptmgr.manifest import FileEntry, Manifest, manifest_name
from ckptmgr.manifest_files import ManifestFiles
from ckptmgr.name_lease import lease_of_name
from ckptmgr.naming import parse_name
from ckptmgr.saver import SaveOptions, SaveOrder, save_items
from ckptmgr.store import Store


def write_file(
    path: Path,
    items: Sequence[Item],
    *,
    options: SaveOptions,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a checkpoint file and return its path; directories are made, a file of that name is replaced.

    Args:
        path: Where to.
        items: What it holds; contents are asked for one after the other.
        options: Format and key.
        metadata: Strings kept in the file.

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
            step=0,
            epoch=None if parsed is None else parsed.epoch,
            sequence=0,
            saved_at=datetime.fromtimestamp(time.time(), UTC),
            stats=stats,
        )

    store = Store(path.parent, key=options.key)
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
        remove_name(store.fs, path)
        remove_name(store.fs, path.parent / manifest_name(path.name))
        store.fs.sync_directory(path.parent)


def write_small_file(path: Path, data: bytes) -> None:
    """Replace a small file durably; directories are made.

    Raises:
        OSError: From the disk; an older file of this name is intact.
    """
    fs = OsFileSystem()
    fs.make_directory(path.parent, mode=0o700)
    files = ManifestFiles(
        path.parent, fs=fs, key=None, processes=ProcProcesses(), must_authenticate=False
    )
    files.write(path, data, series=path.name, mode=0o600, is_durable=True)
    fs.sync_directory(path.parent)
