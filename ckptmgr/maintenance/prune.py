# SPDX-License-Identifier: Apache-2.0
"""Prune a directory: propose a plan, and carry out exactly that plan or nothing.

Every series is planned by itself. `retention.plan` believes the listing, which looks at sizes and
not at contents; so the newest checkpoint that would stay is verified before an older one goes. A
damaged one does not count, and the rules are applied again.

`carry_out` takes the lease of a series, plans it again, and stops where the plan differs from the
proposed one. Dropped checkpoints go to the trash; a later prune removes them after a grace time.
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
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.maintenance.verify import Status, verify_checkpoint
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.policy.retention import plan
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store import trash
from ckptmgr.store.store import Store
from ckptmgr.store.trash import Batch
from ckptmgr.store.trash_folder import DEFAULT_GRACE


class VerifiedPlanner:
    """Plans the series of a directory; verifies as few checkpoints as needed, each at most once.

    Only a store with a key finds damage in the header of a container, which digests leave out.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        # Digests and structure show damage; who wrote the checkpoint does not matter here.
        self._options = ReadOptions(trust=Trust(keys=store.trust.keys, allow_unencrypted=True))
        self._problems: dict[Path, str | None] = {}

    @property
    def damaged(self) -> Mapping[Path, str]:
        """Path to problem, of the checkpoints that were found damaged."""
        return {path: problem for path, problem in self._problems.items() if problem is not None}

    def plan(self, history: Sequence[Checkpoint], policy: RetentionPolicy, now: datetime) -> Plan:
        """Return the plan for one series at a time `now`; verifies nothing unless a file would go.

        Raises:
            UnsafePrune: The policy is refused; see `retention.plan`.
            OSError: A passing error of the disk; the checkpoint must not count as damaged.
        """
        while True:
            decided = plan_with(history, self.damaged, policy, now)
            newest = next((c for c in decided.kept if c.is_countable), None)
            if not decided.dropped or newest is None or self._problem(newest) is None:
                return decided

    def newest_intact(self, history: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the newest intact checkpoint of a series, or None; the newest is verified first."""
        countable = (c for c in history if c.is_countable)
        newest_first = sorted(countable, key=lambda c: c.order, reverse=True)
        return next((one for one in newest_first if self._problem(one) is None), None)

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
        # The key authenticates its manifest and does not open the file: the header was changed.
        is_damaged = checkpoint.state is State.OK
    if answer.status is Status.UNREADABLE:
        is_damaged = not _is_foreign(store, checkpoint)
    return "; ".join(answer.problems) if is_damaged else None


def _is_foreign(store: Store, checkpoint: Checkpoint) -> bool:
    """Return whether another library wrote the file in a format that this one never reads."""
    with contextlib.suppress(OSError), contextlib.closing(store.fs.open(checkpoint.path)) as raw:
        return detect(raw) is Kind.ZIP_PICKLE
    return False


_NONE: Mapping[Path, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPlan:
    """Plan for one series, and the problems of the checkpoints that were found damaged, by path."""

    series: str
    plan: Plan
    damaged: Mapping[Path, str] = field(default_factory=lambda: _NONE, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Plan for a directory, for the time `now`; making it changed nothing.

    Attributes:
        leftovers: Remains of interrupted saves, and files that live processes are writing.
        expired: Batches in the trash whose grace time is over.
        intact: Checkpoints outside the trash, verified, because of which the expired batches go.
        spared: Those of them that stay, because a series has no intact checkpoint outside the
            trash.
    """

    now: datetime
    policy: RetentionPolicy
    plans: tuple[SeriesPlan, ...]
    leftovers: tuple[Checkpoint, ...] = ()
    expired: tuple[Batch, ...] = ()
    intact: tuple[Checkpoint, ...] = ()
    spared: tuple[Batch, ...] = ()

    @property
    def dropped(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that would go."""
        return tuple(c for one in self.plans for c in one.plan.dropped)

    @property
    def kept(self) -> tuple[Checkpoint, ...]:
        """All checkpoints that would stay."""
        return tuple(c for one in self.plans for c in one.plan.kept)

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


def propose(
    store: Store,
    policy: RetentionPolicy,
    *,
    now: datetime,
    series: str | None = None,
    grace: timedelta = DEFAULT_GRACE,
) -> Proposal:
    """Return the plan of a prune at a time `now` (UTC); changes nothing.

    Where something would go, the newest one that would stay is verified; without a key, a container
    with a damaged header counts as intact. `grace` is how long the trash keeps a batch.

    Raises:
        UnsafePrune: The policy is refused; see `retention.plan`.
    """
    found = store.scan()
    planner = VerifiedPlanner(store)
    plans = []
    for name in sorted({c.series for c in _finished(found, series)}):
        decided = planner.plan(_finished(found, name), policy, now)
        plans.append(SeriesPlan(series=name, plan=decided, damaged=planner.damaged))
    old = [b for b in trash.batches(store) if now - b.thrown_at >= grace]
    intact = {b: _intact_outside(store, b, found, planner) for b in old}
    spared = tuple(b for b in old if None in intact[b])
    return Proposal(
        now=now,
        policy=policy,
        plans=tuple(plans),
        leftovers=tuple(sorted((c for c in found if c.state in UNFINISHED), key=lambda c: c.name)),
        expired=tuple(b for b in old if b not in spared),
        intact=tuple({one.path: one for b in old for one in intact[b] if one}.values()),
        spared=spared,
    )


def _intact_outside(
    store: Store, batch: Batch, found: Sequence[Checkpoint], planner: VerifiedPlanner
) -> list[Checkpoint | None]:
    """Return the newest intact checkpoint outside the trash, or None, for each series in a batch."""
    names = {_series_of(store, checkpoint) for checkpoint in batch.checkpoints}
    return [planner.newest_intact(_finished(found, name)) for name in sorted(names)]


def _finished(found: Sequence[Checkpoint], series: str | None) -> list[Checkpoint]:
    return [c for c in found if c.state not in UNFINISHED and series in (None, c.series)]


def carry_out(store: Store, proposal: Proposal, *, at_once: bool = False) -> PruneResult:
    """Carry out a proposal, series by series, each under its lease.

    A series that is locked, has changed or fails is left alone and named in `failures`. `at_once`
    removes for good instead of moving to the trash.
    """
    with REGISTERED.timed("prune", path=store.directory) as facts:
        outcome = _carry_out(store, proposal, at_once=at_once)
        facts["figures"] = {
            "kept": len(proposal.kept),
            "dropped": len(outcome.removed),
            "freed_bytes": sum(c.size_bytes for c in outcome.removed),
        }
        facts["notes"] = (*(f"dropped {c.name}" for c in outcome.removed), *outcome.notes)
        if outcome.failures:
            facts["error"] = "; ".join(map(str, outcome.failures))
            facts["error_type"] = type(outcome.failures[0]).__name__
    return outcome


def _carry_out(store: Store, proposal: Proposal, *, at_once: bool) -> PruneResult:
    outcome = PruneResult()
    into = trash.new_batch_path(store, proposal.now)
    has_leftovers = any(c.state is State.LEFTOVER for c in proposal.leftovers)
    for one in proposal.plans:
        if one.plan.dropped or has_leftovers:
            try:
                with store.lease(one.series):
                    trash.finish(store, one.series)
                    outcome.notes += store.recover(one.series)
                    _prune_series(store, proposal, one, outcome, None if at_once else into)
            except (StoreLocked, UnsafePrune, OSError) as error:
                outcome.failures.append(error)
    for batch in proposal.expired:
        try:
            _check_may_go(store, proposal, batch)
            trash.discard_batch(store, batch)
            outcome.notes.append(f"removed {len(batch.checkpoints)} from the trash for good")
        except StoreLocked:
            outcome.notes.append("left the trash alone: another process restores or removes it")
        except (UnsafePrune, OSError) as error:
            outcome.failures.append(error)
    return outcome


def _check_may_go(store: Store, proposal: Proposal, batch: Batch) -> None:
    """Raise UnsafePrune unless the checkpoints because of which a batch goes are still there."""
    series = {_series_of(store, checkpoint) for checkpoint in batch.checkpoints}
    store.check_needed(one for one in proposal.intact if one.series in series)


def _prune_series(
    store: Store, proposal: Proposal, shown: SeriesPlan, outcome: PruneResult, into: Path | None
) -> None:
    if not shown.plan.dropped:
        return
    history = _finished(store.scan(), shown.series)
    fresh = plan_with(history, shown.damaged, proposal.policy, proposal.now)
    if fresh != shown.plan:
        raise UnsafePrune(
            f"series {shown.series!r} changed after its plan was made; nothing was removed from it",
            path=store.directory,
            hint="run prune again and look at the new plan",
        )
    dropped = shown.plan.dropped
    needed = [one for one in shown.plan.kept if one.is_countable and one.path not in shown.damaged]
    if into is None:
        outcome.failures += store.remove(dropped, needed=needed)
    else:
        outcome.batch = into
        outcome.failures += trash.throw_away(store, dropped, into, needed=needed)
    staying = trash.taken_names(store, dropped)
    outcome.removed += [c for c in dropped if c.name not in staying]


@dataclass(frozen=True, slots=True, kw_only=True)
class UndoResult:
    """Result of an undo: restored checkpoints, and names that another checkpoint has taken."""

    restored: tuple[Checkpoint, ...]
    taken: tuple[str, ...]


def undo(store: Store, *, is_dry: bool = False) -> UndoResult:
    """Restore the last batch in the trash with a proven checkpoint to restore, or the last.

    With `is_dry` only report what would be restored.

    Raises:
        CheckpointNotFound: The trash is empty.
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
