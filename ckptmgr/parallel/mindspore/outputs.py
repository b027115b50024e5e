# SPDX-License-Identifier: Apache-2.0
"""Output files of a transformation: durable, whole, with a manifest when the call returns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.names import parse_name
from ckptmgr.core.trust import Trust
from ckptmgr.files.save.job import SaveOptions, SaveOrder, draft_entry
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.safetensors_file import MINDSPORE_METADATA
from ckptmgr.formats.tensor import Item
from ckptmgr.io.filesystem import FileSystem, OsFileSystem, unlink_if_present
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.store.change_leases import lease_of_name
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.manifest.files import ManifestFiles
from ckptmgr.store.store import Store


class WrittenFiles(list[Path]):
    """The files that a call wrote.

    Attributes:
        step: The training step, `20` or `3_40`; None where the names of the source files have none.
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
    step: int | None = None,
    fs: FileSystem | None = None,
) -> Path:
    """Write a checkpoint file and return its path; makes directories, replaces a file of that name.

    Raises:
        UnsupportedCheckpoint: The format cannot hold an item; nothing was changed.
        StoreLocked: Another process writes this file now.
        StoreFull, OSError: From the disk; nothing was changed.
    """
    parsed = parse_name(path.name)
    draft = Manifest(
        file=draft_entry(path.name, options),
        series=path.stem if parsed is None else parsed.prefix,
        run_id="",
        step=step or 0,
        epoch=None if parsed is None else parsed.epoch,
        sequence=0,
        saved_at=datetime.fromtimestamp(time.time(), UTC),
        stats={},
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
        draft=draft,
        metadata=None if options.format == "ckpt" else MINDSPORE_METADATA,
    )
    with lease_of_name(store, path.name):
        save_items(store, order)
    return path


def remove_file(path: Path) -> None:
    """Remove a checkpoint file of an earlier call, if there is one, and its manifest, durably."""
    store = Store(path.parent)
    if store.fs.status(path) is None:
        return
    with lease_of_name(store, path.name):
        unlink_if_present(store.fs, path)
        unlink_if_present(store.fs, path.parent / manifest_name(path.name))
        store.fs.sync_directory(path.parent)


class Staging(NamedTuple):
    """A folder whose files are moved out of it together, and the disk that holds it."""

    fs: FileSystem
    path: Path


@contextmanager
def staging_folder(target: Path, name: str) -> Iterator[Staging]:
    """Yield an empty folder in a directory that will get its files; remove it at the end.

    The directory and the folder are held open, so that another user with write access to the
    directory cannot put a link in their place. Raises StoreLocked while another process uses this
    folder.
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
    """Move checkpoint files and their manifests out of a staging folder, durably.

    After an error, also of a lease that another process has, some are moved.
    """
    fs, source, target = staging.fs, staging.path, staging.path.parent
    for name in names:
        with lease_of_name(Store(target, fs=fs), name):
            fs.replace(source / manifest_name(name), target / manifest_name(name))
            fs.replace(source / name, target / name)
    fs.sync_directory(target)
    return [target / name for name in names]


def write_small_file(
    path: Path,
    data: bytes,
    *,
    is_beside_checkpoint: bool = False,
    fs: FileSystem | None = None,
    mode: int = 0o600,
) -> None:
    """Replace a small file durably; makes directories. After an error the older file is intact.

    A file that `is_beside_checkpoint` gets the owner of its directory; so does one on a given `fs`.
    """
    fs = OsFileSystem(keeps_owner=not is_beside_checkpoint) if fs is None else fs
    fs.make_directory(path.parent, mode=0o700)
    files = ManifestFiles(path.parent, fs=fs, trust=Trust(), processes=ProcProcesses())
    with fs.hold_directory(path.parent):
        files.write(path, data, series=path.name, mode=mode, is_durable=True)
        fs.sync_directory(path.parent)
