# SPDX-License-Identifier: Apache-2.0
"""Writing of one series by many ranks: lease, numbering and retention on rank 0, saves on all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from ckptmgr.core.errors import SaveFailed, StoreFull, StoreLocked
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import is_of_prefix
from ckptmgr.core.shard_names import SET_FORMAT
from ckptmgr.files.save.job import SaveJob, SaveOptions, SaveOrder
from ckptmgr.formats.strict_json import Json
from ckptmgr.formats.tensor import Item
from ckptmgr.parallel.agreement import all_prepared, first_that_all_load, steps_of_all
from ckptmgr.parallel.coordinator import Coordinator, RanksMissing
from ckptmgr.parallel.dedup import Sharing
from ckptmgr.parallel.errors import not_begun
from ckptmgr.parallel.proposal import SaveProposal, chosen_series
from ckptmgr.parallel.rounds import Barriers, CollectiveRounds
from ckptmgr.parallel.team import DEFAULT_TIMEOUT_S
from ckptmgr.parallel.two_phase_commit import Deadline, TwoPhaseSave
from ckptmgr.series.candidates import Candidates, Skipped
from ckptmgr.series.commit import BegunSave, OfWriter
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.shards import RankFiles

_LOG = logging.getLogger(__name__)
_Loaded = TypeVar("_Loaded")


def together(
    coordinator: Coordinator,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    sharing: Sharing | None = None,
) -> Callable[[SeriesWriter], Together]:
    """Return what makes the commit strategy of many ranks; see `Together`."""
    return partial(Together, coordinator=coordinator, timeout_s=timeout_s, sharing=sharing)


class BegunTogether(BegunSave):
    """The part of one rank in a save that all ranks have begun."""

    def __init__(
        self, writer: SeriesWriter, job: SaveJob, order: SaveOrder, save: TwoPhaseSave
    ) -> None:
        super().__init__(writer, job, order)
        self._save = save

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Vote for the save; return the checkpoint once rank 0 has committed it."""
        return super().commit(self._save.commit(manifest, mode=self.order.options.file_mode))

    def make_room(self, error: StoreFull) -> bool:
        """Make none: rank 0 has done so before the save began."""
        return False

    def abandon(self, error: Exception) -> None:
        """Vote against the save. See `TwoPhaseSave.abandon`."""
        self._save.abandon(error)


