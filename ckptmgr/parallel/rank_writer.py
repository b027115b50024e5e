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
from ckptmgr.files.save.saver import Publish, Refusal, SaveOptions, SaveOrder, save_items
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
from ckptmgr.series.writer import FreeName, SaveFacts, SeriesWriter
from ckptmgr.store.manifest.codec import FileEntry, Manifest

_LOG = logging.getLogger(__name__)
_Loaded = TypeVar("_Loaded")
DEFAULT_TIMEOUT_S = 600.0


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

    def save(
        self,
        name: str,
        items: Sequence[Item],
        facts: SaveFacts,
        *,
        metadata: Mapping[str, str] | None = None,
        options: SaveOptions | None = None,
        publish: Publish = save_items,
    ) -> Checkpoint:
        """Save with all ranks; return the checkpoint once it is durable.

        Args:
            name: Of the checkpoint, ending in `.shards`; that of rank 0 counts.
            items: What this rank saves.
            facts: About the save; those of rank 0 count.
            metadata: Strings kept in the file of this rank.
            options: How files are written.
            publish: Writes the file.

        Raises:
            RankFailed: A rank could not do its part; names it and its error. There is no such checkpoint.
            SaveFailed: Ranks did not come in time; names them. The storage, asked last, holds no commit.
        """
        return self._save_together(
            lambda _: (name, facts.attempt),
            items,
            facts,
            metadata=metadata,
            options=options or self.options,
            publish=publish,
        )

    def save_next(
        self,
        free_name: FreeName,
        items: Sequence[Item],
        facts: SaveFacts,
        *,
        metadata: Mapping[str, str] | None = None,
        publish: Publish = save_items,
    ) -> Checkpoint:
        """Save with all ranks under the name that rank 0 finds; see `save`."""
        return self._save_together(
            lambda present: free_name(SET_FORMAT, present),
            items,
            facts,
            metadata=metadata,
            options=self.options,
            publish=publish,
        )

    def _save_together(
        self,
        choose: Callable[[Sequence[Checkpoint]], tuple[str, int | None]],
        items: Sequence[Item],
        facts: SaveFacts,
        *,
        metadata: Mapping[str, str] | None,
        options: SaveOptions,
        publish: Publish,
    ) -> Checkpoint:
        step = facts.step
        rounds = self._meetings.begin(f"save {step}", what=f"step {step} was not saved")

        def offered() -> Json:
            if isinstance(publish, Refusal):
                raise publish.error
            return self._offered(choose, facts, options) if self.is_first else None

        offer = self._begin(rounds, offered, step=step)
        facts = offer.applied_to(facts)
        deadline = Deadline.after(self._monotonic(), self.timeout_s)
        rounds = rounds.of_attempt(offer.attempt_id)
        items, metadata = self._divided(rounds, items, metadata, stop=deadline.end)

        def describe(entry: FileEntry, stats: Mapping[str, float]) -> Manifest:
            return self.describe(entry, stats, facts, place=offer.place)

        def write(file_name: str) -> Manifest:
            order = SaveOrder(
                name=file_name,
                items=items,
                options=options,
                series=self.series,
                describe=describe,
                metadata=metadata,
            )
            return publish(self.store, order)

        save = TwoPhaseSave(
            self._shards,
            self.coordinator,
            rounds,
            offer,
            deadline=deadline,
            monotonic=self._monotonic,
        )
        return self.note_saved(save.run(write, mode=options.file_mode))

    def _offered(
        self,
        choose: Callable[[Sequence[Checkpoint]], tuple[str, int | None]],
        facts: SaveFacts,
        options: SaveOptions,
    ) -> Json:
        self.open()  # before a name is chosen, which another process could take
        present = self.store.scan()
        name, attempt = choose(present)
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
