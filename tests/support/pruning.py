# SPDX-License-Identifier: Apache-2.0
"""Prune a place as the command does: plan, and carry the plan out."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from ckptmgr.core.place import Place
from ckptmgr.maintenance import prune
from ckptmgr.maintenance.foreign.place import ForeignPlace
from ckptmgr.maintenance.foreign.planner import ForeignPlanner
from ckptmgr.maintenance.prune import Proposal
from ckptmgr.maintenance.prune_plan import Planner, PolicyOf, RunPlanner, Spared, nothing_spared
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.applied import Applied
from ckptmgr.store.store import Store


def planner_of(place: Place, stays: Spared = nothing_spared) -> Planner:
    """Return the planner of a place."""
    if isinstance(place, ForeignPlace):
        return ForeignPlanner(place, stays)
    assert isinstance(place, Store)
    return RunPlanner(place, stays)


def foreign_place(store: Store) -> ForeignPlace:
    """Return the checkpoints of other tools in a directory, listed."""
    place = ForeignPlace(store)
    place.scan()
    return place


def propose(
    place: Place,
    policy: RetentionPolicy | PolicyOf,
    *,
    now: datetime,
    stays: Spared = nothing_spared,
    **options: Any,
) -> Proposal:
    """Return the plan of a prune."""
    return prune.propose(place, policy, planner_of(place, stays), now=now, **options)


def carry_out(
    place: Place, proposal: Proposal, *, stays: Spared = nothing_spared, at_once: bool = False
) -> Applied:
    """Carry out a plan."""
    return prune.carry_out(place, proposal, planner_of(place, stays), at_once=at_once)
