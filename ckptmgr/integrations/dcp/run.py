# SPDX-License-Identifier: Apache-2.0
"""The run of this process in a series: its lease, its identity, and the save in flight.

Programs make a new `StorageWriter` for each save, and a `StorageReader` before the first one. All
writers and readers of a directory and a prefix share one run, so that retention knows which
checkpoints it may remove.

Only the coordinator begins and commits. A save that has not ended when the next one begins has
failed: its files are removed then, or by a later process after the time in their names.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError, SaveFailed
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.shard_names import SET_FORMAT
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.job import SaveFacts, SaveOptions
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.observe.observers import REGISTERED, Observers, SaveWatch
from ckptmgr.parallel.proposal import SaveProposal
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.series.commit import Alone
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.shards import RankFiles
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesLocation:
    """A series as this process reaches it."""

    directory: Path
    series: str
    trust: Trust
    fs: FileSystem | None = None
    clock: Callable[[], float] = time.time
    file_mode: int = DEFAULT_FILE_MODE

    def store(self) -> Store:
        """Return the store of the directory."""
        return Store(
            self.directory,
            clock=self.clock,
            fs=self.fs,
            trust=self.trust,
            file_mode=self.file_mode,
        )

    def reading(self) -> ReadOptions:
        """Return the read options."""
        return ReadOptions(trust=self.trust)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestry:
    """A run, the runs it continues, and the checkpoint it continues from."""

    run_id: str
    parent_run_ids: tuple[str, ...]
    resumed_from: Checkpoint | None

    @property
    def runs(self) -> frozenset[str]:
        """The run and those that it continues."""
        return frozenset((self.run_id, *self.parent_run_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    proposal: SaveProposal
    world: int
    commit_by: float
    watch: SaveWatch


class _Coordinator(Alone):
    """The one process that begins and commits; the files of all ranks are recovered with its own."""

    def recover(self) -> list[str]:
        """Remove the leftovers of dead writers."""
        return RankFiles(self._writer.store).recover(self._writer.series)


class DcpRun:
    """The writing of this process in a series."""

    def __init__(
        self, place: SeriesLocation, *, options: SaveOptions, observers: Observers = REGISTERED
    ) -> None:
        self.place = place
        self.store = place.store()
        self._files = RankFiles(self.store)
        self.writer = SeriesWriter(
            self.store,
            place.series,
            options=options,
            clock=place.clock,
            observers=observers,
            commit=_Coordinator,
        )
        self.writer.ways_out = (
            "load it before the first step; to begin beside it on purpose, give another prefix"
        )
        self._options = options
        self._attempt: _Attempt | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        step: int,
        *,
        world: int,
        timeout_s: float,
        watch: SaveWatch,
        retention: RetentionPolicy | None = None,
    ) -> SaveProposal:
        """Take the lease and begin a save; an earlier uncommitted one ends.

        On a full disk, what `retention` drops goes before.

        Raises:
            StoreLocked: Another process writes this series.
            OSError: From the disk.
        """
        with self._lock:
            self.writer.open()
            self._give_up()
            self.writer.make_room_for_next(retention)
            reader = SeriesReader(self.store, self.place.series, options=self.place.reading())
            present = self.store.scan()
            name, attempt = reader.free_name(step, present, format=SET_FORMAT)
            place = self.writer.next_place(SaveFacts(step=step, attempt=attempt), present)
            now = self.place.clock()
            proposal = SaveProposal.for_save(
                name,
                place,
                format=self._options.extension,
                run_id=self.writer.run_id,
                at=now,
                now=now,
                timeout_s=timeout_s,
            )
            commit_by = time.monotonic() + timeout_s
            self._attempt = _Attempt(
                proposal=proposal, world=world, commit_by=commit_by, watch=watch
            )
            return proposal

    def commit(self, proposal: SaveProposal, merged: Callable[[], Manifest]) -> Checkpoint:
        """Commit the manifest of all files that `merged` returns; return the durable checkpoint.

        Raises:
            SaveFailed: It was begun too long ago, or not as the last one, or files are missing.
            OSError: From the disk.
        """
        with self._lock:
            attempt = self._attempt
            if attempt is None or attempt.proposal != proposal:
                raise SaveFailed(
                    "another save of this series was begun before this one was over",
                    path=self.store.directory / proposal.set_name,
                    hint="wait for the future of async_save before the next save",
                )
            # From here on only a failure proves that there is no commit: an interrupt may follow
            # it.
            self._attempt = None
            try:
                if time.monotonic() >= attempt.commit_by:
                    raise SaveFailed(
                        "all ranks have written, but too late; give a longer timeout_s"
                    )
                manifest = merged()
                problem = self._files.commit(manifest, mode=self.place.file_mode)
            except (CkptmgrError, OSError) as error:
                self._withdraw(attempt, error)
                raise
            saved = self.writer.note_saved(manifest)
        if problem is not None:
            raise SaveFailed(
                f"all ranks have saved, but the commit may not be durable: {problem}",
                path=saved.path,
            ) from problem
        return saved

    def retain(self, policy: RetentionPolicy) -> None:
        """Apply a retention policy, and remove uncommitted files; failures are logged."""
        self.writer.retain(policy)
        try:
            for sentence in self._files.collect(self.place.series):
                _LOG.warning("%s: %s", self.store.directory, sentence)
        except OSError as error:
            _LOG.warning("retention: %s", error)

    def _give_up(self) -> None:
        """End the save that was begun and not committed, if there is one."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._withdraw(attempt, SaveFailed("a rank could not do its part"))

    def _withdraw(self, attempt: _Attempt, error: Exception) -> None:
        """Remove the files of a save that only this process could commit, and did not."""
        attempt.watch.ended_with(error)
        for rank in range(attempt.world):
            self._files.withdraw(attempt.proposal.file_name(rank, world=attempt.world))

    def close(self) -> None:
        """Release the lease, and remove the files of an uncommitted save."""
        with self._lock:
            self._give_up()
            self.writer.close()


