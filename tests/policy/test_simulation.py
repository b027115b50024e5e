# SPDX-License-Identifier: Apache-2.0
"""A policy replayed save by save."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from ckptmgr import Checkpoint, parse_policy, plan
from ckptmgr.policy import simulation
from ckptmgr.policy.simulation import made_up_history, simulate
from tests.support.policies import checkpoint

NOW = datetime(2026, 3, 2, tzinfo=UTC)
POLICIES = [
    "last(3)",
    "best(2, loss, min) | last(1)",
    "best(2, acc, max)",
    "every(3000) | within(5h)",
    "hourly(3) | daily(2)",
    "per_minutes(90)",
    "all",
]


@pytest.mark.parametrize("text", POLICIES)
@pytest.mark.parametrize("most_explained", [500, 0])
def test_replay_is_a_plan_after_each_save(
    text: str, most_explained: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "_MOST_EXPLAINED", most_explained)
    policy = parse_policy(text)
    history = made_up_history(
        policy,
        every=timedelta(minutes=20),
        span=timedelta(hours=20),
        steps=500,
        size_bytes=7,
        now=NOW,
    )
    present: list[Checkpoint] = []
    peaks = []
    for one in history:
        present = [*present, one]
        bytes_now = 7 * len(present)
        present = [*plan(present, policy, one.saved_at, is_one_line=True).kept]
        peaks.append((len(present), bytes_now))
    answer = simulate(history, policy, NOW)
    kept = plan(present, policy, NOW, is_one_line=True).kept
    assert [one.step for one in answer.plan.kept] == [one.step for one in kept]
    assert [one.checkpoint for one in answer.plan.verdicts] == history[::-1]
    assert (answer.peak_count, answer.peak_bytes) == (
        max(count for count, _ in peaks),
        max(size for _, size in peaks),
    )
    assert all(one.is_kept or one.nearest for one in answer.plan.verdicts)


def test_metric_that_comes_later_does_not_stop_the_replay() -> None:
    history = [checkpoint(step, metrics={"loss": 1 / step} if step > 3 else {}) for step in range(1, 7)]  # fmt: skip
    answer = simulate(history, parse_policy("best(1, loss, min)"), NOW)
    assert answer.plan.kept[0].step == 6
