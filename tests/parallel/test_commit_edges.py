# SPDX-License-Identifier: Apache-2.0
"""The corners of a save of many ranks: late and ambiguous messages, and ranks of another version."""

from __future__ import annotations

import errno
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, RankFailed, RanksOutOfStep, SaveFailed
from ckptmgr.formats.strict_json import Json
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.parallel.errors import Failure
from ckptmgr.parallel.proposal import SaveProposal, merged_manifest, vote_of
from ckptmgr.policy.rules import Last, RetentionPolicy
from ckptmgr.store.manifest.codec import entry_to_document
from ckptmgr.store.shards import RankFiles
from tests.faults.training import RUNS
from tests.parallel.ranks import (
    TIMEOUT_S,
    Job,
    Meeting,
    RankDied,
    Seat,
    run_ranks,
    save_step,
)
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import put
from tests.support.shard_sets import CONTENTS, SET, shard, sharded

PROPOSAL = SaveProposal(
    stem="net-1", attempt_id="0" * 16, format="ckpt", sequence=1, attempt=0, at=1.5, run_id="run"
)


def store_with_files(disk: ModelDisk, fs: FailingDisk | None = None) -> api.Place:
    """Return a directory in which all ranks have written their files."""
    disk.make_directory(RUNS, mode=0o700)
    for rank, content in enumerate(CONTENTS):
        put(disk, RUNS / shard(rank), content)
    return api.place(RUNS, clock=lambda: 0.0, fs=fs or disk)


class LosesTheAnswer(FailingDisk):
    """A file server that makes a link, and whose answer is lost.

    Args:
        disk: The disk behind it.
        is_blind: Whether it cannot be asked about names afterwards either.
    """

    def __init__(self, disk: ModelDisk, *, is_blind: bool) -> None:
        super().__init__(disk)
        self._is_blind = is_blind
        self._has_linked = False

    def link(self, source: Path, target: Path) -> None:
        super().link(source, target)
        self._has_linked = True
        raise OSError(errno.EIO, "the answer was lost")

    def status(self, path: Path) -> FileStatus | None:
        if self._is_blind and self._has_linked:
            raise OSError(errno.EIO, "cannot be asked")
        return super().status(path)


def test_link_whose_answer_was_lost_is_a_commit() -> None:
    disk = ModelDisk()
    store = store_with_files(disk, LosesTheAnswer(disk, is_blind=False))
    assert RankFiles(store).commit(sharded()) is None
    assert [c.name for c in store.scan()] == [SET]


def test_link_of_which_nobody_can_tell_may_be_a_commit() -> None:
    disk = ModelDisk()
    store = store_with_files(disk, LosesTheAnswer(disk, is_blind=True))
    assert isinstance(RankFiles(store).commit(sharded()), OSError)


def test_name_taken_after_the_last_look_is_not_replaced() -> None:
    disk = ModelDisk()
    store = store_with_files(disk)
    other = api.encode_manifest(replace(sharded(), run_id="other"))
    put(disk, RUNS / api.manifest_name(SET), other)
    with pytest.raises(SaveFailed, match="another attempt at this checkpoint was committed"):
        RankFiles(store).commit(sharded())
    assert disk.read_bytes(RUNS / api.manifest_name(SET)) == other


