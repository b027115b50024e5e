# SPDX-License-Identifier: Apache-2.0
"""SIGTERM in a program that never asks `should_stop`: a save, then SystemExit(143), or the signal's own end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Never, Ranks, Stop
from ckptmgr.parallel import SharedDirectory

SELDOM = CheckpointConfig(save_checkpoint_steps=100)


def found(directory: Path) -> list[tuple[int, str]]:
    return [(one.step, one.why) for one in CheckpointManager(directory).checkpoints()]


def loop(manager: CheckpointManager, steps: Iterable[int], signal_at: int) -> list[int]:
    """Run without asking, and end by the signal; return the steps whose `step_end` returned."""
    ended: list[int] = []

    def run() -> None:
        with manager:
            for step in steps:
                if step == signal_at:
                    signal.raise_signal(signal.SIGTERM)
                manager.step_end(step, {"n": step})
                ended.append(step)

    with pytest.raises(SystemExit) as raised:
        run()
    assert raised.value.code == 128 + signal.SIGTERM
    return ended


def train(manager: CheckpointManager, *, signal_at: int, last: int = 8) -> int:
    """Return the last step whose `step_end` returned."""
    return loop(manager, range(1, last + 1), signal_at)[-1]


@pytest.mark.parametrize("mode", [False, "thread", "process"])
def test_step_after_sigterm_is_saved_and_the_next_one_ends_the_program(
    mode: Literal["thread", "process"] | bool, tmp_path: Path
) -> None:
    config = CheckpointConfig(save_checkpoint_steps=100, async_save=mode)
    assert train(CheckpointManager(tmp_path, config), signal_at=3) == 3
    assert found(tmp_path) == [(3, "preempted")]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_step_is_saved_where_the_policy_never_saves(tmp_path: Path) -> None:
    train(CheckpointManager(tmp_path, save_policy=Never()), signal_at=3)
    assert found(tmp_path) == [(3, "preempted")]


def test_exit_saves_nothing_twice(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    train(CheckpointManager(tmp_path, config), signal_at=3)
    assert found(tmp_path) == [(3, "preempted")]


def test_next_batch_ends_the_program(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, SELDOM)
    taken: list[int] = []

    def steps() -> Iterator[int]:
        for step in manager.batches(range(1, 9)):
            taken.append(step)
            yield step

    loop(manager, steps(), signal_at=3)
    assert taken == [1, 2, 3]
    assert found(tmp_path) == [(3, "preempted")]


def test_program_that_asks_meanwhile_ends_in_its_own_way(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, SELDOM) as manager:
        manager.step_end(1, {"n": 1})
        signal.raise_signal(signal.SIGTERM)
        manager.step_end(2, {"n": 2})
        assert manager.should_stop
    assert found(tmp_path) == [(2, "preempted")]


def test_signal_before_the_first_question_counts_for_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, SELDOM) as manager:
        manager.step_end(1, {"n": 1})
        signal.raise_signal(signal.SIGTERM)
        answers = [manager.should_stop]
        manager.step_end(2, {"n": 2})
        answers.append(manager.should_stop)
    assert answers == [False, True]
    assert found(tmp_path) == [(2, "preempted")]


def test_block_that_ends_after_the_signal_saves_and_ends_the_program(tmp_path: Path) -> None:
    assert train(CheckpointManager(tmp_path, SELDOM), signal_at=8) == 8
    assert found(tmp_path) == [(8, "preempted")]


def test_nothing_is_held_before_the_first_step_outside_a_block_or_in_another_thread(
    tmp_path: Path,
) -> None:
    outside = CheckpointManager(tmp_path / "outside", SELDOM)
    outside.step_end(1, {"n": 1})
    outside.close()
    with CheckpointManager(tmp_path / "inside", SELDOM) as manager:
        thread = threading.Thread(target=lambda: manager.step_end(1, {"n": 1}))
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handler_of_the_program_stays(tmp_path: Path) -> None:
    called: list[int] = []
    own: Callable[[int, Any], None] = lambda number, _: called.append(number)  # noqa: E731
    before = signal.signal(signal.SIGTERM, own)
    try:
        with CheckpointManager(tmp_path, SELDOM) as manager:
            manager.step_end(1, {"n": 1})
            signal.raise_signal(signal.SIGTERM)
            manager.step_end(2, {"n": 2})
            manager.step_end(3, {"n": 3})
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == [signal.SIGTERM]
    assert found(tmp_path) == [(3, "end")]


def test_descriptor_of_wakeups_of_the_program_stays(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    try:
        train(CheckpointManager(tmp_path, SELDOM), signal_at=2)
        assert signal.set_wakeup_fd(before) == writing
    finally:
        os.close(reading)
        os.close(writing)
    assert found(tmp_path) == [(2, "preempted")]


def test_forked_child_ends_by_the_signal_and_the_run_goes_on(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, SELDOM) as manager:
        manager.step_end(1, {"n": 1})
        child = os.fork()
        if child == 0:  # pragma: no cover - it ends by the signal
            signal.raise_signal(signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        manager.step_end(2, {"n": 2})
        manager.step_end(3, {"n": 3})
    assert found(tmp_path) == [(3, "end")]


SIGNALLED_CHILD = """
import os, select, signal, sys

