# SPDX-License-Identifier: Apache-2.0
"""The history of a run from one retention to the next, from what changed in its directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.core.model import Checkpoint, Plan
from ckptmgr.policy.rules import Best, RetentionPolicy
from ckptmgr.store.store import Store

if TYPE_CHECKING:  # a run that keeps few checkpoints needs none of it
    from ckptmgr.policy.growing import GrowingHistory


@dataclass(frozen=True, kw_only=True)
class RetentionBasis:
    """Inputs beside the checkpoints; where one changes, the whole history is judged again.

    Attributes:
        policy: The retention policy.
        lineage: Ids of the runs whose checkpoints count.
        damaged: Number of checkpoints that are known to be damaged.
    """

    policy: RetentionPolicy
    lineage: Set[str]
    damaged: int


class Retained(NamedTuple):
    """Checkpoints that a policy drops.

    Attributes:
        dropped: The checkpoints that go.
        kept: Number of checkpoints of the run that stay.
        needed: The newest countable one of them, because of which the others may go.
        present: The dropped checkpoints, and others of the directory: all, or the needed one.
    """

    dropped: Sequence[Checkpoint]
    kept: int
    needed: Sequence[Checkpoint]
    present: Sequence[Checkpoint]


class FollowedHistory:
    """Finds the checkpoints that a policy drops without judging the whole history, where that is possible."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._basis: RetentionBasis | None = None
        self._history: GrowingHistory | None = None
        self._unranked: Sequence[Best] = ()

    def begin(
        self,
        basis: RetentionBasis,
        applied: RetentionPolicy,
        history: Sequence[Checkpoint],
        decided: Plan,
        *,
        protected: Mapping[Path, str],
    ) -> None:
        """Follow a history that was just judged, if the directory is followed.

        `applied` is the policy that the run can apply. `history` has the checkpoints listed as whole.
        """
        if not self._store.catalogue.is_kept:
            return
        from ckptmgr.policy.growing import GrowingHistory

        self._basis = basis
        self._unranked = [
            rule
            for rule in basis.policy.rules
            if isinstance(rule, Best) and rule not in applied.rules
        ]
        self._history = GrowingHistory(
            applied.rules, history, dropped=decided.dropped, protected=protected
        )

    def dropped(
        self,
        basis: RetentionBasis,
        known: Callable[[Checkpoint], Checkpoint],
        now: datetime,
        *,
        protected: Mapping[Path, str],
    ) -> Retained | None:
        """Return the checkpoints that the policy drops.

        None: the directory must be listed, and the whole history judged. `known` returns a listed
        checkpoint with the damage that is known of it.
        """
        changes = self._store.changes()
        history, self._history = self._history, None
        if changes is None or history is None or basis != self._basis:
            return None
        for path, one in changes.settled.items():
            if one is None or one.run_id not in basis.lineage:
                history.discard(path)
            elif any(rule.value_of(one) is not None for rule in self._unranked):
                return None
            else:
                history.put(known(one))
        others = [one for one in changes.others if one.run_id in basis.lineage]
        if any(one.is_countable for one in others):
            return None
        dropped = history.dropped(now, protected=protected)
        newest = history.newest
        if dropped is None or newest is None:
            return None
        self._history = history
        kept = len(history) + len(others) - len(dropped)
        return Retained(dropped, kept, [newest], [*dropped, newest])
