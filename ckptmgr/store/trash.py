# SPDX-License-Identifier: Apache-2.0
"""The trash of a directory: dropped checkpoints wait there before they are removed for good.

```
<directory>/.ckptmgr-trash/20260301T101500.000000Z/net-1_20.ckpt
                                                   net-1_20.ckpt.manifest.json
```

One folder for each prune (a batch). Moving in, in this order: data renamed; both directories
synced; manifest renamed; both synced. Moving back: manifest, synced; data, synced. So at every
instant a checkpoint in the directory is whole, or it is a manifest without data, which is a
leftover and not listed as a checkpoint. For a sharded checkpoint the manifest moves in first and
back last.

The leases of the series must be held. The newest good checkpoint never moves in.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, StoreLocked, UnsafePrune
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.place import Batch
from ckptmgr.core.shard_names import is_checkpoint_name, parse_shard_name
from ckptmgr.io.filesystem import FileSystem, unlink_if_present
from ckptmgr.io.owners import is_of_stranger
from ckptmgr.io.signals import defer_signals
from ckptmgr.io.temp_names import parse_temp
from ckptmgr.store.manifest.codec import SUFFIX, files_of, manifest_name
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import STAMP, TRASH_NAME, batch_folders, held_batch, held_trash

_CLOCK_SKEW = timedelta(days=1)
_WITHOUT_DATA = (State.LEFTOVER, State.MISSING)
_MOST_TRIES = 20


class DirectoryTrash:
    """The trash of a directory; see `core.place.Trash`."""

    NAME: ClassVar[str] = TRASH_NAME

    def __init__(self, store: Store) -> None:
        self._store = store

    def folders(self) -> list[tuple[Path, datetime]]:
        """Return the folders of the batches and their times, oldest first."""
        return batch_folders(self._store.fs, self._store.directory, name=self.NAME)

    def batches(self) -> list[Batch]:
        """Return the batches in the trash of a directory, oldest first; other entries are ignored."""
        found = []
        for path, thrown_at in self.folders():
            try:
                with held_batch(self._store.fs, path):
                    inside = Store(path, fs=self._store.fs, trust=self._store.trust).scan()
            except FileNotFoundError:
                continue  # another process has removed it
            whole = [c for c in inside if c.state not in _WITHOUT_DATA]
            checkpoints = tuple(sorted(whole, key=lambda c: (c.series, c.order, c.name)))
            found.append(Batch(path=path, thrown_at=thrown_at, checkpoints=checkpoints))
        return found

    def new_batch_path(self, now: datetime) -> Path:
        """Return the path of a new batch, later than all others but those of a future day.

        A folder with a date far in the future, from a wrong clock or an attacker, would otherwise keep
        all later batches beyond their grace time. Nothing is created.
        """
        found = (thrown_at for _, thrown_at in self.folders())
        latest = max((one for one in found if one - now <= _CLOCK_SKEW), default=None)
        if latest is not None and now <= latest:
            now = latest + timedelta(microseconds=1)
        return self._store.directory / self.NAME / now.astimezone(UTC).strftime(STAMP)

    def throw_away(
        self,
        checkpoints: Sequence[Checkpoint],
        into: Path,
        *,
        needed: Sequence[Checkpoint] = (),
    ) -> list[Exception]:
        """Move checkpoints into the batch folder `into`, durably; return the errors of those that stay.

        A checkpoint under whose name another process saves, or saved since the listing, stays; that is
        one of the errors. The leases of the series must be held. `needed` are the staying ones because
        of which these go.

        Raises:
            UnsafePrune: It would take the last good checkpoint, a needed one is not there as it was
                listed, or the trash is a link or no folder.
            OSError: The folder cannot be created, or the directories cannot be synced.
        """
        self._store.check_not_all(checkpoints, self._store.scan())
        self._check_folder(into.parent)
        failures: list[Exception] = []
        for _ in range(_MOST_TRIES):
            failures, is_gone = self._try_to_throw_away(checkpoints, into, needed)
            if not is_gone:
                break
        return failures

    def _try_to_throw_away(
        self, checkpoints: Sequence[Checkpoint], into: Path, needed: Sequence[Checkpoint]
    ) -> tuple[list[Exception], bool]:
        """Return the errors, and whether another process removed the empty folder before a file was in it."""
        with (
            self._new_batch(into),
            defer_signals(),
            self._store.unchanged(checkpoints, needed=needed) as held,
        ):
            others = dict(files_of(checkpoint) for checkpoint in held.checkpoints)
            failures, moved = self._move_all(list(others), self._store.directory, into)
            is_missing = any(isinstance(one, FileNotFoundError) for one in failures)
            is_gone = is_missing and not moved and self._store.fs.is_moved(into)
            rest = [name for first in moved for name in others[first]]
            more, _ = self._move_all(rest, self._store.directory, into, may_be_missing=True)
            return [*held.failures, *failures, *more], is_gone

    @contextmanager
    def _new_batch(self, into: Path) -> Iterator[None]:
        """Create the folder of a batch if it is missing, and hold it.

        Another process may remove the trash, and the folder, as long as they are empty (see `tidy`).
        """
        fs = self._store.fs
        with fs.hold_directory(self._store.directory), contextlib.ExitStack() as held:
            tries_left = _MOST_TRIES
            while True:
                try:
                    fs.make_directory(into.parent, mode=None)
                    held.enter_context(held_trash(fs, self._store.directory, name=into.parent.name))
                    fs.make_directory(into, mode=None)
                    held.enter_context(held_batch(fs, into))
                    break
                except FileNotFoundError:
                    held.close()
                    tries_left -= 1
                    if not tries_left:
                        raise
            yield

    def restore(self, batch: Batch, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Move checkpoints of a batch back, durably; return the taken names, which stay in it.

        A name is also taken while another process saves under it.

        Raises:
            CheckpointNotFound: Another process has restored or removed the batch.
            StoreLocked: Another process removes old batches, or restores one; or a lease was lost.
                Nothing was moved.
            OSError: From the disk; calling it again continues.
        """
        with contextlib.ExitStack() as leases:
            leases.enter_context(self._store.lease(TRASH_NAME))
            leases.enter_context(held_listed(self._store.fs, batch.path))
            busy = [c.name for c in checkpoints if not self._is_held(c, leases)]
            taken = list(dict.fromkeys(busy + self.taken_names(checkpoints)))
            others = dict(files_of(c) for c in checkpoints if c.name not in taken)
            rest = [name for names in others.values() for name in names]
            self._store.leases.check_all()
            for files, may_be_missing in ((rest, True), (list(others), False)):
                failures, _ = self._move_all(
                    files, batch.path, self._store.directory, may_be_missing=may_be_missing
                )
                if failures:
                    raise failures[0]
            return taken

    def _is_held(self, checkpoint: Checkpoint, leases: contextlib.ExitStack) -> bool:
        """Return whether this process is the only writer of a name from now on."""
        try:
            if checkpoint.name != checkpoint.series:
                leases.enter_context(self._store.lease(checkpoint.name))
        except StoreLocked:
            return False
        return True

    def taken_names(self, checkpoints: Sequence[Checkpoint]) -> list[str]:
        """Return the names of checkpoints that the directory already has, or a stranger has taken."""
        at = self._store.fs.status(self._store.directory)

        def is_taken(checkpoint: Checkpoint) -> bool:
            first, others = files_of(checkpoint)
            if self._store.fs.status(self._store.directory / first) is not None:
                return True
            rest = (self._store.fs.status(self._store.directory / name) for name in others)
            return any(one is not None and is_of_stranger(one, at) for one in rest)

        return [one.name for one in checkpoints if is_taken(one)]

    def can_restore(self, batch: Batch) -> bool:
        """Return whether a proven checkpoint of a batch can come back."""
        proven = [c for c in batch.checkpoints if not c.is_unproven or self._is_described(c)]
        return len(self.taken_names(proven)) < len(proven)

    def _is_described(self, checkpoint: Checkpoint) -> bool:
        """Return whether a proven manifest describes data that an interrupted prune moved alone."""
        with contextlib.suppress(CkptmgrError, OSError):
            return checkpoint.is_bare and self._store.read_manifest(checkpoint.name) is not None
        return False

    def series_of(self, checkpoint: Checkpoint) -> str:
        """Return the series of a checkpoint in the trash.

        Only data that was moved alone is bare there: its manifest is still in the directory.
        """
        return self._series_said(checkpoint) if checkpoint.is_bare else checkpoint.series

    def _series_said(self, checkpoint: Checkpoint) -> str:
        """Return the series in a file's manifest, with or without its data; else the listed one."""
        try:
            manifest = self._store.read_manifest(checkpoint.name)
        except (CkptmgrError, OSError):
            manifest = None
        return checkpoint.series if manifest is None else manifest.series

    def finish(self, series: str) -> None:
        """Move manifests of a series after their data, which an interrupted `throw_away` moved alone.

        Raises:
            OSError: From the disk; calling it again continues.
        """
        for checkpoint in self._store.scan():
            if checkpoint.state not in _WITHOUT_DATA or self._series_said(checkpoint) != series:
                continue
            for batch in self.batches():
                with (
                    contextlib.suppress(FileNotFoundError),  # another process has removed the batch
                    held_batch(self._store.fs, batch.path),
                    contextlib.ExitStack() as leases,
                ):
                    if self._store.fs.status(batch.path / checkpoint.name) is None:
                        continue
                    if self._is_held(checkpoint, leases):
                        self._finish(checkpoint.name, batch.path)
                    break

    def _finish(self, data_name: str, into: Path) -> None:
        if self._store.fs.status(self._store.directory / data_name) is not None:
            return  # saved again: the manifest describes the new file
        self._store.leases.check_all()
        failures, _ = self._move_all(
            [manifest_name(data_name)], self._store.directory, into, may_be_missing=True
        )
        if failures:
            raise failures[0]

    def discard(self, batch: Batch) -> None:
        """Remove a batch for good: data, then manifests, then the folder, and the trash if it is empty.

        Raises:
            StoreLocked: Another process restores or removes it.
            OSError: From the disk; calling it again continues.
        """
        with self._store.lease(TRASH_NAME):
            # Another prune may have removed it first.
            with contextlib.suppress(FileNotFoundError), held_batch(self._store.fs, batch.path):
                self._store.leases.check_all()
                _remove_files(self._store.fs, batch.path)
            self.tidy(batch.path)

    def tidy(self, folder: Path) -> None:
        """Remove the folder of a batch, and the trash, if they are empty."""
        with (
            self._store.fs.hold_directory(self._store.directory),
            contextlib.suppress(FileNotFoundError),
        ):
            with held_trash(self._store.fs, self._store.directory, name=folder.parent.name):
                _remove_empty(self._store.fs, folder)
            _remove_empty(self._store.fs, folder.parent)

    def _move_all(
        self, names: Sequence[str], source: Path, target: Path, *, may_be_missing: bool = False
    ) -> tuple[list[OSError], list[str]]:
        """Rename files and sync both directories; return the failures and the moved names."""
        failures: list[OSError] = []
        moved: list[str] = []
        for name in names:
            try:
                self._store.fs.replace(source / name, target / name)
                moved.append(name)
            except FileNotFoundError as error:
                if not may_be_missing:
                    failures.append(error)
            except OSError as error:
                failures.append(error)
        if moved:
            # The target first: after a crash a file in both places is better than one in neither.
            self._store.fs.sync_directory(target)
            self._store.fs.sync_directory(source)
        return failures, moved

    def _check_folder(self, folder: Path) -> None:
        status = self._store.fs.status(folder)
        if status is not None and not status.is_directory:
            raise UnsafePrune(
                "is not a directory, so nothing can be put there",
                path=folder,
                hint="remove it; a trash elsewhere is not supported",
            )


