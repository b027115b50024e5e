# SPDX-License-Identifier: Apache-2.0
"""The collector rests in a pause, and afterwards works as before."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from ckptmgr.io import gc_pause
from ckptmgr.io.gc_pause import gc_paused, gc_paused_if_short


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if was_enabled else gc.disable)()


def test_collector_rests_until_the_outermost_pause_is_over() -> None:
    with gc_paused():
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_collector_rests_during_short_work_only() -> None:
    with gc_paused_if_short() as end_pause_if_long:
        end_pause_if_long(1 << 20)
        assert not gc.isenabled()
        end_pause_if_long(1 << 30)
        assert gc.isenabled()
    assert gc.isenabled()


def test_collector_is_back_after_an_error() -> None:
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_collector_runs_again_when_all_threads_are_done() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def pause() -> None:
        with gc_paused():
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=pause)
    thread.start()
    begun.wait()
    with gc_paused():
        assert not gc.isenabled()
        may_end.set()
        thread.join()
    assert gc.isenabled()


def _in_a_child(check: object) -> bool:
    """Return whether a function returns true in a forked child."""
    child = os.fork()
    if not child:  # pragma: no cover - another process
        is_right = False
        try:
            is_right = callable(check) and bool(check())
        finally:
            os._exit(0 if is_right else 1)
    return os.waitpid(child, 0)[1] == 0


def test_collector_runs_in_a_child_forked_in_a_pause() -> None:
    with gc_paused():
        assert _in_a_child(gc.isenabled)


def test_pauses_work_in_a_child_forked_in_a_pause() -> None:
    def check() -> bool:
        with gc_paused():
            is_paused = not gc.isenabled()
        return is_paused and gc.isenabled()

    with gc_paused():
        assert _in_a_child(check)


def test_child_leaves_off_what_its_parent_had_turned_off() -> None:
    gc.disable()
    with gc_paused():
        assert _in_a_child(lambda: not gc.isenabled())


def _interrupted(at: int) -> bool:
    """Pause with Ctrl-C at one of the points where Python looks for it; return whether there are so many."""
    left = at

    def press(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        code = frame.f_code
        is_inside = code.co_filename == gc_pause.__file__
        if is_inside and event in ("call", "c_return"):
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(press)
    try:
        with gc_paused():
            pass
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return left <= 0


def test_collector_is_back_wherever_a_pause_was_interrupted() -> None:
    at = 1
    while _interrupted(at):
        assert gc.isenabled(), at
        with gc_paused():
            assert not gc.isenabled(), at
        assert gc.isenabled(), at
        at += 1
    assert at > 5