class SlowDisk(FailingDisk):
    """A disk on which writing takes as long as a save may."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.disk)
        self._clock = job.clock

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if operation == "reserve":
            self._clock.now += TIMEOUT_S


def test_commit_that_would_come_too_late_is_none() -> None:
    job = Job(ModelDisk())

    def save(rank: int) -> Checkpoint:
        return job.save(rank, 1, SlowDisk(job) if rank == 0 else None)

    for outcome in run_ranks(job.meeting, save):
        assert isinstance(outcome.raised, RankFailed)
        assert "all ranks have voted, but too late" in str(outcome.raised)
    assert job.store().scan() == []


@pytest.mark.parametrize(
    "answer",
    [None, "net", {}, {**asdict(PROPOSAL), "attempt": "0"}, {**asdict(PROPOSAL), "at": None}],
)
def test_offer_of_another_version_is_refused(answer: Json) -> None:
    with pytest.raises(RanksOutOfStep, match="rank 0 runs another version"):
        SaveProposal.from_json(answer)


class DiesAfterItsVote(Seat):
    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        if tag.endswith("/commit") and self.rank == 2:
            self.meeting.gone(self.rank)
            raise RankDied
        return super().all_gather(tag, value, timeout_s=timeout_s)


def test_rank_that_dies_after_its_vote_does_not_undo_the_commit() -> None:
    job = Job(ModelDisk())

    def save(rank: int) -> Checkpoint:
        writer = job.writer(rank, seat=DiesAfterItsVote(job.meeting, rank))
        try:
            return save_step(writer, 1)
        finally:
            writer.close()

    outcomes = run_ranks(job.meeting, save)
    assert [o.must().name for o in outcomes[:2]] == ["net-1.shards"] * 2
    assert [c.name for c in job.store().scan()] == ["net-1.shards"]


@pytest.mark.parametrize("meeting", ["write", "commit"])
@pytest.mark.parametrize("confused", [0, 1])
def test_rank_that_alone_hears_nonsense_leaves_its_file_where_others_may_have_committed_it(
    confused: int, meeting: str
) -> None:
    job = Job(ModelDisk())

    class HearsNonsense(Seat):
        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            answers = super().all_gather(tag, value, timeout_s=timeout_s)
            if tag.endswith(f"/{meeting}") and self.rank == confused:
                raise RanksOutOfStep("nonsense")
            return answers

    def save(rank: int) -> Checkpoint:
        writer = job.writer(rank, seat=HearsNonsense(job.meeting, rank))
        try:
            return save_step(writer, 1)
        finally:
            writer.close()

    outcomes = run_ranks(job.meeting, save)
    for outcome in outcomes:
        assert outcome.raised is None or isinstance(outcome.raised, SaveFailed)
    listed = {checkpoint.name: checkpoint.state for checkpoint in job.store().scan()}
    if (confused, meeting) == (0, "write"):
        assert "net-1.shards" not in listed
    else:
        assert listed == {"net-1.shards": api.State.OK}
    assert outcomes[2].raised is None or "net-1.shards" not in listed


def test_offer_travels() -> None:
    assert SaveProposal.from_json(PROPOSAL.to_json()) == PROPOSAL
    assert PROPOSAL.set_name == SET


@pytest.mark.parametrize("vote", [None, {}, {"file": {}}, {"file": 7}])
def test_vote_of_another_version_names_its_rank(vote: Json) -> None:
    good = vote_of(sharded().of_shard(0))
    with pytest.raises(RanksOutOfStep, match="rank 1 runs another version"):
        merged_manifest(sharded(), [good, vote])


def test_figures_are_those_of_the_slowest_rank() -> None:
    votes: list[Json] = []
    for rank, seconds in enumerate((1.0, 3.0)):
        votes.append(vote_of(replace(sharded().of_shard(rank), stats={"write_s": seconds})))
    assert merged_manifest(sharded(), votes).stats == {"write_s": 3.0}
    unknown: Json = {"file": entry_to_document(sharded().shards[1])}
    assert merged_manifest(sharded(), [votes[0], unknown]).stats == {"write_s": 1.0}


def test_failure_that_makes_no_sense_is_still_told() -> None:
    failure = Failure.from_json(7, rank=3)
    assert str(failure) == "rank 3: Exception: 7"


def test_retention_that_cannot_clean_up_does_not_raise() -> None:
    job = Job(ModelDisk())
    job.save_all(1)
    job.meeting = Meeting(1)
    disk = FailingDisk(job.disk, operation="list", call=2)
    writer = job.writer(0, disk)
    assert writer.retain(RetentionPolicy((Last(1),))) is not None
    assert disk.has_failed


def test_retention_collects_what_has_expired_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    job = Job(ModelDisk())
    saved = job.save_all(1)[0].must()
    job.disk.unlink(RUNS / api.manifest_name("net-1.shards"))
    job.disk.unlink(RUNS / saved.shards[0])  # whole sets stay: only their manifest may be lost
    job.clock.now += 3 * TIMEOUT_S
    job.writer(0).retain(RetentionPolicy((Last(1),)))
    assert job.store().scan() == []
    assert caplog.text.count("which was never committed") == 2


def test_options_of_one_save_count() -> None:
    job = Job(ModelDisk())
    job.meeting = Meeting(1)
    writer = job.writer(0)
    options = api.SaveOptions(format="safetensors")
    saved = writer.save("net-1.shards", [], api.SaveFacts(step=1), options=options)
    writer.close()
    assert saved.format == "safetensors"
    assert saved.shards[0].endswith(".safetensors")