@contextmanager
def held_listed(fs: FileSystem, path: Path) -> Iterator[None]:
    """Hold the folder of a batch, as `held_batch`, that was listed before.

    Raises:
        CheckpointNotFound: Another process has restored or removed the batch meanwhile.
    """
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(held_batch(fs, path))
        except FileNotFoundError as error:
            raise CheckpointNotFound(
                "another process has restored or removed this batch of the trash",
                path=path,
                hint="run the undo again: it restores the last batch that is still there, if any",
            ) from error
        yield


def _remove_files(fs: FileSystem, folder: Path) -> None:
    names = sorted(name for name, one in fs.list(folder).items() if one.is_file and _is_ours(name))
    for is_manifest in (False, True):
        chosen = [name for name in names if name.endswith(SUFFIX) is is_manifest]
        for name in chosen:
            unlink_if_present(fs, folder / name)
        if chosen:
            fs.sync_directory(folder)


def _is_ours(name: str) -> bool:
    """Return whether a run writes files of this name; others in the trash stay, with their folder."""
    is_of_rank = parse_shard_name(name) is not None
    return (
        is_of_rank or is_checkpoint_name(name.removesuffix(SUFFIX)) or parse_temp(name) is not None
    )


def _remove_empty(fs: FileSystem, folder: Path) -> None:
    try:
        fs.remove_directory(folder)
    except FileNotFoundError:
        return  # another prune was faster
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return
        raise
    fs.sync_directory(folder.parent)
