# SPDX-License-Identifier: Apache-2.0
"""Recent states in memory, complete for a rollback: after a loss spike it takes milliseconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import CheckpointNotFound, StagingExhausted
from ckptmgr.engine.budget import Ledger
from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.tree import FlatState

if TYPE_CHECKING:  # only a run with snapshots needs them
    from ckptmgr.engine.snapshots import CostOf, SnapshotCache
    from ckptmgr.state.stored_arrays import ReadTensor

_LOG = logging.getLogger(__name__)


class RecentState(NamedTuple):
    """A state in memory; `read` returns a tensor of it by name."""

    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    skeleton: str
    read: ReadTensor


class _Note(NamedTuple):
    skeleton: str
    epoch: int | None
    metrics: Mapping[str, float]


class RecentStates:
    """Keeps copies of the last states, within the budget of a `MemoryConfig`.

    At most `most` states are kept; the oldest is dropped first. Otherwise the eviction depends on
    the cost of getting a state again, and on how long it was not used. `ledger` is the account of
    `host_budget_bytes`, shared with the staging of saves.
    """

    def __init__(
        self,
        config: MemoryConfig | None,
        clock: Callable[[], float],
        *,
        ledger: Ledger | None = None,
        cost_of: CostOf | None = None,
        most: int,
    ) -> None:
        self._config, self._clock, self._ledger = config, clock, ledger
        self._cost_of = cost_of
        self._cache: SnapshotCache | None = None  # until the first state
        self._most = most
        self._notes: dict[int, _Note] = {}
        self._lock = threading.RLock()

    def put(
        self, step: int, flat: FlatState, *, epoch: int | None, metrics: Mapping[str, float]
    ) -> bool:
        """Copy a state; return whether there was room. Training goes on either way."""
        with self._lock:
            cache = self._cache = self._cache or self._new_cache()
            try:
                # Any snapshot may be evicted: a rollback to an older state only costs time.
                cache.put(step, flat.tensors, is_committed=True)
            except StagingExhausted as error:
                _LOG.warning("no snapshot of step %d: %s", step, error)
                return False
            self._notes[step] = _Note(skeleton=flat.skeleton, epoch=epoch, metrics=dict(metrics))
            for oldest in cache.steps[: -self._most]:
                cache.drop(oldest)
            held = cache.steps
            self._notes = {one: note for one, note in self._notes.items() if one in held}
        return True

    def _new_cache(self) -> SnapshotCache:
        from ckptmgr.engine.snapshots import SnapshotCache

        return SnapshotCache(self._config, self._clock, ledger=self._ledger, cost_of=self._cost_of)

    def give_way(self) -> bool:
        """Drop one state, because a save needs the memory; return whether there was one."""
        return self._cache is not None and self._cache.evict() is not None

    @property
    def steps(self) -> list[int]:
        """The steps of the states, in order."""
        return [] if self._cache is None else self._cache.steps

    def newest_of(self, steps: Sequence[int]) -> RecentState | None:
        """Return the newest available state of the given steps, or None."""
        if not steps or self._cache is None:
            return None
        with self._lock:
            try:
                snapshot = self._cache.get(max(steps))
            except CheckpointNotFound:  # pragma: no cover - evicted by another thread just now
                return None
            note = self._notes[snapshot.step]
        tensors = {item.spec.name: item for item in snapshot.items if isinstance(item, Tensor)}

        def read(name: str) -> np.ndarray:
            tensor = tensors[name]
            flat = np.frombuffer(tensor.content(), tensor.spec.dtype.to_numpy())
            return flat.reshape(tensor.spec.shape)

        return RecentState(
            step=snapshot.step,
            epoch=note.epoch,
            metrics=note.metrics,
            skeleton=note.skeleton,
            read=read,
        )

    def drop_after(self, step: int) -> None:
        """Drop the states after `step`: they belong to an abandoned branch."""
        with self._lock:
            if self._cache is not None:
                self._cache.drop_after(step)
            self._notes = {held: note for held, note in self._notes.items() if held <= step}

    def close(self) -> None:
        """Free the memory; the next `put` allocates it again."""
        self.drop_after(-1)
