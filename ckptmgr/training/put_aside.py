# SPDX-License-Identifier: Apache-2.0
"""`PutAside`: the state of the last step as it was when a pass of `batches` ended, or a validation began.

After its loop a program loads its best weights, or swaps in averaged ones: the exit of the manager, or a
stop, saves the step, and not what came after it. Nothing of the program runs between the end of a
step and the end of its pass, which ask for the next batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ckptmgr.core.arguments import is_function, resolve_state
from ckptmgr.formats.tensor import Tensor
from ckptmgr.training.companions import Companion
from ckptmgr.training.forecast import available_memory_bytes

if TYPE_CHECKING:
    from ckptmgr.engine.engine import SaveEngine
    from ckptmgr.engine.snapshots import SnapshotCache
    from ckptmgr.state.tree import FlatState
    from ckptmgr.training.history import RunPast, UnsavedStep

# A copy of less is always made, so that the state that the exit saves does not depend on the time.
_SMALL_BYTES = 16 << 20
_FREE_S = 0.05  # a copy that takes less is never too dear
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
        self.taken: Callable[[], None] = lambda: None  # called after each copy

    def pass_ended(self, step: int) -> None:
        """Copy the state of `step`, unless it is saved."""
        last = self._past.unsaved
        if last is not None and last.step == step:
            self.take(last)

    def take_last(self) -> None:
        """Copy the state of the last step, unless it is saved; also one that a function returns."""
        if self._past.unsaved is not None:
            self.take(self._past.unsaved)

    def take(self, last: UnsavedStep, *, is_urgent: bool = False) -> HeldState | None:
        """Copy the state of a step and return it; None if it is saved, or the copy would be too dear.

        If it `is_urgent`, another thread asks, and the copy may cost anything. Slices are left alone:
        to gather them takes all ranks.
        """
        now, step = self._monotonic(), last.step
        is_cheap = is_urgent or self._is_cheap(now)
        if self._past.progress.last.step == step or (is_function(last.state) and not is_cheap):
            return None
        try:
            flat = self._flatten(resolve_state(last.state))
            is_small = self._is_small(flat.size_bytes)
            if not ((is_small or is_cheap) and self._has_room(flat.size_bytes, is_small=is_small)):
                return None
            if is_urgent and flat.slices:
                return None
            copied = _copies(flat.tensors) if is_small else self._staged(step, flat.tensors)
        except Exception:  # no budget, or no state that can be stored: the exit raises it
            return None
        texts = self._texts()
        if texts is None:  # the manager is gone
            return None
        held = HeldState(replace(flat, tensors=copied, objects=()), texts(flat, step))
        self._held = step, held
        self._at = self._monotonic()
        took_s = self._at - now
        self._cost_s = min(took_s, self._cost_s or took_s)  # others only make it slower
        self.taken()
        return held

    def _staged(self, step: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        from ckptmgr.engine.snapshots import SnapshotCache

        if self._cache is None:
            self._cache = SnapshotCache(self._engine.memory, ledger=self._engine.ledger)
        self._cache.put(step, tensors)
        return [one for one in self._cache.get(step).items if isinstance(one, Tensor)]

    def held_of(self, last: UnsavedStep) -> HeldState | None:
        """Return the copy of the state of a step, if there is one."""
        return None if self._held is None or self._held[0] != last.step else self._held[1]

    def _is_cheap(self, now: float) -> bool:
        return self._cost_s <= max(_FREE_S, _SHARE * (now - self._at))

    def _is_small(self, size_bytes: int) -> bool:
        budget = self._engine.ledger.host_room_bytes()
        return size_bytes <= _SMALL_BYTES and (budget is None or size_bytes <= budget)

    def _has_room(self, size_bytes: int, *, is_small: bool) -> bool:
        """Return whether the machine and the control group keep as much memory as the copy takes.

        A run that saves in the foreground has never needed a second state in memory. The control
        group is not asked about a small one, which takes less time.
        """
        group = None if is_small else self._engine.ledger.group_room_bytes()
        return all(
            room is None or 2 * size_bytes <= room for room in (self._available_bytes(), group)
        )

    def state_of(self, last: UnsavedStep) -> object:
        """Return the state to save for the last step: the copy, where the live one has changed since."""
        held = self.held_of(last)
        if held is None or is_function(last.state):
            return last.state if held is None else held
        try:
            is_same = _are_equal(self._flatten(last.state), held.flat)
        except Exception:  # the program has left it so that it cannot be read
            is_same = False
        return last.state if is_same else held

    def step_ended(self, step: int) -> None:
        """Give the memory back."""
        if self._held is not None:
            self.drop()

    def closing(self) -> None:
        """Give the memory back."""
        self.drop()

    def drop(self) -> None:
        """Forget the copy, and give its memory back."""
        self._held = None
        if self._cache is not None:
            self._cache.close()
            self._cache = None


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies outside of the staging memory, whose room takes longer to find."""
    found = []
    for one in tensors:
        content = memoryview(bytes(one.content()))
        found.append(Tensor(one.spec, lambda content=content: content))  # type: ignore[misc]
    return found


def _are_equal(one: FlatState, other: FlatState) -> bool:
    from ckptmgr.state.read_back import Tags

    tags = Tags()
    return one.skeleton == other.skeleton and all(
        mine.spec == its.spec and tags.of(mine.content()) == tags.of(its.content())
        for mine, its in zip(one.tensors, other.tensors, strict=True)
    )
