# SPDX-License-Identifier: Apache-2.0
"""Past of a run: its last step, its saves, its snapshots, and checkpoints that a rollback gave up.

A save in flight counts as saved, so that the policy does not demand it again; a failed one does
not, so that the policy does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.policy.save import LastSave
from ckptmgr.state.growth import built
from ckptmgr.state.paths import StateMismatch

if TYPE_CHECKING:  # a run without snapshots needs none of it
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.files.save.job import SaveFacts
    from ckptmgr.state.growth import Built
    from ckptmgr.state.tree import FlatState
    from ckptmgr.training.kept_states import KeptStates


_LOG = logging.getLogger(__name__)
_MOST_SHOWN = 8


def save_when_measured(metric: str) -> str:
    """Return how to save each step that has a metric."""
    return f"CheckpointConfig(save_when_measured={metric!r}) saves each step whose step_end is given it"


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


class _Restored(NamedTuple):
    """A step whose state was restored, with the largest stride of its run, and what it came from."""

    step: int
    stride: int | None
    what: str

    def check_first(self, step: int) -> None:
        """Raise StateMismatch if the first step that ends is no later one; warn of one far later."""
        if step <= self.step:
            raise StateMismatch(
                f"step {step} is the first that ends after {self.what} at step {self.step}, and would overwrite what is newer",
                hint="begin where the run goes on: start = manager.resume(state), then for step in"
                ' range(start.next_step, ...); or begin anew, Resume(start="new")',
            )
        if self.stride is not None and step - self.step > self.stride:
            _LOG.warning(
                "step %d is the first that ends after %s at step %d, and the steps of the run were at most %d apart: does the"
                " training go on where it was?",
                step,
                self.what,
                self.step,
                self.stride,
            )


class RunPast:
    """The past of a run, which a resumption or a rollback changes.

    `given_up` holds path and commit sequence of the checkpoints that a rollback went back behind;
    `kept` the snapshots, if there are any; `stride` the largest difference between two steps that
    ended one after the other, and None before the second one; `empty` names what was empty in the
    state when the run began, and is None before a resumption; `left_out` what its objects hold and no
    checkpoint has, None before the first save; `measured` the metrics of steps, and
    whether a save had them.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.progress = Progress(LastSave(at=clock(), is_start=True))
        self.kept: KeptStates | None = None
        self.seen_step = 0
        self.unsaved: UnsavedStep | None = None
        self.given_up: set[tuple[Path, int]] = set()
        self.stride: int | None = None
        self.empty: Sequence[str] | None = None
        self.left_out: Sequence[str] | None = None
        self._built: Built | None = None
        self._seen_size = -1
        self._last_ended: int | None = None
        self._restored: _Restored | None = None
        self.measured: dict[str, bool] = {}

    def warn_of_unsaved(self, metric: str) -> None:
        """Warn once if only steps that were not saved had a metric."""
        if self.measured.get(metric) is False:
            self.measured[metric] = True
            _LOG.warning(
                "no checkpoint has %s, which so far only steps had that were not saved: %s",
                metric,
                save_when_measured(metric),
            )

    def saw(self, step: int) -> None:
        """Record a step."""
        self.seen_step = max(self.seen_step, step)

    def ended(
        self, step: int, state: object, epoch: int | None, metrics: Mapping[str, float] | None
    ) -> None:
        """Record the last step that ended.

        Raises:
            StateMismatch: It is the first one after a resumption or a rollback, and no later one.
        """
        if self._restored is not None:
            self._restored.check_first(step)
            self._restored = None
        if self._last_ended is not None and step > self._last_ended:
            self.stride = max(self.stride or 0, step - self._last_ended)
        self._last_ended = step
        self.unsaved = UnsavedStep(step, state, epoch, metrics)
        self.seen_step = step
        for name in metrics or ():
            self.measured.setdefault(name, False)

    def start_fresh(self) -> None:
        """Reset to the start of a run."""
        self.start_at(0, is_own=False)
        self._restored = self._last_ended = None
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

    def began(self, given: Built, empty: Iterable[str] = ()) -> None:
        """Record the state that a resumption was given, and what was empty when the run began."""
        self.empty = tuple(sorted({*given.empty, *empty}))
        self._built, self._seen_size = given, -1

    def check_keys(self, state: object, flat: FlatState) -> None:
        """Warn once of entries that a restart of the program could not take."""
        size = flat.skeleton.count(",")  # of the structure, whatever the values are
        if self._built is None or size == self._seen_size:
            return
        self._seen_size = size
        later = sorted(self._built.later_keys(built(state)))
        if later:
            self._built = None
            _LOG.warning(
                "a restart could not take %s: the state that resume was given has no such entries. Build it with"
                " them, as None or empty",
                ", ".join(later[:_MOST_SHOWN]),
            )

    def restored_at(self, step: int, *, stride: int | None, what: str) -> None:
        """Record which step the state is of now; `what` names where it came from."""
        self.stride = max(filter(None, (stride, self.stride)), default=None)
        self._last_ended = step
        self._restored = _Restored(step, stride, what)

    def go_back(self, step: int, checkpoints: Sequence[Checkpoint]) -> None:
        """Record a rollback to `step`, which gives up the later ones of `checkpoints`."""
        self.restored_at(step, stride=self.stride, what="the rollback")
        self.given_up |= {(one.path, one.sequence) for one in checkpoints if one.step > step}
        if self.kept is not None:
            self.kept.recent.drop_after(step)
            self.kept.costs.go_back(step)
        self.progress.go_back(step, self._clock())
        self.seen_step = step
        self.unsaved = None

    def went_back(self, step: int, others: Sequence[Checkpoint]) -> None:
        """Record a resumption at a chosen `step`, after which `others` are of another future.

        The next step is due: until it is saved, a resumption would take the newest of them.
        """
        self.given_up |= {(one.path, one.sequence) for one in others}
        self.progress = Progress(LastSave(step=step, at=self._clock(), is_given_up=True))

    def resumed(self, checkpoint: Checkpoint, *, is_own: bool, load_s: float) -> None:
        """Record the resumed checkpoint; if it was given up, all given-up ones count again."""
        if self.kept is not None and is_own:
            self.kept.costs.go_back(checkpoint.step)
        elif self.kept is not None:
            self.kept.costs.begin(checkpoint, load_s=load_s)
        if (checkpoint.path, checkpoint.sequence) in self.given_up:
            self.given_up.clear()