class Together(OfWriter):
    """The part of one rank in what all ranks do together; see `series.commit.Commit`.

    `timeout_s` limits the wait for the other ranks, and the save from then on; the `run_id` of rank
    0 counts; without `sharing` each rank writes all that it holds.
    """

    def __init__(
        self,
        writer: SeriesWriter,
        *,
        coordinator: Coordinator,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        sharing: Sharing | None = None,
    ) -> None:
        super().__init__(writer)
        self._files = RankFiles(writer.store)
        self._sharing = sharing
        self.coordinator = coordinator
        self.timeout_s = timeout_s
        self._barriers = Barriers(
            coordinator, writer.series, timeout_s=timeout_s, monotonic=writer.monotonic
        )
        self._prefix: str | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which holds the lease, commits and removes."""
        return self.coordinator.rank == 0

    def recover(self) -> list[str]:
        """Remove the leftovers of dead writers, and files that earlier runs never committed."""
        return self._files.recover(self._writer.series) + self._collect_earlier()

    def take_series(self, choose: Callable[[], str]) -> str:
        """Return the series that `choose` returns on rank 0; before, all have the same one.

        Raises:
            RanksOutOfStep: They have different ones.
            RankFailed: `choose` failed on rank 0.
            RanksMissing: Some ranks did not come in time.
        """

        def chosen() -> Json:
            return [self._writer.series, choose() if self.is_first else None]

        rounds = self._barriers.begin_first(what="no series was chosen")
        answers = rounds.together("choose", chosen, stop=self._barriers.stop())
        self._prefix = self._writer.series
        return chosen_series(answers)

    def prepare(self) -> None:
        """Do nothing: `open` is part of the first round, so that a failure reaches all ranks."""

    def held_by_all(self, target: int, steps: Sequence[int]) -> list[int]:
        """Return the steps until `target` that all ranks have in memory.

        Raises:
            RanksOutOfStep: Another rank goes back to another step.
            RanksMissing: Some ranks did not come in time.
        """
        own: Json = [target, *(step for step in steps if step <= target)]
        rounds = self._barriers.begin("rollback", what="not gone back")
        answers = rounds.together("steps", lambda: own, stop=self._barriers.stop())
        return steps_of_all(answers)

    def first_that_loads(
        self, candidates: Candidates[_Loaded]
    ) -> tuple[Checkpoint | None, _Loaded | None, list[Skipped]]:
        """Return the checkpoint from which all ranks resume; see `first_that_all_load`."""
        return first_that_all_load(
            self._barriers.begin("resume", what="not resumed"),
            self.coordinator,
            candidates,
            self._writer.store.fs,
            prepare=self._writer.open,
            stop=self._barriers.stop,
        )

    def all_prepared(self, *, is_changing: bool = False) -> AbstractContextManager[None]:
        """Leave the `with` block once every rank has run its own; see `agreement.all_prepared`."""
        rounds = self._barriers.begin("restore", what="not restored")
        return all_prepared(rounds, stop=self._barriers.stop(), is_changing=is_changing)

    def begin(self, job: SaveJob) -> BegunTogether:
        """Begin a save with all ranks: take the name and place of rank 0, and divide the items.

        A job with an error takes part as well: then the save fails on all ranks.

        Raises:
            RankFailed: A rank could not do its part; names it and its error. There is no such
                checkpoint.
            SaveFailed: Ranks did not come in time; names them. The storage holds no commit.
        """
        step, options = job.facts.step, job.options or self._writer.options
        rounds = self._barriers.begin(f"save {step}", what=f"step {step} was not saved")

        def proposed() -> Json:
            if job.error is not None:
                raise job.error
            return self._proposed(job, options) if self.is_first else None

        proposal = self._begin(rounds, proposed, step=step)
        deadline = Deadline.after(self._writer.monotonic(), self.timeout_s)
        rounds = rounds.of_attempt(proposal.attempt_id)
        items, metadata = self._divided(rounds, job.items, job.metadata, stop=deadline.end)
        save = TwoPhaseSave(
            self._writer.store,
            self.coordinator,
            rounds,
            proposal,
            deadline=deadline,
            monotonic=self._writer.monotonic,
        )
        name, facts = save.file_name, proposal.applied_to(job.facts)
        order = SaveOrder(
            name=name,
            items=items,
            options=options,
            series=self._writer.series,
            draft=self._writer.draft(
                name, options, facts, place=proposal.place, retention=job.retention
            ),
            metadata=metadata,
            is_rank_file=True,
        )
        return BegunTogether(self._writer, job, order, save)

    def _proposed(self, job: SaveJob, options: SaveOptions) -> Json:
        writer = self._writer
        writer.open()  # before a name is chosen, which another process could take
        writer.make_room_for_next(job.retention)
        facts, present = job.facts, writer.store.scan()
        name, attempt = job.naming.free_name(facts.step, present, format=SET_FORMAT)
        place = writer.next_place(replace(facts, attempt=attempt), present)
        now = writer.clock()
        return SaveProposal.for_save(
            name,
            place,
            format=options.extension,
            run_id=writer.run_id,
            at=now if facts.at is None else facts.at,
            now=now,
            timeout_s=self.timeout_s,
        ).to_json()

    def _divided(
        self,
        rounds: CollectiveRounds,
        items: Sequence[Item],
        metadata: Mapping[str, str] | None,
        *,
        stop: float,
    ) -> tuple[Sequence[Item], Mapping[str, str] | None]:
        """Return the items that this rank writes, and their metadata."""
        if self._sharing is None:
            return items, metadata
        try:
            return self._sharing.divided(rounds, self.coordinator, items, metadata or {}, stop=stop)
        except RanksMissing as missing:
            raise self._not_begun(missing) from missing

    def _not_begun(self, missing: RanksMissing) -> SaveFailed:
        return SaveFailed(missing.message, path=self._writer.store.directory, hint=missing.hint)

    def _begin(
        self, rounds: CollectiveRounds, proposed: Callable[[], Json], *, step: int
    ) -> SaveProposal:
        """Wait until all ranks are here, and return the proposal of rank 0."""
        try:
            answers = rounds.together("begin", proposed, stop=self._barriers.stop())
        except RanksMissing as missing:
            elsewhere = self._barriers.give_up(step)
            raise not_begun(
                missing, step, elsewhere, path=self._writer.store.directory
            ) from missing
        begun = SaveProposal.from_json(answers[0])
        self._writer.run_id = begun.run_id
        return begun

    def collect(self) -> list[str]:
        """Remove files that were never committed, of this run and of earlier ones of the prefix."""
        return self._files.collect(self._writer.series) + self._collect_earlier()

    def _collect_earlier(self) -> list[str]:
        """Remove files that earlier, dead runs of the prefix never committed."""
        if self._prefix is None:
            return []
        sentences: list[str] = []
        for series in self._files.garbage():
            if series == self._writer.series or not is_of_prefix(series, self._prefix):
                continue
            try:
                with suppress(StoreLocked), self._writer.store.lease(series):
                    sentences += self._files.collect(series)
            except OSError as error:  # such as a run of another user, whose lease we cannot have
                sentences.append(f"could not clean up after {series}: {error}")
        return sentences
