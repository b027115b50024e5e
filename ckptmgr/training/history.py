# SPDX-License-Identifier: Apache-2.0
"""What a run has behind it: the last step it has seen, what of it is saved, copied into memory, and given up.

Which step counts as saved while a save is still running.

A save in flight counts, so that the policy does not ask for it again; one that failed does not, so that it does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptmgr.config.memory import MemoryConfig
from ckptmgr.core.handle import SaveHandle
from ckptmgr.core.model import Checkpoint
from ckptmgr.engine.recent_states import RecentStates
from ckptmgr.engine.staging import Ledger
from ckptmgr.policy.save import LastSave


class Progress:
    """The last save as the save policy shall see it. Safe to use from several threads.

    Args:
        start: Step 0 and the time of construction, or what a run was resumed from.
    """

    def __init__(self, start: LastSave) -> None:
        self._durable = start
        self._in_flight: list[tuple[SaveHandle, LastSave]] = []
        self._path = ""
        self._lock = threading.Lock()

    def note(self, handle: SaveHandle, save: LastSave) -> None:
        """Note that a save was handed over."""
        with self._lock:
            self._settle()
            self._in_flight.append((handle, save))

    def go_back(self, step: int, at: float) -> None:
        """Note a rollback to `step`. A last save after it is given up: no step counts as saved until a save succeeds.

        Nothing may be in flight.
        """
        with self._lock:
            self._settle()
            if self._durable.step > step or self._durable.is_given_up:
                self._durable = replace(self._durable, step=step, at=at, is_given_up=True)

    @property
    def last(self) -> LastSave:
        """The newest save that succeeded or may still do so, and for how long it held up the training."""
        with self._lock:
            self._settle()
            if not self._in_flight:
                return self._durable
            handle, save = self._in_flight[-1]
            return _with_cost(save, handle)

    @property
    def latest_path(self) -> str:
        """Path of the newest save that succeeded, or an empty string."""
        with self._lock:
            self._settle()
            return self._path

    def _settle(self) -> None:
        remaining = []
        for handle, save in self._in_flight:
            if not handle.durable.done():
                remaining.append((handle, save))
            elif handle.durable.exception() is None:
                self._durable = _with_cost(save, handle)
                self._path = str(handle.durable.result().path)
        self._in_flight = remaining


def _with_cost(save: LastSave, handle: SaveHandle) -> LastSave:
    return replace(save, cost_s=handle.stats.blocked_s)


class UnsavedStep(NamedTuple):
    """A step that has ended, to be saved at the end; as values, because a function would keep its manager alive."""

    step: int
    state: object
    epoch: int | None
    metrics: Mapping[str, float] | None


class RunPast:
    """The past of a run, which changes when the run goes back.

    Args:
        clock: Seconds since the epoch.
        memory: Bounds the copies in memory.
        ledger: The account of its budget, which saves live on, too; a new one by default.
        snapshots: How many of them are kept.

    Attributes:
        progress: What is saved.
        recent: What is copied into memory.
        seen_step: The last step that was seen.
        unsaved: The last step that has ended, or None.
        given_up: Path and place of the checkpoints that a rollback went back behind.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        memory: MemoryConfig | None,
        ledger: Ledger | None = None,
        snapshots: int,
    ) -> None:
        self._clock = clock
        self.progress = Progress(LastSave(step=0, at=clock()))
        self.recent = RecentStates(memory, time.monotonic, ledger=ledger, most=snapshots)
        self.seen_step = 0
        self.unsaved: UnsavedStep | None = None
        self.given_up: set[tuple[Path, int]] = set()

    def saw(self, step: int) -> None:
        """Note a step."""
        self.seen_step = max(self.seen_step, step)

    def start_at(self, step: int, *, is_own: bool) -> None:
        """Forget what the steps before a resumption left behind.

        Args:
            step: Where the run starts; 0 for a fresh start.
            is_own: Whether it resumes what itself has saved. Only then snapshots stay that lie before: all others are of
                another past.
        """
        self.progress = Progress(LastSave(step=step, at=self._clock()))
        self.seen_step = step
        self.unsaved = None
        self.recent.drop_after(step if is_own else -1)

    def go_back(self, step: int, checkpoints: Sequence[Checkpoint]) -> None:
        """Note a rollback.

        Args:
            step: Where to.
            checkpoints: Those of the series; later ones are given up.
        """
        self.given_up |= {(one.path, one.sequence) for one in checkpoints if one.step > step}
        self.recent.drop_after(step)
        self.progress.go_back(step, self._clock())
        self.seen_step = step
        self.unsaved = None

    def resumed(self, checkpoint: Checkpoint) -> None:
        """Note that the run goes on from a checkpoint: if that was given up, its past is ours again."""
        if (checkpoint.path, checkpoint.sequence) in self.given_up:
            self.given_up.clear()
