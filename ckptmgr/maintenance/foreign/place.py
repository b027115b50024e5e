# SPDX-License-Identifier: Apache-2.0
"""A directory of other tools as a place: their checkpoints are whole entries, and only removed or brought back.

A note of a tool that cannot be read, or that names no checkpoint of the directory, stops a prune:
the checkpoints that it protects are not known. The trash is beside ours, because whole directories
wait there:

```
<directory>/.ckptmgr-trash-foreign/20260301T101500.000000Z/checkpoint-500/
```

An entry moves by one rename, so it is always whole in one place. The lease of the trash is held
while anything moves. A link is moved or removed as such, never followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.place import OTHER_TOOL, Batch, Capabilities
from ckptmgr.core.printable import quoted
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.signals import defer_signals
from ckptmgr.maintenance.foreign.layouts import TITLES
from ckptmgr.maintenance.foreign.listing import ForeignListing, list_foreign
from ckptmgr.store.name_leases import check_as_listed
from ckptmgr.store.store import Store
from ckptmgr.store.trash import DirectoryTrash, held_listed
from ckptmgr.store.trash_folder import FOREIGN_TRASH_NAME, TRASH_NAME, held_batch


class ForeignPlace:
    """The checkpoints of other tools in a directory; `listing` is the last one."""

    can: Capabilities = OTHER_TOOL

    def __init__(self, store: Store, listing: ForeignListing | None = None) -> None:
        self.store = store
        self.directory = store.directory
        self.trash = ForeignTrash(store)
        self.listing = ForeignListing() if listing is None else listing

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The listed checkpoints."""
        return [one.checkpoint for one in self.listing.checkpoints]

    def scan(self) -> list[Checkpoint]:
        """List the directory again; return the checkpoints of other tools."""
        self.listing = list_foreign(self.store.fs, self.directory)
        return self.checkpoints

    def look(self, name: str) -> Checkpoint | None:
        """Return the checkpoint that is listed under one name now, or None."""
        return next((one for one in self.scan() if one.name == name), None)

    @contextmanager
    def lease(self, series: str) -> Iterator[None]:
        """Keep other processes from moving anything into or out of the trash; the tool knows no lease.

        Raises:
            StoreLocked: Another process does.
        """
        del series
        with self.store.lease(TRASH_NAME), self.store.fs.hold_directory(self.directory):
            yield

    def finish_moves(self, series: str) -> Sequence[str]:
        """Do nothing: an entry moves by one rename."""
        del series
        return ()

    settle = finish_moves

    def clean_up(self) -> Sequence[str]:
        """Do nothing: a removal leaves nothing."""
        return ()

    def check_not_all(
        self, checkpoints: Sequence[Checkpoint], present: Sequence[Checkpoint]
    ) -> None:
        """Raise UnsafePrune when no complete checkpoint of a tool would remain."""
        for tool in {one.format for one in checkpoints}:
            own = [one for one in present if one.format == tool]
            self.store.check_not_all([one for one in checkpoints if one.format == tool], own)

    def check_pointers(self) -> None:
        """Raise UnsafePrune unless each note of a tool names a checkpoint that is listed."""
        names = {one.name for one in self.checkpoints}
        for tool, pointers in self.listing.pointers.items():
            for pointer in pointers:
                if pointer.target in names:
                    continue
                what = "cannot be read"
                if pointer.target is not None:
                    what = f"names {quoted(pointer.target)}, which is no checkpoint here"
                raise UnsafePrune(
                    f"{pointer.source} of {TITLES[tool]} {what}; nothing was removed",
                    path=self.directory,
                    hint="what it protects is not known; put it right, or remove checkpoints by hand",
                )

    def check_needed(self, needed: Sequence[Checkpoint]) -> None:
        """Raise UnsafePrune unless these are still as they were listed."""
        check_as_listed(needed, {one.name: one for one in self.scan()} if needed else {})

    def remove(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        needed: Sequence[Checkpoint] = (),
        present: Sequence[Checkpoint] | None = None,
    ) -> Sequence[Exception]:
        """Remove checkpoints for good: a crash in between leaves them in the trash."""
        del present
        self.check_needed(needed)
        into = self.trash.new_batch_path(datetime.fromtimestamp(self.store.clock(), UTC))
        failures = self.trash.throw_away(checkpoints, into)
        self.trash.remove_folder(into)
        return failures


