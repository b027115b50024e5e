# SPDX-License-Identifier: Apache-2.0
"""A stop that comes between two steps: what was put aside, or the state while the run waits for data."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Stop

BATCHES, EPOCHS = 4, 2
ASK = "manager.should_stop"
# It waits in `{where}` at `AT`, with weights that are no part of any step.
PROGRAM = """
import ctypes, random, select, sys
import numpy as np
from ckptmgr import CheckpointConfig, CheckpointManager, Stop

directory, where, at = sys.argv[1], sys.argv[2], int(sys.argv[3])

def wait():
    print("waits", flush=True)
    for _ in range(99):  # a signal ends each
        {wait}

class Loader:
    count = 0

    def __iter__(self):
        for index in range({batches}):
            Loader.count += 1
            if where == "fetch" and Loader.count == at + 1:
                {draw}
                wait()
            yield index + random.random()

class Stateful(Loader):
    def state_dict(self):
        return {{"count": self.count}}

    def load_state_dict(self, state):
        self.count = state["count"]

def told(event):
    if event.name == "save.durable":
        print("saved", event.step, flush=True)

random.seed(3)
state = dict(w=np.zeros(3), n=0)
config = CheckpointConfig(save_checkpoint_steps=100, {config})
with CheckpointManager(directory, config, stop={stop}, observe=told) as manager:
    start = manager.resume(state)
    step = start.step
    {ask}
    for epoch in range(start.next_epoch, {epochs}):
        for batch in manager.batches({loader}()):
            state["w"] += batch + random.random()
            if where == "step" and step + 1 == at:
                wait()
            step += 1
            state["n"] = step
            manager.step_end(step, {ended}, epoch=epoch)
            if where == "code" and step == at:
                wait()
        kept = state["w"].copy()
        if where == "validation" and step == at:
            state["w"][:] = -1.0
            wait()
        state["w"][:] = kept
        random.random()
print("end", state["n"], state["w"][0].hex(), flush=True)
"""
DEFAULTS = {
    "wait": "select.select([], [], [], 60)",
    "draw": "pass",
    "config": "",
    "stop": "None",
    "ask": "pass",
    "loader": "Loader",
    "ended": "state",
    "batches": BATCHES,
    "epochs": EPOCHS,
}


class Child:
    """A program that trains, and waits somewhere."""

    def __init__(self, text: str, *args: object) -> None:
        command = [sys.executable, "-c", text, *map(str, args)]
        self.process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> Child:
        assert self.line() == "waits"
        self.process.send_signal(signal.SIGTERM)
        return self

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def rest(self, told: str | None = None) -> tuple[int, list[str]]:
        output, _ = self.process.communicate(told)
        return self.process.returncode, output.splitlines()


def begun(directory: Path, where: str, at: int = 0, **changes: Any) -> Child:
    return Child(PROGRAM.format(**{**DEFAULTS, **changes}), directory, where, at)


def end_of(directory: Path) -> str:
    code, lines = begun(directory, "nowhere").rest()
    assert code == 0
    return lines[-1]


@pytest.mark.parametrize("ask", ["pass", ASK])
@pytest.mark.parametrize(
    ("where", "at"), [("fetch", 2), ("fetch", BATCHES), ("fetch", 7), ("validation", BATCHES)]
)
def test_stop_saves_the_last_step_while_the_program_waits_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, where: str, at: int, ask: str
) -> None:
    program = begun(tmp_path / "cut", where, at, ask=ask).stop()
    assert program.line() == f"saved {at}"
    program.kill()
    assert end_of(tmp_path / "cut") == end_of(tmp_path / "uncut")


@pytest.mark.parametrize(
    "mode", ["async_save='thread'", "async_save='process'", "enc_key=bytes(32)"]
)
def test_stop_saves_the_last_step_in_every_mode(tmp_path: Path, mode: str) -> None:
    program = begun(tmp_path, "validation", BATCHES, config=mode).stop()
    assert program.line() == f"saved {BATCHES}"
    program.kill()


def test_stop_saves_what_a_function_returned_when_the_pass_ended(tmp_path: Path) -> None:
    program = begun(tmp_path, "validation", BATCHES, ended="lambda: state").stop()
    assert program.line() == f"saved {BATCHES}"
    program.kill()
    with CheckpointManager(tmp_path) as manager:
        found: Any = manager.load("latest")
    assert found["n"] == BATCHES
    assert (found["w"] > 0).all()


@pytest.mark.parametrize("where", ["fetch", "validation"])
def test_stop_is_answered_while_the_main_thread_runs_compiled_code(
    tmp_path: Path, where: str
) -> None:
    program = begun(tmp_path, where, BATCHES, wait="ctypes.CDLL(None).poll(None, 0, 60_000)").stop()
    assert program.line() == f"saved {BATCHES}"
    program.kill()


def test_second_signal_ends_the_program(tmp_path: Path) -> None:
    program = begun(tmp_path, "validation", BATCHES, stop="Stop(grace=3600)").stop()
    assert program.line() == f"saved {BATCHES}"
    program.process.send_signal(signal.SIGTERM)
    assert program.rest() == (-signal.SIGTERM, [])


def test_program_that_never_calls_again_ends_by_the_signal_after_the_write(tmp_path: Path) -> None:
    program = begun(tmp_path, "validation", BATCHES, stop="Stop(grace=0.3)").stop()
    assert program.rest() == (-signal.SIGTERM, [f"saved {BATCHES}"])


NOTHING = {
    "the program computes a step": ("step", {}),
    "the program runs after a step": ("code", {}),
    "a loader has a state of its own": ("fetch", {"loader": "Stateful"}),
    "the fetch has drawn random numbers": ("fetch", {"draw": "random.random()"}),
    "the state is a function": ("fetch", {"ended": "lambda: state"}),
    "no copy is wanted": ("validation", {"stop": "Stop(grace=0.3, put_aside=False)"}),
}


@pytest.mark.parametrize(("where", "changes"), NOTHING.values(), ids=NOTHING)
def test_nothing_is_read_where_the_state_may_be_of_no_step(
    tmp_path: Path, where: str, changes: dict[str, Any]
) -> None:
    at = BATCHES if where == "validation" else BATCHES - 1  # inside a pass
    program = begun(tmp_path, where, at, **{"stop": "Stop(grace=0.3)", **changes}).stop()
    assert program.rest() == (-signal.SIGTERM, [])


# Each has changed the weights since its last step when a batch is fetched.
CHANGED_BEFORE_A_FETCH = {
    "another pass begins, with averaged weights": """
