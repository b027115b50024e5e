# SPDX-License-Identifier: Apache-2.0
"""Run saves in the background, one at a time, and never lose a failure.

* One save runs; `back_pressure` decides about the next one meanwhile: `wait` for the running one,
  `skip` the new one, or `coalesce`: keep only the newest as the next to run. So at most two states
  are staged.
* A failure is sticky: it is raised once, at the next `submit`, `check` or `wait`, or passed to
  `on_error`. Handles raise their own failure on every request.
* The thread is not a daemon: the interpreter waits for it at exit, so the end of the program never
  cuts off an accepted save. In functions that `atexit` calls the interpreter no longer waits for
  threads; nothing must be submitted there (see `is_exiting`). A failure that the program has not
  fetched by then is logged.
* A forked child starts with no save in flight: the saves are its parent's.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from ckptmgr.config.failure import (
    BackPressure,
    ErrorPolicy,
    OnError,
    check_back_pressure,
    parse_on_error,
)
from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import SaveFailed, SaveSuperseded
from ckptmgr.core.forks import reset_in_child
from ckptmgr.core.handle import SaveHandle, SaveStats, wait_in_on_error
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.notes import add_note
from ckptmgr.io.signals import SLICE_S
from ckptmgr.io.threads import work_beside_training

_LOG = logging.getLogger(__name__)


class Staged(Protocol):
    """A copy of a state in memory of its own."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the copy."""
        ...

    def release(self) -> None:
        """Give the memory back. Calling it again is fine."""
        ...


_Staged = TypeVar("_Staged", bound=Staged)


class _Job(NamedTuple):
    handle: SaveHandle
    staged: Staged
    finish: Callable[[], Checkpoint]
    submitted_at: float
    is_of_on_error: bool = False  # whether `on_error` asked for it, which would be called again


