# SPDX-License-Identifier: Apache-2.0
"""Signals that are held back: Ctrl-C comes when nothing is half done, and never gets lost."""

# ruff: noqa: PT012  the test is where in a block it is raised

from __future__ import annotations

import signal
import threading
from types import FrameType

import pytest

from ckptmgr.io.signals import defer_signals, deliver_signals
from tests.faults.pressed import pressed

pytestmark = pytest.mark.usefixtures("plain_ctrl_c")


def press(number: int = signal.SIGINT) -> None:
    signal.raise_signal(number)


def test_ctrl_c_comes_after_the_outermost_block() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        with defer_signals():
            press()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_ctrl_c_comes_at_once_where_signals_are_heard() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        try:
            with deliver_signals():
                press()
                done.append("never")
        finally:
            press()  # a second time, while the first one is cleaned up after
            done.append("cleaned up")
    assert done == ["cleaned up"]


def test_ctrl_c_that_waited_comes_where_signals_are_heard_next() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        press()
        done.append("held")
        with deliver_signals():
            done.append("never")
    assert done == ["held"]


def test_ctrl_c_in_a_held_block_within_a_heard_one_comes_between_them() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), defer_signals(), deliver_signals():
        with defer_signals():
            press()
            done.append("held")
        done.append("never")
    assert done == ["held"]


def test_handler_that_returns_runs_again_and_again() -> None:
    heard = []

    def note(number: int, _: FrameType | None) -> None:
        heard.append(number)
        if len(heard) == 1:
            press(signal.SIGUSR1)  # another one comes while the handler runs

    before = signal.signal(signal.SIGUSR1, note)
    try:
        with defer_signals():
            with deliver_signals():
                press(signal.SIGUSR1)
                assert len(heard) == 2
                press(signal.SIGUSR1)
                assert len(heard) == 3
            press(signal.SIGUSR1)
            assert len(heard) == 3
        assert len(heard) == 4
        assert signal.getsignal(signal.SIGUSR1) is note
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_two_signals_that_waited_are_both_handled() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        with pytest.raises(KeyboardInterrupt), defer_signals():
            press()
            press(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_handler_that_is_replaced_meanwhile_stays_replaced() -> None:
    with defer_signals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_hold_nothing() -> None:
    seen = []

    def work() -> None:
        with defer_signals(), deliver_signals():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_heard_alone_changes_nothing() -> None:
    with pytest.raises(KeyboardInterrupt), deliver_signals():
        press()


def test_interpreter_that_has_no_signals_saves_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("signal only works in main thread of the main interpreter")

    done = []
    with monkeypatch.context() as patch:
        patch.setattr(signal, "signal", refuse)
        with defer_signals(), deliver_signals():
            done.append("saved")
    assert done == ["saved"]


def _interrupted(at: int) -> tuple[bool, bool]:
    """Hold and hear with Ctrl-C at a point; return whether there are so many, and whether it was raised."""
    try:
        with pressed(at) as presses, defer_signals():
            with deliver_signals():
                pass
            with defer_signals():
                pass
    except KeyboardInterrupt:
        return True, True
    return presses.points >= at, False


def test_ctrl_c_at_any_step_of_holding_is_raised_and_handlers_are_back() -> None:
    at, is_there = 0, True
    while is_there:
        at += 1
        is_there, was_raised = _interrupted(at)
        assert was_raised or not is_there, at
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, at
        with pytest.raises(KeyboardInterrupt), defer_signals():
            press()
    assert at > 30
