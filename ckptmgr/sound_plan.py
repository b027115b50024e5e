# SPDX-License-Identifier: Apache-2.0
"""A retention plan that leaves a whole checkpoint behind.

`retention.plan` believes what a listing says, and a listing looks at sizes, not at contents: the newest checkpoint may be
half of a file that another program was killed over, or have rotted since. So the newest one that would stay is read and
verified before anything older goes. A damaged one is not counted, like all that are known to be, and the rules are applied
again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ckptmgr.formats.detect import Kind, detect
from ckptmgr.model import Checkpoint, Plan, State
from ckptmgr.retention import RetentionPolicy, plan
from ckptmgr.store import Store
from ckptmgr.verify import Status, verify_checkpoint


def sound_plan(
    store: Store, history: Sequence[Checkpoint], policy: RetentionPolicy, now: datetime
) -> tuple[Plan, Mapping[Path, str]]:
    """Return what a policy would do to one series, and the damage that was found on the way.

    Nothing is read when nothing would be dropped.

    Args:
        store: The directory.
        history: The checkpoints of the series.
        policy: What to keep.
        now: The present time, UTC.

    Raises:
        UnsafePrune: The policy is refused; see `retention.plan`.
    """
    damaged: dict[Path, str] = {}
    while True:
        decided = plan_with(history, damaged, policy, now)
        newest = next((c for c in decided.kept if c.is_countable), None)
        problem = _damage(store, newest) if decided.dropped and newest is not None else None
        if newest is None or problem is None:
            return decided, damaged
        damaged[newest.path] = problem


def plan_with(
    history: Sequence[Checkpoint],
    damaged: Mapping[Path, str],
    policy: RetentionPolicy,
    now: datetime,
) -> Plan:
    """Return the plan for a series of which some checkpoints are known to be damaged."""
    marked = [
        replace(c, state=State.CORRUPT, problem=damaged[c.path]) if c.path in damaged else c
        for c in history
    ]
    return plan(marked, policy, now)


def _damage(store: Store, checkpoint: Checkpoint) -> str | None:
    # Without a key: digests and structure tell what is damaged, and nothing else is asked.
    answer = verify_checkpoint(store, checkpoint)
    if answer.status is Status.DAMAGED:
        return "; ".join(answer.problems)
    if answer.status is Status.UNREADABLE and not _is_foreign(store, checkpoint):
        return "; ".join(answer.problems)
    return None


def _is_foreign(store: Store, checkpoint: Checkpoint) -> bool:
    """Return whether another library wrote a file in a format that is never read here."""
    with contextlib.suppress(OSError), contextlib.closing(store.fs.open(checkpoint.path)) as raw:
        return detect(raw) is Kind.ZIP_PICKLE
    return False
