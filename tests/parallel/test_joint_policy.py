# SPDX-License-Identifier: Apache-2.0
"""Saving by time on many ranks: rank 0 decides, and not at every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    AtSteps,
    CheckpointConfig,
    EverySeconds,
    EverySteps,
    Overhead,
    RankFailed,
    Ranks,
    RanksOutOfStep,
)
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel import SharedDirectory
from ckptmgr.parallel.rank_policy import RankZeroPolicy, for_all_ranks
from ckptmgr.parallel.team import policy_of_all
from ckptmgr.policy.save import LastSave, SaveDecision, SavePolicy
from tests.parallel.ranks import START, WORLD, Clock, Meeting, Outcome, Seat, run_ranks
from tests.support import api
from tests.support.runs import manager_on


def joint(policy: SavePolicy, meeting: Meeting, rank: int) -> RankZeroPolicy:
    return RankZeroPolicy(policy, Seat(meeting, rank), timeout_s=9.0, monotonic=Clock())


def saved_steps(
    policy: SavePolicy, step_s: Sequence[float], *, rank: int, first: int = 1
) -> list[int]:
    """Return the steps that a training saves whose steps take so long, by a clock that is off by days on other ranks."""
    now = START + 86_400.0 * rank
    last = LastSave(at=now)
    found = []
    for step, seconds in enumerate(step_s, first):
        now += seconds * (1.0 if rank == 0 else 0.3)
        if policy.decide(step, now, last).is_due:
            last = LastSave(step=step, at=now, cost_s=0.5 if rank == 0 else 9.0)
            found.append(step)
    return found


policies = st.one_of(
    st.builds(EverySeconds, st.floats(0.5, 200.0)),
    st.builds(Overhead, st.floats(0.005, 0.5)),
    st.builds(lambda s, n: EverySeconds(s) | AtSteps(n), st.floats(0.5, 200.0), st.integers(1, 99)),
)


@settings(max_examples=30)
@given(policy=policies, step_s=st.lists(st.floats(1.0, 1.9), max_size=150))
def test_all_ranks_save_when_rank_0_would_alone(policy: SavePolicy, step_s: list[float]) -> None:
    alone = saved_steps(policy, step_s, rank=0)
    meeting = Meeting()
    outcomes = run_ranks(
        meeting, lambda rank: saved_steps(joint(policy, meeting, rank), step_s, rank=rank)
    )
    assert [outcome.must() for outcome in outcomes] == [alone] * WORLD


def test_ranks_meet_some_twenty_times_for_a_save_every_thousand_steps() -> None:
    meeting = Meeting()

    def train(rank: int) -> list[int]:
        return saved_steps(joint(EverySeconds(1000.0), meeting, rank), [1.0] * 3500, rank=rank)

    for outcome in run_ranks(meeting, train):
        assert outcome.must() == [1001, 2002, 3003]
    assert len(set(meeting.tags)) < 3 * 25


def test_save_that_failed_is_due_again_at_the_next_step() -> None:
    meeting = Meeting()

    def train(rank: int) -> list[bool]:
        policy = joint(EverySeconds(2.5), meeting, rank)
        return [policy.decide(step, float(step), LastSave(at=0.0)).is_due for step in range(1, 6)]

    for outcome in run_ranks(meeting, train):
        assert outcome.must() == [False, False, True, True, True]


def test_training_that_went_back_is_not_without_a_decision_until_the_old_step() -> None:
    meeting = Meeting()

    def train(rank: int) -> list[int]:
        policy = joint(EverySeconds(100.0), meeting, rank)
        saved_steps(policy, [1.0] * 90, rank=rank)
        return saved_steps(policy, [60.0] * 4, rank=rank, first=11)

    for outcome in run_ranks(meeting, train):
        assert outcome.must() == [12, 14]


def test_reason_and_activity_are_those_of_rank_0() -> None:
    meeting = Meeting()

    def one(rank: int) -> tuple[bool, SaveDecision, str]:
        policy = joint(EverySeconds(8.0 + rank), meeting, rank)
        first = policy.decide(1, 1.0, LastSave(at=0.0))
        policy.decide(2, 2.0, LastSave(at=0.0))
        return policy.is_active, first, policy.decide(3, 3.0, LastSave(at=0.0)).reason

    expected = SaveDecision(is_due=False, reason="1 s since the last save, every 8 s")
    for outcome in run_ranks(meeting, one):
        assert outcome.must() == (True, expected, "rank 0 is asked again at step 4")


def test_ranks_meet_again_within_65536_steps_however_far_the_next_save_is() -> None:
    policy = RankZeroPolicy(EverySeconds(1e9), Seat(Meeting(1), 0), timeout_s=9.0)
    for step in (1, 2):
        assert not policy.decide(step, float(step), LastSave(at=0.0)).is_due
    assert policy.decide(3, 3.0, LastSave(at=0.0)).reason == "rank 0 is asked again at step 65538"


def test_ranks_at_different_steps_hear_which() -> None:
    meeting = Meeting()

    def one(rank: int) -> None:
        joint(EverySeconds(8.0), meeting, rank).decide(7 + rank // 2, 1.0, LastSave(at=0.0))

    for outcome in run_ranks(meeting, one):
        assert isinstance(outcome.raised, RanksOutOfStep)
        assert "rank 0 has ended step 7, and rank 2 step 8" in str(outcome.raised)


def test_rank_0_that_cannot_decide_fails_all() -> None:
    class Broken:
        is_active = True

        def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
            raise ArithmeticError("no such time")

    meeting = Meeting()
    outcomes: list[Outcome[SaveDecision]] = run_ranks(
        meeting, lambda rank: joint(Broken(), meeting, rank).decide(1, 1.0, LastSave(at=0.0))
    )
    for outcome in outcomes:
        assert isinstance(outcome.raised, RankFailed)
        assert "no such time" in str(outcome.raised)


def test_answer_of_another_version_is_refused() -> None:
    class Other(Seat):
        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            return [{"ok": {"step": 1}}]

    policy = RankZeroPolicy(EverySeconds(8.0), Other(Meeting(1), 0), timeout_s=9.0)
    with pytest.raises(RanksOutOfStep, match="the same version of ckptmgr"):
        policy.decide(1, 1.0, LastSave(at=0.0))


def test_only_what_looks_at_the_time_needs_more_meetings_than_one() -> None:
    steps, seconds = EverySteps(10), Overhead(0.1)
    assert policy_of_all(seconds, None, timeout_s=9.0) is seconds
    for policy, rounds in ((steps, 1), (seconds, 4)):
        meeting = Meeting(1)
        common = for_all_ranks(policy, Seat(meeting, 0), timeout_s=9.0)
        for step in (1, 2, 3):
            common.decide(step, 0.0, LastSave(at=0.0))
        assert len(meeting.tags) == rounds


@pytest.mark.parametrize("mode", [False, "thread"])
def test_managers_whose_clocks_differ_save_the_same_steps(mode: bool | str, tmp_path: Path) -> None:
    config = CheckpointConfig(
        save_checkpoint_steps=0, save_checkpoint_seconds=5, keep="all", async_save=mode
    )
    meeting = Meeting()

    def train(rank: int) -> int:
        clock = Clock(START + 1000.0 * rank)
        ranks = SharedDirectory(tmp_path / "ranks", rank=rank, world=WORLD, session="one")
        with manager_on(tmp_path / "run", config, clock=clock, ranks=Ranks(ranks)) as manager:
            for step in range(1, 20):
                clock.now += 1.0 if rank == 0 else 3.0
                manager.step_end(step, {"rank": rank})
        return rank

    assert [outcome.must() for outcome in run_ranks(meeting, train)] == list(range(WORLD))
    assert sorted(one.step for one in api.listed(tmp_path / "run")) == [6, 12, 18, 19]
    manifest = api.place(tmp_path / "run").read_manifest("ckpt-19.shards")
    assert manifest is not None
    assert manifest.keep == "all"
