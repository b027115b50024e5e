# SPDX-License-Identifier: Apache-2.0
"""No function runs any more when `run_in_threads` returns."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ckptmgr.io.threads import run_in_threads


class _Failures:
    """Remembers failures; what works wait for is set by the first."""

    def __init__(self) -> None:
        self.seen: list[BaseException] = []
        self.is_failed = threading.Event()
        self.heard = threading.Semaphore(0)

    def __call__(self, error: BaseException) -> None:
        self.seen.append(error)
        self.is_failed.set()
        self.heard.release()


@pytest.fixture
def failures() -> _Failures:
    return _Failures()


@pytest.fixture
def _ctrl_c_raises() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def _press_ctrl_c(thread: int = threading.main_thread().ident or 0) -> None:
    """Press it when the main thread waits: nobody is fast enough to hit the microsecond in which it handles the last one.

    Another `thread` may receive it, as the main thread handles it in any case.
    """
    while sys._current_frames()[threading.main_thread().ident or 0].f_code.co_name != "_finish":
        pass
    signal.pthread_kill(thread, signal.SIGINT)


def test_works_run_at_the_same_time(failures: _Failures) -> None:
    meeting = threading.Barrier(3, timeout=60)

    def work() -> None:
        meeting.wait()

    run_in_threads([work] * 3, fail=failures)
    assert not failures.seen
    assert not meeting.broken


def test_no_work_at_all_returns(failures: _Failures) -> None:
    run_in_threads([], fail=failures)
    assert not failures.seen


@pytest.mark.usefixtures("_ctrl_c_raises")
def test_ctrl_c_pressed_often_is_told_each_time_and_waits_for_everybody(
    failures: _Failures,
) -> None:
    presses = 5
    was_heard: list[bool] = []
    finished = []

    def work() -> None:
        for _ in range(presses):
            _press_ctrl_c()
            was_heard.append(failures.heard.acquire(timeout=60))
        finished.append(True)

    run_in_threads([work], fail=failures)
    assert finished == [True]
    assert was_heard == [True] * presses
    assert [type(error) for error in failures.seen] == [KeyboardInterrupt] * presses


@pytest.mark.usefixtures("_ctrl_c_raises")
def test_ctrl_c_that_does_not_wake_the_caller_is_heard_before_the_works_end(
    failures: _Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckptmgr.io.threads.SLICE_S", 0.05)
    was_heard: list[bool] = []

    def work() -> None:
        _press_ctrl_c(threading.get_ident())
        was_heard.append(failures.heard.acquire(timeout=60))

    run_in_threads([work], fail=failures)
    assert was_heard == [True]
    assert [type(error) for error in failures.seen] == [KeyboardInterrupt]


def test_works_without_a_thread_are_done_by_the_caller(
    failures: _Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    started: list[threading.Thread] = []
    ran_in: list[threading.Thread] = []
    has_begun = threading.Event()

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)
        assert has_begun.wait(timeout=60)  # else the caller may do its work, too

    monkeypatch.setattr(threading.Thread, "start", start_one)

    def work() -> None:
        has_begun.set()
        failures.is_failed.wait(timeout=60)
        ran_in.append(threading.current_thread())

    run_in_threads([work] * 3, fail=failures)
    assert sorted(thread is threading.main_thread() for thread in ran_in) == [False, True, True]
    assert [str(error) for error in failures.seen] == ["can't start new thread"]


@pytest.mark.usefixtures("_ctrl_c_raises")
@pytest.mark.parametrize("is_started", [False, True])
def test_ctrl_c_while_a_thread_is_started_calls_each_work_once(
    failures: _Failures, monkeypatch: pytest.MonkeyPatch, *, is_started: bool
) -> None:
    start: Callable[[threading.Thread], None] = threading.Thread.start
    calls: list[int] = []

    def interrupted(thread: threading.Thread) -> None:
        if is_started:
            start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    run_in_threads([partial(calls.append, number) for number in range(3)], fail=failures)
    assert sorted(calls) == [0, 1, 2]
    assert len(failures.seen) == 1
