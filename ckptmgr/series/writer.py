# SPDX-License-Identifier: Apache-2.0
"""`SeriesWriter`: writes one series for one run: lease, numbering, saves, retention.

`CheckpointManager` and `ModelCheckpoint` both use it. Retention counts and removes only the
checkpoints of this run and of the runs that it resumed from.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from ckptmgr.core.errors import CkptmgrError, StoreFull, StoreLocked, UnsafePrune
from ckptmgr.core.forks import reset_in_child
from ckptmgr.core.model import Checkpoint, Link, Plan, State
from ckptmgr.files.save.job import (
    FixedName,
    SaveFacts,
    SaveJob,
    SaveOptions,
    draft_entry,
)
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.tensor import Item
from ckptmgr.io.signals import defer_signals, deliver_signals
from ckptmgr.observe.observers import REGISTERED, Observers
from ckptmgr.policy.lines import lines_of, meant_line
from ckptmgr.policy.retention import (
    dropped,
    plan,
    replaced_emergencies,
    without_unranked,
)
from ckptmgr.policy.rules import RetentionPolicy, text_of
from ckptmgr.series.candidates import Candidates, Skipped
from ckptmgr.series.commit import Alone, BegunSave, Commit, Destination, Here
from ckptmgr.store.applied import drop
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.manifest.lineage import link_to_newest
from ckptmgr.store.numbering import next_attempt, next_sequence
from ckptmgr.store.store import Store

if TYPE_CHECKING:
    pass

_LOG = logging.getLogger(__name__)
# Longest wait for the worker process of a killed run, which ends when its last write returns.
_ENDING_S = 30.0
_PAUSE_S = 0.05
_Loaded = TypeVar("_Loaded")


class SavePosition(NamedTuple):
    """Position of a save in its series: commit sequence, attempt at its step, predecessor link."""

    sequence: int
    attempt: int
    previous: Link | None


class Retained(NamedTuple):
    """Decision of a policy about the checkpoints of a run.

    Attributes:
        dropped: The checkpoints that go, newest first.
        kept: Number of checkpoints of the run that stay.
        needed: The last good one of them, because of which the others may go.
        present: All checkpoints of the directory.
    """

    dropped: Sequence[Checkpoint]
    kept: int
    needed: Sequence[Checkpoint]
    present: Sequence[Checkpoint]


class SeriesWriter:
    """The only writer of a series, which holds its lease.

    `ways_out` ends the warning of a run that was not resumed.

    Files are written into `store`; `listing` is the place that is listed and read. `clock` returns
    seconds since the epoch, `monotonic` seconds for timeouts, `pause` waits for some seconds.
    `run_id` is random by default. `commit` and `destination` make the strategies (see `series.commit`).
    """

    ways_out = 'call resume() before the first step; to begin beside it on purpose, resume(state, Resume(start="new"))'

    def __init__(
        self,
        store: Store,
        series: str,
        *,
        options: SaveOptions,
        clock: Callable[[], float],
        run_id: str | None = None,
        observers: Observers = REGISTERED,
        monotonic: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
        commit: Callable[[SeriesWriter], Commit] = Alone,
        destination: Callable[[SeriesWriter], Destination] = Here,
    ) -> None:
        self.store = store
        self.series = series
        self.options = options
        self.run_id = run_id if run_id is not None else uuid.uuid4().hex
        self.parent_run_ids: tuple[str, ...] = ()
        self.starts_anew = False
        self.resumed_from: Checkpoint | None = None
        self._last_saved: Checkpoint | None = None
        self._damaged: dict[tuple[Path, str | None], str] = {}
        self.rival: StoreLocked | None = None
        self._held_back: dict[Path, str] = {}
        self.clock = clock
        self.monotonic = monotonic
        self._pause = pause
        self._observers = observers
        self._lease = contextlib.ExitStack()
        self._holder: int | None = None
        self.forget_parent()
        self.destination = destination(self)
        self.listing = self.destination.place
        self.commit = commit(self)
        reset_in_child(self)

    def forget_parent(self) -> None:
        """Create new locks, for a forked child: a thread of the parent may hold the old ones."""
        # Reentrant: a signal handler may save in the middle of a save.
        self._opening = threading.RLock()
        self.store.catalogue.forget_parent()
        # Held by retention from the plan to the last removal, and by a change of pins.
        self.changing = threading.RLock()
        self._has_said_unranked = False

    @property
    def is_first(self) -> bool:
        """Whether this process removes, pins and counts starts: only one of a run may."""
        return self.commit.is_first

    @property
    def is_holder(self) -> bool:
        """Whether this process holds the lease."""
        return self._holder == os.getpid()  # not the lease of a parent

    def take_series(self, choose: Callable[[], str]) -> None:
        """Switch to the unused series that `choose` returns, before the first save."""
        self.series = self.commit.take_series(choose)

    def prepare(self) -> None:
        """Prepare for a save or a resumption; the ranks of a run do it together."""
        self.commit.prepare()

    def first_that_loads(
        self, candidates: Candidates[_Loaded]
    ) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
        """Return the first candidate that loads, in all processes; see `Commit.first_that_loads`.

        Retention must neither count nor remove those that are proven to be damaged.
        """
        found = self.commit.first_that_loads(candidates)
        for one in found[2]:
            if one.is_damaged:
                self._damaged[one.checkpoint.path, one.checkpoint.id] = one.reason
        return found

    def open(self) -> None:
        """Take the lease and clean up after dead writers; a lease that is already held is checked.

        Raises:
            StoreLocked: Another live process writes this series, or this one has lost the lease;
                `close` releases it.
        """
        if self.is_first:
            self.destination.open(self._hold)

    def _hold(self) -> None:
        with defer_signals(), self._opening:
            if self.is_holder:
                self.store.leases.check(self.series)
            else:
                self._open()

    def hold_again(self) -> None:
        """Take a lost lease again, and remove nothing: a save in flight may still need its file."""
        with defer_signals(), self._opening:
            self._release()
            self._take_lease()
            self._holder = os.getpid()
            self.store.follow()

    def _open(self) -> None:
        self._take_lease()
        self._holder = os.getpid()
        self.store.follow()
        sentences = self.clean_up()
        for sentence in sentences:
            _LOG.warning("%s: %s", self.store.directory, sentence)
        if sentences:
            self._observers.emit(
                "lease.taken_over",
                path=self.store.directory,
                series=self.series,
                notes=tuple(sentences),
            )

    def _take_lease(self) -> None:
        """Take the lease; wait up to `_ENDING_S` for the worker process of a killed run."""
        stop: float | None = None
        while (locked := self._lease_refused()) is not None:
            now = self.monotonic()
            if not locked.is_ending or (stop is not None and now >= stop):
                raise locked
            if stop is None:
                stop = now + _ENDING_S
                _LOG.warning("%s; waiting for its end, up to %g s", locked.message, _ENDING_S)
            with deliver_signals():
                self._pause(_PAUSE_S)

    def _lease_refused(self) -> StoreLocked | None:
        """Take the lease, or return the refusal."""
        try:
            self._lease.enter_context(self.store.lease(self.series))
        except StoreLocked as locked:
            return locked
        return None

    def clean_up(self) -> list[str]:
        """Remove the leftovers of dead writers under the lease; return one sentence per action."""
        sentences = self.commit.recover()
        self.destination.clean_up()
        return sentences

    def close(self) -> None:
        """Release the lease."""
        with defer_signals(), self._opening:
            self.destination.close(self._release)

    def _release(self) -> None:
        self._holder = None
        self.store.catalogue.stop()
        self._lease.close()

    def start_anew(self) -> None:
        """Record that this run continues none of the present checkpoints, because it was asked to.

        Its checkpoints so far count as those of another run.
        """
        with self._opening:
            if self._last_saved is not None:
                self.run_id = uuid.uuid4().hex
            self.resumed_from, self.parent_run_ids = None, ()
            self.starts_anew = True
            self.rival = None
        self.hold_back((), "")
        self.destination.begin_at()

    def stop(self, rival: StoreLocked, *, began: Checkpoint | None) -> bool:
        """Refuse the saves of the run from now on, if it still continues `began`; return whether."""
        with self._opening:
            if self.resumed_from is not began:
                return False
            self.rival = rival
            return True

    @property
    def last_saved(self) -> Checkpoint | None:
        """The last checkpoint that this run has committed."""
        return self._last_saved

    @property
    def has_saved(self) -> bool:
        """Whether this run has committed a checkpoint."""
        return self._last_saved is not None

    @property
    def own_runs(self) -> frozenset[str]:
        """This run and the runs that it continues."""
        return frozenset((self.run_id, *self.parent_run_ids)) - {""}

    def continue_from(self, checkpoint: Checkpoint, manifest: Manifest | None) -> None:
        """Continue the run of a checkpoint: its checkpoints now count as those of this run."""
        with self._opening:
            self.resumed_from, self.starts_anew, self.rival = checkpoint, False, None
        self._damaged.pop((checkpoint.path, checkpoint.id), None)  # a mirror had it whole
        if manifest is not None:
            parents = (manifest.run_id, *manifest.parent_run_ids)
            # A file of no run has the run id "", which must not make other such files ours.
            self.parent_run_ids = tuple(
                dict.fromkeys(parent for parent in parents if parent not in ("", self.run_id))
            )
        self.destination.begin_at()

    def branch_from(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint in a line of its own: those that are there stay those of others."""
        self.start_anew()
        with self._opening:
            self.resumed_from = checkpoint

    def hold_back(self, checkpoints: Iterable[Checkpoint], why: str) -> None:
        """Keep these checkpoints, and no longer those of the last call, whatever the policy says."""
        self._held_back = {one.path: why for one in checkpoints}

    def belong_to(self, run: SeriesWriter) -> None:
        """Save for the run of another writer, in a series of this one's own."""
        parents = (run.run_id, *run.parent_run_ids)
        self.parent_run_ids = tuple(dict.fromkeys(one for one in parents if one != self.run_id))

    def begin(self, job: SaveJob) -> BegunSave:
        """Take the lease, and choose the name and the position of a save; see `Commit.begin`."""
        return self.commit.begin(job)

    def present_at(self, step: int) -> Sequence[Checkpoint]:
        """Return the checkpoints that decide name, number and predecessor of a save."""
        return self.destination.present_at(step, self._last_saved)

    def save(
        self,
        name: str,
        items: Sequence[Item],
        facts: SaveFacts,
        *,
        metadata: Mapping[str, str] | None = None,
        options: SaveOptions | None = None,
    ) -> Checkpoint:
        """Save in the calling thread; return the durable checkpoint. Raises as `save_items`."""
        naming = FixedName(name, facts.attempt)
        begun = self.begin(
            SaveJob(naming=naming, facts=facts, items=items, metadata=metadata, options=options)
        )
        try:
            manifest = save_items(self.store, begun.order)
        except Exception as error:
            begun.abandon(error)
            raise
        return begun.commit(manifest)

    def publish(self, manifest: Manifest) -> Checkpoint:
        """Make a checkpoint of a written file; return it. Raises as `Destination.publish`."""
        self.destination.publish(manifest)
        return self.note_saved(manifest)

    def next_place(self, facts: SaveFacts, present: Sequence[Checkpoint]) -> SavePosition:
        """Return the position of the next save; `present` lists the directory."""
        sequence = next_sequence(
            present,
            trust=self.store.trust,
            saved=self._last_saved,
            resumed_from=self.resumed_from,
        )
        attempt = facts.attempt
        if attempt is None:
            history = [c for c in present if c.series == self.series]
            attempt = next_attempt(history, facts.step, trust=self.store.trust)
        own = [c for c in (self.resumed_from, self._last_saved) if c is not None]
        if not (own or self.parent_run_ids or self.starts_anew):
            self._warn_if_not_resumed(facts.step, present)
        return SavePosition(sequence, attempt, link_to_newest([*present, *own], self.series))

    def _warn_if_not_resumed(self, step: int, present: Sequence[Checkpoint]) -> None:
        """Warn before the first save of a run that begins below what another run has reached."""
        found = [c for c in present if c.series == self.series]
        meant = meant_line(lines_of(found))
        reached = None if meant is None else meant.newest
        if reached is None or reached.step < step or self.run_id in {c.run_id for c in found}:
            return
        _LOG.warning(
            "%s: this run was not resumed, and its first save is of step %d, but %s has reached step %d (%s). The "
            "checkpoints of both stay: each run is counted by itself, and latest and resume() mean step %d. To continue "
            "it, %s",
            self.listing.directory,
            step,
            meant,
            reached.step,
            reached.name,
            reached.step,
            self.ways_out,
        )

    def draft(
        self,
        name: str,
        options: SaveOptions,
        facts: SaveFacts,
        *,
        place: SavePosition,
        retention: RetentionPolicy | None,
    ) -> Manifest:
        """Return the manifest of a file before its write; `place` is from `next_place`.

        It records `retention`, so that `ckptmgr prune` applies the policy of the run.
        """
        keep = text_of(retention)
        return Manifest(
            file=draft_entry(name, options),
            series=self.series,
            run_id=self.run_id,
            parent_run_ids=self.parent_run_ids,
            starts_anew=self.starts_anew,
            step=facts.step,
            attempt=place.attempt,
            sequence=place.sequence,
            saved_at=datetime.fromtimestamp(self.clock() if facts.at is None else facts.at, UTC),
            epoch=facts.epoch,
            why=facts.why,
            metrics=dict(facts.metrics or {}),
            keep=keep,
            keep_at=None if keep is None else self.destination.keep_at(),
            stats={},
            previous=place.previous,
        )

    def note_saved(self, manifest: Manifest) -> Checkpoint:
        """Record the last durable save, which retention keeps; warn where it is the first not finite."""
        before, saved = self._last_saved, manifest.to_checkpoint(self.listing.directory)
        self._last_saved = saved
        if self.is_first and saved.health and not (before and before.health):
            _LOG.warning("%s is %s: NaN or infinite elements were saved", saved.path, saved.health)
        return saved

    def own_history(self) -> list[Checkpoint]:
        """Return the checkpoints of this run and of the runs that it continues, as one series."""
        return self._own(self.listing.scan())

    def _own(self, present: Sequence[Checkpoint]) -> list[Checkpoint]:
        lineage = self.own_runs
        own = [
            c if c.series == self.series else replace(c, series=self.series)
            for c in present
            if c.run_id in lineage
        ]
        return [self._known(c) for c in own] if self._damaged else own

    def _known(self, listed: Checkpoint) -> Checkpoint:
        """Return a listed checkpoint with its known damage: a listing checks only names and sizes."""
        problem = self._damaged.get((listed.path, listed.id))
        return listed if problem is None else replace(listed, state=State.CORRUPT, problem=problem)

    def planned(self, policy: RetentionPolicy) -> Plan:
        """Return the plan of a retention policy for the checkpoints of this run.

        Raises:
            UnsafePrune: The policy is refused.
        """
        own = self._own(self.listing.scan())
        applied, _ = without_unranked(own, policy)
        return plan(own, applied, self._utc_now(), protected=self._protected())

    def _decided(self, policy: RetentionPolicy) -> Retained:
        """Return the checkpoints that a policy drops now."""
        present = self.listing.scan()
        lineage = self.own_runs
        own = [one for one in present if one.run_id in lineage]
        own = [self._known(one) for one in own] if self._damaged else own
        applied, changed = without_unranked(own, policy)
        going, good = dropped(own, applied, self._utc_now(), protected=self._protected())
        if changed is not None and going and not self._has_said_unranked:
            self._has_said_unranked = True
            _LOG.warning("retention: %s", changed)
        # This one alone: looking at each of many would take longer than the save.
        needed = [] if good is None else [good]
        return Retained(going, len(own) - len(going), needed, present)

    def _utc_now(self) -> datetime:
        return datetime.fromtimestamp(self.clock(), UTC)

    def _protected(self) -> dict[Path, str]:
        protected = dict(self._held_back)
        if self.resumed_from is not None:
            protected[self.resumed_from.path] = "resumed from"
        if self._last_saved is not None:
            protected[self._last_saved.path] = "saved last"
        return protected

    def check_can_change(self) -> None:
        """Raise UnsupportedCheckpoint where no manifest can be changed after its save."""
        self.destination.check_can_change()

    def note_metrics(self, checkpoint: Checkpoint, metrics: Mapping[str, float]) -> None:
        """Add metrics to a committed checkpoint, on rank 0; log a failure."""
        if not self.is_first:
            return

        def change(manifest: Manifest) -> Manifest:
            return replace(manifest, metrics={**manifest.metrics, **metrics})

        try:
            self.open()
            with self.changing, self.store.lease(checkpoint.name):
                self.store.change_manifest(checkpoint, change)
        except (CkptmgrError, OSError) as error:
            _LOG.warning("the metrics %s are not noted: %s", dict(metrics), error)

    def retain(self, policy: RetentionPolicy) -> Retained | None:
        """Apply a retention policy to the checkpoints of this run, only after a durable save.

        Returns None if the policy was refused or the directory cannot be listed, and in a process
        that removes nothing. A failure is logged and not raised, because the save succeeded.
        """
        if not self.is_first:
            return None
        decided = self._retain(policy)
        self.destination.retained()
        try:
            for sentence in self.commit.collect():
                _LOG.warning("%s: %s", self.store.directory, sentence)
        except OSError as error:
            _LOG.warning("retention: %s", error)
        return decided

    def _retain(self, policy: RetentionPolicy) -> Retained | None:
        started = time.perf_counter()
        if self.rival is not None:
            return None
        try:
            with defer_signals(), self.changing:
                decided = self._decided(policy)
                failures = self._drop(
                    decided.dropped, needed=decided.needed, present=decided.present
                )
        except (UnsafePrune, OSError) as error:
            _LOG.warning("retention: %s", error)
            self._observers.emit("prune", error, path=self.listing.directory, series=self.series)
            return None
        for failure in failures:
            _LOG.warning("retention: %s", failure)
        if decided.dropped:
            self._tell_pruned(decided, failures, seconds=time.perf_counter() - started)
        return decided

    def make_room(self, policy: RetentionPolicy, full: StoreFull) -> bool:
        """Remove checkpoints that a policy drops without the save that the disk has no room for, oldest first.

        No more than that save needs goes, and nothing into the trash. The newest checkpoint stays,
        as do those that `plan` keeps under every policy. Returns whether anything went.
        """
        if self.listing is not self.store:  # the disk is not that of the checkpoints
            return False
        started = time.perf_counter()
        try:
            with defer_signals(), self.changing:
                decided = self._decided(policy)
                needed = decided.needed
                enough = full.missing_bytes or (needed[0].size_bytes if needed else 0)
                going = _oldest(decided.dropped, enough)
                if sum(one.size_bytes for one in going) < full.missing_bytes:
                    return False  # it would not fit all the same
                failures = self._drop(going, needed=needed, present=None)
                left = {one.path for one in self.listing.scan()} if going else ()
                gone = [one for one in going if one.path not in left]
        except (UnsafePrune, OSError) as error:
            _LOG.warning("retention: %s", error)
            return False
        for failure in failures:
            _LOG.warning("retention: %s", failure)
        if gone:
            names = ", ".join(one.name for one in gone)
            reason = f"{self.store.directory}: {full.message}"
            _LOG.warning("%s; to make room, removed what %s drops: %s", reason, policy, names)
            kept = decided.kept + len(decided.dropped) - len(gone)
            removed = decided._replace(dropped=gone, kept=kept)
            self._tell_pruned(removed, failures, seconds=time.perf_counter() - started)
        return bool(gone)

    def make_room_for_next(self, policy: RetentionPolicy | None) -> None:
        """Make room for a checkpoint of many ranks, as large as the last one: see `make_room`."""
        last = self._last_saved or self.resumed_from
        if policy is None or last is None:
            return
        try:
            self.store.publisher.check_space(last.size_bytes)
        except StoreFull as full:
            self.make_room(policy, full)

    def drop_replaced(self, newest: Checkpoint, *, has_restarts: bool = False) -> None:
        """Remove the emergency saves that a durable newer one replaces; log a failed removal.

        `has_restarts` as for `replaced_emergencies`.
        """
        try:
            with defer_signals(), self.changing:
                present = self.listing.scan()
                replaced = replaced_emergencies(
                    newest, present, self.own_runs, has_restarts=has_restarts
                )
                protected = self._protected().keys() - {newest.path}
                replaceable = [one for one in replaced if one.path not in protected]
                needed = [one for one in present if one.path == newest.path]
                failures = self._drop(replaceable if needed else [], needed=needed, present=present)
        except OSError as error:
            failures = [error]
        for failure in failures:
            _LOG.warning("replaced emergency saves: %s", failure)

    def _tell_pruned(
        self, decided: Retained, failures: Sequence[Exception], *, seconds: float
    ) -> None:
        self._observers.emit(
            "prune",
            failures[0] if failures else None,
            path=self.listing.directory,
            series=self.series,
            seconds=seconds,
            figures={
                "kept": decided.kept,
                "dropped": len(decided.dropped),
                "freed_bytes": sum(one.size_bytes for one in decided.dropped),
            },
            notes=tuple(f"dropped {checkpoint.name}" for checkpoint in decided.dropped),
        )

    def _drop(
        self,
        going: Sequence[Checkpoint],
        *,
        needed: Sequence[Checkpoint],
        present: Sequence[Checkpoint] | None,
    ) -> Sequence[Exception]:
        """Remove checkpoints because of the `needed` ones that stay; return what failed.

        `present` are all that were listed after a durable save; None where there was none.
        """
        return drop(self.listing, going, needed=needed, present=present, held=(self.series,))


def _oldest(newest_first: Sequence[Checkpoint], size_bytes: int) -> list[Checkpoint]:
    """Return the oldest checkpoints that take a number of bytes together; all if they take less."""
    chosen: list[Checkpoint] = []
    for one in reversed(newest_first):
        chosen.append(one)
        size_bytes -= one.size_bytes
        if size_bytes <= 0:
            break
    return chosen
