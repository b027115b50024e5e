# SPDX-License-Identifier: Apache-2.0
"""Retention plans that leave a whole checkpoint behind.

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

from ckptmgr.core.model import Checkpoint, Plan, State
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.maintenance.verify import Status, verify_checkpoint
from ckptmgr.policy.retention import RetentionPolicy, plan
from ckptmgr.store.store import Store


class SoundPlans:
    """Plans the series of a directory; reads as few checkpoints as needed, each at most once.

    Args:
        store: The directory. Only a key finds damage in the header of a container, which the digests leave out.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Digests and structure tell what is damaged of all others; nothing else is asked.
        self._options = ReadOptions(trust=Trust(keys=store.trust.keys, allow_unencrypted=True))
        self._problems: dict[Path, str | None] = {}

    @property
    def damaged(self) -> Mapping[Path, str]:
        """Path to problem, of the checkpoints that were found damaged."""
        return {path: problem for path, problem in self._problems.items() if problem is not None}

    def plan(self, history: Sequence[Checkpoint], policy: RetentionPolicy, now: datetime) -> Plan:
        """Return what a policy would do to one series; nothing is read when nothing would be dropped.

        Args:
            history: The checkpoints of the series.
            policy: What to keep.
            now: The present time, UTC.

        Raises:
            UnsafePrune: The policy is refused; see `retention.plan`.
            OSError: The disk does not give a checkpoint now that may be whole; it must not count as damaged.
        """
        while True:
            decided = plan_with(history, self.damaged, policy, now)
            newest = next((c for c in decided.kept if c.is_countable), None)
            if not decided.dropped or newest is None or self._problem(newest) is None:
                return decided

    def has_whole(self, history: Sequence[Checkpoint]) -> bool:
        """Return whether a checkpoint of a series is whole, looking from the newest on."""
        countable = (c for c in history if c.is_countable)
        newest_first = sorted(countable, key=lambda c: c.order, reverse=True)
        return any(self._problem(checkpoint) is None for checkpoint in newest_first)

    def _problem(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.path not in self._problems:
            self._problems[checkpoint.path] = _damage(self._store, checkpoint, self._options)
        return self._problems[checkpoint.path]


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


def _damage(store: Store, checkpoint: Checkpoint, options: ReadOptions) -> str | None:
    answer = verify_checkpoint(store, checkpoint, options=options)
    if answer.obstacle is not None:
        raise answer.obstacle
    is_damaged = answer.status in (Status.DAMAGED, Status.MISSING)
    if answer.status is Status.WRONG_KEY and options.trust.keys is not None:
        # The key proves its manifest and does not open the file: somebody has changed the header.
        is_damaged = checkpoint.state is State.OK
    if answer.status is Status.UNREADABLE:
        is_damaged = not _is_foreign(store, checkpoint)
    return "; ".join(answer.problems) if is_damaged else None


def _is_foreign(store: Store, checkpoint: Checkpoint) -> bool:
    """Return whether another library wrote a file in a format that is never read here."""
    with contextlib.suppress(OSError), contextlib.closing(store.fs.open(checkpoint.path)) as raw:
        return detect(raw) is Kind.ZIP_PICKLE
    return False
