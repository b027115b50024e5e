# SPDX-License-Identifier: Apache-2.0
"""Many ranks save one checkpoint, when nothing or something simple goes wrong; `tests.faults` has the rest."""

from __future__ import annotations

import errno
from collections import defaultdict

import pytest

from ckptmgr import Checkpoint, RankFailed, RanksMissing, SaveFailed, StoreFull
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.formats.strict_json import Json
from ckptmgr.policy.rules import Last, RetentionPolicy
from ckptmgr.store.shards import RankFiles
from tests.faults.training import KEY, KEYS, RUNS, SERIES, disk_with
from tests.parallel.ranks import START, TIMEOUT_S, WORLD, Job, Outcome, Seat, run_ranks, save_step
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import put
from tests.support.diskimage import Snapshot

with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])


def listed(job: Job) -> dict[str, api.State]:
    return {c.name: c.state for c in job.store().scan()}


@with_and_without_key
def test_all_ranks_get_the_same_checkpoint(key: bytes | None) -> None:
    job = Job(ModelDisk(), key=key)
    outcomes = [outcome.must() for outcome in job.save_all(7)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert listed(job) == {"net-7.shards": api.State.OK}
    (stored,) = job.store().scan()
    assert stored == outcomes[0]
    assert stored.cipher == (None if key is None else "AES-GCM")


def test_every_rank_writes_its_own_file() -> None:
    job = Job(ModelDisk())
    saved = job.save_all(7)[0].must()
    shards = [parse_shard_name(name) for name in saved.shards]
    assert [None if s is None else (s.rank, s.world) for s in shards] == [(0, 3), (1, 3), (2, 3)]
    assert all(job.disk.status(RUNS / name) is not None for name in saved.shards)
    expiry = {None if s is None else s.expires_at for s in shards}
    assert expiry == {int(START + 2 * TIMEOUT_S)}


def test_second_save_of_a_step_is_another_attempt() -> None:
    job = Job(ModelDisk())
    job.save_all(7)

    def save_again(rank: int) -> Checkpoint:
        writer = job.writer(rank)
        try:
            first = save_step(writer, 8)
            assert first.sequence == 2
            return save_step(writer, 9)
        finally:
            writer.close()

    again = run_ranks(job.meeting, save_again)
    assert [outcome.must().sequence for outcome in again] == [3, 3, 3]


def test_name_that_is_taken_stays_as_it_is() -> None:
    job = Job(ModelDisk())
    first = job.save_all(7)[0].must()
    for outcome in job.save_all(7):
        assert isinstance(outcome.raised, RankFailed)
        assert "another attempt at this checkpoint was committed before" in str(outcome.raised)
    assert job.store().scan() == [first]


def test_rank_with_a_full_disk_is_named_on_all_ranks() -> None:
    job = Job(disk_with(10.0))
    before = job.disk.state()

    def save(rank: int) -> Checkpoint:
        return job.save(rank, 7, FailingDisk(job.disk, space_bytes=10 if rank == 2 else None))

    for rank, outcome in enumerate(run_ranks(job.meeting, save)):
        failure = outcome.raised
        assert isinstance(failure, RankFailed)
        assert (failure.rank, failure.errno) == (2, errno.ENOSPC)
        assert "rank 2: StoreFull [ENOSPC]: not enough disk space" in str(failure)
        assert isinstance(failure.__cause__, StoreFull) == (rank == 2)
    assert names(job.disk.state()) == names(before)


def names(state: Snapshot) -> set[str]:
    return {path for path, _ in state}


def test_rank_that_never_comes_is_named() -> None:
    job = Job(ModelDisk())

    def save(rank: int) -> Checkpoint | None:
        return job.save(rank, 7) if rank != 1 else None

    outcomes = run_ranks(job.meeting, save)
    for outcome in (outcomes[0], outcomes[2]):
        assert isinstance(outcome.raised, SaveFailed)
        assert outcome.raised.message == (
            "rank 1 did not come to 'net/save 7/1/begin' within 100 s; ranks 0, 2 waited there to save step 7"
        )
        assert "give them the same save policy" in str(outcome.raised.hint)
    assert listed(job) == {}


def test_rank_that_waits_in_vain_hears_who_gave_up_before_at_another_step() -> None:
    job, said = Job(ModelDisk()), defaultdict[str, dict[int, Json]](dict)

    class Hasty(Seat):
        """A rank that waits for nobody."""

        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            said[tag][self.rank] = value
            others = set(range(self.world)) - said[tag].keys()
            raise RanksMissing(
                tag, ranks=sorted(others), found=dict(said[tag]), timeout_s=timeout_s
            )

    def told(rank: int, step: int) -> str:
        with pytest.raises(SaveFailed) as caught:
            save_step(job.writer(rank, seat=Hasty(job.meeting, rank)), step)
        return caught.value.message.partition("; ")[2]

    assert told(2, 7) == "rank 2 waited there to save step 7"
    assert told(1, 9) == (
        "rank 1 waited there to save step 9; gave up waiting before: rank 2 at step 7"
    )
    assert told(0, 9) == (
        "ranks 0, 1 waited there to save step 9; gave up waiting before: rank 2 at step 7"
    )
    assert listed(job) == {}


def test_series_that_another_run_writes_is_an_error_on_all_ranks() -> None:
    job = Job(ModelDisk())
    with job.store().lease(SERIES):
        outcomes = job.save_all(7)
    for outcome in outcomes:
        assert isinstance(outcome.raised, RankFailed)
        assert "rank 0: StoreLocked" in str(outcome.raised)


def test_ranks_that_encrypt_differently_save_nothing() -> None:
    jobs = [Job(ModelDisk(), key=KEY)]
    jobs.append(Job(jobs[0].disk, key=bytes(32), meeting=jobs[0].meeting, clock=jobs[0].clock))

    def save(rank: int) -> Checkpoint:
        return jobs[rank == 1].save(rank, 7)

    for outcome in run_ranks(jobs[0].meeting, save):
        assert isinstance(outcome.raised, SaveFailed)
        assert "rank 1 encrypts with AES-GCM" in str(outcome.raised)
    assert listed(jobs[0]) == {}
    assert not [name for name in jobs[0].disk.list(RUNS) if name.endswith(".ckpt")]


def test_retention_removes_whole_checkpoints_on_rank_0() -> None:
    job = Job(ModelDisk())

    def save_and_retain(rank: int) -> int:
        writer = job.writer(rank)
        try:
            for step in (1, 2, 3):
                save_step(writer, step)
                plan = writer.retain(RetentionPolicy((Last(1),)))
                assert (plan is None) == (rank != 0)
            return rank
        finally:
            writer.close()

    assert [o.must() for o in run_ranks(job.meeting, save_and_retain)] == [0, 1, 2]
    assert listed(job) == {"net-3.shards": api.State.OK}
    assert len(job.disk.list(RUNS)) == WORLD + 1  # and the manifest


def test_files_of_a_failed_attempt_stay_until_it_expires() -> None:
    job = Job(ModelDisk())
    saved = job.save_all(7)[0].must()
    job.disk.unlink(RUNS / "net-7.shards.manifest.json")
    job.disk.unlink(RUNS / saved.shards[0])
    store = job.store()
    job.clock.now += 2 * TIMEOUT_S + 60
    assert RankFiles(store).recover(SERIES) == []
    job.clock.now += 1
    removed = [f"removed {name}, which was never committed" for name in saved.shards[1:]]
    assert RankFiles(store).recover("other") == []
    assert RankFiles(store).recover(SERIES) == removed
    assert set(job.disk.list(RUNS)) == set()


@pytest.mark.parametrize(
    ("keys", "state"),
    [((None, None), api.State.CORRUPT), ((KEY, KEY[::-1]), api.State.OTHER_KEY)],
    ids=["plain", "another key"],
)
def test_files_whose_manifest_another_run_has_overwritten_stay(
    keys: tuple[bytes | None, bytes | None], state: api.State
) -> None:
    job, other = (Job(ModelDisk(), key=key) for key in keys)
    saved = job.save_all(7)[0].must()
    other.save_all(7)
    path = RUNS / "net-7.shards.manifest.json"
    put(job.disk, path, other.disk.read_bytes(path))
    job.clock.now += 1000
    assert RankFiles(job.store()).recover(SERIES) == []
    assert set(saved.shards) <= set(job.disk.list(RUNS))
    assert listed(job) == {"net-7.shards": state}


def test_file_that_cannot_be_collected_is_said_and_tried_again() -> None:
    job = Job(ModelDisk())
    saved = job.save_all(7)[0].must()
    job.disk.unlink(RUNS / "net-7.shards.manifest.json")
    job.disk.unlink(RUNS / saved.shards[0])
    job.clock.now += 1000
    failing = RankFiles(job.store(FailingDisk(job.disk, operation="unlink", call=1)))
    sentences = failing.collect(SERIES)
    assert "could not clean up" in sentences[0]
    assert [s.startswith("removed") for s in sentences] == [False, True]
    assert len(failing.collect(SERIES)) == 1


def test_ranks_that_do_not_share_the_directory_commit_nothing() -> None:
    job = Job(ModelDisk())
    elsewhere = Job(ModelDisk(), meeting=job.meeting)

    def save(rank: int) -> Checkpoint:
        return (elsewhere if rank == 2 else job).save(rank, 7)

    outcomes: list[Outcome[Checkpoint]] = run_ranks(job.meeting, save)
    for outcome in outcomes:
        assert isinstance(outcome.raised, RankFailed)
        assert "is missing" in str(outcome.raised)
    assert listed(job) == {}
