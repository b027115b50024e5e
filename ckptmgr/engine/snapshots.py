# SPDX-License-Identifier: Apache-2.0
"""Snapshots of recent states in memory, for a rollback that takes milliseconds instead of a load.

* A snapshot is a copy of its own: later training and saves do not change it.
* An uncommitted one (not durable as a checkpoint) is the only copy of its state and is never
  evicted.
* The cache never exceeds its budget: it makes room first, and refuses a state that does not fit
  with `StagingExhausted`.

>>> import numpy as np
>>> from ckptmgr.formats.tensor import tensor_from_array
>>> weights = np.zeros(2)
>>> with SnapshotCache() as cache:
...     for step in (1, 2, 3):
...         weights += 1
...         _ = cache.put(step, [tensor_from_array("w", weights)])
...     print(np.frombuffer(cache.newest(steps_back=2).items[0].content()))
[1. 1.]

The choice of the snapshot to evict is pure. The victim is cheap to restore, large and long unused:
the least of

    restore_seconds ** time_exponent * restore_bytes ** memory_exponent / size / staleness

Source: `Eviction heuristics`, Kirisame et al., Dynamic Tensor Rematerialization, ICLR 2021 (h =
cost / (memory * staleness)); the exponents are those of MegEngine's `DTRConfig`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isqrt, log
from typing import NamedTuple, Protocol

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import CheckpointNotFound, StagingExhausted
from ckptmgr.engine.staging import Ledger, StagedState, StagingPool
from ckptmgr.formats.tensor import Item
from ckptmgr.state.items import tensors_of

# Below the resolution of any clock or disk; keeps logarithms finite.
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Evictee:
    """A candidate for eviction.

    Attributes:
        step: Its step.
        size_bytes: Memory that its eviction frees.
        used_at_s: When it was put or last read, on the clock of `now_s`.
        is_pinned: Whether it must stay.
        restore_s: Seconds it would take to get the state again: a load, and the training from there.
        restore_bytes: Bytes that this would read.
    """

    step: int
    size_bytes: int
    used_at_s: float
    is_pinned: bool
    restore_s: float = 1.0
    restore_bytes: int = 0


class RestoreCost(NamedTuple):
    """The seconds to get a state again without its snapshot, and the bytes that this reads."""

    seconds: float
    read_bytes: int


class CostOf(Protocol):
    """Finds the present cost of a snapshot."""

    def __call__(self, step: int, /, *, size_bytes: int) -> RestoreCost:
        """Return the cost for a step, whose snapshot has that size."""
        ...


def choose_victim(
    snapshots: Sequence[Evictee], config: MemoryConfig, *, now_s: float
) -> int | None:
    """Return the step of the snapshot to evict, or None when none may be evicted.

    The configuration has the exponents, the size below which nothing is evicted, and whether only
    about sqrt(n) candidates are scored.
    """
    candidates = [
        snapshot
        for snapshot in snapshots
        if not snapshot.is_pinned and snapshot.size_bytes >= config.smallest_evictee_bytes
    ]
    if config.is_sampling:
        candidates = candidates[:: max(1, isqrt(len(candidates)))]
    if not candidates:
        return None
    victim = min(candidates, key=lambda snapshot: log_score(snapshot, config, now_s=now_s))
    return victim.step


def log_score(snapshot: Evictee, config: MemoryConfig, *, now_s: float) -> float:
    """Return the logarithm of the score, which has the same order and cannot overflow.

    >>> old, new = (
    ...     Evictee(step=1, size_bytes=9, restore_s=1, restore_bytes=9, used_at_s=at, is_pinned=False)
    ...     for at in (0, 50)
    ... )
    >>> log_score(old, MemoryConfig(), now_s=60) < log_score(new, MemoryConfig(), now_s=60)
    True
    """
    return (
        config.restore_time_exponent * log(max(snapshot.restore_s, _LEAST_S))
        + config.restore_memory_exponent * log(max(snapshot.restore_bytes, 1))
        - log(max(snapshot.size_bytes, 1))
        - log(max(now_s - snapshot.used_at_s, _LEAST_S))
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A state in the cache.

    Attributes:
        step: Its step.
        items: Its tensors and texts; their contents are views, valid until it is evicted or
            dropped.
        size_bytes: Bytes of all contents.
        is_committed: Whether it is durable as a checkpoint, too.
    """

    step: int
    items: Sequence[Item]
    size_bytes: int
    is_committed: bool


@dataclass(slots=True)
class _Entry:
    state: StagedState
    evictee: Evictee