class ForeignTrash(DirectoryTrash):
    """The trash of other tools' checkpoints; the lease of the place must be held."""

    NAME: ClassVar[str] = FOREIGN_TRASH_NAME

    def batches(self) -> list[Batch]:
        """Return the batches, oldest first."""
        found = []
        for path, thrown_at in self.folders():
            try:
                with held_batch(self._store.fs, path):
                    inside = list_foreign(self._store.fs, path)
            except FileNotFoundError:
                continue  # another process has removed it
            shown = () if inside.is_itself else inside.checkpoints
            checkpoints = tuple(one.checkpoint for one in shown)
            found.append(Batch(path=path, thrown_at=thrown_at, checkpoints=checkpoints))
        return found

    def throw_away(
        self, checkpoints: Sequence[Checkpoint], into: Path, *, needed: Sequence[Checkpoint] = ()
    ) -> list[Exception]:
        """Move entries into the batch `into`, durably; return the errors of those that stay.

        Raises:
            UnsafePrune: The trash is a link, or no folder; or one of `needed` is not as it was.
            OSError: The folder cannot be created or synced.
        """
        ForeignPlace(self._store).check_needed(needed)
        self._check_folder(into.parent)
        with self._new_batch(into), defer_signals():
            names = [one.name for one in checkpoints]
            return [*self._move_all(names, self._store.directory, into)[0]]

    def restore(self, batch: Batch, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Move checkpoints of a batch back, durably; return the names that are taken.

        Raises:
            CheckpointNotFound: Another process has restored or removed the batch meanwhile.
            OSError: From the disk; calling it again continues.
        """
        with held_listed(self._store.fs, batch.path), defer_signals():
            taken = self.taken_names(checkpoints)
            names = [one.name for one in checkpoints if one.name not in taken]
            for failure in self._move_all(names, batch.path, self._store.directory)[0]:
                raise failure
        self.tidy(batch.path)
        return taken

    def taken_names(self, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Return the names of checkpoints that the directory has, or has again."""
        names = [one.name for one in checkpoints]
        fs, directory = self._store.fs, self._store.directory
        return [name for name in names if fs.status(directory / name) is not None]

    def can_restore(self, batch: Batch) -> bool:
        """Return whether a name of a batch is free."""
        return len(self.taken_names(batch.checkpoints)) < len(batch.checkpoints)

    def series_of(self, checkpoint: Checkpoint) -> str:
        """Return the tool."""
        return checkpoint.series

    def discard(self, batch: Batch) -> None:
        """Remove a batch for good.

        Raises:
            StoreLocked: Another process moves things.
            OSError: From the disk; calling it again continues.
        """
        with ForeignPlace(self._store).lease(TRASH_NAME):
            self.remove_folder(batch.path)

    def remove_folder(self, path: Path) -> None:
        """Remove the folder of a batch and its content; raises as `discard`."""
        fs = self._store.fs
        with contextlib.suppress(FileNotFoundError), held_batch(fs, path):
            _empty(fs, path)
            fs.sync_directory(path)
        self.tidy(path)


def _empty(fs: FileSystem, folder: Path) -> None:
    """Remove the entries of a held directory."""
    for name, status in fs.list(folder).items():
        if status.is_directory:
            with fs.hold_directory(folder / name):
                _empty(fs, folder / name)
            fs.remove_directory(folder / name)
        else:
            fs.unlink(folder / name)
