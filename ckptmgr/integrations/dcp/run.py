# SPDX-License-Identifier: Apache-2.0
"""The run of this process in a series: the lease, who it is, and the save in flight.

Programs make a new `StorageWriter` for each save, and a `StorageReader` before the first one. All that are made for a
directory and a prefix share one run, so that retention knows whose checkpoints it may remove.

Only the coordinator begins and commits. A save of which no end was heard has failed when the next one begins: its files
are removed then, and by whoever comes next when the time in their names is over.
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
from ckptmgr.core.shard_names import SET_FORMAT, new_attempt_id, set_stem
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.job import SaveFacts, SaveOptions
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.observe.observers import REGISTERED, Observers, SaveWatch
from ckptmgr.parallel.offer import Offer
from ckptmgr.parallel.shard_store import ShardStore
from ckptmgr.policy.retention import RetentionPolicy
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.manifest.codec import Manifest

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesAt:
    """A series as this process reaches it.

    Attributes:
        directory: Where it lies; all ranks see it.
        series: Its name.
        trust: Which keys encrypt, sign and prove.
        fs: The disk; None for the real one.
        clock: Seconds since 1970.
    """

    directory: Path
    series: str
    trust: Trust
    fs: FileSystem | None = None
    clock: Callable[[], float] = time.time

    def store(self) -> ShardStore:
        """Return the directory."""
        return ShardStore(self.directory, clock=self.clock, fs=self.fs, trust=self.trust)

    def reading(self) -> ReadOptions:
        """Return how files are read."""
        return ReadOptions(trust=self.trust)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Which run the saves of a process belong to.

    Attributes:
        run_id: The run.
        parent_run_ids: The runs it goes on from.
        resumed_from: The checkpoint it goes on from, or None.
    """

    run_id: str
    parent_run_ids: tuple[str, ...]
    resumed_from: Checkpoint | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    offer: Offer
    world: int
    commit_by: float
    watch: SaveWatch


class Run:
    """What this process writes in a series."""

    def __init__(
        self, place: SeriesAt, *, options: SaveOptions, observers: Observers = REGISTERED
    ) -> None:
        self.place = place
        self.store = place.store()
        self.writer = SeriesWriter(
            self.store, place.series, options=options, clock=place.clock, observers=observers
        )
        self._options = options
        self._attempt: _Attempt | None = None
        self._lock = threading.Lock()

    def begin(self, step: int, *, world: int, timeout_s: float, watch: SaveWatch) -> Offer:
        """Take the lease and begin a save; an earlier one that was not committed is over.

        Args:
            step: Global step.
            world: Number of ranks.
            timeout_s: How long it may take until it is committed.
            watch: Hears when it is given up.

        Raises:
            StoreLocked: Another process writes this series.
            OSError: From the disk.
        """
        with self._lock:
            self.writer.open()
            self._give_up()
            reader = SeriesReader(self.store, self.place.series, options=self.place.reading())
            present = self.store.scan()
            name, attempt = reader.free_name(step, present, format=SET_FORMAT)
            place = self.writer.next_place(SaveFacts(step=step, attempt=attempt), present)
            now = self.place.clock()
            offer = Offer(
                stem=set_stem(name),
                attempt_id=new_attempt_id(now + 2 * timeout_s),
                format=self._options.extension,
                sequence=place.sequence,
                attempt=place.attempt,
                previous=place.previous,
                at=now,
                run_id=self.writer.run_id,
            )
            commit_by = time.monotonic() + timeout_s
            self._attempt = _Attempt(offer=offer, world=world, commit_by=commit_by, watch=watch)
            return offer

    def commit(self, offer: Offer, whole: Callable[[], Manifest]) -> Checkpoint:
        """Make a checkpoint of what all ranks have written; return it once it is durable.

        Args:
            offer: What was begun.
            whole: Returns the manifest of all files.

        Raises:
            SaveFailed: It was begun too long ago, or not as the last one, or the files are not there.
            OSError: From the disk.
        """
        with self._lock:
            attempt = self._attempt
            if attempt is None or attempt.offer != offer:
                raise SaveFailed(
                    "another save of this series was begun before this one was over",
                    path=self.store.directory / offer.set_name,
                    hint="wait for the future of async_save before the next save",
                )
            # From here on only a failure proves that there is no commit: an interrupt may come after it.
            self._attempt = None
            try:
                if time.monotonic() >= attempt.commit_by:
                    raise SaveFailed(
                        "all ranks have written, but too late; give a longer timeout_s"
                    )
                manifest = whole()
                problem = self.store.commit(manifest, mode=self._options.file_mode)
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
        """Apply a retention policy, and remove files that were never committed; failures are logged."""
        self.writer.retain(policy)
        try:
            for sentence in self.store.collect(self.place.series):
                _LOG.warning("%s: %s", self.store.directory, sentence)
        except OSError as error:
            _LOG.warning("retention: %s", error)

    def _give_up(self) -> None:
        """End the save that was begun and never came to its commit, if there is one."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._withdraw(attempt, SaveFailed("a rank could not do its part"))

    def _withdraw(self, attempt: _Attempt, error: Exception) -> None:
        """Remove the files of a save that only this process could commit, and did not."""
        attempt.watch.ended_with(error)
        for rank in range(attempt.world):
            self.store.withdraw(attempt.offer.file_name(rank, world=attempt.world))

    def close(self) -> None:
        """Give the lease back, and remove the files of a save that was not committed."""
        with self._lock:
            self._give_up()
            self.writer.close()


_runs: dict[tuple[Path, str], Run] = {}
_runs_lock = threading.Lock()


def run_of(
    place: SeriesAt,
    *,
    options: SaveOptions,
    observers: Observers = REGISTERED,
    lineage: Lineage | None = None,
) -> Run:
    """Return the run of this process in a series; with another key, or another disk, it goes on there.

    Args:
        place: The series.
        options: How files are written.
        observers: Hear of what it removes; those that were given first.
        lineage: Of the run, where this process begins it now.
    """
    where = place.directory, place.series
    with _runs_lock:
        old = _runs.get(where)
        if old is not None and old.place == place:
            return old
        run = _runs[where] = Run(place, options=options, observers=observers)
        if old is not None:
            old.close()
            lineage = _lineage(old)
        if lineage is not None:
            run.writer.run_id = lineage.run_id
            run.writer.parent_run_ids = lineage.parent_run_ids
            run.writer.resumed_from = lineage.resumed_from
        return run


def lineage_of(place: SeriesAt) -> Lineage | None:
    """Return the lineage of the run of this process in a series, or None when it has none yet."""
    with _runs_lock:
        run = _runs.get((place.directory, place.series))
    return None if run is None else _lineage(run)


def _lineage(run: Run) -> Lineage:
    return Lineage(
        run_id=run.writer.run_id,
        parent_run_ids=run.writer.parent_run_ids,
        resumed_from=run.writer.resumed_from,
    )


def note_resumed(place: SeriesAt, checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Note that the run of this process in a series goes on from a checkpoint."""
    with _runs_lock:
        run = _runs.get((place.directory, place.series))
    (run or run_of(place, options=SaveOptions())).writer.continue_from(checkpoint, manifest)


def end_run(place: SeriesAt) -> None:
    """End the run of this process in a series: its next save there is one of another run."""
    with _runs_lock:
        run = _runs.pop((place.directory, place.series), None)
    if run is not None:
        run.close()
