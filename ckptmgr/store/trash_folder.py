# SPDX-License-Identifier: Apache-2.0
"""Find and hold the trash folder of a directory; `store.trash` moves files in and out.

An attacker with write access to the directory can replace the trash with a link. So every function
here and in `store.trash` opens the trash without following a link, and accesses its entries through
that descriptor.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.owners import is_of_stranger

TRASH_NAME = ".ckptmgr-trash"
DEFAULT_GRACE = timedelta(hours=24)
QUARANTINE_NAME = ".ckptmgr-quarantine"
"""Folder of damaged checkpoints: batches as in the trash, which nothing removes."""
FOREIGN_TRASH_NAME = ".ckptmgr-trash-foreign"
"""Trash of the checkpoints of other tools, which are directories."""
STAMP = "%Y%m%dT%H%M%S.%fZ"


@contextmanager
def held_trash(fs: FileSystem, directory: Path, *, name: str = TRASH_NAME) -> Iterator[None]:
    """Hold a directory and the trash in it, or another folder of batches.

    Raises:
        FileNotFoundError: There is no trash.
        OSError: It is a link, belongs to another user, or cannot be opened.
    """
    with fs.hold_directory(directory), fs.hold_directory(directory / name):
        yield


@contextmanager
def held_batch(fs: FileSystem, path: Path) -> Iterator[None]:
    """Hold the folder of a batch and its parents; errors as of `held_trash`."""
    folder = path.parent
    with held_trash(fs, folder.parent, name=folder.name), fs.hold_directory(path):
        yield


def batch_folders(
    fs: FileSystem, directory: Path, *, name: str = TRASH_NAME
) -> list[tuple[Path, datetime]]:
    """Return the folders of the batches and their times, oldest first; ignore other entries."""
    trash = directory / name
    status = fs.status(trash)
    if status is None or not status.is_directory or is_of_stranger(status, fs.status(directory)):
        return []
    try:
        with held_trash(fs, directory, name=name):
            entries = sorted(fs.list(trash).items())
    except FileNotFoundError:
        return []  # another process has emptied and removed it
    dated = [(trash / entry, _time_of(entry)) for entry, one in entries if one.is_directory]
    return [(path, thrown_at) for path, thrown_at in dated if thrown_at is not None]


def may_be_in_trash(fs: FileSystem, directory: Path, name: str) -> bool:
    """Return whether a file of this name is in the trash, or the trash cannot be read.

    Its counterpart in the directory is then one half of an interrupted prune or undo and must stay.
    """
    try:
        return any(_is_in(fs, path, name) for path, _ in batch_folders(fs, directory))
    except OSError:
        return True


def _is_in(fs: FileSystem, batch: Path, name: str) -> bool:
    with held_batch(fs, batch):
        return fs.status(batch / name) is not None


def _time_of(name: str) -> datetime | None:
    try:
        return datetime.strptime(name, STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
