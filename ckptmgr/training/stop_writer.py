# SPDX-License-Identifier: Apache-2.0
"""`StopWriter`: writes the last step in another thread when a stop comes and no step ends soon.

A stop may come in a validation, in a compilation, or while the run waits for data: the process would be
killed before the next step ends. The copy of `put_aside` is written then; and while the
run waits for the next of its `batches`, where only the loader's code runs, the state is copied and
written. At any other time the program may be changing the state, and nothing reads it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ckptmgr.core.arguments import is_function
from ckptmgr.io.signal_thread import CHANGED, leave, listen, tell
from ckptmgr.training.companions import Companion

if TYPE_CHECKING:
    from ckptmgr.training.data_state import DataState
    from ckptmgr.training.history import RunPast, UnsavedStep
    from ckptmgr.training.put_aside import HeldState, PutAside

_LOG = logging.getLogger(__name__)
_LEAST_S = 0.05  # between two looks


class StopWriter(Companion):
    """Writes the last step once a stop was asked for and no step has ended for a while.

    Args:
        past: The past of the run, with its last step.
        aside: Holds the copy of a state, and makes one.
        data: Knows whether the run waits for a batch.
        save: Method that saves a step in the calling thread; held weakly, because its object holds the
            lease of the series.
        monotonic: Seconds on any clock.
    """

    def __init__(
        self,
        past: RunPast,
        aside: PutAside,
        data: DataState,
        save: Callable[[UnsavedStep], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._past, self._aside, self._data = past, aside, data
        self._save, self._monotonic = WeakMethod(save), monotonic
        self.writing = threading.RLock()  # a save of the main thread takes it, too
        aside.taken = self._taken
        self._numbers: Collection[int] = ()
        self._asked_in_s: Callable[[], float | None] = lambda: None
        self._patience_s: Callable[[], float] = lambda: 0.0
        self._signals = 0
        self._asked_at: float | None = None
        self._ended_at = -1.0
        self._seen: int | None = None  # the last step that was written, or could not be
        self._written: int | None = None

    def begin(
        self,
        numbers: Collection[int],
        asked_in_s: Callable[[], float | None],
        patience_s: Callable[[], float],
    ) -> None:
        """Wait for signals, in the main thread.

        `asked_in_s` returns the seconds until a stop is asked for, 0 if it is, and None for never;
        `patience_s` how long the end of a step may take.
        """
        self._numbers, self._asked_in_s, self._patience_s = numbers, asked_in_s, patience_s
        self._signals, self._asked_at = 0, None
        leave(self._woken)
        listen(self._woken)

    def _taken(self) -> None:
        """Wake the thread if a stop waits for the copy."""
        if self._asked_at is not None:
            tell(CHANGED)

    def _woken(self, told: bytes) -> float | None:
        self._signals += sum(map(told.count, self._numbers))
        now = self._monotonic()
        if self._asked_at is None:
            left_s = 0.0 if self._signals else self._asked_in_s()
            if left_s is None or left_s > 0.0:
                return left_s
            self._asked_at = now
        patience_s = max(_LEAST_S, self._patience_s())
        left_s = max(self._asked_at, self._ended_at) + patience_s - now
        if left_s > 0.0 and self._signals < 2:
            return left_s
        with self.writing:
            self._write()
        return patience_s

    def _write(self) -> None:
        last = self._past.unsaved
        if last is None or last.step in (self._seen, self._past.progress.last.step):
            return
        held = self._aside.held_of(last) or self._copied(last)
        save = self._save()
        if held is None or save is None:
            return
        self._seen = last.step
        try:
            save(last._replace(state=held))
        except Exception as error:
            _LOG.warning("step %d could not be saved before the process ends: %s", last.step, error)
            return
        self._written = last.step
        _LOG.warning(
            "the run is asked to stop, and no step has ended since: step %d is saved as it ended",
            last.step,
        )

    def _copied(self, last: UnsavedStep) -> HeldState | None:
        if is_function(last.state):
            return None
        aside = self._aside
        return self._data.while_fetching(
            last.step, lambda: aside.take(last, is_urgent=True), aside.drop
        )

    def has_written(self, last: UnsavedStep) -> bool:
        """Return whether the last step is saved as it ended, once that has ended."""
        with self.writing:
            return self._written == last.step and self._aside.held_of(last) is not None

    def step_ended(self, step: int) -> None:
        """Wait for a write; then the main thread saves."""
        self._ended_at = self._monotonic()
        with self.writing:
            self._seen = self._written = None

    def closing(self) -> None:
        """Wait for a write, and end."""
        leave(self._woken)
        with self.writing:
            return