class SnapshotCache:
    """Holds recent states. Safe to use from several threads.

    `ledger` is that of the staging pool, when both share a budget. `cost_of` finds the costs when a
    snapshot is to be evicted; without it all cost the same.
    """

    def __init__(
        self,
        config: MemoryConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        ledger: Ledger | None = None,
        cost_of: CostOf | None = None,
    ) -> None:
        self._cost_of = cost_of
        self._config = MemoryConfig() if config is None else config
        self._clock = clock
        # Evicting must free memory at once, and several snapshots exist at the same time.
        own = replace(self._config, staging_place=self._config.snapshot_place, allocation="exact")
        self._pool = StagingPool(own, ledger=ledger, most_states=None)
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> SnapshotCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def resident_bytes(self) -> int:
        """Bytes of all snapshots."""
        with self._lock:
            return sum(entry.state.size_bytes for entry in self._entries.values())

    @property
    def steps(self) -> list[int]:
        """The steps of the snapshots, in order."""
        with self._lock:
            return sorted(self._entries)

    def put(self, step: int, items: Sequence[Item], *, is_committed: bool = False) -> list[int]:
        """Copy a state into the cache; replace one of the same step. Return the evicted steps.

        `is_committed`: the state is durable already; otherwise call `commit` later.

        Raises:
            StagingExhausted: There is not enough room, even after every possible eviction. A
                snapshot of the same step stays.
        """
        size = sum(tensor.spec.size_bytes for item in items for tensor in tensors_of(item))
        with self._lock:
            evicted = self._make_room(size, replaced=step)
            state, more = self._stage(items)
            self._drop(step)
            evictee = Evictee(
                step=step,
                size_bytes=size,
                used_at_s=self._clock(),
                is_pinned=not is_committed,
            )
            self._entries[step] = _Entry(state, evictee)
            return evicted + more

    def commit(self, step: int) -> None:
        """Allow eviction of a snapshot that is durable as a checkpoint; ignore an evicted one."""
        with self._lock:
            entry = self._entries.get(step)
            if entry is not None:
                entry.evictee = replace(entry.evictee, is_pinned=False)

    def get(self, step: int) -> Snapshot:
        """Return the snapshot of a step.

        Raises:
            CheckpointNotFound: It was never put, or evicted.
        """
        with self._lock:
            entry = self._entries.get(step)
            if entry is None:
                raise CheckpointNotFound(
                    f"there is no snapshot of step {step} in memory; there are {self.steps}",
                    hint="load the checkpoint instead, or raise snapshot_budget_bytes"
                    " (eviction_threshold)",
                )
            entry.evictee = replace(entry.evictee, used_at_s=self._clock())
            return Snapshot(
                step=step,
                items=entry.state.items,
                size_bytes=entry.state.size_bytes,
                is_committed=not entry.evictee.is_pinned,
            )

    def newest(self, *, steps_back: int = 0) -> Snapshot:
        """Return the newest snapshot that is at least `steps_back` steps older than the newest one.

        Raises:
            CheckpointNotFound: There is none.
        """
        with self._lock:
            steps = self.steps
            old = [step for step in steps if step <= steps[-1] - steps_back]
            if not old:
                raise CheckpointNotFound(
                    f"no snapshot is {steps_back} steps old; there are {steps}",
                    hint="load a checkpoint instead",
                )
            return self.get(old[-1])

    def drop(self, step: int) -> None:
        """Drop the snapshot of a step, if there is one."""
        with self._lock:
            self._drop(step)

    def drop_after(self, step: int) -> None:
        """Drop the snapshots of later steps: after a rollback their branch is abandoned."""
        with self._lock:
            for later in [known for known in self._entries if known > step]:
                self._drop(later)

    def evict(self) -> int | None:
        """Drop the best victim; return its step, or None when none may be evicted."""
        with self._lock:
            return self._evict(keep=None)

    def close(self) -> None:
        """Drop everything. Calling it again is fine."""
        with self._lock:
            for step in list(self._entries):
                self._drop(step)
            self._pool.close()

    def _make_room(self, size_bytes: int, *, replaced: int) -> list[int]:
        budget = self._config.snapshot_budget_bytes
        evicted: list[int] = []
        if budget is None:
            return evicted
        while self._resident_without(replaced) + size_bytes > budget:
            step = self._evict(keep=replaced)
            if step is None:
                raise StagingExhausted(
                    f"a snapshot of {size_bytes} bytes does not fit: of {budget} bytes"
                    f" {self.resident_bytes} are taken by steps {self.steps}, and none of them may"
                    " be evicted",
                    hint="raise snapshot_budget_bytes (eviction_threshold), or put fewer snapshots"
                    " between commits",
                )
            evicted.append(step)
        return evicted

    def _resident_without(self, step: int) -> int:
        entry = self._entries.get(step)
        return self.resident_bytes - (0 if entry is None else entry.state.size_bytes)

    def _stage(self, items: Sequence[Item]) -> tuple[StagedState, list[int]]:
        evicted: list[int] = []
        while True:
            try:
                return self._pool.stage(items), evicted
            except StagingExhausted:
                # The budget shared with staging is full: restorable snapshots are evicted.
                step = self._evict(keep=None)
                if step is None:
                    raise
                evicted.append(step)

    def _evict(self, *, keep: int | None) -> int | None:
        entries = self._entries.items()
        evictees = [self._priced(entry.evictee) for step, entry in entries if step != keep]
        victim = choose_victim(evictees, self._config, now_s=self._clock())
        if victim is not None:
            self._drop(victim)
        return victim

    def _priced(self, evictee: Evictee) -> Evictee:
        if self._cost_of is None:
            return evictee
        cost = self._cost_of(evictee.step, size_bytes=evictee.size_bytes)
        return replace(evictee, restore_s=cost.seconds, restore_bytes=cost.read_bytes)

    def _drop(self, step: int) -> None:
        entry = self._entries.pop(step, None)
        if entry is not None:
            entry.state.release()
