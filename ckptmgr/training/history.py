# SPDX-License-Identifier: Apache-2.0
"""Past of a run: its last step, its saves, its snapshots, and checkpoints that a rollback gave up.

A save in flight counts as saved, so that the policy does not demand it again; a failed one does
not, so that the policy does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.policy.save import LastSave

if TYPE_CHECKING:  # a run without snapshots needs none of it
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.files.save.job import SaveFacts
    from ckptmgr.training.kept_states import KeptStates


class Progress:
    """The last save for the save policy. Several threads may use it."""

    def __init__(self, start: LastSave) -> None:
        self._durable = start
        self._in_flight: list[tuple[SaveHandle, LastSave, SaveFacts]] = []
        self._path = ""
        self._lock = threading.Lock()

    def note(self, handle: SaveHandle, facts: SaveFacts, *, at: float) -> None:
        """Record a save in flight, which was due at the time `at`."""
        with self._lock:
            self._settle()
            self._in_flight.append((handle, LastSave(step=facts.step, at=at), facts))

    def go_back(self, step: int, at: float) -> None:
        """Record a rollback to `step`; no save may be in flight.

        If the last save is of a later step, no step counts as saved until a save succeeds.
        """
        with self._lock:
            self._settle()
            if self._durable.step > step or self._durable.is_given_up:
                self._durable = replace(self._durable, step=step, at=at, is_given_up=True)

    def demand(self) -> None:
        """Make every step due until a save succeeds, if none has: step 0 was due."""
        with self._lock:
            if self._durable.is_start:
                self._durable = replace(self._durable, is_given_up=True)

    @property
    def last(self) -> LastSave:
        """The newest save that succeeded or is in flight, with the seconds that training waited."""
        with self._lock:
            self._settle()
            if not self._in_flight:
                return self._durable
            handle, save, _ = self._in_flight[-1]
            return _with_cost(save, handle)

    @property
    def durable(self) -> LastSave:
        """The newest save that succeeded."""
        with self._lock:
            self._settle()
            return self._durable

    @property
    def unfinished(self) -> list[SaveFacts]:
        """The saves in flight, the oldest first."""
        with self._lock:
            self._settle()
            return [facts for _, _, facts in self._in_flight]

    @property
    def latest_path(self) -> str:
        """Path of the newest successful save, or an empty string."""
        with self._lock:
            self._settle()
            return self._path

    def _settle(self) -> None:
        remaining = []
        for handle, save, facts in self._in_flight:
            if not handle.durable.done():
                remaining.append((handle, save, facts))
            elif handle.durable.exception() is None:
                self._durable = _with_cost(save, handle)
                self._path = str(handle.durable.result().path)
        self._in_flight = remaining


def _with_cost(save: LastSave, handle: SaveHandle) -> LastSave:
    return replace(save, cost_s=handle.stats.blocked_s)


class UnsavedStep(NamedTuple):
    """The last ended step, saved on exit. A closure in its place would keep the manager alive."""

    step: int
    state: object
    epoch: int | None
    metrics: Mapping[str, float] | None


class RunPast:
    """The past of a run, which a resumption or a rollback changes.

    `given_up` holds path and commit sequence of the checkpoints that a rollback went back behind;
    `kept` the snapshots, if there are any.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.progress = Progress(LastSave(at=clock(), is_start=True))
        self.kept: KeptStates | None = None
        self.seen_step = 0
        self.unsaved: UnsavedStep | None = None
        self.given_up: set[tuple[Path, int]] = set()

    def saw(self, step: int) -> None:
        """Record a step."""
        self.seen_step = max(self.seen_step, step)

    def ended(
        self, step: int, state: object, epoch: int | None, metrics: Mapping[str, float] | None
    ) -> None:
        """Record the last step that ended."""
        self.unsaved = UnsavedStep(step, state, epoch, metrics)
        self.seen_step = step

    def start_fresh(self) -> None:
        """Reset to the start of a run."""
        self.start_at(0, is_own=False)
        self.progress = Progress(LastSave(at=self._clock(), is_start=True))
        if self.kept is not None:
            self.kept.costs.begin()

    def start_at(self, step: int, *, is_own: bool) -> None:
        """Reset to a resumption at `step`.

        If the run resumes a checkpoint of its own (`is_own`), earlier snapshots stay; otherwise
        they are of another past.
        """
        self.progress = Progress(LastSave(step=step, at=self._clock()))
        self.seen_step = step
        self.unsaved = None
        if self.kept is not None:
            self.kept.recent.drop_after(step if is_own else -1)

    def go_back(self, step: int, checkpoints: Sequence[Checkpoint]) -> None:
        """Record a rollback to `step`, which gives up the later ones of `checkpoints`."""
        self.given_up |= {(one.path, one.sequence) for one in checkpoints if one.step > step}
        if self.kept is not None:
            self.kept.recent.drop_after(step)
            self.kept.costs.go_back(step)
        self.progress.go_back(step, self._clock())
        self.seen_step = step
        self.unsaved = None

    def resumed(self, checkpoint: Checkpoint, *, is_own: bool, load_s: float) -> None:
        """Record the resumed checkpoint; if it was given up, all given-up ones count again."""
        if self.kept is not None and is_own:
            self.kept.costs.go_back(checkpoint.step)
        elif self.kept is not None:
            self.kept.costs.begin(checkpoint, load_s=load_s)
        if (checkpoint.path, checkpoint.sequence) in self.given_up:
            self.given_up.clear()
