# SPDX-License-Identifier: Apache-2.0
"""Plan the checkpoints of other tools: whole entries with understood names, each tool by itself.

Besides the newest complete one, these stay whatever the policy says: those that a note of the tool
points at, incomplete ones, which use up no slot, and entries whose names are not understood.
`last(n)` keeps the n newest by number and the n newest by time. Where anything would go, the newest
of both orders that would stay are checked first (`foreign.check`); one that is damaged counts as
incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from ckptmgr.core.model import Checkpoint, Plan, State
from ckptmgr.maintenance.foreign.check import verify_foreign
from ckptmgr.maintenance.foreign.model import ForeignCheckpoint
from ckptmgr.maintenance.foreign.place import ForeignPlace
from ckptmgr.maintenance.prune_plan import Counted, Planner, Spared, nothing_spared, plan_with
from ckptmgr.maintenance.verdict import Status
from ckptmgr.policy.lines import RunLine
from ckptmgr.policy.rules import Last, RetentionPolicy


class ForeignPlanner(Planner):
    """Plans the checkpoints of other tools."""

    def __init__(self, place: ForeignPlace, spared: Spared = nothing_spared) -> None:
        super().__init__(spared)
        self._place = place

    def counted(
        self, found: Sequence[Checkpoint], *, series: str | None, by_series: bool
    ) -> list[Counted]:
        """Return the tools with their checkpoints that have a step.

        Raises:
            UnsafePrune: A note of a tool names nothing.
        """
        del by_series
        self._place.check_pointers()
        tools = dict.fromkeys(one.format for one in found if series in (None, one.format))
        return [
            Counted(series=(tool,), lines=(RunLine(runs=(), checkpoints=checkpoints),))
            for tool in tools
            if (checkpoints := tuple(c for c in found if c.format == tool and c.has_step))
        ]

    def untouched(self, found: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        """Return the entries without a step."""
        return [one for one in found if not one.has_step]

    def plan_with(
        self,
        counted: Counted,
        damaged: Mapping[Path, str],
        policy: RetentionPolicy,
        now: datetime,
    ) -> Plan:
        """Return the plan for the checkpoints of a tool of which some are known to be damaged."""
        checkpoints = [one for one in counted.lines[0].checkpoints if one.path not in damaged]
        protected = _last_by_time(checkpoints, policy) | {
            one.checkpoint.path: f"{', '.join(one.named_by)} points here"
            for one in self._place.listing.checkpoints
            if one.named_by
        }
        return plan_with(
            counted,
            damaged,
            policy,
            now,
            self.spared,
            protected=protected,
            as_damaged=State.INCOMPLETE,
        )

    def heads(self, counted: Counted, decided: Plan) -> list[Checkpoint]:
        """Return the newest staying ones by number and by time, if anything goes."""
        kept = [one for one in decided.kept if one.is_countable and decided.dropped]
        return [*kept[:1], *_by_time(kept)[:1]]

    def problem_of(self, checkpoint: Checkpoint) -> str | None:
        """Check a complete checkpoint as far as its layout allows; return its problem, or None."""
        answer = verify_foreign(self._place.store.fs, ForeignCheckpoint(checkpoint=checkpoint))
        if answer.obstacle is not None:
            raise answer.obstacle
        return None if answer.status is Status.UNVERIFIED else "; ".join(answer.problems)


def _last_by_time(checkpoints: Sequence[Checkpoint], policy: RetentionPolicy) -> dict[Path, str]:
    """Return why those stay that are among the newest by time, and not among those by number.

    They are as many as `last` keeps. A second run that counts from the beginning has the lower
    numbers; the times of a copy say nothing: so neither order decides alone.
    """
    count = max([1, *(rule.count for rule in policy.rules if isinstance(rule, Last))])
    whole = [one for one in checkpoints if one.is_countable]
    by_number = {one.path for one in sorted(whole, key=lambda one: one.order)[-count:]}
    return {
        one.path: f"last {rank}/{count} by time, and the numbers have another order"
        for rank, one in enumerate(_by_time(whole)[:count], start=1)
        if one.path not in by_number
    }


def _by_time(checkpoints: Sequence[Checkpoint]) -> list[Checkpoint]:
    return sorted(checkpoints, key=lambda one: (one.saved_at, one.order), reverse=True)