for step in manager.batches(range(1, 4)):
    end(step)
    state["w"][:] = -1.0
    for _ in manager.batches(waits(0), name="validation"):
        pass
""",
    "a step has several batches": """
for count, _ in enumerate(manager.batches(waits(3)), 1):
    state["w"] += 1.0
    if count % 2 == 0:
        end(count // 2)
""",
    "the batch of another loader is asked for inside the step": """
others = iter(manager.batches(waits(2), name="others"))
for step in manager.batches(range(1, 9)):
    state["w"] += 1.0
    next(others)
    end(step)
""",
    "a loader that gave no batch of the last step": """
measured = iter(manager.batches(waits(1), name="measured"))
for step in manager.batches(range(1, 9)):
    end(step)
    if step % 3 == 1:
        state["w"][:] = -1.0
        next(measured)
        state["w"][:] = 1.0
""",
}


PASSES = """
import select, sys
import numpy as np
from ckptmgr import CheckpointConfig, CheckpointManager, Stop

def waits(after):
    yield from range(after)
    print("waits", flush=True)
    while True:
        select.select([], [], [], 60)

def end(step):
    manager.step_end(step, state)

state = dict(w=np.zeros(3))
told = lambda event: event.name == "save.durable" and print("saved", event.step, flush=True)
config = CheckpointConfig(save_checkpoint_steps=100)
with CheckpointManager(sys.argv[1], config, stop=Stop(grace=0.3), observe=told) as manager:
    manager.resume(state)
{loop}
"""


@pytest.mark.parametrize("loop", CHANGED_BEFORE_A_FETCH.values(), ids=CHANGED_BEFORE_A_FETCH)
def test_nothing_is_read_at_a_fetch_of_batches_that_are_not_of_the_next_step(
    tmp_path: Path, loop: str
) -> None:
    text = PASSES.format(loop=textwrap.indent(loop, "    "))
    assert Child(text, tmp_path).stop().rest() == (-signal.SIGTERM, [])


def test_exit_saves_no_step_again_that_a_stop_had_written(tmp_path: Path) -> None:
    until_written = "input(); return"
    program = begun(tmp_path, "validation", BATCHES, epochs=1, wait=until_written, ask=ASK).stop()
    assert program.line() == f"saved {BATCHES}"
    code, (last,) = program.rest("go on\n")
    assert (code, last.split()[0]) == (0, "end")
    assert [one.step for one in CheckpointManager(tmp_path).checkpoints()] == [BATCHES]


@pytest.mark.parametrize("put_aside", [1, None, "no"])
def test_put_aside_that_is_no_switch_is_refused(put_aside: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="put_aside"):
        Stop(put_aside=put_aside)


def test_without_put_aside_the_exit_saves_the_live_state(tmp_path: Path) -> None:
    state = {"w": np.zeros(2)}
    config = CheckpointConfig(save_checkpoint_steps=100)
    with CheckpointManager(tmp_path, config, stop=Stop(put_aside=False)) as manager:
        manager.resume(state)
        for step in manager.batches(range(1, 4)):
            manager.step_end(step, state)
        state["w"][:] = -1.0
    with CheckpointManager(tmp_path) as manager:
        found: Any = manager.load("latest")
    assert found["w"][0] == -1.0
