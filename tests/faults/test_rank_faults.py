# SPDX-License-Identifier: Apache-2.0
"""One rank dies, fails or hangs, at every call it makes to the disk; or the power goes while all ranks save."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, ChecksumMismatch, RankFailed, SaveFailed
from ckptmgr.maintenance.check_file import check_digests
from ckptmgr.store.shards import RankFiles
from tests.faults.training import RUNS, SERIES
from tests.parallel.ranks import (
    TIMEOUT_S,
    WORLD,
    Clock,
    Job,
    Meeting,
    Outcome,
    RankDied,
    RankDisk,
    run_ranks,
)
from tests.support import api
from tests.support.crashmodel import Crash, FailingDisk, ModelDisk, Order, every_crash

OLD, NEW = "net-1.shards", "net-2.shards"
RANKS = range(WORLD)


def old_job() -> Job:
    """Return a job whose run has saved step 1 and ended."""
    job = Job(ModelDisk())
    for outcome in job.save_all(1):
        outcome.must()
    job.disk.settle()
    return job


def restarted(job: Job, *, later_s: float = 0.0) -> Job:
    """Return the job as it starts anew after all its processes are gone."""
    meeting = Meeting(job.meeting.world)
    return Job(job.disk.restart(), clock=Clock(job.clock.now + later_s), meeting=meeting)


def calls_of(rank: int) -> int:
    """Return how many calls a rank makes to the disk in a save that goes well."""
    job = Job(old_job().disk)
    disks = [RankDisk(job.disk) for _ in RANKS]
    for outcome in run_ranks(job.meeting, lambda r: job.save(r, 2, disks[r])):
        outcome.must()
    return len(disks[rank].calls)


def save_with(
    job: Job, rank: int, call: int, happens: Callable[[], None]
) -> list[Outcome[Checkpoint]]:
    """Save step 2; at a call of a rank something happens."""

    def save(one: int) -> Checkpoint:
        is_it = one == rank
        disk = RankDisk(job.disk, call=call if is_it else None, happens=happens)
        return job.save(one, 2, disk)

    job.meeting = Meeting()
    return run_ranks(job.meeting, save)


def listed(job: Job) -> set[str]:
    """Check that every checkpoint is whole, and return their names."""
    unfinished = (api.State.LEFTOVER, api.State.WRITING)
    found = [c for c in job.store().scan() if c.state not in unfinished]
    for checkpoint in found:
        assert checkpoint.state is api.State.OK, checkpoint
        check_whole(job, checkpoint)
    return {checkpoint.name for checkpoint in found}


def check_whole(job: Job, checkpoint: Checkpoint) -> None:
    manifest = job.store().read_manifest(checkpoint.name)
    assert manifest is not None
    assert len(manifest.shards) == job.meeting.world
    for entry in manifest.shards:
        with contextlib.closing(job.disk.open(RUNS / entry.name)) as file:
            check_digests(file, entry.digest, path=entry.name)


def check_goes_on(job: Job) -> None:
    """Check that the job can start anew, save, and leaves nothing behind once everything has expired.

    The files of all ranks, whose manifest may have been lost, go once a newer checkpoint is whole.
    """
    there = listed(job)
    again = restarted(job, later_s=3 * TIMEOUT_S)
    for outcome in again.save_all(3):
        outcome.must()
    RankFiles(again.store()).recover(SERIES)
    assert listed(again) == there | {"net-3.shards"}
    wanted = set()
    for checkpoint in again.store().scan():
        wanted |= {checkpoint.name + ".manifest.json", *checkpoint.shards}
    assert set(again.disk.list(RUNS)) == wanted


def check_survivors(job: Job, outcomes: Sequence[Outcome[Checkpoint]], lost: int) -> None:
    """Check that who returned was right, and that who raised has named the lost rank."""
    survivors = [outcome for rank, outcome in enumerate(outcomes) if rank != lost]
    for outcome in survivors:
        if outcome.raised is None:
            assert outcome.must().name == NEW
            assert NEW in listed(job)
        else:
            assert isinstance(outcome.raised, SaveFailed), repr(outcome.raised)
            assert f"rank {lost}" in str(outcome.raised)
    assert len({outcome.raised is None for outcome in survivors}) == 1


def after_power_cuts(job: Job) -> Iterator[Job]:
    for disk in job.disk.crash_states(Order.WEAK, tears=1):
        yield Job(disk, clock=job.clock)


@pytest.mark.slow
@pytest.mark.parametrize("rank", RANKS)
def test_death_of_a_rank_leaves_a_whole_checkpoint_or_none(rank: int) -> None:
    def die() -> None:
        job.meeting.gone(rank)
        raise RankDied

    committed = set()
    for call in range(1, calls_of(rank) + 1):
        job = old_job()
        outcomes = save_with(job, rank, call, die)
        assert isinstance(outcomes[rank].raised, RankDied)
        left = restarted(job)
        check_survivors(left, outcomes, rank)
        has_new = NEW in listed(left)
        committed.add(has_new)
        survivor = outcomes[(rank + 1) % WORLD]
        assert has_new or survivor.raised is not None
        for cut in after_power_cuts(left):
            assert {OLD} <= listed(cut) <= {OLD, NEW}
            assert survivor.raised is not None or NEW in listed(cut)
        check_goes_on(left)
    # Rank 0 commits in the middle of its calls; without another rank nothing is committed.
    assert committed == ({False, True} if rank == 0 else {False})


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=["ENOSPC", "EIO"])
def test_failure_of_a_rank_is_the_same_error_on_all(rank: int, error: int) -> None:
    def fail() -> None:
        raise OSError(error, "injected")

    outcomes_seen = set()
    for call in range(1, calls_of(rank) + 1):
        job = old_job()
        outcomes = save_with(job, rank, call, fail)
        left = restarted(job)
        has_raised = {outcome.raised is not None for outcome in outcomes}
        assert len(has_raised) == 1, (call, outcomes)
        outcomes_seen |= has_raised
        for outcome in outcomes:
            check_told(outcome.raised, rank, error)
        if outcomes[0].raised is None:
            assert listed(left) == {OLD, NEW}
        check_goes_on(left)
    # Some calls of rank 0 are only there to clean up, and reads that fail with EIO are made again.
    has_harmless = rank == 0 or error == errno.EIO
    assert outcomes_seen == ({False, True} if has_harmless else {True})


def check_told(raised: BaseException | None, rank: int, error: int) -> None:
    """Check that an error names the rank and the error of its disk."""
    if raised is None:
        return
    assert isinstance(raised, SaveFailed), repr(raised)
    if isinstance(raised, RankFailed):
        assert (raised.rank, raised.errno) == (rank, error), raised
    else:
        assert rank == 0
        assert "the commit may not be durable" in str(raised)


@pytest.mark.parametrize("rank", RANKS)
def test_failed_save_leaves_no_file(rank: int) -> None:
    def fail() -> None:
        raise OSError(errno.ENOSPC, "injected")

    for call in range(1, calls_of(rank) + 1):
        job = old_job()
        before = set(job.disk.list(RUNS))
        outcomes = save_with(job, rank, call, fail)
        if isinstance(outcomes[0].raised, RankFailed):
            # A lease file that could not be removed is collected by the next save.
            left = set(job.disk.list(RUNS)) - {f".{SERIES}.lease"}
            assert left == before, (call, job.disk.tree())


@pytest.mark.parametrize("rank", RANKS)
def test_rank_that_hangs_and_comes_back_does_no_harm(rank: int) -> None:
    late = set()
    for call in range(1, calls_of(rank) + 1):
        job = old_job()
        outcomes, seen = save_with_hang(job, rank, call)
        left = restarted(job)
        survivors = [outcome for one, outcome in enumerate(outcomes) if one != rank]
        for outcome in survivors:
            assert outcome.raised is None or isinstance(outcome.raised, SaveFailed)
        assert {OLD} <= seen <= listed(left) <= {OLD, NEW}
        if any(outcome.raised is None for outcome in outcomes):
            assert NEW in listed(left)
        late |= listed(left) - seen
        check_goes_on(left)
    # Rank 0 may come back in the middle of the commit: its commit is then whole, and no file of it was removed.
    assert late == ({NEW} if rank == 0 else set())


def save_with_hang(job: Job, rank: int, call: int) -> tuple[list[Outcome[Checkpoint]], set[str]]:
    """Save step 2 while a rank hangs until all others have given up; also return the listing at that moment."""
    is_over = threading.Event()
    others_left = threading.Semaphore(0)
    seen: set[str] = set()

    def hang() -> None:
        job.meeting.gone(rank)
        for _ in range(WORLD - 1):
            assert others_left.acquire(timeout=60)
        seen.update(listed(job))
        job.clock.now += 2 * TIMEOUT_S
        job.meeting.back(rank)
        is_over.set()

    def save(one: int) -> Checkpoint:
        disk = RankDisk(job.disk, call=call if one == rank else None, happens=hang)
        try:
            return job.save(one, 2, disk)
        finally:
            job.meeting.gone(one)
            others_left.release()

    job.meeting = Meeting()
    return run_ranks(job.meeting, save), seen


def crashes_of_a_save(
    disk_of: Callable[[ModelDisk], api.FileSystem],
) -> Iterator[tuple[Crash, set[str] | None]]:
    """Yield every disk a power cut in a save of step 2 may leave, and the listing there; None when not all is whole."""

    def save(disk: ModelDisk) -> None:
        job = Job(disk)
        for outcome in run_ranks(job.meeting, lambda rank: job.save(rank, 2, disk_of(disk))):
            outcome.must()
        disk.acknowledge("saved")

    for crash in every_crash(old_job().disk, save, order=Order.WEAK, tears=1):
        try:
            yield crash, listed(Job(crash.disk))
        except (AssertionError, ChecksumMismatch):
            yield crash, None


def is_sound(crash: Crash, there: set[str] | None) -> bool:
    may_be = [{OLD, NEW}] if crash.disk.acknowledged else [{OLD}, {OLD, NEW}]
    return there in may_be


def test_power_cut_leaves_a_whole_checkpoint_or_none() -> None:
    crashes = list(crashes_of_a_save(lambda disk: disk))
    assert [str(crash) for crash, there in crashes if not is_sound(crash, there)] == []
    assert {OLD, NEW} in [there for crash, there in crashes if not crash.is_finished]


class WithoutDirectorySync(FailingDisk):
    def sync_directory(self, path: Path) -> None:
        pass


class WithoutFileSync(FailingDisk):
    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> api.OutputFile:
        file = super().create(path, mode=mode, owner_of=owner_of)
        return file if path.name.endswith(".lease") else Unsynced(file)


class Unsynced:
    def __init__(self, file: api.OutputFile) -> None:
        self.reserve, self.write_at, self.close = file.reserve, file.write_at, file.close

    def sync(self) -> None:
        pass


@pytest.mark.parametrize("disk_of", [WithoutDirectorySync, WithoutFileSync])
def test_ranks_that_do_not_sync_are_found_out(
    disk_of: Callable[[ModelDisk], api.FileSystem],
) -> None:
    crashes = crashes_of_a_save(disk_of)
    assert not all(is_sound(crash, there) for crash, there in crashes)
