# SPDX-License-Identifier: Apache-2.0
"""One run of many ranks writing one series: the lease, the numbering and the retention are on rank 0, the saves on all."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ckptmgr.core.errors import SaveFailed, StoreLocked
from ckptmgr.core.model import Checkpoint, Plan
from ckptmgr.core.names import is_of_prefix
from ckptmgr.core.shard_names import SET_FORMAT, new_attempt_id, set_stem
from ckptmgr.files.save.job import SaveJob, SaveOptions, SaveOrder
from ckptmgr.formats.tensor import Item
from ckptmgr.observe.observers import REGISTERED, Observers
from ckptmgr.parallel.agreement import all_prepared, first_that_all_load, steps_of_all
from ckptmgr.parallel.coordinator import Coordinator, Json, RanksMissing
from ckptmgr.parallel.dedup import Sharing
from ckptmgr.parallel.errors import not_begun
from ckptmgr.parallel.offer import Offer, chosen_series
from ckptmgr.parallel.rounds import Meetings, Rounds
from ckptmgr.parallel.shard_store import ShardStore
from ckptmgr.parallel.two_phase_commit import Deadline, TwoPhaseSave
from ckptmgr.policy.retention import RetentionPolicy
from ckptmgr.series.candidates import Skipped
from ckptmgr.series.writer import BegunSave, SeriesWriter
from ckptmgr.store.manifest.codec import Manifest

_LOG = logging.getLogger(__name__)
_Loaded = TypeVar("_Loaded")
DEFAULT_TIMEOUT_S = 600.0


class BegunTogether(BegunSave):
    """The part of one rank in a save that all ranks have begun."""

    def __init__(
        self, writer: SeriesWriter, job: SaveJob, order: SaveOrder, save: TwoPhaseSave
    ) -> None:
        super().__init__(writer, job, order)
        self._save = save

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Vote for the save; return the checkpoint once rank 0 has committed it. See `TwoPhaseSave.commit`."""
        whole = self._save.commit(manifest, mode=self.order.options.file_mode)
        return super().commit(whole)

    def abandon(self, error: Exception) -> None:
        """Vote against the save. See `TwoPhaseSave.abandon`."""
        self._save.abandon(error)


