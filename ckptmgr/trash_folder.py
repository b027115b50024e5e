# SPDX-License-Identifier: Apache-2.0
"""Where the trash of a directory lies, and whether a file is in it; `ckptmgr.trash` moves files in and out."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from ckptmgr.fsio import FileSystem

TRASH_NAME = ".ckptmgr-trash"
DEFAULT_GRACE = timedelta(hours=24)
STAMP = "%Y%m%dT%H%M%S.%fZ"


def batch_folders(fs: FileSystem, directory: Path) -> list[tuple[Path, datetime]]:
    """Return the folders of the batches and when they were thrown away, oldest first; strangers are left out."""
    trash = directory / TRASH_NAME
    status = fs.status(trash)
    if status is None or not status.is_directory:
        return []
    entries = sorted(fs.list(trash).items())
    dated = [(trash / name, _time_of(name)) for name, entry in entries if entry.is_directory]
    return [(path, thrown_at) for path, thrown_at in dated if thrown_at is not None]


def may_be_in_trash(fs: FileSystem, directory: Path, name: str) -> bool:
    """Return whether a file of this name is in the trash, or the trash cannot be read.

    What belongs to such a file is one half of a prune or an undo that was interrupted, so it must stay.
    """
    try:
        return any(fs.status(path / name) is not None for path, _ in batch_folders(fs, directory))
    except OSError:
        return True


def _time_of(name: str) -> datetime | None:
    try:
        return datetime.strptime(name, STAMP).replace(tzinfo=UTC)
    except ValueError:
        return None
