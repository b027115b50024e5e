# SPDX-License-Identifier: Apache-2.0
"""Forty policies over one history, with every reason, against a recorded table.

After a wanted change: `python -m tests.policy.test_retention_golden` writes the table anew; read the difference.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, UnsafePrune, parse_policy, plan
from ckptmgr.core.model import Pin, State
from tests.support.policies import NOW, checkpoint

_GOLDEN = Path(__file__).parent.parent / "golden" / "retention.json"
_POLICIES = (
    "last(1)",
    "last(3)",
    "last(100)",
    "best(1, loss, min)",
    "best(2, loss, min)",
    "best(2, acc, max)",
    "best(1, bleu, max)",
    "last(1) | best(1, bleu, max)",
    "every(1000)",
    "every(4000)",
    "every(10000)",
    "every(2500)",
    "every(1000000)",
    "within(1s)",
    "within(6h)",
    "within(2d)",
    "within(52w)",
    "hourly(1)",
    "hourly(24)",
    "hourly(3) | last(1)",
    "daily(1)",
    "daily(3)",
    "daily(7)",
    "daily(100)",
    "weekly(1)",
    "weekly(4)",
    "weekly(52)",
    "monthly(1)",
    "monthly(2)",
    "monthly(6)",
    "per_minutes(1)",
    "per_minutes(600)",
    "per_minutes(100000)",
    "pinned",
    "pinned | last(2)",
    "all",
    "all | last(1)",
    "last(3) | best(2, loss, min) | every(10000)",
    "last(2) | daily(7) | weekly(4) | monthly(6)",
    "last(1) | within(12h) | hourly(6) | best(1, acc, max)",
)


def _history() -> list[Checkpoint]:
    """A run of 24 saves over 70 days, with what happens to runs: a rollback, a pin, a divergence, damage, another series."""
    hours = [1680, 1500, 1300, 1200, 1000, 800, 700, 600, 500, 400, 300, 200]
    hours += [170, 150, 120, 96, 72, 60, 48, 30, 20, 10, 5, 0]
    run = []
    for number, age_h in enumerate(hours, start=1):
        metrics = {"loss": 2.0 / number + (number % 3) / 10, "acc": number / 30}
        if number in (7, 18):
            metrics["loss"] = float("nan")
        if number % 4 == 3:
            del metrics["acc"]
        run.append(
            checkpoint(
                1000 * number,
                age=timedelta(hours=age_h),
                metrics=metrics,
                pins=(Pin(name="paper", reason="paper table 2"),) if number == 7 else (),
                state={22: State.CORRUPT, 5: State.UNVERIFIED, 23: State.LEFTOVER}.get(
                    number, State.OK
                ),
                problem={22: "digest of range 3 differs", 5: None}.get(number),
            )
        )
    again = [checkpoint(step, attempt=1, age=timedelta(hours=3)) for step in (20000, 21000)]
    other = [
        checkpoint(1000 * age_h, series="other", age=timedelta(hours=age_h)) for age_h in (30, 60)
    ]
    return [*run, *again, *other]


def _table() -> dict[str, object]:
    """Return policy text to verdicts: `series/step.attempt keep|drop: details`, or the refusal."""
    table: dict[str, object] = {}
    for text in _POLICIES:
        try:
            answer = plan(_history(), parse_policy(text), NOW)
        except UnsafePrune as error:
            table[text] = str(error).splitlines()
            continue
        table[text] = [
            f"{v.checkpoint.series}/{v.checkpoint.step}.{v.checkpoint.attempt} "
            f"{'keep' if v.is_kept else 'drop'}: {'; '.join(r.detail for r in (*v.reasons, *v.nearest))}"
            for v in answer.verdicts
        ]
    return table


@pytest.mark.parametrize("text", _POLICIES)
def test_plan_equals_the_recorded_one(text: str) -> None:
    assert _table()[text] == json.loads(_GOLDEN.read_text(encoding="utf-8"))[text]


def test_recording_has_all_policies_and_no_other() -> None:
    assert tuple(json.loads(_GOLDEN.read_text(encoding="utf-8"))) == _POLICIES


if __name__ == "__main__":
    _GOLDEN.write_text(json.dumps(_table(), indent=1) + "\n", encoding="utf-8")
