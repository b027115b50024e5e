# SPDX-License-Identifier: Apache-2.0
"""`Preemption`: a signal or the clock asks the run to stop, and the run decides after which step.

It stops after the step that runs, or, where the user says how long after the signal the process is
killed (`grace`), as late as a save allows: while there is time for two more saves and two steps, the
training goes on. The answer changes only when a step ends, so that it is the same in all places of
the loop, and on all ranks. So is that to a request to save a step and to go on.

In a program that does not ask, SIGTERM has the next step saved, and the next call ends the program.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptmgr.core.handle import SaveHandle
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.io.sigterm import SigtermHold
from ckptmgr.io.stop_signals import NUMBERS, StopWatch
from ckptmgr.training.companions import Companion
from ckptmgr.training.save_requests import SaveRequests

if TYPE_CHECKING:  # one process needs none of it
    from ckptmgr.parallel.coordinator import Coordinator
    from ckptmgr.parallel.joint_stop import JointStop
    from ckptmgr.training.stop_writer import StopWriter

_LOG = logging.getLogger(__name__)
_RECENT_STEPS = 8
_INTERVAL_S = 1.0  # between two exchanges of ranks
_UNASKED_GRACE_S = 25.0  # torchrun waits for 30 s
_UNASKED_INTERVAL_S = 5.0  # an exchange may take 50 ms
_UNASKED_SHARE = 0.2
_GRACE_SHARE = 0.05  # of the grace, where that is less


class Preemption(Companion):
    """Whether a run should stop; it watches for signals once it was asked.

    `is_save_asked` says whether the step that has ended is to be saved, whatever the policy;
    `is_ending` whether that is because SIGTERM came and the program does not ask; `has_ended`
    whether `check` has ended it. Ranks of a program that has not asked meet only if `meets`: it
    would be a new way to wait for each other in a run that asks for none of this.
    """

    def __init__(
        self,
        *,
        grace_s: float | None,
        after_s: float | None = None,
        coordinator: Coordinator | None,
        timeout_s: float,
        requests: SaveRequests | None = None,
        meets: bool = True,
        has_stepped: bool = False,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grace_s, self._after_s = grace_s, after_s
        self._ends_at = math.inf if after_s is None else monotonic() + after_s
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._watch: StopWatch | None = None
        self._joint: JointStop | None = None
        self._handle: SaveHandle | None = None
        self._save_s: float | None = None
        self._step_ended_at = monotonic() if has_stepped else None
        self._steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._is_installed = self._has_warned = False
        self._requests, self._meets = requests, meets or coordinator is None
        self._hold: SigtermHold | None = None
        self._has_tried_to_hold = False
        self._writer: StopWriter | None = None
        self.is_decided = self.is_save_asked = self.is_ending = self.has_ended = False

    def have_written(self, writer: StopWriter) -> None:
        """Have the last step written where a stop comes and no step ends soon."""
        self._writer = writer
        if self._is_installed or self._hold is not None:
            self._begin_writer()

    def _begin_writer(self) -> None:
        if self._writer is not None and _is_main():
            numbers = (signal.SIGTERM,) if self._watch is None else NUMBERS
            self._writer.begin(numbers, self._asked_in_s, self._patience_s)

    def _asked_in_s(self) -> float | None:
        """Return the seconds until a stop is asked for; None for never."""
        if self._requested_at is not None or (self._hold is not None and self._hold.is_noted):
            return 0.0
        left_s = self._ends_at - self._monotonic()
        return None if left_s == math.inf or self._watch is None else max(0.0, left_s)

    def _patience_s(self) -> float:
        """Return how long the end of a step may take after a stop was asked for."""
        most_s = (self._grace_s or _UNASKED_GRACE_S) / 4
        return min(most_s, 2 * max(self._steps_s, default=0.0))

    def ask(self) -> bool:
        """Return whether to stop; the first call begins to watch for signals."""
        watch = self._watch or self._begun()
        if not self._is_installed:
            self._install(watch)
        if self._step_ended_at is None and self._coordinator is None and self._is_wanted():
            self._decide(None)  # a loop that never calls step_end
        return self.is_decided

    def _begun(self) -> StopWatch:
        """Begin to watch; what came before counts."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()
        watch = self._watch = StopWatch(self._monotonic)
        if hold is not None and hold.is_noted:
            watch.note(signal.SIGTERM)
        self.is_decided, self.is_ending = self.is_decided or self.is_ending, False
        return watch

    def hold_sigterm(self) -> None:
        """Hold SIGTERM back from a program that has not asked, once a step has ended."""
        if self._watch is None and self._meets and not self._has_tried_to_hold:
            self._has_tried_to_hold = True
            if SigtermHold.is_possible():
                self._begin_writer()  # before the hold, which ends the process
                self._hold = SigtermHold(self._grace_s or _UNASKED_GRACE_S)

    def check(self) -> None:
        """End a program that SIGTERM asked to end, if its step is saved and it does not ask."""
        if self.is_ending and not self.is_save_asked and _is_main():
            if self._hold is not None:
                self._hold.pause()
            self.has_ended = True
            raise SystemExit(128 + signal.SIGTERM)

    def _of_all(self, step: int, is_wanted: bool, saves: bool) -> tuple[bool, bool]:
        """Return whether any rank wants to stop, and whether any is asked to save."""
        if self._coordinator is None:
            return is_wanted, saves
        if self._watch is None and not self._meets:
            return False, False
        if self._joint is None:
            from ckptmgr.parallel.joint_stop import JointStop

            self._joint = JointStop(
                self._coordinator,
                timeout_s=self._timeout_s,
                interval_s=self._interval_s,
                monotonic=self._monotonic,
            )
        self._joint.interval_s = self._interval_s  # the program may have asked since
        is_wanted = self._joint.decide(step, is_wanted, saves=saves)
        return is_wanted, self._joint.saves

    def _install(self, watch: StopWatch) -> None:
        """Install the handlers of the signals, or warn once that this thread cannot."""
        self._is_installed = watch.install()
        if self._is_installed:
            self._begin_writer()
        if not self._is_installed and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "should_stop was asked in the thread %r, and only the main thread can watch for SIGTERM and SIGUSR1: it stays "
                "False for them. Ask manager.should_stop once in the main thread before this one starts",
                threading.current_thread().name,
            )

    @property
    def _interval_s(self) -> float:
        if self._watch is None:
            grace_s = self._grace_s or _UNASKED_GRACE_S
            return min(_UNASKED_INTERVAL_S, _UNASKED_SHARE * grace_s)
        if self._grace_s is None:
            return _INTERVAL_S
        return min(_INTERVAL_S, _GRACE_SHARE * self._grace_s)

    def step_ended(self, step: int) -> None:
        """Decide after a step; with ranks together."""
        now = self._monotonic()
        if self._step_ended_at is not None:
            self._steps_s.append(now - self._step_ended_at)
        self._step_ended_at = now
        self._warn_of_the_clock()
        if self.is_decided:
            return
        saves = self._requests is not None and self._requests.are_there()
        is_noted = self._hold is not None and self._hold.is_noted
        is_wanted = is_noted if self._watch is None else self._is_wanted()
        is_wanted, saves = self._of_all(step, is_wanted, saves)
        self.is_save_asked |= saves
        if is_wanted and self._watch is not None:
            self._decide(step)
        elif is_wanted and not self.is_ending:
            self._begin_to_end(step)

    def _begin_to_end(self, step: int) -> None:
        self.is_ending = self.is_save_asked = True
        if self._hold is not None:
            self._hold.pause()
        _LOG.warning(
            "SIGTERM asks the program to end, and it does not ask should_stop: step %d is saved, and the next"
            " step_end or batch ends it",
            step,
        )

    def _warn_of_the_clock(self) -> None:
        """Warn once that the time has come where the program does not ask."""
        if self._watch is not None or self._has_warned or not self._steps_s:
            return  # after its first step it may ask
        if self._requested_at is not None:
            self._has_warned = True
            _LOG.warning(
                "%s asks the run to stop, and the program has not asked should_stop: it goes on",
                self._cause,
            )

    def saved(self, handle: SaveHandle, facts: SaveFacts) -> None:
        """Take a save, whose time the next ones will take, too."""
        del facts
        self._learn()
        self._handle, self.is_save_asked = handle, False
        if self._requests is not None:
            self._requests.saved(handle)
        if self.is_ending and self._hold is not None:
            self._hold.resume()

    def closing(self) -> None:
        """Put the earlier handlers of the signals back; asked again, it watches again."""
        if self._watch is not None:
            self._watch.close()
            self._watch, self._is_installed = None, False
        if self._requests is not None:
            self._requests.close()
        if self._hold is not None:
            self._hold.close()
            self.is_ending |= self._hold.is_noted
            self._hold = None
        self._joint, self.is_save_asked = None, False

    def _learn(self) -> None:
        handle = self._handle
        if handle is not None and handle.durable.done() and handle.durable.exception() is None:
            stats = handle.stats
            in_background_s = stats.stage_s + stats.write_s + stats.sync_s + stats.commit_s
            self._save_s = max(stats.blocked_s, in_background_s)

    @property
    def _requested_at(self) -> float | None:
        """When the run was first asked to stop, by a signal or by the clock."""
        at = None if self._watch is None else self._watch.requested_at
        at = math.inf if at is None else at
        return min(at, self._ends_at) if min(at, self._ends_at) <= self._monotonic() else None

    def _is_wanted(self) -> bool:
        requested_at = self._requested_at
        if requested_at is None:
            return False
        if self._grace_s is None:
            return True
        self._learn()
        if self._save_s is None or not self._steps_s:
            return True
        left_s = requested_at + self._grace_s - self._monotonic()
        # A save may be in flight, and the next one may be slower.
        needed_s = 2 * (self._save_s + max(self._steps_s))
        if self._joint is not None:
            needed_s += 2 * self._interval_s
        return left_s <= needed_s

    def _decide(self, step: int | None) -> None:
        self.is_decided = True
        _LOG.warning(
            "%s asks the run to stop%s", self._cause, "" if step is None else f" after step {step}"
        )
        if self._grace_s is not None and self._save_s is not None and self._save_s > self._grace_s:
            _LOG.warning(
                "the last save took %.3g s, and the process is killed after %.3g s",
                self._save_s,
                self._grace_s,
            )

    @property
    def _cause(self) -> str:
        number = None if self._watch is None else self._watch.number
        if number is not None:
            return signal.Signals(number).name
        if self._requested_at is not None:
            return f"the clock (Stop(after=), {self._after_s:g} s)"
        return "another rank"


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
