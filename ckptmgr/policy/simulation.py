# SPDX-License-Identifier: Apache-2.0
"""Retention replayed over a history, save by save, and histories made up for that. Pure.

A run applies its policy after every save, at the time of that save. What that leaves can be less
than what one plan of the whole history keeps: a rule by age has dropped what another rule would
have taken later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint, Plan, Reason, Verdict
from ckptmgr.policy.retention import dropped, order_key, plan, without_unranked
from ckptmgr.policy.rules import Best, RetentionPolicy

MOST_SAVES = 100_000
_MOST_EXPLAINED = 500
"""Checkpoints of a history for which each verdict says how near the rules came."""
_MOST_JUDGED = 15_000_000
"""Checkpoints that are judged in a replay, over all saves: about 15 seconds."""
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_NOISE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result of a replay.

    Attributes:
        plan: A verdict for each checkpoint, newest first; of a dropped one that of the save after
            which it went.
        peak_count: Most checkpoints that were there at once, after a save.
        peak_bytes: Most bytes that they had; before the retention after a save.
    """

    plan: Plan
    peak_count: int
    peak_bytes: int


def simulate(history: Sequence[Checkpoint], policy: RetentionPolicy, now: datetime) -> Simulation:
    """Return the result of a run with this policy that saved the checkpoints of one line of runs.

    Where a rule `best` has no metric yet, the newest stay in its place, as in a run. At the end the
    policy is applied once more, at `now`.

    Raises:
        UnsafePrune: The policy is refused; see `retention.plan`.
        CkptmgrError: The history is too long for the rules.
    """
    present: dict[Path, Checkpoint] = {}
    gone: list[Verdict] = []
    peak_count = peak_bytes = size_bytes = judged = 0
    is_explained = len(history) <= _MOST_EXPLAINED
    for one in sorted(history, key=order_key):
        present[one.path] = one
        size_bytes += one.size_bytes
        peak_bytes = max(peak_bytes, size_bytes)
        judged += len(present)
        if judged > _MOST_JUDGED:
            raise CkptmgrError(
                f"{policy} keeps {len(present):,} after {len(gone) + len(present):,} of {len(history):,} saves, "
                "and looks at all of them after each save",
                hint="choose times that make fewer saves",
            )
        for verdict in _dropped([*present.values()], policy, one, is_explained=is_explained):
            gone.append(verdict)
            del present[verdict.checkpoint.path]
            size_bytes -= verdict.checkpoint.size_bytes
        peak_count = max(peak_count, len(present))
    last = plan([*present.values()], policy, now, is_one_line=True)
    verdicts = sorted([*gone, *last.verdicts], key=_place, reverse=True)
    return Simulation(
        plan=Plan(policy=last.policy, verdicts=tuple(verdicts)),
        peak_count=peak_count,
        peak_bytes=peak_bytes,
    )


def _dropped(
    present: Sequence[Checkpoint],
    policy: RetentionPolicy,
    saved: Checkpoint,
    *,
    is_explained: bool,
) -> list[Verdict]:
    """Return the verdicts of checkpoints that go after a save; `plan` explains them, but slowly."""
    applied, _ = without_unranked(present, policy)
    going = dropped(present, applied, saved.saved_at).checkpoints
    if going and is_explained:
        decided = plan(present, applied, saved.saved_at, is_one_line=True)
        return [verdict for verdict in decided.verdicts if not verdict.is_kept]
    why = Reason(rule=str(policy), detail=f"went after the save of step {saved.step}")
    return [Verdict(checkpoint=one, is_kept=False, nearest=(why,)) for one in going]


def made_up_history(
    policy: RetentionPolicy,
    *,
    every: timedelta,
    span: timedelta,
    steps: int,
    size_bytes: int,
    now: datetime,
) -> list[Checkpoint]:
    """Return the checkpoints of a run that saved every so often and ends now.

    The metrics of the rules `best` improve like one over the number of saves, with noise.

    Raises:
        CkptmgrError: There would be none, or more than 100,000.
    """
    count = span // every if every else 0
    if not 0 < count <= MOST_SAVES:
        raise CkptmgrError(
            f"that makes {count if every else 'endless'} saves",
            hint=f"choose times that make 1 to {MOST_SAVES:,} saves",
        )
    best = {rule.metric: rule.mode for rule in policy.rules if isinstance(rule, Best)}
    return [
        Checkpoint(
            path=Path(f"made-up/run-{steps * number}.ckpt"),
            series="run",
            step=steps * number,
            sequence=number,
            run_id="made-up",
            saved_at=now - every * (count - number),
            size_bytes=size_bytes,
            metrics={name: _metric(number, mode) for name, mode in best.items()},
        )
        for number in range(1, count + 1)
    ]


def _metric(number: int, mode: str) -> float:
    loss = 1 / math.sqrt(number) + _NOISE * (number * _GOLDEN_RATIO % 1)
    return loss if mode == "min" else 1 - loss


def _place(verdict: Verdict) -> tuple[object, ...]:
    return order_key(verdict.checkpoint)
