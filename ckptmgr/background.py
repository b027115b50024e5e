# SPDX-License-Identifier: Apache-2.0
"""Run saves in the background, one at a time, and never lose a failure.

* One save runs; what happens to the next one meanwhile is `back_pressure`: `wait` for it, `skip` the new one, or `coalesce`:
  keep only the newest as the next to run. So at most two states are staged.
* A failure is sticky: it is raised at the next `submit`, `check`, `wait` or `close`, or handed to `on_error`.
* The thread is an ordinary one: the interpreter waits for it at exit, so an acknowledged hand-over is never cut off by the end
  of the program. A failure that nobody fetched by then is logged.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from ckptmgr.errors import SaveFailed
from ckptmgr.handle import SaveHandle
from ckptmgr.model import Checkpoint
from ckptmgr.save_failure import BackPressure, OnError, parse_on_error

_LOG = logging.getLogger(__name__)


class Staged(Protocol):
    """A copy of a state in memory of its own."""

    def release(self) -> None:
        """Give the memory back."""
        ...


_Staged = TypeVar("_Staged", bound=Staged)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    handle: SaveHandle
    staged: Staged
    finish: Callable[[], Checkpoint]
    submitted_at: float


class BackgroundSaver:
    """Runs saves in a thread.

    Args:
        back_pressure: What happens to a save while another one runs.
        on_error: What happens to a failure.
    """

    def __init__(
        self, *, back_pressure: BackPressure = "wait", on_error: OnError = "raise"
    ) -> None:
        if back_pressure not in ("wait", "skip", "coalesce"):
            raise ValueError(
                f"back_pressure must be 'wait', 'skip' or 'coalesce', but got {back_pressure!r}"
            )
        self._back_pressure = back_pressure
        self._policy = parse_on_error(on_error)
        self._changed = threading.Condition()
        self._running: _Job | None = None
        self._next: _Job | None = None
        self._failure: BaseException | None = None
        _unfinished.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether a save is running."""
        with self._changed:
            return self._running is not None

    def submit(
        self, stage: Callable[[], _Staged], finish: Callable[[_Staged], Checkpoint]
    ) -> SaveHandle | None:
        """Stage a state now and save it in the background.

        Args:
            stage: Copies the state; runs in the caller.
            finish: Makes the copy durable; runs in the background. The copy is released afterwards.

        Returns:
            The handle, or None when the save was skipped because another one is running.

        Raises:
            BaseException: The failure of an earlier save, or of `stage`.
        """
        started = time.perf_counter()
        self.check()
        if self._back_pressure == "wait":
            self._wait_until_idle()
            self.check()
        elif self._back_pressure == "skip" and self.is_busy:
            return None
        handle = SaveHandle()
        staging = time.perf_counter()
        staged = stage()
        now = time.perf_counter()
        handle.stats.stage_s = now - staging
        handle.staged.set_result(None)
        self._enqueue(
            _Job(handle=handle, staged=staged, finish=partial(finish, staged), submitted_at=now)
        )
        handle.stats.blocked_s = time.perf_counter() - started
        return handle

    def check(self) -> None:
        """Raise the failure of an earlier save, once."""
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Wait until nothing is running or waiting; then raise a failure, if any."""
        self._wait_until_idle()
        self.check()

    def close(self) -> None:
        """Do as `wait` does."""
        self.wait()

    def _wait_until_idle(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running is None and self._next is None)

    def _enqueue(self, job: _Job) -> None:
        with self._changed:
            superseded, self._next = self._next, job
            must_start = self._running is None
            if must_start:
                self._running, self._next = job, None
        if superseded is not None:
            superseded.staged.release()
            superseded.handle.durable.set_exception(
                SaveFailed(
                    "superseded by a newer save before it was started (back_pressure='coalesce')"
                )
            )
        if must_start:
            threading.Thread(target=self._work, name="ckptmgr-save", daemon=False).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                job = self._running
            if job is None:  # pragma: no cover - the thread is started with a job
                return
            self._run(job)
            with self._changed:
                self._running, self._next = self._next, None
                self._changed.notify_all()
                if self._running is None:
                    return

    def _run(self, job: _Job) -> None:
        job.handle.stats.queue_s = time.perf_counter() - job.submitted_at
        outcome = self._attempt(job)
        job.staged.release()
        if isinstance(outcome, Checkpoint):
            job.handle.durable.set_result(outcome)
        else:
            job.handle.durable.set_exception(outcome)
            self._deliver(outcome)

    def _attempt(self, job: _Job) -> Checkpoint | BaseException:
        failure: BaseException = SaveFailed("not attempted")
        for _ in range(self._policy.attempts):
            try:
                return job.finish()
            except BaseException as error:  # delivered to whoever asks next
                failure = error
        return failure

    def _deliver(self, failure: BaseException) -> None:
        if self._policy.action == "warn":
            _LOG.error("a background save failed: %s", failure)
            return
        if self._policy.call is not None:
            try:
                self._policy.call(failure)
            except BaseException as error:  # a failing handler is a failure of the save, too
                failure = error
            else:
                return
        with self._changed:
            self._failure = failure

    def report_unfetched(self) -> None:
        """Log a failure that nobody has fetched."""
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            _LOG.critical("a background save failed and nobody asked: %s", failure)


_unfinished: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()


@atexit.register
def _report_at_exit() -> None:
    for saver in list(_unfinished):
        saver.report_unfetched()
