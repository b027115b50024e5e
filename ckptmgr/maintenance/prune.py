# SPDX-License-Identifier: Apache-2.0
"""Prune a place: propose a plan, and carry out exactly that plan or nothing.

Every line of runs is planned by itself (`prune_plan`). `retention.plan` believes the listing, which looks at sizes and
not at contents; so the newest checkpoint that would stay is verified before an older one goes. A
damaged one does not count, and the rules are applied again.

`carry_out` takes the leases of its series, plans it again, and stops where the plan differs from the
proposed one. Just before the first file goes it looks once more at the checkpoints that stay: their
names are not held, so one may be gone or saved again. Dropped checkpoints go to the trash; a later
prune removes them after a grace time, while the intact ones outside are still there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, StoreLocked, UnsafePrune
from ckptmgr.core.model import UNFINISHED, Checkpoint, Plan, State
from ckptmgr.core.place import Batch, Place
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.maintenance.prune_plan import Counted, Planner, PolicyOf, Undecided, policy_for
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store import applied
from ckptmgr.store.applied import Applied
from ckptmgr.store.trash_folder import DEFAULT_GRACE

_NONE: Mapping[Path, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlan:
    """Plan of a policy for one line of runs, or one series, and the problems of damaged checkpoints."""

    counted: Counted
    policy: RetentionPolicy
    plan: Plan
    damaged: Mapping[Path, str] = field(default_factory=lambda: _NONE, hash=False)

    @property
    def series(self) -> tuple[str, ...]:
        """The series of the checkpoints, the oldest first."""
        return self.counted.series

    @property
    def run_id(self) -> str | None:
        """The newest run of the line; None for files of no run, and for a whole series."""
        return self.counted.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Plan for a directory, for the time `now`; making it changed nothing.

    Attributes:
        policy: Text of the policy; of several, of each.
        undecided: Checkpoints that count together, and stay because nothing says what to keep, or
            because of an error, which is about them alone.
        by_series: Whether each series is counted by itself, instead of each line of runs.
        series: The only series of the plan; None for all.
        leftovers: Remains of interrupted saves, and files that live processes are writing.
        expired: Batches in the trash whose grace time is over.
        intact: Path of an expired batch to the verified checkpoints outside because of which it
            goes.
        spared: Those of them that stay, because a series has no intact checkpoint outside the
            trash.
        untouched: Entries that no policy counts, because their names are not understood.
    """

    now: datetime
    policy: str
    plans: tuple[LinePlan, ...]
    undecided: tuple[Undecided, ...] = ()
    by_series: bool = False
    series: str | None = None
    leftovers: tuple[Checkpoint, ...] = ()
    expired: tuple[Batch, ...] = ()
    intact: Mapping[Path, tuple[Checkpoint, ...]] = field(default_factory=dict, hash=False)
    spared: tuple[Batch, ...] = ()
    untouched: tuple[Checkpoint, ...] = ()

    @property
    def dropped(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that would go."""
        return tuple(c for one in self.plans for c in one.plan.dropped)

    @property
    def kept(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that would stay."""
        return tuple(c for one in self.plans for c in one.plan.kept)

    @property
    def refused(self) -> tuple[Exception, ...]:
        """The errors of the lines that are left out because of one."""
        return tuple(one.error for one in self.undecided if one.error is not None)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do; files of ranks are left to the saves of their run."""
        removable = [
            c
            for c in self.leftovers
            if c.state is State.LEFTOVER and parse_shard_name(c.name) is None
        ]
        return not (self.dropped or removable or self.expired)


def propose(
    place: Place,
    policy: RetentionPolicy | PolicyOf,
    planner: Planner,
    *,
    now: datetime,
    series: str | None = None,
    by_series: bool = False,
    grace: timedelta = DEFAULT_GRACE,
    found: Sequence[Checkpoint] | None = None,
) -> Proposal:
    """Return the plan of a prune at a time `now` (UTC); changes nothing.

    Where something would go, the newest one that would stay is verified; without a key, a container
    with a damaged header counts as intact. `grace` is how long the trash keeps a batch. `policy`
    may be a function: checkpoints that it has none for stay. `found` is the listing, where the
    caller has just made it; `carry_out` lists again. An error about one line leaves out that line
    (`Proposal.refused`).

    Raises:
        UnsafePrune: The policy is refused for every line; see `retention.plan`.
        CkptmgrError, OSError: Nothing can be planned because of it.
    """
    found = place.scan() if found is None else found
    plans: list[LinePlan] = []
    undecided: list[Undecided] = []
    for counted in planner.counted(found, series=series, by_series=by_series):
        try:
            own = policy_for(counted, policy)
            decided = None if own is None else planner.plan(counted, own, now)
        except (CkptmgrError, OSError) as error:
            undecided.append(Undecided(counted=counted, error=error))
            continue
        if own is None or decided is None:
            undecided.append(Undecided(counted=counted))
            continue
        plans.append(LinePlan(counted=counted, policy=own, plan=decided, damaged=planner.damaged))
    for one in undecided if not plans else ():
        if one.error is not None:
            raise one.error
    texts = [str(policy)] if isinstance(policy, RetentionPolicy) else [str(p.policy) for p in plans]
    batches = () if place.trash is None else place.trash.batches()
    old = [b for b in batches if now - b.thrown_at >= grace]
    intact = {b: _intact_outside(place, b, found, planner) for b in old}
    spared = tuple(b for b in old if None in intact[b])
    return Proposal(
        now=now,
        policy="; ".join(dict.fromkeys(texts)),
        plans=tuple(plans),
        undecided=tuple(undecided),
        by_series=by_series,
        series=series,
        leftovers=tuple(sorted((c for c in found if c.state in UNFINISHED), key=lambda c: c.name)),
        expired=tuple(b for b in old if b not in spared),
        intact={b.path: tuple(one for one in intact[b] if one) for b in old},
        spared=spared,
        untouched=tuple(planner.untouched(found)),
    )


def _intact_outside(
    place: Place, batch: Batch, found: Sequence[Checkpoint], planner: Planner
) -> list[Checkpoint | None]:
    """Return the newest one that is known to be intact outside the trash, for each line in a batch.

    None stands for a line that has none, or of which it cannot be found out.
    """
    trash = place.trash
    series_of = {} if trash is None else {c.path: trash.series_of(c) for c in batch.checkpoints}
    inside = [replace(one, series=series_of[one.path]) for one in batch.checkpoints]
    whole = [one for one in found if one.state not in UNFINISHED]
    paths = {one.path for one in inside}
    answer: list[Checkpoint | None] = []
    together = planner.counted([*inside, *whole], series=None, by_series=False)
    for line in (line for counted in together for line in counted.lines):
        if paths.isdisjoint(one.path for one in line.checkpoints):
            continue
        try:
            outside = [one for one in line.checkpoints if one.path not in paths]
            answer.append(planner.newest_intact(outside))
        except (CkptmgrError, OSError):
            answer.append(None)
    return answer


def carry_out(
    place: Place, proposal: Proposal, planner: Planner, *, at_once: bool = False
) -> Applied:
    """Carry out a proposal, line by line, each under the leases of its series.

    A line that is locked, has changed or fails is left alone and named in `failures`. `planner` has
    made the plans, and makes them again before anything goes. `at_once` removes for good instead of moving to the trash.
    """
    with REGISTERED.timed("prune", path=place.directory) as facts:
        done = Applied()
        into = None
        if place.trash is not None and not at_once:
            into = place.trash.new_batch_path(proposal.now)
        has_leftovers = any(c.state is State.LEFTOVER for c in proposal.leftovers)
        for one in proposal.plans:
            if one.plan.dropped or has_leftovers:
                kept = one.plan.kept
                applied.carry_out(
                    place,
                    one.plan.dropped,
                    done,
                    series=one.series,
                    needed=[c for c in kept if c.is_countable and c.path not in one.damaged],
                    into=into,
                    settle=place.settle,
                    check=partial(_check_unchanged, place, proposal, planner, one),
                )
        _empty_trash(place, proposal, done)
        try:
            done.notes += place.clean_up()
        except (CkptmgrError, OSError) as error:
            done.failures.append(error)
        facts |= done.facts(kept=len(proposal.kept))
    return done


def _empty_trash(place: Place, proposal: Proposal, done: Applied) -> None:
    for batch in proposal.expired:
        try:
            place.check_needed(proposal.intact[batch.path])
            if place.trash is not None:
                place.trash.discard(batch)
            done.notes.append(f"removed {len(batch.checkpoints)} from the trash for good")
        except StoreLocked:
            done.notes.append("left the trash alone: another process restores or removes it")
        except (CkptmgrError, OSError) as error:
            done.failures.append(error)


def _check_unchanged(place: Place, proposal: Proposal, planner: Planner, shown: LinePlan) -> None:
    """Raise UnsafePrune unless the plan of a line would be the same now."""
    now = planner.counted(place.scan(), series=proposal.series, by_series=proposal.by_series)
    same = next((one for one in now if one.is_as(shown.counted)), None)
    policy, at = shown.policy, proposal.now
    if same is None or planner.plan_with(same, shown.damaged, policy, at) != shown.plan:
        names = ", ".join(map(repr, shown.series))
        raise UnsafePrune(
            f"series {names} changed after its plan was made; nothing was removed from it",
            path=place.directory,
            hint="run prune again and look at the new plan",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoResult:
    """Result of an undo: restored checkpoints, and names that another checkpoint has taken."""

    restored: tuple[Checkpoint, ...]
    taken: tuple[str, ...]


def undo(place: Place, *, is_dry: bool = False) -> UndoResult:
    """Restore the last batch in the trash with a proven checkpoint to restore, or the last.

    With `is_dry` only report what would be restored.

    Raises:
        CheckpointNotFound: The trash is empty, or another process has just emptied it.
        StoreLocked: A live process writes one of the series; those before it are restored.
        OSError: From the disk; calling it again continues.
    """
    trash = place.trash
    filled = [] if trash is None else [batch for batch in trash.batches() if batch.checkpoints]
    if trash is None or not filled:
        raise CheckpointNotFound(
            "there is nothing to undo: the trash is empty", path=place.directory
        )
    # A batch of unproven checkpoints, or of names that are taken, must not hide an older one.
    batch = next((one for one in reversed(filled) if trash.can_restore(one)), filled[-1])
    restored: list[Checkpoint] = []
    taken: list[str] = []
    series_of = {c.name: trash.series_of(c) for c in batch.checkpoints}
    for series in sorted(set(series_of.values())):
        chosen = [c for c in batch.checkpoints if series_of[c.name] == series]
        if is_dry:
            refused = trash.taken_names(chosen)
        else:
            with place.lease(series):
                refused = trash.restore(batch, chosen)
        taken += refused
        restored += [
            replace(c, path=place.directory / c.name) for c in chosen if c.name not in refused
        ]
    if not is_dry:
        trash.tidy(batch.path)
    return UndoResult(restored=tuple(restored), taken=tuple(taken))
