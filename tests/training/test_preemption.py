# SPDX-License-Identifier: Apache-2.0
"""`manager.should_stop`: real signals, one decision for all places of a loop and all ranks, a saved last step."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    Never,
    Ranks,
    RanksOutOfStep,
    SaveHandle,
    Stop,
)
from ckptmgr.core.handle import SaveStats
from ckptmgr.formats.strict_json import Json
from ckptmgr.io.stop_signals import StopWatch
from ckptmgr.parallel import SharedDirectory
from ckptmgr.parallel.joint_stop import JointStop
from ckptmgr.training.preemption import Preemption
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api

SELDOM = CheckpointConfig(save_checkpoint_steps=100)


def train(manager: CheckpointManager, *, signal_at: int, last: int = 8) -> int:
    """Run until asked to stop; return the last step."""
    step = 0
    with manager:
        while step < last and not manager.should_stop:
            step += 1
            if step == signal_at:
                signal.raise_signal(signal.SIGTERM)
                assert not manager.should_stop  # the answer changes when a step ends
            manager.step_end(step, {"n": step})
    return step


@pytest.mark.parametrize("mode", [False, "thread", "process"])
def test_run_stops_after_the_step_and_its_last_step_is_saved(
    mode: Literal["thread", "process"] | bool, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    config = CheckpointConfig(save_checkpoint_steps=2, async_save=mode)
    assert train(CheckpointManager(tmp_path, config), signal_at=3) == 3
    latest = CheckpointManager(tmp_path).latest()
    assert latest is not None
    assert (latest.step, latest.why) == (3, "preempted")
    assert signal.getsignal(signal.SIGTERM) is before


def test_last_step_is_saved_also_where_the_policy_never_saves(tmp_path: Path) -> None:
    train(CheckpointManager(tmp_path, save_policy=Never()), signal_at=3)
    assert [one.step for one in CheckpointManager(tmp_path).checkpoints()] == [3]


def test_step_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    train(CheckpointManager(tmp_path, CheckpointConfig(keep="all")), signal_at=3)
    assert [one.why for one in CheckpointManager(tmp_path).checkpoints()] == ["policy"] * 3


def test_run_that_nobody_asks_to_stop_ends_as_ever(tmp_path: Path) -> None:
    assert train(CheckpointManager(tmp_path, SELDOM), signal_at=0) == 8
    latest = CheckpointManager(tmp_path).latest()
    assert latest is not None
    assert (latest.step, latest.why) == (8, "end")


def test_manager_that_is_never_asked_leaves_signals_alone_where_they_are_switched_off(
    tmp_path: Path,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path, stop=Stop(signals=False)) as manager:
        manager.step_end(1, {"n": 1})
        assert signal.getsignal(signal.SIGTERM) is before


def test_loop_without_step_end_is_answered_at_once(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert not manager.should_stop
        signal.raise_signal(signal.SIGUSR1)
        assert manager.should_stop


def asked_in_a_thread(manager: CheckpointManager) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(manager.should_stop), name="trainer")
    thread.start()
    thread.join()
    return answers[0]


def test_other_thread_that_asks_first_is_warned_once_until_the_main_thread_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert [asked_in_a_thread(manager) for _ in range(2)] == [False, False]
        (warning,) = caplog.messages
        assert "thread 'trainer'" in warning
        assert "Ask manager.should_stop once in the main thread" in warning
        assert not manager.should_stop
        signal.raise_signal(signal.SIGTERM)
        assert asked_in_a_thread(manager)


def test_other_thread_asks_in_silence_after_the_main_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert not manager.should_stop
        assert not asked_in_a_thread(manager)
    assert caplog.messages == []


@pytest.mark.parametrize("grace", [0, -1.0, float("inf"), float("nan")])
def test_grace_that_is_no_time_is_refused(grace: float, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="grace must be a positive number of seconds"):
        CheckpointManager(tmp_path, stop=Stop(grace=grace))


@pytest.mark.parametrize("grace", ["90", True, [1.0]])
def test_grace_that_is_no_number_is_refused(grace: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="grace must be a number of seconds, but got"):
        CheckpointManager(tmp_path, stop=Stop(grace=grace))


@pytest.mark.parametrize(
    ("after", "seconds"), [("11h30min", 41400.0), ("90s", 90.0), (2.5, 2.5), (None, None)]
)
def test_after_is_a_text_or_seconds(after: Any, seconds: float | None) -> None:
    assert Stop(after=after).after_s == seconds


@pytest.mark.parametrize(
    ("after", "error"),
    [
        ("0s", "after must be a time such as '90s', .*, but got '0s'$"),
        ("soon", "after must be a time such as .*, but got 'soon'$"),
        ("11h30m", r"'30min' \(m may be months\) or '11h30min', but got '11h30m'$"),
        (0, "after must be a positive number of seconds, but got 0"),
        (float("inf"), "after must be a positive number of seconds, but got inf"),
    ],
)
def test_after_that_is_no_time_is_refused(after: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Stop(after=after)


@pytest.mark.parametrize("after", [True, [1.0]])
def test_after_of_another_type_is_refused(after: Any) -> None:
    with pytest.raises(TypeError, match="after must be a number of seconds or a text such as"):
        Stop(after=after)


def test_run_stops_by_the_clock_and_its_last_step_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = 0
    with CheckpointManager(tmp_path, SELDOM, stop=Stop(after=1e-9)) as manager:
        while step < 8:
            step += 1
            manager.step_end(step, {"n": step})
            if manager.should_stop:  # from the first answer on
                break
    (newest,) = CheckpointManager(tmp_path).checkpoints()
    assert (step, newest.step, newest.why) == (2, 2, "preempted")
    (warning,) = caplog.messages
    assert warning == "the clock (Stop(after=), 1e-09 s) asks the run to stop after step 2"


def test_program_that_never_asks_is_warned_of_the_clock_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, SELDOM, stop=Stop(after=1e-9)) as manager:
        for step in (1, 2):
            manager.step_end(step, {"n": step})
    (warning,) = caplog.messages
    assert "and the program has not asked should_stop: it goes on" in warning


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def saved(seconds: float) -> SaveHandle:
    durable: Future[Checkpoint] = Future()
    durable.set_result(
        Checkpoint(path=Path("x"), series="x", step=1, saved_at=datetime.now(UTC), size_bytes=1)
    )
    return SaveHandle(staged=Future(), durable=durable, stats=SaveStats(blocked_s=seconds))


@pytest.mark.parametrize(("save_s", "steps"), [(1.0, 96), (20.0, 58), (60.0, 1)])
def test_run_goes_on_for_as_long_as_two_saves_and_two_steps_have_time(
    save_s: float, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    run = Preemption(grace_s=100.0, coordinator=None, timeout_s=1.0, monotonic=clock)
    try:
        assert not run.ask()
        run.step_ended(0)
        clock.now += 1.0
        run.saved(saved(save_s), api.SaveFacts(step=1))
        run.step_ended(1)
        signal.raise_signal(signal.SIGTERM)
        count = 0
        while not run.ask():
            count += 1
            clock.now += 1.0
            run.step_ended(1 + count)
    finally:
        run.closing()
    assert count == steps
    assert "SIGTERM asks the run to stop after step" in caplog.text


@pytest.mark.parametrize(("grace", "steps"), [(None, 49), (100.0, 145)])
def test_clock_counts_from_the_start_and_the_grace_from_its_end(
    grace: float | None, steps: int
) -> None:
    clock = Clock()
    run = Preemption(grace_s=grace, after_s=50.0, coordinator=None, timeout_s=1.0, monotonic=clock)
    try:
        clock.now = 1.0
        count = 0
        while not run.ask():
            clock.now += 1.0
            count += 1
            run.saved(saved(1.0), api.SaveFacts(step=count))
            run.step_ended(count)
    finally:
        run.closing()
    assert count == steps


def test_save_that_takes_longer_than_the_grace_is_said(caplog: pytest.LogCaptureFixture) -> None:
    run = Preemption(grace_s=10.0, coordinator=None, timeout_s=1.0)
    try:
        run.ask()
        run.saved(saved(60.0), api.SaveFacts(step=1))
        run.step_ended(1)
        run.step_ended(2)
        signal.raise_signal(signal.SIGTERM)
        run.step_ended(3)
    finally:
        run.closing()
    assert "the last save took 60 s, and the process is killed after 10 s" in caplog.text


def test_run_without_a_save_to_learn_from_stops_at_once() -> None:
    run = Preemption(grace_s=1000.0, coordinator=None, timeout_s=1.0)
    try:
        run.ask()
        run.step_ended(1)
        signal.raise_signal(signal.SIGTERM)
        run.step_ended(2)
        assert run.is_decided
    finally:
        run.closing()


def test_ranks_stop_after_the_same_step() -> None:
    meeting, clock = Meeting(2), Clock()

    def run(rank: int) -> list[int]:
        joint = JointStop(Seat(meeting, rank), timeout_s=5.0, interval_s=3.0, monotonic=clock)
        return [step for step in range(1, 9) if joint.decide(step, rank == 1 and step >= 4)][:1]

    assert [one.result for one in run_ranks(meeting, run)] == [[4], [4]]


def test_ranks_do_not_meet_at_every_step() -> None:
    meeting = Meeting(2)

    def run(rank: int) -> None:
        clock = Clock()
        joint = JointStop(Seat(meeting, rank), timeout_s=5.0, interval_s=10.0, monotonic=clock)
        for step in range(1, 101):
            clock.now += 1.0
            joint.decide(step, is_wanted=False)

    assert [one.raised for one in run_ranks(meeting, run)] == [None, None]
    assert len(set(meeting.tags)) == 13


def test_ranks_that_count_other_steps_are_told() -> None:
    meeting = Meeting(2)

    def run(rank: int) -> bool:
        joint = JointStop(Seat(meeting, rank), timeout_s=5.0, interval_s=1.0)
        return joint.decide(1 + rank, is_wanted=False)

    errors = [one.raised for one in run_ranks(meeting, run)]
    assert [type(error) for error in errors] == [RanksOutOfStep] * 2


def test_ranks_that_are_threads_stop_together_within_the_grace(tmp_path: Path) -> None:
    meeting, watch = Meeting(2), StopWatch()  # only the main thread can have a handler

    def run(rank: int) -> int:
        manager = CheckpointManager(
            tmp_path, SELDOM, stop=Stop(grace=0.5), ranks=Ranks(Seat(meeting, rank))
        )
        step = 0
        with manager:
            while not manager.should_stop:
                step += 1
                if rank == 1 and step == 3:
                    os.kill(os.getpid(), signal.SIGTERM)
                manager.step_end(step, {"n": step})
        return step

    try:
        steps = [one.result for one in run_ranks(meeting, run)]
    finally:
        watch.close()
    assert steps[0] == steps[1] is not None
    newest = CheckpointManager(tmp_path).checkpoints()[-1]
    assert (newest.step, newest.why) == (steps[0], "preempted")


def test_ranks_stop_together_when_the_clock_of_one_asks(tmp_path: Path) -> None:
    meeting, watch = Meeting(2), StopWatch()  # only the main thread can have a handler

    def run(rank: int) -> int:
        stop = Stop(after=1e-9 if rank else 3600, grace=None if rank else 0.5)
        manager = CheckpointManager(tmp_path, SELDOM, stop=stop, ranks=Ranks(Seat(meeting, rank)))
        step = 0
        with manager:
            while not manager.should_stop:
                step += 1
                manager.step_end(step, {"n": step})
        return step

    try:
        steps = [one.result for one in run_ranks(meeting, run)]
    finally:
        watch.close()
    assert steps[0] == steps[1] is not None
    newest = CheckpointManager(tmp_path).checkpoints()[-1]
    assert (newest.step, newest.why) == (steps[0], "preempted")


def test_answer_of_a_rank_that_is_none_is_refused() -> None:
    class Odd(Seat):
        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            return [{"ok": "yes"}]

    joint = JointStop(Odd(Meeting(1), 0), timeout_s=5.0, interval_s=1.0)
    with pytest.raises(RanksOutOfStep, match="a rank answers 'yes' about the stop"):
        joint.decide(1, is_wanted=False)


def test_processes_of_a_job_stop_and_save_together_when_one_is_signalled(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:  # pragma: no cover - it exits without a word to coverage
            step = 99
            try:
                seat = SharedDirectory(tmp_path / "meet", rank=rank, world=2, session="test")
                manager = CheckpointManager(tmp_path / "run", SELDOM, ranks=Ranks(seat))
                step = train(manager, signal_at=3 * rank, last=50)
            finally:
                os._exit(step)
    steps = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    assert steps[0] == steps[1] < 50
    assert [one.step for one in CheckpointManager(tmp_path / "run").checkpoints()] == steps[:1]
