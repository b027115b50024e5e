# SPDX-License-Identifier: Apache-2.0
"""Saves in a thread: order, back-pressure, failures, and what becomes of the copies."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, SaveFailed, SaveHandle, StagingExhausted
from ckptmgr.config.failure import BackPressure, OnError
from ckptmgr.core.handle import SaveStats
from ckptmgr.engine import background
from ckptmgr.engine.background import BackgroundSaver
from tests.support.held import TIMEOUT_S


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        path=Path(f"/runs/ckpt-{step}.ckpt"),
        series="ckpt",
        step=step,
        saved_at=datetime.fromtimestamp(0, UTC),
        size_bytes=8,
    )


class Copies:
    """Counts copies of states, and those that are not released."""

    def __init__(self) -> None:
        self.made = 0
        self.live = 0
        self.most_live = 0
        self.release_fails = False

    @property
    def size_bytes(self) -> int:
        return 8

    def stage(self) -> Copies:
        self.made += 1
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return self

    def release(self) -> None:
        self.live -= 1
        if self.release_fails:
            raise OSError("no release")


class Saves:
    """Submits saves to a BackgroundSaver; while the gate is shut, a save that has begun goes no further."""

    def __init__(
        self, *, back_pressure: BackPressure = "wait", on_error: OnError = "raise"
    ) -> None:
        self.saver = BackgroundSaver(back_pressure=back_pressure, on_error=on_error)
        self.copies = Copies()
        self.gate = threading.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.arrivals = threading.Semaphore(0)

    def submit(self, step: int, *failures: BaseException) -> SaveHandle | None:
        """Submit a save that fails with these, one after the other, before it succeeds."""
        left = list(failures)

        def finish(_: Copies, stats: SaveStats) -> Checkpoint:
            stats.write_s = 1.0
            self.begun.append(step)
            self.arrivals.release()
            assert self.gate.wait(TIMEOUT_S)
            if left:
                raise left.pop(0)
            return checkpoint(step)

        return self.saver.submit(self.copies.stage, finish)

    def submitted(self, step: int, *failures: BaseException) -> SaveHandle:
        handle = self.submit(step, *failures)
        assert handle is not None
        return handle

    def begin(self, step: int, *failures: BaseException) -> SaveHandle:
        """Submit a save, and return when it has begun and is held up."""
        self.gate.clear()
        handle = self.submitted(step, *failures)
        assert self.arrivals.acquire(timeout=TIMEOUT_S)
        return handle


def failed(handle: SaveHandle) -> BaseException | None:
    return handle.durable.exception(TIMEOUT_S)


def test_submit_returns_when_the_state_is_staged_and_not_durable() -> None:
    saves = Saves()
    handle = saves.begin(1)
    assert handle.staged.done()
    assert not handle.durable.done()
    was_busy = saves.saver.is_busy
    saves.gate.set()
    assert handle.wait(TIMEOUT_S).step == 1
    assert (was_busy, saves.saver.is_busy) == (True, False)
    saves.saver.wait()
    assert saves.copies.live == 0


def test_handle_wait_gives_up_after_its_timeout() -> None:
    saves = Saves()
    handle = saves.begin(1)
    with pytest.raises(TimeoutError):
        handle.wait(0.0)
    saves.gate.set()
    saves.saver.wait()


def test_stats_say_what_a_save_cost() -> None:
    saves = Saves()
    stats = saves.submitted(1).stats
    saves.saver.wait()
    assert stats.blocked_s >= stats.stage_s >= 0.0
    assert (stats.staged_bytes, stats.write_s) == (8, 1.0)
    assert stats.queue_s >= 0.0


def test_wait_stages_the_next_state_only_when_the_first_save_is_over() -> None:
    saves = Saves()
    first = saves.begin(1)
    opener = threading.Thread(target=saves.gate.set)
    opener.start()
    saves.submitted(2)
    assert first.durable.done()
    opener.join()
    saves.saver.wait()
    assert saves.begun == [1, 2]
    assert saves.copies.most_live == 1


def test_saves_of_several_threads_are_all_done() -> None:
    saves = Saves()
    threads = [threading.Thread(target=saves.submit, args=(step,)) for step in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    saves.saver.wait()
    assert sorted(saves.begun) == list(range(8))


def test_skip_neither_stages_nor_waits_while_a_save_runs() -> None:
    saves = Saves(back_pressure="skip")
    first = saves.begin(1)
    assert saves.submit(2) is None
    assert saves.copies.made == 1
    saves.gate.set()
    first.wait(TIMEOUT_S)
    # At once: whoever knows that the first one is durable is not skipped any more.
    assert saves.submitted(3).wait(TIMEOUT_S).step == 3
    saves.saver.wait()


def test_skip_does_not_skip_behind_a_finished_save_in_a_hundred_attempts() -> None:
    saves = Saves(back_pressure="skip")
    for step in range(100):
        saves.submitted(step).wait(TIMEOUT_S)
    assert saves.begun == list(range(100))
    saves.saver.wait()


def test_coalesce_keeps_the_newest_and_never_stages_three() -> None:
    saves = Saves(back_pressure="coalesce")
    first = saves.begin(1)
    second, third = saves.submitted(2), saves.submitted(3)
    assert isinstance(failed(second), SaveFailed)
    assert second.staged.done()
    assert saves.copies.live == 2
    saves.gate.set()
    saves.saver.wait()
    assert (first.wait().step, third.wait().step) == (1, 3)
    assert saves.begun == [1, 3]
    assert (saves.copies.most_live, saves.copies.live) == (2, 0)


def test_superseded_save_is_not_a_failure_to_be_raised() -> None:
    saves = Saves(back_pressure="coalesce")
    saves.begin(1)
    second = saves.submitted(2)
    saves.submitted(3)
    saves.gate.set()
    saves.saver.wait()
    assert "superseded by a newer save" in str(failed(second))


def test_wait_includes_the_save_that_waits() -> None:
    saves = Saves(back_pressure="coalesce")
    saves.begin(1)
    waiting = saves.submitted(2)
    saves.gate.set()
    saves.saver.wait()
    assert waiting.durable.done()


ASK: dict[str, Callable[[Saves], object]] = {
    "submit": lambda saves: saves.submit(2),
    "check": lambda saves: saves.saver.check(),
    "wait": lambda saves: saves.saver.wait(),
}


@pytest.mark.parametrize("back_pressure", ["wait", "skip", "coalesce"])
@pytest.mark.parametrize("ask", ASK.values(), ids=ASK)
def test_failure_is_raised_once_at_the_next_call(
    ask: Callable[[Saves], object], back_pressure: BackPressure
) -> None:
    saves = Saves(back_pressure=back_pressure)
    failure = OSError(28, "full")
    handle = saves.submitted(1, failure)
    assert failed(handle) is failure
    with pytest.raises(OSError, match="full") as raised:
        ask(saves)
    assert raised.value is failure
    ask(saves)
    saves.saver.wait()
    assert saves.copies.live == 0


def test_failure_of_the_save_that_was_waited_for_is_raised_before_the_next_is_staged() -> None:
    saves = Saves()
    saves.begin(1, OSError("full"))
    opener = threading.Thread(target=saves.gate.set)
    opener.start()
    with pytest.raises(OSError, match="full"):
        saves.submit(2)
    opener.join()
    assert saves.copies.made == 1


def test_later_failures_are_noted_on_the_first() -> None:
    saves = Saves(back_pressure="coalesce")
    saves.begin(1, OSError("first"))
    saves.submitted(2, OSError("second"))
    saves.gate.set()
    with pytest.raises(OSError, match="first") as raised:
        saves.saver.wait()
    assert raised.value.__notes__ == ["ckptmgr: a later save failed, too: second"]
    saves.saver.wait()


def test_failure_of_staging_is_raised_by_the_call_itself() -> None:
    saver = BackgroundSaver()

    def stage() -> Copies:
        raise StagingExhausted("no memory")

    with pytest.raises(StagingExhausted, match="no memory"):
        saver.submit(stage, lambda copies, stats: checkpoint(1))
    assert not saver.is_busy
    saver.wait()


def test_retry_succeeds_without_a_failure() -> None:
    saves = Saves(on_error="retry(2)")
    assert saves.submitted(1, OSError("a"), OSError("b")).wait(TIMEOUT_S).step == 1
    saves.saver.wait()
    assert saves.begun == [1, 1, 1]


def test_retry_that_is_used_up_raises_the_last_failure() -> None:
    saves = Saves(on_error="retry(1)")
    saves.submitted(1, OSError("a"), OSError("b"))
    with pytest.raises(OSError, match="b"):
        saves.saver.wait()


def test_warn_logs_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    saves = Saves(on_error="warn")
    handle = saves.submitted(1, OSError("full"))
    saves.saver.wait()
    assert "a save failed: full" in caplog.text
    assert isinstance(failed(handle), OSError)


def test_callable_gets_the_failure_and_nothing_is_raised() -> None:
    got: list[BaseException] = []
    saves = Saves(on_error=got.append)
    failure = OSError("full")
    saves.submitted(1, failure)
    saves.saver.wait()
    assert got == [failure]


@pytest.mark.parametrize("error", [ValueError("handler"), SystemExit("handler")])
def test_failure_of_the_callable_is_raised_as_an_exception(error: BaseException) -> None:
    def handler(_: BaseException) -> None:
        raise error

    saves = Saves(on_error=handler)
    handle = saves.submitted(1, OSError("full"))
    with pytest.raises((ValueError, SaveFailed), match="handler"):
        saves.saver.wait()
    assert str(failed(handle)) == "full"


def test_callable_may_save_again_while_the_training_waits() -> None:
    again: list[SaveHandle | None] = []

    def handler(_: BaseException) -> None:
        again.append(saves.submit(2))

    for back_pressure in ("wait", "skip", "coalesce"):
        saves = Saves(back_pressure=back_pressure, on_error=handler)
        saves.submitted(1, OSError("full"))
        saves.saver.wait()
        assert saves.begun == [1, 2]
        assert saves.copies.most_live == 1
    assert [handle.wait(TIMEOUT_S).step for handle in again if handle] == [2, 2, 2]


def test_callable_that_waits_is_an_error_instead_of_a_deadlock() -> None:
    saves = Saves(on_error=lambda _: saves.saver.wait())
    saves.submitted(1, OSError("full"))
    with pytest.raises(SaveFailed, match="cannot wait"):
        saves.saver.wait()


def test_callable_that_waits_for_the_save_it_asked_for_is_an_error_instead_of_a_deadlock() -> None:
    def handler(_: BaseException) -> None:
        saves.submitted(2).wait()

    saves = Saves(on_error=handler)
    saves.submitted(1, OSError("full"))
    with pytest.raises(SaveFailed, match="cannot wait"):
        saves.saver.wait()
    assert saves.begun == [1, 2]


def test_save_asked_for_while_its_own_thread_copies_is_refused_and_the_first_goes_on() -> None:
    saves = Saves()

    def interrupted() -> Copies:
        with pytest.raises(SaveFailed, match="signal handlers"):
            saves.submit(2)
        return saves.copies.stage()

    handle = saves.saver.submit(interrupted, lambda _, stats: checkpoint(1))
    assert handle is not None
    assert handle.wait(TIMEOUT_S).step == 1
    assert saves.submitted(3).wait(TIMEOUT_S).step == 3


def test_thread_that_cannot_be_started_is_an_error_of_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    saves = Saves()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            saves.submit(1)
    assert saves.copies.live == 0
    assert saves.submitted(2).wait(TIMEOUT_S).step == 2
    saves.saver.wait()


@pytest.mark.parametrize("is_there", [False, True])
def test_save_that_ctrl_c_stops_before_it_begins_is_given_up(
    monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if is_there:
            start(thread)
        raise KeyboardInterrupt

    saves = Saves()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saves.submit(1)
    assert saves.copies.live == 0
    assert saves.submitted(2).wait(TIMEOUT_S).step == 2
    saves.saver.wait()
    assert saves.begun == [2]


def test_copy_that_cannot_be_released_is_logged_and_the_save_is_good(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saves = Saves()
    saves.copies.release_fails = True
    assert saves.submitted(1).wait(TIMEOUT_S).step == 1
    saves.saver.wait()
    assert "could not be given back" in caplog.text


def test_save_that_is_stopped_by_no_exception_fails_with_one() -> None:
    saves = Saves()
    saves.submitted(1, SystemExit("stop"))
    with pytest.raises(SaveFailed, match="stopped by SystemExit: stop"):
        saves.saver.wait()


def test_kept_failure_keeps_nothing_that_was_staged() -> None:
    class Memory:
        pass

    seen: list[weakref.ref[Memory]] = []

    def finish(_: Copies, stats: SaveStats) -> Checkpoint:
        memory = Memory()
        seen.append(weakref.ref(memory))
        try:
            raise ValueError("inner")
        except ValueError as error:
            raise OSError("outer") from error

    saver = BackgroundSaver()
    handle = saver.submit(Copies().stage, finish)
    assert handle is not None
    assert isinstance(failed(handle), OSError)
    with pytest.raises(OSError, match="outer"):
        saver.wait()
    gc.collect()
    assert seen[0]() is None


def test_failure_nobody_asked_for_is_logged_even_if_the_saver_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saves = Saves(back_pressure="coalesce")
    saves.begin(1, OSError("first"))
    saves.submitted(2, OSError("second"))
    saves.gate.set()
    saves.saver.wait_until_idle()
    with caplog.at_level(logging.CRITICAL):
        saves.saver.report_unfetched()
        saves.saver.report_unfetched()
    assert [record.levelname for record in caplog.records] == ["CRITICAL"]
    assert "first; ckptmgr: a later save failed, too: second" in caplog.text
    saves.saver.check()


@pytest.mark.parametrize("which", ["staged", "durable"])
def test_handle_cannot_be_cancelled(which: str) -> None:
    saves = Saves()
    handle = saves.begin(1)
    assert not getattr(handle, which).cancel()
    saves.gate.set()
    assert handle.wait(TIMEOUT_S).step == 1
    saves.saver.wait()


def test_handle_can_be_awaited() -> None:
    async def main() -> Checkpoint:
        handle = saves.submitted(1)
        await asyncio.wrap_future(handle.staged)
        return await asyncio.wrap_future(handle.durable)

    saves = Saves()
    assert asyncio.run(main()).step == 1
    saves.saver.wait()


def test_task_that_gives_up_waiting_does_not_stop_the_save() -> None:
    async def main() -> SaveHandle:
        handle = saves.begin(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(handle.durable), 0.0)
        return handle

    saves = Saves()
    handle = asyncio.run(main())
    saves.gate.set()
    assert handle.wait(TIMEOUT_S).step == 1
    assert saves.submitted(2).wait(TIMEOUT_S).step == 2
    saves.saver.wait()


@pytest.mark.usefixtures("plain_ctrl_c")
def test_ctrl_c_that_does_not_wake_the_waiting_thread_is_heard_before_the_save_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "SLICE_S", 0.05)
    saves = Saves()
    handle = saves.begin(1)

    def press() -> None:
        while not saves.saver._changed._waiters:  # type: ignore[attr-defined]
            os.sched_yield()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        saves.saver.wait()
    assert not handle.durable.done()
    pressing.join(TIMEOUT_S)
    saves.gate.set()
    saves.saver.wait()


def test_no_thread_is_left_after_close() -> None:
    saves = Saves()
    saves.submitted(1)
    saves.saver.wait()
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-save":
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("error", [ValueError("oops"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("fails", [False, True])
def test_callback_that_raises_neither_ends_the_saving_nor_keeps_others_from_hearing(
    error: BaseException, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    saves = Saves(on_error="warn")
    handle = saves.begin(1, *[OSError("no disk")] * fails)
    heard: list[str] = []

    def stop(_: object) -> None:
        raise error

    handle.durable.add_done_callback(stop)
    handle.durable.add_done_callback(lambda _: heard.append("the second"))
    saves.gate.set()
    saves.saver.wait()
    assert saves.submitted(2).wait(TIMEOUT_S).step == 2
    saves.saver.wait()
    assert heard == ["the second"]
    assert type(error).__name__ in caplog.text


def test_callback_of_a_finished_save_may_end_the_program() -> None:
    saves = Saves()
    handle = saves.submitted(1)
    saves.saver.wait()
    with pytest.raises(SystemExit):
        handle.durable.add_done_callback(lambda _: sys.exit(3))


def test_copy_is_given_back_when_ctrl_c_comes_between_the_copying_and_the_saving() -> None:
    saves = Saves()

    def interrupted(_: Copies) -> SaveHandle:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        saves.saver.submit(
            saves.copies.stage, lambda _, stats: checkpoint(1), handle_of=interrupted
        )
    assert (saves.copies.live, saves.saver.is_busy) == (0, False)
    assert saves.submitted(2).wait(TIMEOUT_S).step == 2
