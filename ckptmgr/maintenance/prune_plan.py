# SPDX-License-Identifier: Apache-2.0
"""Plans of a prune: which checkpoints count together, and how many are verified before any may go.

Each line of runs is counted by itself (`policy.lines`), in whatever series its runs saved. On
request each series is counted by itself; then the newest checkpoint of every line in it stays, too.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from ckptmgr.core.model import UNFINISHED, Checkpoint, Plan, State
from ckptmgr.core.trust import Trust
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.maintenance.verify import Status, verify_checkpoint
from ckptmgr.policy.lines import RunLine, lines_of
from ckptmgr.policy.retention import last_good, plan
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.store import Store

PolicyOf = Callable[["Counted"], RetentionPolicy | None]
"""Returns the policy of checkpoints that count together; None where nothing says what to keep."""

_NONE_PROTECTED: Mapping[Path, str] = MappingProxyType({})

Spared = Callable[[Checkpoint], str | None]
"""Says why a checkpoint must stay whatever the policy says, or None."""


def nothing_spared(checkpoint: Checkpoint) -> None:
    """Spare no checkpoint."""
    del checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Checkpoints that a policy counts together: a line of runs, or a whole series.

    Attributes:
        series: Their series, the oldest first.
        lines: The lines, each with those of its checkpoints that are counted here.
        is_series: Whether it is a whole series.
    """

    series: tuple[str, ...]
    lines: tuple[RunLine, ...]
    is_series: bool = False

    @property
    def run_id(self) -> str | None:
        """The newest run of the line; None for files of no run, and for a whole series."""
        return None if self.is_series else self.lines[0].run_id

    def is_as(self, other: Counted) -> bool:
        """Return whether it is the same line or series, in another listing."""
        return (self.run_id, self.series[:1]) == (other.run_id, other.series[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Undecided:
    """Checkpoints that count together and all stay.

    Attributes:
        error: Why their policy is refused, or cannot be found out; None where nothing says one.
    """

    counted: Counted
    error: Exception | None = None


def counted_together(
    found: Sequence[Checkpoint], *, series: str | None = None, by_series: bool = False
) -> list[Counted]:
    """Return the groups that a policy counts together: the lines of runs, or each series by itself.

    `series` leaves out the checkpoints of all others. The order is that of the names of the series
    that were saved in first, of equal names the line that committed last first.
    """
    whole = [c for c in found if c.state not in UNFINISHED]
    lines = lines_of(whole)
    if series is not None:
        cut = [(line, tuple(c for c in line.checkpoints if c.series == series)) for line in lines]
        lines = [replace(line, checkpoints=those) for line, those in cut if those]
    if by_series:
        return _by_series(lines)
    counted = [Counted(series=line.series, lines=(line,)) for line in lines]
    return sorted(counted, key=lambda one: one.series[0])


def _by_series(lines: Sequence[RunLine]) -> list[Counted]:
    parts: dict[str, list[RunLine]] = {}
    for line in lines:
        for name in line.series:
            own = tuple(c for c in line.checkpoints if c.series == name)
            parts.setdefault(name, []).append(replace(line, checkpoints=own))
    return [
        Counted(series=(name,), lines=tuple(parts[name]), is_series=True) for name in sorted(parts)
    ]


def policy_for(counted: Counted, policy: RetentionPolicy | PolicyOf) -> RetentionPolicy | None:
    """Return the policy of checkpoints that count together."""
    return policy if isinstance(policy, RetentionPolicy) else policy(counted)


class Planner(ABC):
    """Plans the checkpoints of a place; verifies as few as needed, each at most once.

    A listing looks at sizes and not at contents; so where anything would go, the newest that would
    stay are verified. A damaged one does not count, and the rules are applied again.
    """

    def __init__(self, spared: Spared = nothing_spared) -> None:
        self.spared = spared
        self._problems: dict[Path, str | None] = {}

    @property
    def damaged(self) -> Mapping[Path, str]:
        """Path to problem, of the checkpoints that were found damaged."""
        return {path: problem for path, problem in self._problems.items() if problem is not None}

    @abstractmethod
    def counted(
        self, found: Sequence[Checkpoint], *, series: str | None, by_series: bool
    ) -> list[Counted]:
        """Return the groups that a policy counts together."""

    def untouched(self, found: Sequence[Checkpoint]) -> Sequence[Checkpoint]:
        """Return those that no policy counts, because their names are not understood."""
        del found
        return ()

    @abstractmethod
    def plan_with(
        self,
        counted: Counted,
        damaged: Mapping[Path, str],
        policy: RetentionPolicy,
        now: datetime,
    ) -> Plan:
        """Return the plan for checkpoints of which some are known to be damaged."""

    @abstractmethod
    def heads(self, counted: Counted, decided: Plan) -> Sequence[Checkpoint]:
        """Return the staying checkpoints that must be intact if anything goes."""

    @abstractmethod
    def problem_of(self, checkpoint: Checkpoint) -> str | None:
        """Verify a checkpoint; return its damage, or None.

        Raises:
            OSError: A passing error of the disk; the checkpoint must not count as damaged.
        """

    def plan(self, counted: Counted, policy: RetentionPolicy, now: datetime) -> Plan:
        """Return the plan at a time `now`; verifies nothing unless a file would go.

        Raises:
            UnsafePrune: The policy is refused; see `retention.plan`.
            OSError: As `problem_of`.
        """
        while True:
            decided = self.plan_with(counted, self.damaged, policy, now)
            heads = self.heads(counted, decided)
            if not any([self._problem(one) is not None for one in heads]):
                return decided

    def newest_intact(self, history: Sequence[Checkpoint]) -> Checkpoint | None:
        """Return the newest intact checkpoint, or None; the newest is verified first."""
        countable = (c for c in history if c.is_countable)
        newest_first = sorted(countable, key=lambda c: c.order, reverse=True)
        return next((one for one in newest_first if self._problem(one) is None), None)

    def _problem(self, checkpoint: Checkpoint) -> str | None:
        if checkpoint.path not in self._problems:
            self._problems[checkpoint.path] = self.problem_of(checkpoint)
        return self._problems[checkpoint.path]


class RunPlanner(Planner):
    """Plans the lines of runs.

    Only a store with a key finds damage in the header of a container, which digests leave out.
    """

    def __init__(self, store: Store, spared: Spared = nothing_spared) -> None:
        super().__init__(spared)
        self._store = store
        # Digests and structure show damage; who wrote the checkpoint does not matter here.
        self._options = ReadOptions(trust=Trust(keys=store.trust.keys, allow_unencrypted=True))

    def counted(
        self, found: Sequence[Checkpoint], *, series: str | None, by_series: bool
    ) -> list[Counted]:
        """Return the lines of runs, or each series."""
        return counted_together(found, series=series, by_series=by_series)

    def plan_with(
        self,
        counted: Counted,
        damaged: Mapping[Path, str],
        policy: RetentionPolicy,
        now: datetime,
    ) -> Plan:
        """Return the plan for checkpoints of which some are known to be damaged."""
        return plan_with(counted, damaged, policy, now, self.spared)

    def heads(self, counted: Counted, decided: Plan) -> list[Checkpoint]:
        """Return the last good staying one of each line from which something goes."""
        staying = frozenset(one.path for one in decided.kept)
        countable = [
            [c for c in line.checkpoints[::-1] if c.is_countable and c.path in staying]
            for line in _marked(counted, self.damaged)
            if not all(one.path in staying for one in line.checkpoints)
        ]
        return [last_good(those) for those in countable if those]

    def problem_of(self, checkpoint: Checkpoint) -> str | None:
        """Verify a checkpoint; return its damage, or None."""
        return _damage(self._store, checkpoint, self._options)


def plan_with(
    counted: Counted,
    damaged: Mapping[Path, str],
    policy: RetentionPolicy,
    now: datetime,
    spared: Spared = nothing_spared,
    *,
    protected: Mapping[Path, str] = _NONE_PROTECTED,
    as_damaged: State = State.CORRUPT,
) -> Plan:
    """Return the plan for checkpoints of which some are known to be damaged.

    Where several lines are counted together, the newest of each one stays, and the `protected` ones
    do. `spared` says which others must stay: the rules count them, too. A damaged one counts in the
    state `as_damaged`.
    """
    lines = _marked(counted, damaged, as_damaged)
    several = lines if len(lines) > 1 else ()
    stay = {one.path: f"newest of {line}" for line in several if (one := line.newest)}
    for line in several:
        if one := line.newest_finite:
            stay.setdefault(one.path, f"newest of {line} that is finite")
    stay |= protected
    history = [one for line in lines for one in line.checkpoints]
    reasons = [(one, spared(one)) for one in history] if spared is not nothing_spared else []
    for one, why in reasons:
        if why is not None:
            stay.setdefault(one.path, why)
    return plan(history, policy, now, protected=stay, is_one_line=True)


def _marked(
    counted: Counted, damaged: Mapping[Path, str], state: State = State.CORRUPT
) -> Sequence[RunLine]:
    if not damaged:
        return counted.lines
    return [
        replace(
            line,
            checkpoints=tuple(
                replace(c, state=state, problem=damaged[c.path]) if c.path in damaged else c
                for c in line.checkpoints
            ),
        )
        for line in counted.lines
    ]


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