def told():
    os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(after_in_child=told)  # before those of ckptmgr
from ckptmgr import CheckpointManager, Stop

with CheckpointManager(sys.argv[1], stop=Stop(grace=0.3)) as manager:
    manager.step_end(1, {"n": 1})
    child = os.fork()
    if child == 0:
        signal.pause()
    print(os.waitpid(child, 0)[1], flush=True)
    select.select([], [], [], 1.5)
    manager.step_end(2, {"n": 2})
    print(manager.should_stop, flush=True)
"""


def test_signal_to_a_child_that_is_being_forked_is_none_of_the_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALLED_CHILD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, [str(int(signal.SIGTERM)), "False"])


PROGRAM = """
import os, select, signal, sys
from ckptmgr import CheckpointConfig, CheckpointManager, Stop
with CheckpointManager(sys.argv[1], CheckpointConfig(save_checkpoint_steps=100), stop={stop}) as manager:
    manager.step_end(1, dict(n=1))
    {then}
"""
WAIT = "print(flush=True); [select.select([], [], [], 60) for _ in range(9)]"
# A main thread in compiled code: no handler of Python runs until it returns.
COMPILED = "import ctypes; print(flush=True); ctypes.CDLL(None).poll(None, 0, 600); ctypes.CDLL(None).sleep(60)"


def ended(directory: Path, stop: str, then: str, *, signals: int) -> int:
    """Return the exit code of a program that gets SIGTERM once it has said that it waits."""
    program = [sys.executable, "-c", PROGRAM.format(stop=stop, then=then), str(directory)]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        for _ in range(signals):
            child.send_signal(signal.SIGTERM)
        return child.wait()


def test_program_that_never_calls_again_ends_by_the_signal_within_the_grace(tmp_path: Path) -> None:
    assert ended(tmp_path, "Stop(grace=0.2)", WAIT, signals=1) == -signal.SIGTERM


def test_program_in_compiled_code_ends_by_the_signal_within_the_grace(tmp_path: Path) -> None:
    assert ended(tmp_path, "Stop(grace=0.2)", COMPILED, signals=1) == -signal.SIGTERM


def test_program_without_signals_ends_at_once(tmp_path: Path) -> None:
    assert ended(tmp_path, "Stop(signals=False, grace=3600)", WAIT, signals=1) == -signal.SIGTERM


def test_second_sigterm_ends_the_program(tmp_path: Path) -> None:
    then = "signal.raise_signal(signal.SIGTERM); " + WAIT
    assert ended(tmp_path, "Stop(grace=3600)", then, signals=1) == -signal.SIGTERM


def test_program_that_is_saved_and_calls_no_more_ends_by_the_signal(tmp_path: Path) -> None:
    then = "signal.raise_signal(signal.SIGTERM); manager.step_end(2, dict(n=2)); " + WAIT
    assert ended(tmp_path, "Stop(grace=0.2)", then, signals=0) == -signal.SIGTERM
    assert found(tmp_path) == [(2, "preempted")]


@pytest.mark.parametrize("signals", [1, None, "no"])
def test_signals_that_is_no_switch_is_refused(signals: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="signals"):
        Stop(signals=signals)


def test_processes_of_a_job_save_one_step_and_end_when_one_is_signalled(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:  # pragma: no cover - it exits without a word to coverage
            step = 99
            try:
                seat = SharedDirectory(tmp_path / "meet", rank=rank, world=2, session="test")
                how: Any = {"ranks": Ranks(seat), "stop": Stop(grace=25)}
                manager = CheckpointManager(tmp_path / "run", SELDOM, **how)
                step = train(manager, signal_at=3 * rank, last=50)
            finally:
                os._exit(step)
    steps = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    assert steps[0] == steps[1] < 50
    assert found(tmp_path / "run") == [(steps[0], "preempted")]