class BackgroundSaver:
    """Runs saves in a thread. Safe to use from several threads."""

    def __init__(
        self, *, back_pressure: BackPressure = "wait", on_error: OnError = "raise"
    ) -> None:
        self._back_pressure = check_back_pressure(back_pressure)
        self._policy = parse_on_error(on_error)
        self._failure: Exception | None = None
        self._reset()
        reset_in_child(self)

    def _reset(self) -> None:
        """Set the idle state; in a forked child, absent threads may still hold the old locks."""
        self._submitting = threading.RLock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._copying: set[threading.Thread] = set()
        self._running: _Job | None = None
        self._next: _Job | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a save is running or waiting."""
        with self._changed:
            return self._is_busy()

    @property
    def begins_at_once(self) -> bool:
        """Whether a save that is submitted now begins at once."""
        with self._changed:
            return self._running is None

    def submit(
        self,
        stage: Callable[[], _Staged],
        finish: Callable[[_Staged, SaveStats], Checkpoint],
        *,
        handle_of: Callable[[_Staged], SaveHandle] | None = None,
    ) -> SaveHandle | None:
        """Stage a state now and save it in the background.

        Args:
            stage: Copies the state; runs in the calling thread.
            finish: Makes the copy durable and records the costs; runs in the background. The copy
                is released afterwards.
            handle_of: Returns the handle of a state that is still being copied when `stage`
                returns; `finish` waits for it. By default the copy is complete then.

        Returns:
            The handle, or None when the save was skipped because another one is running.

        Raises:
            SaveFailed: Called by a signal handler in the middle of `stage`.
            Exception: The failure of an earlier save, or of `stage`.
        """
        started = time.perf_counter()
        if threading.current_thread() in self._copying:
            raise SaveFailed(
                "a save was asked for in the middle of the copying of another state, by the same thread",
                hint="let signal handlers only note that they were called, and save after the step",
            )
        with self._one_submitter():
            self.check()
            if not self._has_room():
                return None
            self.check()
            staging = time.perf_counter()
            staged = self._copied(stage)
            try:
                now = time.perf_counter()
                if handle_of is None:
                    handle = SaveHandle()
                    handle.stats.stage_s = now - staging
                    handle.staged.set_result(None)
                else:
                    handle = handle_of(staged)
                if self._is_own_thread():
                    handle = replace(handle, asked_by=self._thread)
                handle.stats.staged_bytes = staged.size_bytes
                # Without the last steps; the save may report it before this returns.
                handle.stats.blocked_s = now - started
                work = partial(finish, staged, handle.stats)
                self._enqueue(_Job(handle, staged, work, now, self._is_own_thread()))
            except BaseException:
                self._give_up(staged)
                raise
            handle.stats.blocked_s = time.perf_counter() - started
        return handle

    def check(self) -> None:
        """Raise the failure of an earlier save, once."""
        failure = self._take_failure()
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback holds this frame: a cycle would keep the staged state

    def wait(self) -> None:
        """Wait until no save is running or waiting; then raise a failure, if any."""
        self.wait_until_idle()
        self.check()

    def wait_until_idle(self) -> None:
        """Wait until no save is running or waiting.

        Raises:
            SaveFailed: Called by `on_error`, which would wait for itself.
        """
        if self._is_own_thread():
            raise wait_in_on_error()
        with self._changed:
            while not self._changed.wait_for(self._has_nothing, timeout=SLICE_S):
                pass

    def report_unfetched(self) -> None:
        """Log a failure that the program has not fetched."""
        failure = self._take_failure()
        if failure is not None:
            _LOG.critical("a background save failed and nobody asked: %s", _all_of(failure))

    def forget_parent(self) -> None:
        """Leave the saves in flight to the parent; for a forked child."""
        self._reset()
        self._failure = None
        _unfetched.discard(self)

    def _is_busy(self) -> bool:
        running = self._running
        # A save with a finished handle is over, even if its thread has not noticed yet.
        return self._next is not None or (running is not None and not running.handle.durable.done())

    def _has_nothing(self) -> bool:
        return self._running is None and self._next is None

    def _is_own_thread(self) -> bool:
        return threading.current_thread() is self._thread

    @contextmanager
    def _one_submitter(self) -> Iterator[None]:
        # In `on_error` the thread that holds the lock may wait for this very thread.
        if self._is_own_thread():
            yield
            return
        with self._submitting:
            yield

    def _has_room(self) -> bool:
        """Wait for the earlier save, or make room for the new one; return False to skip it."""
        if self._back_pressure == "coalesce":
            # Before the new state is staged: there are never more than two.
            self._supersede()
        elif self._is_own_thread():
            pass
        elif self._back_pressure == "skip":
            return not self.is_busy
        else:
            self.wait_until_idle()
        return True

    def _supersede(self) -> None:
        with self._changed:
            superseded, self._next = self._next, None
        if superseded is not None:
            _release(superseded.staged)
            superseded.handle.durable.set_exception(
                SaveSuperseded(
                    "superseded by a newer save before it was started (back_pressure='coalesce')"
                )
            )

    def _copied(self, stage: Callable[[], _Staged]) -> _Staged:
        thread = threading.current_thread()
        try:
            self._copying.add(thread)
            return stage()
        finally:
            self._copying.discard(thread)

    def _give_up(self, staged: Staged) -> None:
        """Release a staged state unless its save has started: an interrupt leaves that unclear."""
        with self._changed:
            jobs = (self._running, self._next)
            is_saved = any(job is not None and job.staged is staged for job in jobs)
        if not is_saved:
            _release(staged)

    def _enqueue(self, job: _Job) -> None:
        self._supersede()  # `on_error` may have submitted a save meanwhile
        with self._changed:
            if self._running is not None:
                self._next = job
            else:
                self._start(job)

    def _start(self, job: _Job) -> None:
        """Start the thread, which first waits for the lock.

        Without that wait the new thread would take the interpreter from the caller at once.
        """
        try:
            self._running = job
            self._thread = threading.Thread(target=self._work, name="ckptmgr-save", daemon=False)
            self._thread.start()
        except BaseException:
            # After an interrupt the thread may run all the same; it finds no job.
            self._running = None
            self._changed.notify_all()
            raise

    def _work(self) -> None:
        work_beside_training()
        with self._changed:
            job = self._running if self._is_own_thread() else None
        while job is not None:
            self._run(job)
            with self._changed:
                job = self._running = self._next
                self._next = None
                self._changed.notify_all()

    def _run(self, job: _Job) -> None:
        job.handle.stats.queue_s = time.perf_counter() - job.submitted_at
        outcome = self._attempt(job)
        _release(job.staged)
        if isinstance(outcome, Checkpoint):
            job.handle.durable.set_result(outcome)
            return
        is_kept = job.is_of_on_error or self._policy.action == "raise"
        if is_kept:
            self._keep(outcome)
        job.handle.durable.set_exception(outcome)
        if not job.is_of_on_error:
            self._deliver(outcome)

    def _attempt(self, job: _Job) -> Checkpoint | Exception:
        failure: Exception = SaveFailed("not attempted")
        for _ in range(self._policy.attempts):
            try:
                return job.finish()
            except BaseException as error:  # delivered to the next caller
                failure = storable(error)
        return failure

    def _deliver(self, failure: Exception) -> None:
        try:
            deliver(self._policy, failure)
        except BaseException as error:  # a failing handler must not hide that a save has failed
            self._keep(storable(error))

    def _keep(self, failure: Exception) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = failure
            else:
                add_note(self._failure, f"ckptmgr: a later save failed, too: {failure}")
            _unfetched.add(self)

    def _take_failure(self) -> Exception | None:
        with self._changed:
            failure, self._failure = self._failure, None
            _unfetched.discard(self)
        return failure


def is_exiting() -> bool:
    """Return whether `atexit` calls this: the main thread has ended and still runs code."""
    main = threading.main_thread()
    return threading.current_thread() is main and not main.is_alive()


def _release(staged: Staged) -> None:
    try:
        staged.release()
    except Exception:  # the save has an outcome of its own
        _LOG.exception("the staging memory of a save could not be given back")


def deliver(policy: ErrorPolicy, failure: Exception) -> None:
    """Treat the failure of a save that is not raised; errors of the caller's function pass."""
    if policy.action == "warn":
        _LOG.error("a save failed: %s", failure)
    if policy.call is not None:
        policy.call(failure)


def storable(error: BaseException) -> Exception:
    """Return an exception to raise in another thread, without the variables of its frames.

    Those hold views of the staging memory for as long as the failure is kept. An error that is no
    Exception would end the program, or replace the error that ended the training.
    """
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)
    if isinstance(error, Exception):
        return error
    failure = SaveFailed(f"stopped by {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    for one in chain:
        for behind in (one.__cause__, one.__context__):
            if behind is not None and behind not in chain:
                chain.append(behind)
    return chain


def _all_of(failure: Exception) -> str:
    return "; ".join([str(failure), *getattr(failure, "__notes__", [])])


# Strong references: a failure outlives a manager that was dropped without close().
_unfetched: set[BackgroundSaver] = set()


@atexit.register
def _report_at_exit() -> None:
    for saver in list(_unfetched):
        saver.report_unfetched()
