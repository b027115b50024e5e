# SPDX-License-Identifier: Apache-2.0
"""Forecast of a run: shortage of disk, memory or time, each with its numbers and a hint. Pure.

>>> demand = Demand(save_bytes=2 * 1024**3, keep=5, policy="last(5)", free_bytes=9 * 1024**3)
>>> print(Forecast(demand=demand))
a checkpoint takes 2.0 GiB; last(5) keeps at most 5
the disk has 9.0 GiB free, room for 4 more; 12.0 GiB are needed
! the disk has 9.0 GiB free, but last(5) and the save in progress need 12.0 GiB: 6 checkpoints of 2.0 GiB
  hint: free 3.0 GiB, or keep at most 3
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ckptmgr.core.sizes import size_text
from ckptmgr.policy.rules import RetentionPolicy

GOOD_SHARE = 0.03
"""Share of the time that saving may cost; the proposed interval costs this much."""
_MAX_SHARE = 0.1
_MIN_LOST_S = 5.0
_MIN_DURABLE_S = 1.0
_FEW_CHECKPOINTS = 10

ConcernKind = Literal["disk", "memory", "time", "backlog", "state"]


class Concern(NamedTuple):
    """A shortage: its kind, the numbers, and how to resolve it."""

    kind: ConcernKind
    text: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The configuration of a run, and the resources of its host."""

    save_bytes: int  # size of one checkpoint
    keep: int | None  # most checkpoints that retention keeps; None for any number
    policy: str  # the retention policy as text
    present_bytes: int = 0  # existing checkpoints of the run
    free_bytes: int | None = None  # of the disk; None when unknown
    staged_states: int = 0  # copies in memory at the same time; 0 for synchronous saves
    memory_bytes: int | None = None  # for the copies; None when unknown
    has_memory_budget: bool = (
        False  # whether `memory_bytes` is a budget, above which saves are refused
    )
    is_group_limited: bool = False  # whether a container or job sets the limit
    may_spill: bool = True  # whether a spill_directory would help (not with a key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Mean costs of the last saves."""

    saves: int  # all saves so far
    interval_s: float  # from one save to the next
    blocked_s: float  # for which one save held up the training
    durable_s: float  # for which one save worked until it was durable

    @property
    def share(self) -> float:
        """The share of the time for which saving held up the training."""
        return min(1.0, self.blocked_s / self.interval_s) if self.interval_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected needs and costs of a run; `pace` is None before the first saves."""

    demand: Demand
    pace: Pace | None = None

    @property
    def needed_bytes(self) -> int | None:
        """Free space for one checkpoint more than the run keeps; None without a bound."""
        demand = self.demand
        if demand.keep is None:
            return None
        return max(0, demand.save_bytes * (demand.keep + 1) - demand.present_bytes)

    @property
    def room(self) -> int | None:
        """How many more checkpoints fit the disk, or None when unknown."""
        if self.demand.free_bytes is None or self.demand.save_bytes == 0:
            return None
        return self.demand.free_bytes // self.demand.save_bytes

    @property
    def concerns(self) -> tuple[Concern, ...]:
        """The shortages, the worst first."""
        return (*self._disk(), *self._memory(), *self._time(), *self._backlog())

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        demand, pace = self.demand, self.pace
        keeps = "any number" if demand.keep is None else f"at most {demand.keep}"
        yield f"a checkpoint takes {size_text(demand.save_bytes)}; {demand.policy} keeps {keeps}"
        if demand.free_bytes is not None:
            needed = self.needed_bytes
            needs = "" if needed is None else f"; {size_text(needed)} are needed"
            room = "any number" if self.room is None else self.room
            yield f"the disk has {size_text(demand.free_bytes)} free, room for {room} more{needs}"
        if demand.staged_states:
            copies = size_text(demand.save_bytes * demand.staged_states)
            yield f"saving in the background copies {copies} into memory"
        if pace is not None:
            yield (
                f"saving holds up the training for {pace.share:.1%} of the time:"
                f" {pace.blocked_s:.3g} s every {pace.interval_s:.3g} s;"
                f" a checkpoint is durable after {pace.durable_s:.3g} s"
            )
        for concern in self.concerns:
            yield f"! {concern.text}\n  hint: {concern.hint}"

    def _disk(self) -> Iterator[Concern]:
        demand, needed, room = self.demand, self.needed_bytes, self.room
        if demand.free_bytes is None or room is None:
            return
        start, one = f"the disk has {size_text(demand.free_bytes)} free", demand.save_bytes
        if needed is None or demand.keep is None:
            if room < _FEW_CHECKPOINTS:
                more = f"room for {room} more checkpoints of {size_text(one)}"
                text = f"{start}, {more}, but {demand.policy} keeps any number"
                yield Concern("disk", text, "bound it, e.g. with last(5), or free space")
        elif needed > demand.free_bytes:
            fitting = (demand.free_bytes + demand.present_bytes) // one - 1
            way_out = f", or keep at most {fitting}" if fitting > 0 else ""
            yield Concern(
                "disk",
                f"{start}, but {demand.policy} and the save in progress need"
                f" {size_text(needed)}: {demand.keep + 1} checkpoints of {size_text(one)}",
                f"free {size_text(needed - demand.free_bytes)}{way_out}",
            )

    def _memory(self) -> Iterator[Concern]:
        demand = self.demand
        needed = demand.save_bytes * demand.staged_states
        if demand.memory_bytes is None or needed <= demand.memory_bytes:
            return
        states = "" if demand.staged_states == 1 else f" for {demand.staged_states} states"
        limit = "the memory budget is" if demand.has_memory_budget else "the system has"
        if demand.is_group_limited:
            limit = "the memory limit of this container or job leaves"
        hint = "save with async_save=False, which needs no copy"
        if demand.has_memory_budget:
            spill = ", give it a spill_directory," if demand.may_spill else ""
            hint = f"raise memory=MemoryConfig(host_budget_bytes=...){spill} or {hint}"
        yield Concern(
            "memory",
            f"saving in the background takes {size_text(needed)} of memory{states},"
            f" but {limit} {size_text(demand.memory_bytes)}",
            hint,
        )

    def _time(self) -> Iterator[Concern]:
        pace = self.pace
        if (
            pace is not None
            and pace.share > _MAX_SHARE
            and pace.blocked_s * pace.saves >= _MIN_LOST_S
        ):
            background = "" if self.demand.staged_states else "async_save='process', or "
            yield Concern(
                "time",
                f"saving costs {pace.share:.0%} of the training time: {pace.blocked_s:.3g} s every"
                f" {pace.interval_s:.3g} s",
                f"{background}save every {math.ceil(pace.blocked_s / GOOD_SHARE)} s or less often;"
                f" save_checkpoint_overhead={GOOD_SHARE} finds the interval by itself",
            )

    def _backlog(self) -> Iterator[Concern]:
        pace = self.pace
        if (
            pace is not None
            and self.demand.staged_states
            and pace.durable_s > max(pace.interval_s, _MIN_DURABLE_S)
        ):
            yield Concern(
                "backlog",
                f"a save takes {pace.durable_s:.3g} s until it is durable, but one is asked for"
                f" every {pace.interval_s:.3g} s",
                f"save every {math.ceil(2 * pace.durable_s)} s or less often, or to a faster disk;"
                " back_pressure= says what happens meanwhile: wait, skip or coalesce",
            )


def most_kept(policy: RetentionPolicy) -> int | None:
    """Return how many checkpoints a policy keeps at most, pinned ones aside; None for any number.

    >>> from ckptmgr.policy.rules import Best, Last
    >>> most_kept(Last(3) | Best(2, "loss", "min"))
    5
    """
    counts = [rule.most_kept for rule in policy.rules]
    known = [count for count in counts if count is not None]
    return max(1, sum(known)) if len(known) == len(counts) else None
