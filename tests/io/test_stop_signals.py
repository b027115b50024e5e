# SPDX-License-Identifier: Apache-2.0
"""Signals that ask to stop are noted, earlier handlers are called and put back, forks die as ever."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ckptmgr.io.stop_signals import NUMBERS, StopWatch


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.mark.parametrize("number", NUMBERS)
def test_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    watch = StopWatch(lambda: 7.0)
    try:
        signal.raise_signal(number)
        signal.raise_signal(number)
        assert (watch.requested_at, watch.number) == (7.0, number)
    finally:
        watch.close()


def test_earlier_handler_is_called_too() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    watch = StopWatch()
    signal.raise_signal(signal.SIGTERM)
    watch.close()
    signal.raise_signal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM] * 2


def test_two_watches_note_the_same_signal_and_end_in_any_order() -> None:
    first, second = StopWatch(), StopWatch()
    first.close()
    signal.raise_signal(signal.SIGUSR1)
    second.close()
    assert (first.number, second.number) == (None, signal.SIGUSR1)


def test_handler_that_replaced_ours_stays() -> None:
    watch = StopWatch()
    ours = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    watch.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, ours)
    again = StopWatch()  # finds its handler, and the one that it replaced the first time
    again.close()


def test_handler_between_two_watches_that_calls_ours_is_called_once() -> None:
    called: list[int] = []
    first = StopWatch()
    ours = signal.getsignal(signal.SIGTERM)

    def between(number: int, frame: FrameType | None) -> None:
        called.append(number)
        assert callable(ours)
        ours(number, frame)

    signal.signal(signal.SIGTERM, between)
    first.close()
    second = StopWatch()
    signal.raise_signal(signal.SIGTERM)
    second.close()
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is between
    assert (called, second.number) == ([signal.SIGTERM], signal.SIGTERM)


def test_second_signal_in_an_earlier_handler_reaches_it() -> None:
    called: list[int] = []

    def twice(number: int, _: object) -> None:
        called.append(number)
        if len(called) == 1:
            signal.raise_signal(number)

    before = signal.signal(signal.SIGTERM, twice)
    watch = StopWatch()
    signal.raise_signal(signal.SIGTERM)
    watch.close()
    signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM] * 2


def test_other_threads_do_not_watch() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    def watch() -> None:
        made = StopWatch()
        seen.append(signal.getsignal(signal.SIGTERM))
        made.close()

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [before]


def test_signal_after_a_watch_ended_in_another_thread_ends_the_process() -> None:
    child = os.fork()
    if child == 0:  # pragma: no cover - it dies
        watch = StopWatch()
        thread = threading.Thread(target=watch.close)
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -15), (signal.SIGUSR1, 0)])
def test_forked_process_ends_by_sigterm_alone(number: signal.Signals, code: int) -> None:
    watch = StopWatch()
    child = os.fork()
    if child == 0:  # pragma: no cover - it may die
        signal.raise_signal(number)
        os._exit(0)
    watch.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    assert watch.requested_at is None


def test_forked_process_may_watch_for_itself() -> None:
    watch = StopWatch()
    child = os.fork()
    if child == 0:  # pragma: no cover - no coverage of a process that exits so
        own = StopWatch()
        signal.raise_signal(signal.SIGTERM)
        os._exit(0 if own.number == signal.SIGTERM and watch.number is None else 1)
    watch.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ignored_signal_stays_ignored_after_the_watch() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    watch = StopWatch()
    signal.raise_signal(signal.SIGUSR1)
    watch.close()
    signal.raise_signal(signal.SIGUSR1)
    assert signal.signal(signal.SIGUSR1, before) is signal.SIG_IGN
    assert watch.number == signal.SIGUSR1
