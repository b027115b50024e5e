# SPDX-License-Identifier: Apache-2.0
"""Ranks with different save policies are told at the first step, not when one has waited in vain for another."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckptmgr import (
    AtSteps,
    CheckpointConfig,
    CheckpointManager,
    EverySeconds,
    EverySteps,
    Never,
    RankFailed,
    Ranks,
    RanksOutOfStep,
)
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.rank_policy import describe_policy, for_all_ranks
from ckptmgr.policy.save import LastSave, SaveDecision, SavePolicy
from tests.parallel.ranks import WORLD, Meeting, Seat, run_ranks
from tests.support import api


class Odd:
    """A policy of somebody's own."""

    is_active = True

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        return SaveDecision(is_due=step % 2 == 1, reason="odd")


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (EverySteps(15), "every 15 steps"),
        (EverySteps(10, since="save"), "every 10 steps since the last save"),
        (EverySteps(10, offset=-1), "every 10 steps, offset -1"),
        (Never(), "never"),
        (AtSteps(30, 4), "steps 4, 30"),
        (EverySteps(10) | AtSteps(4), "every 10 steps, or steps 4"),
        (EverySteps(10) | EverySeconds(60.0), "by time"),
        (EverySeconds(60.0), "by time"),
        (Odd(), "by Odd"),
    ],
)
def test_ranks_with_different_policies_hear_both_at_the_first_step(
    others: SavePolicy, words: str
) -> None:
    meeting = Meeting()

    def train(rank: int) -> None:
        policy = for_all_ranks(
            others if rank == 1 else EverySteps(10), Seat(meeting, rank), timeout_s=9.0
        )
        policy.decide(1, 0.0, LastSave(at=0.0))

    for outcome in run_ranks(meeting, train):
        assert isinstance(outcome.raised, RanksOutOfStep)
        assert outcome.raised.message == f"rank 1 saves {words}, but rank 0 saves every 10 steps"
        assert "the same configuration" in str(outcome.raised.hint)


def test_managers_with_different_steps_save_nothing(tmp_path: Path) -> None:
    meeting = Meeting()

    def train(rank: int) -> None:
        config = CheckpointConfig(save_checkpoint_steps=2 + rank, keep="all")
        with CheckpointManager(tmp_path, config, ranks=Ranks(Seat(meeting, rank))) as manager:
            for step in range(1, 10):
                manager.step_end(step, {"rank": rank})

    for outcome in run_ranks(meeting, train):
        assert isinstance(outcome.raised, RanksOutOfStep)
        assert "rank 1 saves every 3 steps, but rank 0 saves every 2 steps" in str(outcome.raised)
    assert api.listed(tmp_path) == []


def test_ranks_with_one_policy_decide_by_it_and_meet_once() -> None:
    meeting = Meeting()

    def train(rank: int) -> list[int]:
        policy = for_all_ranks(Odd(), Seat(meeting, rank), timeout_s=9.0)
        assert policy.is_active
        return [step for step in range(1, 6) if policy.decide(step, 0.0, LastSave(at=0.0)).is_due]

    assert [outcome.must() for outcome in run_ranks(meeting, train)] == [[1, 3, 5]] * WORLD
    assert len(set(meeting.tags)) == 1


def test_rank_that_does_not_come_to_compare_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meeting = Meeting()
    meeting.gone(2)

    def train(rank: int) -> bool:
        if rank == 2:
            return True
        policy = for_all_ranks(EverySteps(1), Seat(meeting, rank), timeout_s=9.0)
        return policy.decide(1, 0.0, LastSave(at=0.0)).is_due

    with caplog.at_level(logging.WARNING):
        assert all(outcome.must() for outcome in run_ranks(meeting, train))
    assert "the save policies were not compared: rank 2 did not come" in caplog.text


def test_rank_of_another_version_is_named() -> None:
    class Other(Seat):
        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            return ["unheard of"] * WORLD

    policy = for_all_ranks(EverySteps(1), Other(Meeting(), 0), timeout_s=9.0)
    with pytest.raises(RankFailed, match="unheard of"):
        policy.decide(1, 0.0, LastSave(at=0.0))


def test_policies_that_decide_alike_are_described_alike() -> None:
    assert describe_policy(EverySteps(5)) == describe_policy(EverySteps(5)) == "every 5 steps"
    assert describe_policy(Odd()) == describe_policy(Odd())