class RankWriter(SeriesWriter):
    """The part of one rank in writing a series. All ranks make the same calls in the same order.

    Args:
        store: The directory, which all ranks see.
        series: Name of the series.
        coordinator: The ranks.
        options: How files are written.
        clock: Seconds since 1970; stamps the checkpoints.
        timeout_s: How long the ranks wait for each other to come to a save, and how long it may take from then on.
        run_id: Identifies the run; that of rank 0 counts.
        observers: Hear of removed checkpoints and of leases that were taken over.
        sharing: How the ranks share the writing of what they have alike; None when each writes all that it has.
        monotonic: Seconds that never go back.
    """

    def __init__(
        self,
        store: ShardStore,
        series: str,
        *,
        coordinator: Coordinator,
        options: SaveOptions,
        clock: Callable[[], float],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        run_id: str | None = None,
        observers: Observers = REGISTERED,
        sharing: Sharing | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            store,
            series,
            options=options,
            clock=clock,
            run_id=run_id,
            observers=observers,
            monotonic=monotonic,
        )
        self._shards = store
        self._sharing = sharing
        self.coordinator = coordinator
        self.timeout_s = timeout_s
        self._now = clock
        self._meetings = Meetings(coordinator, series, timeout_s=timeout_s, monotonic=monotonic)
        self._prefix: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which commits and removes."""
        return self.coordinator.rank == 0

    def open(self) -> None:
        """Take the lease and clean up after dead writers, on rank 0; the others do nothing.

        Raises:
            StoreLocked: Another run writes this series.
        """
        if self.is_first:
            super().open()

    def clean_up(self) -> list[str]:
        """Remove what dead writers left; see `SeriesWriter.clean_up`."""
        return super().clean_up() + self._collect_earlier()

    def take_series(self, choose: Callable[[], str]) -> None:
        """Write the series that `choose` finds on rank 0; the same on all ranks, which have the same one so far.

        Raises:
            RanksOutOfStep: They have not.
            RankFailed: Rank 0 could not find one.
            RanksMissing: Some ranks did not come in time.
        """

        def chosen() -> Json:
            return [self.series, choose() if self.is_first else None]

        rounds = self._meetings.begin_first(what="no series was chosen")
        answers = rounds.together("choose", chosen, stop=self._meetings.stop())
        found = chosen_series(answers)
        self._prefix, self.series = self.series, found

    def prepare(self) -> None:
        """Do nothing yet: what rank 0 finds must reach all ranks, so it is done in the first round."""

    def held_by_all(self, target: int, steps: Sequence[int]) -> list[int]:
        """Return the steps until `target` that all ranks have in memory; see `SeriesWriter.held_by_all`.

        Raises:
            RanksOutOfStep: Another rank goes back to another step.
            RanksMissing: Some ranks did not come in time.
        """
        own: Json = [target, *super().held_by_all(target, steps)]
        rounds = self._meetings.begin("rollback", what="not gone back")
        answers = rounds.together("steps", lambda: own, stop=self._meetings.stop())
        return steps_of_all(answers)

    def first_that_loads(
        self, scan: Callable[[], Sequence[Checkpoint]], load: Callable[[Checkpoint], _Loaded]
    ) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
        """Return the checkpoint that all ranks go on from, the same on all; see `first_that_all_load`."""
        found = first_that_all_load(
            self._meetings.begin("resume", what="not resumed"),
            self.coordinator,
            scan,
            self.patient(load),
            prepare=self.open,
            stop=self._meetings.stop,
            pause=self.store.fs.pause,
        )
        self._note_damaged(found[2])
        return found

    def agreed(self, prepare: Callable[[], _Loaded]) -> _Loaded:
        """Return what is prepared, once every rank has prepared its own; see `all_prepared`."""
        rounds = self._meetings.begin("restore", what="not restored")
        return all_prepared(rounds, prepare, stop=self._meetings.stop())

    def begin(self, job: SaveJob) -> BegunTogether:
        """Meet the other ranks, take the name and the place that rank 0 chooses, and divide the items.

        A job with an error meets the others as well: then the save fails on all ranks.

        Raises:
            RankFailed: A rank could not do its part; names it and its error. There is no such checkpoint.
            SaveFailed: Ranks did not come in time; names them. The storage, asked last, holds no commit.
        """
        step, options = job.facts.step, job.options or self.options
        rounds = self._meetings.begin(f"save {step}", what=f"step {step} was not saved")

        def offered() -> Json:
            if job.error is not None:
                raise job.error
            return self._offered(job, options) if self.is_first else None

        offer = self._begin(rounds, offered, step=step)
        deadline = Deadline.after(self._monotonic(), self.timeout_s)
        rounds = rounds.of_attempt(offer.attempt_id)
        items, metadata = self._divided(rounds, job.items, job.metadata, stop=deadline.end)
        save = TwoPhaseSave(
            self._shards,
            self.coordinator,
            rounds,
            offer,
            deadline=deadline,
            monotonic=self._monotonic,
        )
        name, facts = save.file_name, offer.applied_to(job.facts)
        order = SaveOrder(
            name=name,
            items=items,
            options=options,
            series=self.series,
            draft=self.draft(name, options, facts, place=offer.place),
            metadata=metadata,
            is_rank_file=True,
        )
        return BegunTogether(self, job, order, save)

    def _offered(self, job: SaveJob, options: SaveOptions) -> Json:
        self.open()  # before a name is chosen, which another process could take
        facts, present = job.facts, self.store.scan()
        name, attempt = job.naming.free_name(facts.step, present, format=SET_FORMAT)
        place = self.next_place(replace(facts, attempt=attempt), present)
        return Offer(
            stem=set_stem(name),
            attempt_id=new_attempt_id(self._now() + 2 * self.timeout_s),
            format=options.extension,
            sequence=place.sequence,
            attempt=place.attempt,
            previous=place.previous,
            at=self._now() if facts.at is None else facts.at,
            run_id=self.run_id,
        ).to_json()

    def _divided(
        self,
        rounds: Rounds,
        items: Sequence[Item],
        metadata: Mapping[str, str] | None,
        *,
        stop: float,
    ) -> tuple[Sequence[Item], Mapping[str, str] | None]:
        """Return what this rank writes of what it has."""
        if self._sharing is None:
            return items, metadata
        try:
            return self._sharing.divided(rounds, self.coordinator, items, metadata or {}, stop=stop)
        except RanksMissing as missing:
            raise self._not_begun(missing) from missing

    def _not_begun(self, missing: RanksMissing) -> SaveFailed:
        return SaveFailed(missing.message, path=self.store.directory, hint=missing.hint)

    def _begin(self, rounds: Rounds, offered: Callable[[], Json], *, step: int) -> Offer:
        """Wait until all ranks are here, and return what rank 0 offers."""
        try:
            answers = rounds.together("begin", offered, stop=self._meetings.stop())
        except RanksMissing as missing:
            elsewhere = self._meetings.give_up(step)
            raise not_begun(missing, step, elsewhere, path=self.store.directory) from missing
        begun = Offer.from_json(answers[0])
        self.run_id = begun.run_id
        return begun

    def retain(self, policy: RetentionPolicy) -> Plan | None:
        """Apply a retention policy and remove files that were never committed, on rank 0; see `SeriesWriter.retain`."""
        if not self.is_first:
            return None
        decided = super().retain(policy)
        try:
            for sentence in self._shards.collect(self.series) + self._collect_earlier():
                _LOG.warning("%s: %s", self.store.directory, sentence)
        except OSError as error:
            _LOG.warning("retention: %s", error)
        return decided

    def _collect_earlier(self) -> list[str]:
        """Remove files that earlier runs of the same prefix never committed; a live one removes its own."""
        if self._prefix is None:
            return []
        sentences: list[str] = []
        for series in self._shards.garbage():
            if series == self.series or not is_of_prefix(series, self._prefix):
                continue
            try:
                with suppress(StoreLocked), self.store.lease(series):
                    sentences += self._shards.collect(series)
            except OSError as error:  # such as a run of another user, whose lease we cannot have
                sentences.append(f"could not clean up after {series}: {error}")
        return sentences
