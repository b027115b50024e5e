# SPDX-License-Identifier: Apache-2.0
"""One rank dies, fails or hangs past the timeout at every call to the disk and at every meeting, also in the background."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest

from ckptmgr import Checkpoint, RankFailed, SaveFailed
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.files.save.job import FixedName, SaveJob
from ckptmgr.formats.strict_json import Json
from ckptmgr.state import tree
from tests.faults.test_rank_faults import check_goes_on, listed, restarted
from tests.parallel.ranks import (
    TIMEOUT_S,
    Job,
    Meeting,
    Outcome,
    RankDied,
    RankDisk,
    Seat,
    run_ranks,
    state_of,
)
from tests.support import api
from tests.support.crashmodel import ModelDisk

WORLD = 2
OLD, NEW = "net-1.shards", "net-2.shards"
MEETINGS = ("begin", "write", "commit")
Happens = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Point:
    """Where something happens to a rank: at a call to its disk, or before or after a meeting."""

    rank: int
    call: int | None = None
    meeting: str = ""
    is_before: bool = False
    is_in_background: bool = True


@dataclass(frozen=True)
class FaultySeat(Seat):
    """The place of a rank to which something happens at a meeting."""

    point: Point
    happens: Happens

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        is_here = bool(self.point.meeting) and tag.endswith(f"/{self.point.meeting}")
        if is_here and self.point.is_before:
            self.happens()
        answers = super().all_gather(tag, value, timeout_s=timeout_s)
        if is_here and not self.point.is_before:
            self.happens()
        return answers


class Trial:
    """A job that has saved step 1, and saves step 2 while something happens to a rank.

    Attributes:
        seen: The listing when the other ranks had given up the one that hangs.
    """

    def __init__(self, point: Point) -> None:
        self.point = point
        self.job = Job(ModelDisk(), meeting=Meeting(WORLD))
        for outcome in self.job.save_all(1):
            outcome.must()
        self.job.disk.settle()
        self.job.meeting = Meeting(WORLD)
        self.seen: set[str] = set()
        self.disks = [RankDisk(self.job.disk) for _ in range(WORLD)]
        self._others_left = threading.Event()

    def die(self) -> None:
        self.job.meeting.gone(self.point.rank)
        raise RankDied

    def fail(self) -> None:
        raise OSError(errno.ENOSPC, "injected")

    def hang(self) -> None:
        self.job.meeting.gone(self.point.rank)
        assert self._others_left.wait(60)
        self.seen |= listed(self.job)
        self.job.clock.now += 2 * TIMEOUT_S
        self.job.meeting.back(self.point.rank)

    def run(self, happens: Happens | None) -> list[Outcome[Checkpoint]]:
        """Save step 2 with all ranks."""
        point = self.point
        seats: list[Seat] = [Seat(self.job.meeting, rank) for rank in range(WORLD)]
        if happens is not None:
            self.disks[point.rank] = RankDisk(self.job.disk, call=point.call, happens=happens)
            seats[point.rank] = FaultySeat(self.job.meeting, point.rank, point, happens)

        def save(rank: int) -> Checkpoint:
            try:
                return self._save(rank, seats[rank])
            finally:
                self.job.meeting.gone(rank)
                if rank != point.rank:
                    self._others_left.set()

        return run_ranks(self.job.meeting, save)

    def _save(self, rank: int, seat: Seat) -> Checkpoint:
        writer = self.job.writer(rank, self.disks[rank], seat=seat)
        items = [*tree.flatten(state_of(rank, 2)).tensors]

        job = SaveJob(naming=FixedName(NEW), facts=api.SaveFacts(step=2), items=items)
        engine = SaveEngine("thread" if self.point.is_in_background else "sync", has_peers=True)
        try:
            handle = engine.run(job, writer)
            assert handle is not None
            engine.wait()
            return handle.wait()
        finally:
            engine.close()
            writer.close()

    def check(self, outcomes: Sequence[Outcome[Checkpoint]]) -> None:
        """Check that who returned was right, that who raised named the rank, and that the job can start anew."""
        left = restarted(self.job)
        there = listed(left)
        assert {OLD} | self.seen <= there <= {OLD, NEW}, self.point
        for rank, outcome in enumerate(outcomes):
            if outcome.raised is None:
                assert NEW in there, self.point
            elif rank != self.point.rank:
                assert isinstance(outcome.raised, SaveFailed), repr(outcome.raised)
                assert f"rank {self.point.rank}" in str(outcome.raised)
        check_goes_on(left)


@cache
def calls() -> list[Point]:
    """Return all calls that a save in the background makes to the disk when nothing happens."""
    trial = Trial(Point(rank=0))
    assert [outcome.must().name for outcome in trial.run(None)] == [NEW] * WORLD
    trial.check([])
    counts = [len(disk.calls) for disk in trial.disks]
    return [
        Point(rank=rank, call=call)
        for rank, count in enumerate(counts)
        for call in range(1, count + 1)
    ]


def meetings() -> list[Point]:
    return [
        Point(rank=rank, meeting=meeting, is_before=is_before, is_in_background=is_in_background)
        for rank in range(WORLD)
        for meeting in MEETINGS
        for is_before in (True, False)
        for is_in_background in (True, False)
    ]


with_all_points = pytest.mark.parametrize("points", [calls, meetings])


@with_all_points
def test_rank_that_dies_is_named_and_leaves_a_whole_checkpoint_or_none(
    points: Callable[[], list[Point]],
) -> None:
    for point in points():
        trial = Trial(point)
        outcomes = trial.run(trial.die)
        assert outcomes[point.rank].raised is not None
        trial.check(outcomes)


@pytest.mark.slow
@with_all_points
def test_rank_that_hangs_until_the_others_have_given_up_does_no_harm(
    points: Callable[[], list[Point]],
) -> None:
    for point in points():
        trial = Trial(point)
        trial.check(trial.run(trial.hang))


@pytest.mark.slow
def test_rank_with_a_full_disk_is_named_on_all() -> None:
    for point in calls():
        trial = Trial(point)
        outcomes = trial.run(trial.fail)
        assert len({outcome.raised is None for outcome in outcomes}) == 1, point
        for outcome in outcomes:
            if isinstance(outcome.raised, RankFailed):
                assert (outcome.raised.rank, outcome.raised.errno) == (point.rank, errno.ENOSPC)
        trial.check(outcomes)
