# SPDX-License-Identifier: Apache-2.0
"""Recent states in memory, complete for a rollback: after a loss spike it takes milliseconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.errors import CheckpointNotFound, StagingExhausted
from ckptmgr.engine.snapshots import SnapshotCache
from ckptmgr.engine.staging import Ledger
from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.tree import FlatState
from ckptmgr.state.unflatten import ReadTensor

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentState:
    """A state in memory; `read` returns a tensor of it by name."""

    step: int
    epoch: int | None
    metrics: Mapping[str, float]
    skeleton: str
    read: ReadTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    skeleton: str
    epoch: int | None
    metrics: Mapping[str, float]


class RecentStates:
    """Keeps copies of the last states, within the budget of a `MemoryConfig`.

    Args:
        config: `snapshot_budget_bytes` and the eviction rules.
        clock: Seconds on any monotonic clock.
        ledger: The account of `host_budget_bytes`, shared with the staging of saves; a new one by
            default.
        most: How many states are kept at most; the oldest is dropped first.
    """

    def __init__(
        self,
        config: MemoryConfig | None,
        clock: Callable[[], float],
        *,
        ledger: Ledger | None = None,
        most: int,
    ) -> None:
        self._cache = SnapshotCache(config, clock, ledger=ledger)
        self._most = most
        self._notes: dict[int, _Note] = {}
        self._lock = threading.RLock()

    def put(
        self, step: int, flat: FlatState, *, epoch: int | None, metrics: Mapping[str, float]
    ) -> bool:
        """Copy a state; return whether there was room. Training goes on either way."""
        with self._lock:
            try:
                # Any snapshot may be evicted: a rollback to an older state only costs time.
                self._cache.put(step, flat.tensors, is_committed=True)
            except StagingExhausted as error:
                _LOG.warning("no snapshot of step %d: %s", step, error)
                return False
            self._notes[step] = _Note(skeleton=flat.skeleton, epoch=epoch, metrics=dict(metrics))
            for oldest in self._cache.steps[: -self._most]:
                self._cache.drop(oldest)
            held = self._cache.steps
            self._notes = {one: note for one, note in self._notes.items() if one in held}
        return True

    def give_way(self) -> bool:
        """Drop one state, because a save needs the memory; return whether there was one."""
        return self._cache.evict() is not None

    @property
    def steps(self) -> list[int]:
        """The steps of the states, in order."""
        return self._cache.steps

    def newest_of(self, steps: Sequence[int]) -> RecentState | None:
        """Return the newest available state of the given steps, or None."""
        if not steps:
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
            self._cache.drop_after(step)
            self._notes = {held: note for held, note in self._notes.items() if held <= step}

    def close(self) -> None:
        """Free the memory; the next `put` allocates it again."""
        self.drop_after(-1)
