# SPDX-License-Identifier: Apache-2.0
"""Prune the checkpoints of other tools: whole entries with understood names, into a trash of theirs.

The rules are those of `policy.retention`, each tool counted by itself. Besides the newest complete
one, these stay whatever the policy says: those that a note of the tool points at, incomplete ones,
which use up no slot, and entries whose names are not understood. `last(n)` keeps the n newest by
number and the n newest by time. Where anything would go, the newest of both orders that would stay
are checked first (`foreign.check`); one that is damaged counts as incomplete.

A note that cannot be read, or that names no checkpoint of the directory, stops the prune: the
checkpoints that it protects are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from ckptmgr.core.errors import StoreLocked, UnsafePrune
from ckptmgr.core.model import Checkpoint, Plan, State
from ckptmgr.core.printable import quoted
from ckptmgr.maintenance.foreign import trash
from ckptmgr.maintenance.foreign.check import verify_foreign
from ckptmgr.maintenance.foreign.layouts import TITLES
from ckptmgr.maintenance.foreign.listing import ForeignListing, list_foreign
from ckptmgr.maintenance.foreign.trash import ForeignBatch
from ckptmgr.maintenance.prune import LinePlan, Proposal, PruneResult
from ckptmgr.maintenance.prune_plan import Counted
from ckptmgr.maintenance.verdict import Status
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.policy.lines import RunLine
from ckptmgr.policy.retention import plan
from ckptmgr.policy.rules import Last, RetentionPolicy
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import DEFAULT_GRACE


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignProposal:
    """Plan for the checkpoints of other tools; making it changed nothing.

    Attributes:
        shown: The plan as commands show it, one line for each tool.
        expired: Batches whose grace time is over, and of whose tools a checked one stays.
        spared: Other batches whose grace time is over.
        untouched: Entries whose names are not understood.
    """

    shown: Proposal
    expired: tuple[ForeignBatch, ...] = ()
    spared: tuple[ForeignBatch, ...] = ()
    untouched: tuple[Checkpoint, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.shown.dropped or self.expired)


def propose_foreign(
    store: Store,
    listing: ForeignListing,
    policy: RetentionPolicy,
    *,
    now: datetime,
    grace: timedelta = DEFAULT_GRACE,
) -> ForeignProposal:
    """Return the plan of a prune at a time `now` (UTC); changes nothing.

    Raises:
        UnsafePrune: The policy is refused (`retention.plan`), or a note of a tool names nothing.
        OSError: A passing error of the disk.
    """
    check_pointers(store, listing)
    plans: list[LinePlan] = []
    damaged: dict[Path, str] = {}
    intact: set[str] = set()
    for tool in listing.tools:
        decided, found_damaged = _checked_plan(store, listing, tool, policy, now)
        damaged |= found_damaged
        plans.append(
            LinePlan(
                counted=_counted(listing, tool, damaged),
                policy=policy,
                plan=decided,
                damaged=dict(found_damaged),
            )
        )
    old = [b for b in trash.foreign_batches(store) if now - b.thrown_at >= grace]
    if old:
        intact = {tool for tool in listing.tools if _has_intact(store, listing, tool, damaged)}
    expired = tuple(batch for batch in old if batch.tools <= intact)
    return ForeignProposal(
        shown=Proposal(now=now, policy=str(policy), plans=tuple(plans)),
        expired=expired,
        spared=tuple(batch for batch in old if batch not in expired),
        untouched=tuple(
            one.checkpoint for one in listing.checkpoints if not one.checkpoint.has_step
        ),
    )


def check_pointers(store: Store, listing: ForeignListing) -> None:
    """Raise UnsafePrune unless each note of a tool names a checkpoint that is listed."""
    names = {one.checkpoint.name for one in listing.checkpoints}
    for tool, pointers in listing.pointers.items():
        for pointer in pointers:
            if pointer.target in names:
                continue
            what = "cannot be read"
            if pointer.target is not None:
                what = f"names {quoted(pointer.target)}, which is no checkpoint here"
            raise UnsafePrune(
                f"{pointer.source} of {TITLES[tool]} {what}; nothing was removed",
                path=store.directory,
                hint="what it protects is not known; put it right, or remove checkpoints by hand",
            )


def _counted(listing: ForeignListing, tool: str, damaged: Mapping[Path, str]) -> Counted:
    checkpoints = tuple(
        replace(one.checkpoint, state=State.INCOMPLETE, problem=damaged[one.checkpoint.path])
        if one.checkpoint.path in damaged
        else one.checkpoint
        for one in listing.checkpoints
        if one.checkpoint.format == tool and one.checkpoint.has_step
    )
    return Counted(series=(tool,), lines=(RunLine(runs=(), checkpoints=checkpoints),))


def _plan(
    listing: ForeignListing,
    tool: str,
    policy: RetentionPolicy,
    now: datetime,
    damaged: Mapping[Path, str],
) -> Plan:
    protected = {
        one.checkpoint.path: f"{', '.join(one.named_by)} points here"
        for one in listing.checkpoints
        if one.named_by
    }
    checkpoints = _counted(listing, tool, damaged).lines[0].checkpoints
    for path, why in _last_by_time(checkpoints, policy).items():
        protected.setdefault(path, why)
    return plan(checkpoints, policy, now, protected=protected, is_one_line=True)


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


def _checked_plan(
    store: Store, listing: ForeignListing, tool: str, policy: RetentionPolicy, now: datetime
) -> tuple[Plan, Mapping[Path, str]]:
    """Return the plan of a tool, and the damaged ones that it does not count."""
    damaged: dict[Path, str] = {}
    checked: set[Path] = set()
    while True:
        decided = _plan(listing, tool, policy, now, damaged)
        kept = [one for one in decided.kept if one.is_countable]
        newest = {one.path for one in (*kept[:1], *_by_time(kept)[:1])} - checked
        if not decided.dropped or not newest:
            return decided, damaged
        checked |= newest
        for path in newest:
            problem = _damage(store, listing, path)
            if problem is not None:
                damaged[path] = problem


def _damage(store: Store, listing: ForeignListing, path: Path) -> str | None:
    """Return the problem of a complete checkpoint, or None.

    Raises:
        OSError: A passing error of the disk.
    """
    foreign = next(one for one in listing.checkpoints if one.checkpoint.path == path)
    answer = verify_foreign(store.fs, foreign)
    if answer.obstacle is not None:
        raise answer.obstacle
    return None if answer.status is Status.UNVERIFIED else "; ".join(answer.problems)


def _has_intact(
    store: Store, listing: ForeignListing, tool: str, damaged: Mapping[Path, str]
) -> bool:
    """Return whether the newest one of a tool that counts passes its check."""
    its = [one.checkpoint for one in listing.checkpoints if one.checkpoint.format == tool]
    whole = [one for one in its if one.is_countable and one.path not in damaged]
    newest = max(whole, key=lambda one: one.order, default=None)
    return newest is not None and _damage(store, listing, newest.path) is None


def carry_out_foreign(
    store: Store, proposal: ForeignProposal, *, at_once: bool = False
) -> PruneResult:
    """Carry out a proposal, or nothing if the directory has changed since; see `prune.carry_out`."""
    with REGISTERED.timed("prune", path=store.directory) as facts:
        outcome = PruneResult()
        try:
            _carry_out(store, proposal, outcome, at_once=at_once)
        except (StoreLocked, UnsafePrune, OSError) as error:
            outcome.failures.append(error)
        facts |= outcome.facts(kept=len(proposal.shown.kept))
    return outcome


def _carry_out(
    store: Store, proposal: ForeignProposal, outcome: PruneResult, *, at_once: bool
) -> None:
    shown = proposal.shown
    with trash.locked(store):
        listing = list_foreign(store.fs, store.directory)
        check_pointers(store, listing)
        for one in shown.plans:
            again = _plan(listing, one.series[0], one.policy, shown.now, one.damaged)
            if again != one.plan:
                raise UnsafePrune(
                    "the directory changed after the plan was made; nothing was removed",
                    path=store.directory,
                    hint="run prune again and look at the new plan",
                )
        if shown.dropped:
            into = trash.new_batch_path(store, shown.now)
            names = [one.name for one in shown.dropped]
            outcome.failures += trash.throw_away(store, names, into)
            outcome.removed += [one for one in shown.dropped if store.fs.status(one.path) is None]
            if at_once:
                trash.discard(store, into)
            else:
                outcome.batch = into
        for batch in proposal.expired:
            trash.discard(store, batch.path)
            outcome.notes.append(f"removed {len(batch.checkpoints)} from the trash for good")
