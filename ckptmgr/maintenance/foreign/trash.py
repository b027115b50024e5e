# SPDX-License-Identifier: Apache-2.0
"""The trash of other tools' checkpoints: beside ours, because whole directories wait there.

```
<directory>/.ckptmgr-trash-foreign/20260301T101500.000000Z/checkpoint-500/
```

An entry moves by one rename, so it is always whole in one place. The lease of the trash is held
while anything moves. A link is moved or removed as such, never followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CheckpointNotFound, UnsafePrune
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.signals import defer_signals
from ckptmgr.maintenance.foreign.listing import list_foreign
from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
from ckptmgr.store import trash
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import (
    FOREIGN_TRASH_NAME,
    STAMP,
    TRASH_NAME,
    batch_folders,
    held_batch,
)

_TICK = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignBatch:
    """The checkpoints of other tools that one prune dropped."""

    path: Path
    thrown_at: datetime
    checkpoints: tuple[ForeignCheckpoint, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes that removing it frees."""
        return sum(one.checkpoint.size_bytes for one in self.checkpoints)

    @property
    def tools(self) -> frozenset[str]:
        """The tools that wrote them."""
        return frozenset(one.checkpoint.format for one in self.checkpoints)


def foreign_batches(store: Store) -> list[ForeignBatch]:
    """Return the batches of a directory, oldest first."""
    found = []
    for path, thrown_at in batch_folders(store.fs, store.directory, name=FOREIGN_TRASH_NAME):
        try:
            with held_batch(store.fs, path):
                inside = list_foreign(store.fs, path)
        except FileNotFoundError:
            continue  # another process has removed it
        checkpoints = () if inside.is_itself else inside.checkpoints
        found.append(ForeignBatch(path=path, thrown_at=thrown_at, checkpoints=checkpoints))
    return found


def new_batch_path(store: Store, now: datetime) -> Path:
    """Return the path of a new batch, later than all others; nothing is created."""
    latest = max((batch.thrown_at for batch in foreign_batches(store)), default=None)
    if latest is not None and now <= latest:
        now = latest + _TICK
    return store.directory / FOREIGN_TRASH_NAME / now.astimezone(UTC).strftime(STAMP)


@contextmanager
def locked(store: Store) -> Iterator[None]:
    """Keep other processes from moving anything into or out of the trash of a directory.

    Raises:
        StoreLocked: Another process does.
    """
    with store.lease(TRASH_NAME), store.fs.hold_directory(store.directory):
        yield


def throw_away(store: Store, names: Sequence[str], into: Path) -> list[OSError]:
    """Move entries into the batch `into`, durably; return the errors of those that stay.

    `locked` must be held.

    Raises:
        UnsafePrune: The trash is a link, or no folder.
        OSError: The folder cannot be created or synced.
    """
    status = store.fs.status(into.parent)
    if status is not None and not status.is_directory:
        raise UnsafePrune("is not a directory, so nothing can be put there", path=into.parent)
    store.fs.make_directory(into.parent, mode=None)
    with store.fs.hold_directory(into.parent):
        store.fs.make_directory(into, mode=None)
    with defer_signals(), held_batch(store.fs, into):
        return _move(store.fs, names, store.directory, into)


def restore(store: Store, batch: ForeignBatch) -> tuple[list[ForeignCheckpoint], list[str]]:
    """Move a batch back, durably; return the restored checkpoints, and the names that are taken.

    Raises:
        CheckpointNotFound: Another process has restored or removed the batch meanwhile.
        StoreLocked: Another process moves things.
        OSError: From the disk; calling it again continues.
    """
    with locked(store):
        with trash.held_listed(store.fs, batch.path), defer_signals():
            taken = taken_names(store, batch)
            chosen = [one for one in batch.checkpoints if one.checkpoint.name not in taken]
            names = [one.checkpoint.name for one in chosen]
            for failure in _move(store.fs, names, batch.path, store.directory):
                raise failure
        trash.tidy(store, batch.path)
    return chosen, taken


def taken_names(store: Store, batch: ForeignBatch) -> list[str]:
    """Return the names of a batch that the directory has again."""
    names = [one.checkpoint.name for one in batch.checkpoints]
    return [name for name in names if store.fs.status(store.directory / name) is not None]


def last_batch(store: Store) -> ForeignBatch:
    """Return the newest batch with something to restore.

    Raises:
        CheckpointNotFound: There is none.
    """
    filled = [batch for batch in foreign_batches(store) if batch.checkpoints]
    if not filled:
        raise CheckpointNotFound(
            "there is nothing to undo: the trash is empty", path=store.directory
        )
    is_free = [one for one in filled if len(taken_names(store, one)) < len(one.checkpoints)]
    return (is_free or filled)[-1]


def discard(store: Store, path: Path) -> None:
    """Remove a batch for good; `locked` must be held.

    Raises:
        OSError: From the disk; calling it again continues.
    """
    with contextlib.suppress(FileNotFoundError), held_batch(store.fs, path):
        _empty(store.fs, path)
        store.fs.sync_directory(path)
    trash.tidy(store, path)


def _move(fs: FileSystem, names: Sequence[str], source: Path, target: Path) -> list[OSError]:
    failures: list[OSError] = []
    for name in names:
        try:
            fs.replace(source / name, target / name)
        except OSError as error:
            failures.append(error)
    if len(failures) < len(names):
        # The target first: after a crash an entry in both places is better than one in neither.
        fs.sync_directory(target)
        fs.sync_directory(source)
    return failures


def _empty(fs: FileSystem, folder: Path) -> None:
    """Remove the entries of a held directory."""
    for name, status in fs.list(folder).items():
        if status.is_directory:
            with fs.hold_directory(folder / name):
                _empty(fs, folder / name)
            fs.remove_directory(folder / name)
        else:
            fs.unlink(folder / name)
