# SPDX-License-Identifier: Apache-2.0
"""`save_only_kept`: a due save is passed over where retention would drop it at the next save. Pure.

>>> from pathlib import Path
>>> from datetime import UTC
>>> at = datetime(2026, 3, 1, tzinfo=UTC)
>>> def saved(step: int, loss: float) -> Checkpoint:
...     return Checkpoint(path=Path(f"net-{step}"), series="net", step=step, saved_at=at, size_bytes=1,
...                       sequence=step, metrics={"loss": loss})
>>> best = RetentionPolicy((Best(1, "loss", "min"),))
>>> passed_over(best, [saved(1, 0.5)], saved(2, 0.7), at).reason
'no rule would keep it: best (2nd of 1)'
>>> passed_over(best, [saved(1, 0.5)], saved(2, 0.3), at)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from ckptmgr.core.model import Checkpoint
from ckptmgr.policy.rules import Best, RetentionPolicy


class PassedOver(NamedTuple):
    """Why a due save is not made.

    Attributes:
        reason: A sentence for people.
        lacks_metric: Whether a rule ranks by a metric that was not given: the next step that has it
            is looked at in its place.
        is_doubtful: Whether a metric was missing or no number, which a warning reports.
    """

    reason: str
    lacks_metric: bool = False
    is_doubtful: bool = False


def needs_history(policy: RetentionPolicy, new: Checkpoint) -> bool:
    """Return whether earlier checkpoints can matter: not if each rule ranks by a missing metric."""
    return any(not isinstance(r, Best) or r.value_of(new) is not None for r in policy.rules)


def passed_over(
    policy: RetentionPolicy, history: Sequence[Checkpoint], new: Checkpoint, now: datetime
) -> PassedOver | None:
    """Return why no rule would keep a checkpoint that becomes the newest; None where one keeps it.

    `history` has the checkpoints of the run, in any order. That the newest one always stays does
    not count here.
    """
    earlier = sorted(
        (one for one in history if one.is_countable), key=lambda one: one.order, reverse=True
    )
    line = [new, *earlier]
    if any(rule.stays(line, now)[0] for rule in policy.rules):
        return None
    ranks = [rule for rule in policy.rules if isinstance(rule, Best)]
    missing = list(dict.fromkeys(r.metric for r in ranks if r.metric not in new.metrics))
    if missing:
        given = ", ".join(sorted(new.metrics)) or "none"
        reason = f"it was given no metric {' and no '.join(missing)} (given: {given})"
        return PassedOver(reason, lacks_metric=True, is_doubtful=True)
    found = [rule.judge(line, now)[0] for rule in policy.rules]
    details = ", ".join(one.reason.detail for one in found if one is not None)
    unranked = [f"{r.metric} is {new.metrics[r.metric]}" for r in ranks if r.value_of(new) is None]
    if unranked:
        return PassedOver(f"{', '.join(unranked)}, which never ranks", is_doubtful=True)
    return PassedOver(f"no rule would keep it: {details or policy}")