_runs: dict[tuple[Path, str], DcpRun] = {}
_runs_lock = threading.Lock()


def run_of(
    place: SeriesLocation,
    *,
    options: SaveOptions,
    observers: Observers = REGISTERED,
    lineage: Ancestry | None = None,
) -> DcpRun:
    """Return the run of this process in a series; another key or disk continues it there.

    The `observers` of the first call count, and a `lineage` only where the run begins now.
    """
    where = place.directory, place.series
    with _runs_lock:
        old = _runs.get(where)
        if old is not None and old.place == place:
            return old
        run = _runs[where] = DcpRun(place, options=options, observers=observers)
        if old is not None:
            old.close()
            lineage = _lineage(old)
        if lineage is not None:
            run.writer.run_id = lineage.run_id
            run.writer.parent_run_ids = lineage.parent_run_ids
            run.writer.resumed_from = lineage.resumed_from
        return run


def lineage_of(place: SeriesLocation) -> Ancestry | None:
    """Return the lineage of the run of this process in a series, or None before it has one."""
    with _runs_lock:
        run = _runs.get((place.directory, place.series))
    return None if run is None else _lineage(run)


def _lineage(run: DcpRun) -> Ancestry:
    return Ancestry(
        run_id=run.writer.run_id,
        parent_run_ids=run.writer.parent_run_ids,
        resumed_from=run.writer.resumed_from,
    )


def note_resumed(place: SeriesLocation, checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Note that the run of this process in a series continues from a checkpoint."""
    with _runs_lock:
        run = _runs.get((place.directory, place.series))
    (run or run_of(place, options=SaveOptions())).writer.continue_from(checkpoint, manifest)


def end_run(place: SeriesLocation) -> None:
    """End the run of this process in a series: its next save there begins another run."""
    with _runs_lock:
        run = _runs.pop((place.directory, place.series), None)
    if run is not None:
        run.close()
