# SPDX-License-Identifier: Apache-2.0
"""Prune a directory: propose a plan, and carry out exactly that plan or nothing.

Every line of runs is planned by itself (`prune_plan`). `retention.plan` believes the listing, which looks at sizes and
not at contents; so the newest checkpoint that would stay is verified before an older one goes. A
damaged one does not count, and the rules are applied again.

`carry_out` takes the leases of its series, plans it again, and stops where the plan differs from the
proposed one. Just before the first file goes it looks once more at the checkpoints that stay: their
names are not held, so one may be gone or saved again. Dropped checkpoints go to the trash; a later
prune removes them after a grace time, while the intact ones outside are still there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError, StoreLocked, UnsafePrune
from ckptmgr.core.model import UNFINISHED, Checkpoint, Plan, State
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.maintenance.prune_plan import (
    Counted,
    PolicyOf,
    Spared,
    Undecided,
    VerifiedPlanner,
    counted_together,
    nothing_spared,
    plan_with,
    policy_for,
)
from ckptmgr.observe.events import Facts
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.policy.lines import lines_of
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store import trash
from ckptmgr.store.store import Store
from ckptmgr.store.trash import Batch
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
        stays: Says which checkpoints stay whatever the policy says.
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
    stays: Spared = nothing_spared

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


@dataclass(slots=True, kw_only=True)
class PruneResult:
    """Result of a prune.

    Attributes:
        removed: The checkpoints that went.
        batch: Their folder in the trash, or None when they were removed for good.
        notes: Leftovers and expired trash that were removed, one sentence each.
        failures: What could not be done.
    """

    removed: list[Checkpoint] = field(default_factory=list)
    batch: Path | None = None
    notes: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def facts(self, *, kept: int) -> Facts:
        """Return the fields of the event `prune`."""
        facts: Facts = {
            "figures": {
                "kept": kept,
                "dropped": len(self.removed),
                "freed_bytes": sum(one.size_bytes for one in self.removed),
            },
            "notes": (*(f"dropped {one.name}" for one in self.removed), *self.notes),
        }
        if self.failures:
            facts["error"] = "; ".join(map(str, self.failures))
            facts["error_type"] = type(self.failures[0]).__name__
        return facts


def propose(
    store: Store,
    policy: RetentionPolicy | PolicyOf,
    *,
    now: datetime,
    series: str | None = None,
    by_series: bool = False,
    grace: timedelta = DEFAULT_GRACE,
    stays: Spared = nothing_spared,
    found: Sequence[Checkpoint] | None = None,
) -> Proposal:
    """Return the plan of a prune at a time `now` (UTC); changes nothing.

    Where something would go, the newest one that would stay is verified; without a key, a container
    with a damaged header counts as intact. `grace` is how long the trash keeps a batch, and
    `stays` which checkpoints must stay. `policy` may be a function: checkpoints
    that it has none for stay. `found` is the listing, where the caller has just made it;
    `carry_out` lists again. An error about one line leaves out that line (`Proposal.refused`).

    Raises:
        UnsafePrune: The policy is refused for every line; see `retention.plan`.
        CkptmgrError, OSError: Nothing can be planned because of it.
    """
    found = store.scan() if found is None else found
    planner = VerifiedPlanner(store, stays)
    plans: list[LinePlan] = []
    undecided: list[Undecided] = []
    for counted in counted_together(found, series=series, by_series=by_series):
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
    old = [b for b in trash.batches(store) if now - b.thrown_at >= grace]
    intact = {b: _intact_outside(store, b, found, planner) for b in old}
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
        stays=stays,
    )


def _intact_outside(
    store: Store, batch: Batch, found: Sequence[Checkpoint], planner: VerifiedPlanner
) -> list[Checkpoint | None]:
    """Return the newest one that is known to be intact outside the trash, for each line in a batch.

    None stands for a line that has none, or of which it cannot be found out.
    """
    inside = [replace(one, series=_series_of(store, one)) for one in batch.checkpoints]
    whole = [one for one in found if one.state not in UNFINISHED]
    paths = {one.path for one in inside}
    answer: list[Checkpoint | None] = []
    for line in lines_of([*inside, *whole]):
        if paths.isdisjoint(one.path for one in line.checkpoints):
            continue
        try:
            outside = [one for one in line.checkpoints if one.path not in paths]
            answer.append(planner.newest_intact(outside))
        except (CkptmgrError, OSError):
            answer.append(None)
    return answer


def carry_out(store: Store, proposal: Proposal, *, at_once: bool = False) -> PruneResult:
    """Carry out a proposal, line by line, each under the leases of its series.

    A line that is locked, has changed or fails is left alone and named in `failures`. `at_once`
    removes for good instead of moving to the trash.
    """
    with REGISTERED.timed("prune", path=store.directory) as facts:
        outcome = _carry_out(store, proposal, at_once=at_once)
        facts |= outcome.facts(kept=len(proposal.kept))
    return outcome


def _carry_out(store: Store, proposal: Proposal, *, at_once: bool) -> PruneResult:
    outcome = PruneResult()
    into = trash.new_batch_path(store, proposal.now)
    has_leftovers = any(c.state is State.LEFTOVER for c in proposal.leftovers)
    for one in proposal.plans:
        if one.plan.dropped or has_leftovers:
            try:
                with contextlib.ExitStack() as leases:
                    for series in sorted(one.series):
                        leases.enter_context(store.lease(series))
                        trash.finish(store, series)
                        outcome.notes += store.recover(series)
                    _prune_line(store, proposal, one, outcome, None if at_once else into)
            except (CkptmgrError, OSError) as error:
                outcome.failures.append(error)
    for batch in proposal.expired:
        try:
            store.check_needed(proposal.intact[batch.path])
            trash.discard_batch(store, batch)
            outcome.notes.append(f"removed {len(batch.checkpoints)} from the trash for good")
        except StoreLocked:
            outcome.notes.append("left the trash alone: another process restores or removes it")
        except (CkptmgrError, OSError) as error:
            outcome.failures.append(error)
    return outcome


def _prune_line(
    store: Store, proposal: Proposal, shown: LinePlan, outcome: PruneResult, into: Path | None
) -> None:
    if not shown.plan.dropped:
        return
    check_unchanged(store, proposal, shown)
    dropped = shown.plan.dropped
    needed = [one for one in shown.plan.kept if one.is_countable and one.path not in shown.damaged]
    if into is None:
        outcome.failures += store.remove(dropped, needed=needed)
    else:
        outcome.batch = into
        outcome.failures += trash.throw_away(store, dropped, into, needed=needed)
    staying = trash.taken_names(store, dropped)
    outcome.removed += [c for c in dropped if c.name not in staying]


def check_unchanged(store: Store, proposal: Proposal, shown: LinePlan) -> None:
    """Raise UnsafePrune unless the plan of a line would be the same now."""
    now = counted_together(store.scan(), series=proposal.series, by_series=proposal.by_series)
    same = next((one for one in now if one.is_as(shown.counted)), None)
    policy, at = shown.policy, proposal.now
    if same is None or plan_with(same, shown.damaged, policy, at, proposal.stays) != shown.plan:
        names = ", ".join(map(repr, shown.series))
        raise UnsafePrune(
            f"series {names} changed after its plan was made; nothing was removed from it",
            path=store.directory,
            hint="run prune again and look at the new plan",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoResult:
    """Result of an undo: restored checkpoints, and names that another checkpoint has taken."""

    restored: tuple[Checkpoint, ...]
    taken: tuple[str, ...]


def undo(store: Store, *, is_dry: bool = False) -> UndoResult:
    """Restore the last batch in the trash with a proven checkpoint to restore, or the last.

    With `is_dry` only report what would be restored.

    Raises:
        CheckpointNotFound: The trash is empty, or another process has just emptied it.
        StoreLocked: A live process writes one of the series; those before it are restored.
        OSError: From the disk; calling it again continues.
    """
    filled = [batch for batch in trash.batches(store) if batch.checkpoints]
    if not filled:
        raise CheckpointNotFound(
            "there is nothing to undo: the trash is empty", path=store.directory
        )
    # A batch of unproven checkpoints, or of names that are taken, must not hide an older one.
    batch = next((one for one in reversed(filled) if _can_restore(store, one)), filled[-1])
    restored: list[Checkpoint] = []
    taken: list[str] = []
    series_of = {c.name: _series_of(store, c) for c in batch.checkpoints}
    for series in sorted(set(series_of.values())):
        chosen = [c for c in batch.checkpoints if series_of[c.name] == series]
        if is_dry:
            refused = trash.taken_names(store, chosen)
        else:
            with store.lease(series):
                refused = trash.restore_from_trash(store, batch, chosen)
        taken += refused
        restored += [
            replace(c, path=store.directory / c.name) for c in chosen if c.name not in refused
        ]
    if not is_dry:
        trash.tidy(store, batch.path)
    return UndoResult(restored=tuple(restored), taken=tuple(taken))


def _can_restore(store: Store, batch: Batch) -> bool:
    proven = [c for c in batch.checkpoints if not c.is_unproven or _has_manifest_outside(store, c)]
    return len(trash.taken_names(store, proven)) < len(proven)


def _has_manifest_outside(store: Store, checkpoint: Checkpoint) -> bool:
    """Return whether a proven manifest describes data that an interrupted prune moved alone."""
    with contextlib.suppress(CkptmgrError, OSError):
        return checkpoint.is_bare and store.read_manifest(checkpoint.name) is not None
    return False


def _series_of(store: Store, checkpoint: Checkpoint) -> str:
    # Only data that was moved alone is bare in the trash: its manifest is still in the directory.
    return trash.series_of(store, checkpoint) if checkpoint.is_bare else checkpoint.series
