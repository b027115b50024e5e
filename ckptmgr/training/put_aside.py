# SPDX-License-Identifier: Apache-2.0
"""`PutAside`: the state of the last step as it was when a pass of `batches` ended.

After its loop a program loads its best weights, or swaps in averaged ones: the exit of the manager
saves the step, and not what came after it. Nothing of the program runs between the end of a step
and the end of its pass, which ask for the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ckptmgr.core.arguments import is_function
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.formats.tensor import Tensor
from ckptmgr.training.companions import Companion
from ckptmgr.training.forecast import available_memory_bytes

if TYPE_CHECKING:
    from ckptmgr.engine.engine import SaveEngine
    from ckptmgr.engine.snapshots import SnapshotCache
    from ckptmgr.state.tree import FlatState
    from ckptmgr.training.history import RunPast, UnsavedStep

_FREE_S = 1e-3  # a copy that takes less is never too dear
_SHARE = 0.01  # of the time since the last one


@dataclass(frozen=True, slots=True)
class HeldState:
    """A copy of a state, given to a save in its place, and the texts beside its skeleton."""

    flat: FlatState
    texts: Mapping[str, str]


class PutAside(Companion):
    """Copies the state when a pass ends, where that is cheap enough and there is room.

    Args:
        past: The past of the run, with its last step.
        engine: Has the budget of the memory.
        flatten: Flattens a state.
        texts: Method that returns the texts beside the skeleton of a flat state; held weakly, because
            its object holds the lease of the series.
        monotonic: Seconds on any clock.
        available_bytes: Memory of the machine that is available; None for unknown.
    """

    def __init__(
        self,
        past: RunPast,
        engine: SaveEngine,
        flatten: Callable[[object], FlatState],
        texts: Callable[[FlatState, int], dict[str, str]],
        monotonic: Callable[[], float] = time.monotonic,
        available_bytes: Callable[[], int | None] = available_memory_bytes,
    ) -> None:
        self._past, self._engine, self._available_bytes = past, engine, available_bytes
        self._flatten, self._texts, self._monotonic = flatten, WeakMethod(texts), monotonic
        self._cache: SnapshotCache | None = None
        self._held: tuple[int, HeldState] | None = None
        self._cost_s = 0.0
        self._at = monotonic()

    def pass_ended(self, step: int) -> None:
        """Copy the state of `step`, unless it is saved."""
        last, now = self._past.unsaved, self._monotonic()
        if last is None or last.step != step or is_function(last.state):
            return
        if self._past.progress.last.step == step or self._is_dear(now):
            return
        try:
            flat = self._flatten(last.state)
            if not self._has_room(flat.size_bytes):
                return
            cache = self._cache = self._cache or self._new_cache()
            cache.put(step, flat.tensors)
        except CkptmgrError:  # no budget, or no state that can be stored: the exit raises it
            return
        copied = [one for one in cache.get(step).items if isinstance(one, Tensor)]
        texts = self._texts()
        if texts is None:  # the manager is gone
            return
        self._held = step, HeldState(replace(flat, tensors=copied, objects=()), texts(flat, step))
        self._at = self._monotonic()
        self._cost_s = self._at - now

    def _is_dear(self, now: float) -> bool:
        return self._cost_s > max(_FREE_S, _SHARE * (now - self._at))

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether the machine and the control group keep as much memory as the copy takes.

        A run that saves in the foreground has never needed a second state in memory.
        """
        rooms = (self._available_bytes(), self._engine.ledger.group_room_bytes())
        return all(room is None or 2 * size_bytes <= room for room in rooms)

    def _new_cache(self) -> SnapshotCache:
        from ckptmgr.engine.snapshots import SnapshotCache

        return SnapshotCache(self._engine.memory, ledger=self._engine.ledger)

    def state_of(self, last: UnsavedStep) -> object:
        """Return the state to save for the last step: the copy, where the live one has changed since."""
        if self._held is None or self._held[0] != last.step:
            return last.state
        held = self._held[1]
        try:
            is_same = _are_equal(self._flatten(last.state), held.flat)
        except Exception:  # the program has left it so that it cannot be read
            is_same = False
        return last.state if is_same else held

    def step_ended(self, step: int) -> None:
        """Give the memory back."""
        if self._held is not None:
            self._drop()

    def closing(self) -> None:
        """Give the memory back."""
        self._drop()

    def _drop(self) -> None:
        self._held = None
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _are_equal(one: FlatState, other: FlatState) -> bool:
    from ckptmgr.state.read_back import Tags

    tags = Tags()
    return one.skeleton == other.skeleton and all(
        mine.spec == its.spec and tags.of(mine.content()) == tags.of(its.content())
        for mine, its in zip(one.tensors, other.tensors, strict=True)
    )
