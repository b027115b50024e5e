# SPDX-License-Identifier: Apache-2.0
"""The ranks go on from the same checkpoint, whatever one of them cannot read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptmgr import (
    Checkpoint,
    ChecksumMismatch,
    KeyProblem,
    RanksMissing,
    RanksOutOfStep,
    ResumeFailed,
    UnsupportedCheckpoint,
)
from ckptmgr.files.load.open import open_listed
from ckptmgr.parallel.agreement import all_prepared, first_that_all_load
from ckptmgr.parallel.rounds import CollectiveRounds
from ckptmgr.series.candidates import newest_first
from tests.faults.training import RUNS
from tests.parallel.ranks import TIMEOUT_S, WORLD, Job, Meeting, Outcome, Seat, run_ranks
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.damage import flip_bit
from tests.support.given_candidates import GivenCandidates

Load = Callable[[int, Checkpoint], str]


def job_with(*steps: int) -> Job:
    job = Job(ModelDisk())
    for step in steps:
        for outcome in job.save_all(step):
            outcome.must()
    return job


def agreed(
    job: Job, load: Load, *, prepare: Callable[[], object] = list
) -> list[Outcome[tuple[str | None, str | None, list[str]]]]:
    """Let all ranks agree; return name, loaded state, and why others were skipped."""
    meeting = Meeting()

    def agree(rank: int) -> tuple[str | None, str | None, list[str]]:
        seat = Seat(meeting, rank)
        checkpoint, loaded, skipped = first_that_all_load(
            CollectiveRounds(seat, "resume", what="not resumed", monotonic=job.clock),
            seat,
            GivenCandidates(
                lambda: newest_first(job.store().scan()), lambda found: load(rank, found)
            ),
            job.disk,
            prepare=prepare,
            stop=lambda: job.clock() + TIMEOUT_S,
        )
        reasons = [one.reason for one in skipped]
        return (None if checkpoint is None else checkpoint.name), loaded, reasons

    return run_ranks(meeting, agree)


def read(job: Job, *, world: int = WORLD) -> Load:
    def load(rank: int, checkpoint: Checkpoint) -> str:
        options = api.reading(rank=rank, world=world)
        with open_listed(job.store(), checkpoint, options=options) as (opened, manifest):
            buffer = bytearray(opened.source.size)
            opened.source.read_into(0, memoryview(buffer))
            assert manifest is not None
            return manifest.name

    return load


def test_all_ranks_load_their_part_of_the_newest() -> None:
    job = job_with(1, 2)
    for rank, outcome in enumerate(agreed(job, read(job))):
        name, loaded, reasons = outcome.must()
        assert (name, reasons) == ("net-2.shards", [])
        assert loaded is not None
        assert loaded.startswith(f"net-2.{rank}-of-3.")


def test_damage_that_one_rank_finds_makes_all_take_the_one_before() -> None:
    job = job_with(1, 2)
    newest = max(job.store().scan(), key=lambda c: c.step)
    flip_bit(job.disk, newest.shards[1])
    for outcome in agreed(job, read(job)):
        name, _, reasons = outcome.must()
        assert name == "net-1.shards"
        assert len(reasons) == 1
        assert reasons[0].startswith("rank 1: ChecksumMismatch")


def test_nothing_to_load_is_an_answer() -> None:
    assert [o.must() for o in agreed(Job(ModelDisk()), read(job_with()))] == [(None, None, [])] * 3


def test_only_damaged_checkpoints_are_an_answer_too() -> None:
    def load(rank: int, checkpoint: Checkpoint) -> str:
        raise ChecksumMismatch("damaged")

    for outcome in agreed(job_with(1), load):
        assert outcome.must()[0] is None


def test_rank_that_sees_another_disk_is_an_error_on_all_and_no_fresh_start() -> None:
    job, meeting = job_with(1), Meeting()

    def agree(rank: int) -> object:
        seat = Seat(meeting, rank)

        def seen() -> list[Checkpoint]:
            return newest_first(job.store().scan()) if rank != 1 else []

        return first_that_all_load(
            CollectiveRounds(seat, "resume", what="not resumed", monotonic=job.clock),
            seat,
            GivenCandidates(seen, lambda found: found.name),
            job.disk,
            prepare=list,
            stop=lambda: job.clock() + TIMEOUT_S,
        )

    for outcome in run_ranks(meeting, agree):
        assert isinstance(outcome.raised, ResumeFailed)
        assert "rank 1: CheckpointNotFound: net-1.shards, which rank 0 sees" in str(outcome.raised)


def test_key_that_fails_on_one_rank_is_an_error_on_all() -> None:
    def load(rank: int, checkpoint: Checkpoint) -> str:
        if rank == 2:
            raise KeyProblem("wrong key")
        return "loaded"

    for outcome in agreed(job_with(1), load):
        assert isinstance(outcome.raised, ResumeFailed)
        assert "rank 2: KeyProblem: wrong key" in str(outcome.raised)


def test_mistake_in_the_program_of_one_rank_is_an_error_on_all() -> None:
    def load(rank: int, checkpoint: Checkpoint) -> str:
        if rank == 1:
            raise ZeroDivisionError
        return "loaded"

    for outcome in agreed(job_with(1, 2), load):
        assert isinstance(outcome.raised, ResumeFailed)
        assert "rank 1: ZeroDivisionError" in str(outcome.raised)


def test_ranks_look_once_rank_0_is_prepared() -> None:
    job = job_with(1, 2)
    newest = max(job.store().scan(), key=lambda c: c.step)

    def prepare() -> None:
        job.disk.unlink(RUNS / api.manifest_name(newest.name))

    for outcome in agreed(job, read(job), prepare=prepare):
        name, _, reasons = outcome.must()
        assert (name, reasons) == ("net-1.shards", [])


def test_lease_that_rank_0_does_not_get_is_an_error_on_all() -> None:
    def prepare() -> None:
        raise KeyProblem("no")

    for outcome in agreed(job_with(1), lambda rank, _: "x", prepare=prepare):
        assert isinstance(outcome.raised, ResumeFailed)


def test_newest_that_only_rank_0_sees_is_an_error_on_all_and_no_way_back() -> None:
    job, others = job_with(1, 2), job_with(1)
    meeting = Meeting()

    def agree(rank: int) -> str | None:
        seat = Seat(meeting, rank)
        checkpoint, _, _ = first_that_all_load(
            CollectiveRounds(seat, "resume", what="not resumed", monotonic=job.clock),
            seat,
            GivenCandidates(
                lambda: newest_first((job if rank == 0 else others).store().scan()),
                lambda found: found.name,
            ),
            job.disk,
            prepare=list,
            stop=lambda: job.clock() + TIMEOUT_S,
        )
        return None if checkpoint is None else checkpoint.name

    for outcome in run_ranks(meeting, agree):
        assert isinstance(outcome.raised, ResumeFailed)
        assert "net-2.shards, which rank 0 sees, is not in the directory" in str(outcome.raised)


def test_rank_0_of_another_version_is_an_error() -> None:
    class Odd(CollectiveRounds):
        def compared(self, *_: object, **__: object) -> list[object]:  # type: ignore[override]
            return ["net-1"]

    seat = Seat(Meeting(1), 0)
    with pytest.raises(RanksOutOfStep, match="names no checkpoints"):
        first_that_all_load(
            Odd(seat, "resume", what=""),
            seat,
            GivenCandidates(list, str),
            ModelDisk(),
            prepare=list,
            stop=lambda: 0.0,
        )


@pytest.mark.parametrize("options", [api.reading(), api.reading(rank=0, world=2)])
def test_other_ranks_than_have_saved_are_refused(options: api.ReadOptions) -> None:
    store = job_with(1).store()
    (checkpoint,) = store.scan()
    with (
        pytest.raises(UnsupportedCheckpoint, match="was saved by 3 ranks"),
        open_listed(store, checkpoint, options=options),
    ):
        pass


def test_verify_checks_the_files_of_all_ranks() -> None:
    job = job_with(1)
    store = job.store()
    (checkpoint,) = store.scan()
    whole = api.verify(store, checkpoint)
    assert whole.status is api.Status.OK
    assert "digests" in whole.checked
    flip_bit(job.disk, checkpoint.shards[2])
    damaged = api.verify(store, checkpoint)
    assert damaged.status is api.Status.DAMAGED


def test_rank_that_fails_while_another_is_missing_raises_its_own_error() -> None:
    meeting = Meeting()

    def agree(rank: int) -> int:
        if rank == 2:
            return rank

        rounds = CollectiveRounds(Seat(meeting, rank), "resume", what="not resumed")
        with all_prepared(rounds, stop=0.0):
            if rank == 0:
                raise ZeroDivisionError
        return rank

    failed, waiting = (outcome.raised for outcome in run_ranks(meeting, agree)[:2])
    assert isinstance(failed, ZeroDivisionError)
    assert isinstance(failed.__cause__, RanksMissing)
    assert isinstance(waiting, RanksMissing)
