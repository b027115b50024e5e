# SPDX-License-Identifier: Apache-2.0
"""A training loop whose saves run elsewhere, and fail: disks, forks, signals, deaths, exits."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    StoreLocked,
    load_checkpoint,
)
from ckptmgr.series.writer import SeriesWriter
from tests.support import api
from tests.support.held import (
    TIMEOUT_S,
    HeldDisk,
    Interference,
    run_program,
    start_program,
    stop,
    temporary_files,
    wait_for_end,
)
from tests.support.runs import callback_on, manager_on
from tests.support.surface import Loop, data_files

in_background = pytest.mark.parametrize("mode", ["thread", "process"])
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))


def held_manager(runs: Path, disk: HeldDisk, **config: Any) -> CheckpointManager:
    return manager_on(runs, CheckpointConfig(async_save="thread", **config), fs=disk)


def held_callback(runs: Path, disk: HeldDisk, **config: Any) -> ModelCheckpoint:
    return callback_on("net", str(runs), CheckpointConfig(async_save="thread", **config), fs=disk)


def steps(manager: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in manager.checkpoints()]


def settle(callback: ModelCheckpoint) -> None:
    """Wait for saves in flight, and leave its failure to the next call."""
    callback._engine.wait_until_idle()


@pytest.mark.parametrize("failure", [FULL, BROKEN], ids=["full", "broken"])
def test_step_that_failed_is_heard_of_once_and_is_due_again(
    tmp_path: Path, failure: OSError
) -> None:
    disk = HeldDisk()
    with held_manager(tmp_path, disk, save_checkpoint_steps=2) as manager:
        disk.failure = failure
        manager.step_end(1, {"w": 1})
        assert manager.step_end(2, {"w": 2}) is not None
        manager._engine.wait_until_idle()
        with pytest.raises(OSError, match=os.strerror(failure.errno or 0)) as raised:
            manager.step_end(3, {"w": 3})
        assert raised.value.errno == failure.errno
        assert manager.step_end(4, {"w": 4}) is not None
        assert manager.step_end(5, {"w": 5}) is None
    assert steps(manager) == [4, 5]
    assert temporary_files(tmp_path) == []


def test_last_step_is_saved_even_if_it_was_the_one_that_raised(tmp_path: Path) -> None:
    disk = HeldDisk()
    with held_manager(tmp_path, disk, save_checkpoint_steps=1) as manager:
        disk.failure = FULL
        manager.step_end(1, {"w": 1})
        manager._engine.wait_until_idle()
        with pytest.raises(OSError, match="became full"):
            manager.step_end(2, {"w": 2})
    assert steps(manager) == [2]


def test_last_step_is_saved_and_the_failure_before_it_raised_at_the_end(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.gate.clear()
    disk.failure = FULL
    manager = held_manager(tmp_path, disk, save_checkpoint_steps=2)

    def train() -> None:
        with manager:
            manager.step_end(2, {"w": 2})
            manager.step_end(3, {"w": 3})
            disk.gate.set()

    with pytest.raises(OSError, match="became full"):
        train()
    assert steps(manager) == [3]


def test_error_of_the_training_is_never_replaced(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failure = FULL

    def train() -> None:
        with held_manager(tmp_path, disk) as manager:
            manager.save(1, {"w": 1})
            raise ValueError("loss is NaN")

    with pytest.raises(ValueError, match="loss is NaN") as raised:
        train()
    (note,) = raised.value.__notes__
    assert "a save in the background failed" in note
    assert "became full" in note


def test_callback_raises_a_failure_at_the_next_step_and_saves_again(tmp_path: Path) -> None:
    disk = HeldDisk()
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=2)
    loop = Loop(callbacks=(callback,))
    loop.begin()
    disk.failure = BROKEN
    loop.run_step()
    loop.run_step()
    settle(callback)
    with pytest.raises(OSError, match="Input/output error"):
        loop.run_step()
    loop.run_step()
    loop.end()
    assert data_files(tmp_path) == ["net-2_1.ckpt"]
    assert callback.latest_ckpt_file_name == str(tmp_path / "net-2_1.ckpt")


def test_callback_tries_the_last_step_and_raises_at_the_end(tmp_path: Path) -> None:
    disk = HeldDisk()
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=2)
    loop = Loop(callbacks=(callback,))
    disk.failure = FULL
    loop.run(2, end=False)
    with pytest.raises(OSError, match="became full"):
        loop.end()
    assert data_files(tmp_path) == ["net-1_2.ckpt"]
    with api.place(tmp_path).lease("net"):  # given back
        pass


def test_callback_gives_the_lease_back_when_the_last_step_fails_too(tmp_path: Path) -> None:
    disk = HeldDisk()
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=2)
    loop = Loop(callbacks=(callback,))
    loop.run(3, end=False)
    disk.failure = FULL
    with pytest.raises(OSError, match="became full"):
        loop.end()
    loop.network = {"w": object()}  # type: ignore[dict-item]
    loop.step = 5
    with pytest.raises(TypeError):
        loop.end()
    with api.place(tmp_path).lease("net"):
        pass


def test_breakpoint_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    disk = HeldDisk()
    done: list[str] = []
    create, replace = disk.create, disk.replace

    def noting_create(path: Path, *, mode: int, owner_of: Path | None = None) -> Any:
        done.append(f"create {path.name.split('.ckpt')[0]}")
        return create(path, mode=mode, owner_of=owner_of)

    def noting_replace(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(f"publish {target.name}")

    disk.create, disk.replace = noting_create, noting_replace  # type: ignore[method-assign]
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=2, exception_save=True)
    loop = Loop(callbacks=(callback,))
    with pytest.raises(ValueError, match="boom") as raised:
        loop.run_and_fail(2, ValueError("boom"))
    assert not hasattr(raised.value, "__notes__")
    assert done.index("publish net-1_2.ckpt") < done.index("create .net-1_2_breakpoint")
    assert data_files(tmp_path) == ["net-1_2.ckpt", "net-1_2_breakpoint.ckpt"]


def test_breakpoint_is_saved_after_a_failure_in_the_background(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failure = BROKEN
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=2, exception_save=True)
    with pytest.raises(ValueError, match="boom") as raised:
        Loop(callbacks=(callback,)).run_and_fail(2, ValueError("boom"))
    (note,) = raised.value.__notes__
    assert "Input/output error" in note
    assert data_files(tmp_path) == ["net-1_2_breakpoint.ckpt"]


def test_latest_file_name_is_that_of_a_durable_save(tmp_path: Path) -> None:
    disk = HeldDisk()
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=1)
    loop = Loop(callbacks=(callback,))
    loop.run(1, end=False)
    settle(callback)
    disk.arrive()
    first = str(tmp_path / "net-1_1.ckpt")
    assert callback.latest_ckpt_file_name == first
    disk.gate.clear()
    loop.run_step()
    disk.arrive()
    assert callback.latest_ckpt_file_name == first
    disk.gate.set()
    loop.end()
    assert callback.latest_ckpt_file_name == str(tmp_path / "net-1_2.ckpt")


def test_skipped_step_stays_due_until_the_disk_has_caught_up(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.gate.clear()
    with held_manager(tmp_path, disk, save_checkpoint_steps=2, back_pressure="skip") as manager:
        first = manager.step_end(2, {"w": 2})
        assert first is not None
        assert [manager.step_end(step, {"w": step}) for step in (3, 4, 5)] == [None] * 3
        disk.gate.set()
        first.wait(TIMEOUT_S)
        assert manager.step_end(6, {"w": 6}) is not None
    assert steps(manager) == [2, 6]


def test_slow_disk_coalesces_to_the_newest_step(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.gate.clear()
    callback = held_callback(tmp_path, disk, save_checkpoint_steps=1, back_pressure="coalesce")
    loop = Loop(callbacks=(callback,), batch_num=100)
    loop.run(1, end=False)
    disk.arrive()
    for _ in range(9):
        loop.run_step()
    disk.gate.set()
    loop.end()
    assert data_files(tmp_path) == ["net-1_1.ckpt", "net-1_10.ckpt"]
    values = load_checkpoint(str(tmp_path / "net-1_10.ckpt"))
    assert np.array_equal(np.asarray(values["w"]), np.full(4, 10, np.float32))


@in_background
def test_callback_writes_what_each_step_had(tmp_path: Path, mode: str) -> None:
    config = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=20, async_save=mode)
    Loop(callbacks=(ModelCheckpoint("net", str(tmp_path), config),), batch_num=100).run(8)
    for step in range(1, 9):
        values = load_checkpoint(str(tmp_path / f"net-1_{step}.ckpt"))
        assert np.array_equal(np.asarray(values["w"]), np.full(4, step, np.float32))


def test_resume_waits_for_the_save_in_flight(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(async_save="thread")) as manager:
        manager.save(7, {"w": 7})
        assert manager.resume().step == 7


def test_error_handler_may_save_the_training_elsewhere(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.failure = FULL
    managers: list[CheckpointManager] = []

    def handler(_: BaseException) -> None:
        managers[0].save(2, {"w": "again"})

    with held_manager(tmp_path, disk, on_error=handler) as manager:
        managers.append(manager)
        manager.save(1, {"w": 1})
        manager.wait()
        assert steps(manager) == [2]


PROLOGUE = """
import os, signal, sys, threading
from pathlib import Path
from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.training.options import System
from ckptmgr.io.filesystem import OsFileSystem
runs, mode, *rest = sys.argv[1:]
main = threading.main_thread()

class Disk(OsFileSystem):
    hold = None
    def list(self, path):
        if threading.current_thread().name == "ckptmgr-save" and self.hold is not None:
            self.hold()
        return super().list(path)

disk = Disk()
manager = CheckpointManager._on(System(fs=disk), runs, CheckpointConfig(async_save=mode))
unused = CheckpointManager(runs, CheckpointConfig(async_save=mode))
"""

EXIT_IN_FLIGHT = (
    PROLOGUE
    + """
disk.hold = main.join
manager.save(1, {"w": 1})
"""
)


@in_background
def test_interpreter_that_exits_finishes_the_save_in_flight(tmp_path: Path, mode: str) -> None:
    done = run_program(EXIT_IN_FLIGHT, tmp_path, mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    manager = CheckpointManager(tmp_path)
    assert (steps(manager), manager.load(1)) == ([1], {"w": 1})
    assert temporary_files(tmp_path) == []


EXIT_AND_SAVE = (
    PROLOGUE
    + """
import atexit, os, traceback
manager.save(1, {"w": 1})
manager.wait()

def hold_until_main_waits():
    while "wait_until_idle" not in str(traceback.extract_stack(sys._current_frames()[main.ident])):
        os.sched_yield()

disk.hold = hold_until_main_waits
atexit.register(lambda: manager.save(2, {"w": 2}))
"""
)


@in_background
def test_save_that_is_asked_for_at_exit_is_finished(tmp_path: Path, mode: str) -> None:
    done = run_program(EXIT_AND_SAVE, tmp_path, mode)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    manager = CheckpointManager(tmp_path)
    assert (steps(manager), manager.load(2)) == ([1, 2], {"w": 2})


EXIT_AND_SAVE_FIRST = """
import atexit, sys
atexit.register(lambda: save_the_last())
from ckptmgr import CheckpointConfig, CheckpointManager
manager = CheckpointManager(sys.argv[1], CheckpointConfig(async_save=sys.argv[2], zero_stall=bool(sys.argv[3:])))
def save_the_last():
    handle = manager.save(2, {"w": 2})
    print(handle.durable.result().step)
    manager.close()
manager.save(1, {"w": 1})
manager.wait()
"""


@pytest.mark.parametrize("stall", [(), ("zero_stall",)], ids=["copied", "zero_stall"])
@in_background
def test_function_registered_before_the_first_save_may_save_at_exit(
    tmp_path: Path, mode: str, stall: tuple[str, ...]
) -> None:
    done = run_program(EXIT_AND_SAVE_FIRST, tmp_path, mode, *stall)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
    manager = CheckpointManager(tmp_path)
    assert (steps(manager), manager.load(2)) == ([1, 2], {"w": 2})


EXIT_FAILING = (
    PROLOGUE
    + """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
def fail():
    main.join()
    raise OSError(5, "Input/output error")
disk.hold = fail
manager.save(1, {"w": 1})
del manager
"""
)


@in_background
def test_interpreter_that_exits_logs_a_failure_nobody_asked_for(tmp_path: Path, mode: str) -> None:
    done = run_program(EXIT_FAILING, tmp_path, mode)
    assert (done.returncode, done.stdout) == (0, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("CRITICAL a background save failed and nobody asked")
    assert "Input/output error" in line


FORK = (
    PROLOGUE
    + """
arrived, go = threading.Event(), threading.Event()
def hold():
    arrived.set()
    assert go.wait(60)
manager.save(1, {"w": 1})
manager.wait()
disk.hold = hold
handle = manager.save(2, {"w": 2})
assert arrived.wait(60)
worker = getattr(manager._engine._worker, "pid", None)
child = os.fork()
if child == 0:
    how = rest[0]
    manager.wait()
    if how == "close":
        manager.close()
    elif how == "save":
        try:
            manager.save(3, {"w": 3})
        except Exception as error:
            assert type(error).__name__ == "StoreLocked", error
        else:
            raise SystemExit("saved in the child")
    elif how == "with":
        with manager:
            sys.exit(7)
    sys.exit(7)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert not handle.durable.done()
go.set()
manager.wait()
assert getattr(manager._engine._worker, "pid", None) == worker
disk.hold = None
manager.save(4, {"w": 4})
manager.close()
assert [c.step for c in manager.checkpoints()] == [1, 2, 4]
"""
)


@in_background
@pytest.mark.parametrize("how", ["exit", "close", "save", "with"])
def test_forked_child_neither_writes_nor_waits_nor_ends_the_worker(
    tmp_path: Path, mode: str, how: str
) -> None:
    done = run_program(FORK, tmp_path, mode, how)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert temporary_files(tmp_path) == []


FORK_AND_GO_ON = (
    PROLOGUE
    + """
manager.save(1, {"w": 1})
manager.wait()
child = os.fork()
if child:
    os.waitpid(child, 0)  # holds the lease no longer than the child lets it
    manager.close()
    sys.exit(0)
try:
    manager.save(2, {"w": 2})
except Exception as error:
    assert type(error).__name__ == "StoreLocked", error
manager = CheckpointManager(runs, CheckpointConfig(async_save=mode), prefix="child")
with manager:
    manager.save(3, {"w": 3})
"""
)


@pytest.mark.slow
@in_background
def test_forked_child_may_train_on_its_own(tmp_path: Path, mode: str) -> None:
    done = run_program(FORK_AND_GO_ON, tmp_path, mode)
    assert (done.returncode, done.stderr) == (0, "")
    assert data_files(tmp_path) == ["child-3.ckpt", "ckpt-1.ckpt"]


FORK_AND_STAGE = (
    PROLOGUE
    + """
import numpy as np
from ckptmgr.formats.tensor import tensor_from_array
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.files.save.job import FixedName, SaveFacts, SaveJob, SaveOptions
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.store import Store
manager.save(1, {"w": np.full(4, 1)})
manager.wait()
arrived, go = threading.Event(), threading.Event()
def hold():
    arrived.set()
    assert go.wait(60)
disk.hold = hold
staged_there, staged_here = os.pipe()
child = os.fork()
if child == 0:
    os.read(staged_there, 1)
    disk.hold = None
    writer = SeriesWriter(Store(Path(runs)), "child", options=SaveOptions(), clock=lambda: 0.0)
    items = [tensor_from_array("w", np.full(4, 9))]
    writer.open()
    job = SaveJob(naming=FixedName("child.ckpt"), facts=SaveFacts(step=1), items=items)
    manager._engine.run(job, writer).wait(60)
    sys.exit(0)
manager.save(2, {"w": np.full(4, 2)})
assert arrived.wait(60)
os.write(staged_here, b"x")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
go.set()
manager.close()
assert manager.load(2)["w"].tolist() == [2] * 4
"""
)


@pytest.mark.slow
@in_background
def test_forked_child_does_not_stage_into_memory_of_its_parent(tmp_path: Path, mode: str) -> None:
    done = run_program(FORK_AND_STAGE, tmp_path, mode)
    assert (done.returncode, done.stderr) == (0, "")
    values = load_checkpoint(str(tmp_path / "child.ckpt"))
    assert np.asarray(values["w"]).tolist() == [9] * 4


IDLE_WORKER = (
    PROLOGUE
    + """
manager.save(1, {"w": 1})
manager.wait()
import subprocess
if rest[0] == "fork":
    heir = os.fork()
    if heir == 0:
        sys.stdin.read()
        os._exit(0)
elif rest[0] == "inherit":  # as a process forked from C does
    connection = manager._engine._worker._running.connection
    heir = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], pass_fds=[connection.fileno()]).pid
else:
    heir = 0
print(manager._engine._worker.pid, heir, flush=True)
signal.pause()
"""
)


@pytest.mark.parametrize("how", ["alone", "fork", "inherit"])
def test_worker_does_not_outlive_a_killed_parent(tmp_path: Path, how: str) -> None:
    with start_program(IDLE_WORKER, tmp_path, "process", how) as parent:
        assert parent.stdout is not None
        worker, heir = map(int, parent.stdout.readline().split())
        parent.kill()
        wait_for_end(worker)
        if heir:
            os.kill(heir, signal.SIGKILL)
        parent.communicate(timeout=TIMEOUT_S)
    assert CheckpointManager(tmp_path).load(1) == {"w": 1}


HELD_WORKER = (
    """
import sys
sys.path.insert(0, sys.argv[3])
"""
    + PROLOGUE
    + """
manager = CheckpointManager(runs, CheckpointConfig(async_save=mode))
with manager:
    manager.save(1, {"w": 1})
    manager.save(2, {"w": 2})
    print(manager._engine._worker.pid, flush=True)
    manager.wait()
print("finished", flush=True)
"""
)


def training_with_a_held_save(
    tmp_path: Path, operation: str, call: int
) -> tuple[subprocess.Popen[str], Interference]:
    held = Interference.at(tmp_path / "site", operation, call, action="hold")
    runs = tmp_path / "runs"
    return start_program(HELD_WORKER, runs, "process", tmp_path / "site"), held


def impatient(runs: Path, waited: list[float]) -> SeriesWriter:
    """Return a writer whose time passes only while it waits; it notes how long."""
    return SeriesWriter(
        api.place(runs),
        "ckpt",
        options=api.SaveOptions(),
        clock=lambda: 0.0,
        monotonic=lambda: sum(waited),
        pause=waited.append,
    )


def resumed(pid: int) -> Callable[[], None]:
    """Return a function that lets a stopped process go on."""
    return lambda: os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def on_log(text: str, call: Callable[[], None]) -> Iterator[None]:
    """Call a function when something is logged; fail if it never is."""
    calls: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                calls.append(text)
                call()

    handler = Handler()
    logging.getLogger("ckptmgr").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ckptmgr").removeHandler(handler)
    assert calls


MOMENTS = [("pwrite", 3), ("fsync", 7), ("fsync", 8), ("fsync", 9), ("replace", 3), ("replace", 4)]


@pytest.mark.parametrize(("operation", "call"), MOMENTS)
def test_parent_killed_during_a_save_leaves_what_the_next_run_cleans_up(
    tmp_path: Path, operation: str, call: int
) -> None:
    runs = tmp_path / "runs"
    parent, held = training_with_a_held_save(tmp_path, operation, call)
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        held.arrive()
        stop(worker)
        parent.kill()
        parent.wait(TIMEOUT_S)
        assert temporary_files(runs) != []
        # A worker that is not dead yet may still write: no other process can before it is.
        waited: list[float] = []
        with pytest.raises(StoreLocked) as refused:
            impatient(runs, waited).open()
        assert f"by process {worker} on " in refused.value.message
        assert f"the saving process of process {parent.pid} on " in refused.value.message
        assert 0 < sum(waited) < TIMEOUT_S
        with CheckpointManager(runs) as manager, on_log("waiting for its end", resumed(worker)):
            assert manager.resume().step == 1
        wait_for_end(worker)
    with CheckpointManager(runs) as manager:
        assert manager.resume().step == 1
        assert temporary_files(runs) == []
        manager.save(3, {"w": 3})
        assert steps(manager) == [1, 3]


def test_ctrl_c_reaches_the_training_and_the_save_in_flight_is_finished(tmp_path: Path) -> None:
    held = Interference.at(tmp_path / "site", "pwrite", 3, action="hold")
    runs = tmp_path / "runs"
    code = "import os; os.setpgid(0, 0)\n" + HELD_WORKER
    with start_program(code, runs, "process", tmp_path / "site") as parent:
        assert parent.stdout is not None
        assert int(parent.stdout.readline())
        held.arrive()
        os.killpg(parent.pid, signal.SIGINT)
        held.let_go()
        said, complaint = parent.communicate(timeout=TIMEOUT_S)
    assert said == ""
    assert "KeyboardInterrupt" in complaint
    assert "SaveFailed" not in complaint
    manager = CheckpointManager(runs)
    assert steps(manager) == [1, 2]
    assert temporary_files(runs) == []


INTERRUPTED = """
import sys
sys.path.insert(0, sys.argv[3])
from ckptmgr import CheckpointConfig, CheckpointManager
manager = CheckpointManager(sys.argv[1], CheckpointConfig(async_save=sys.argv[2]))
try:
    manager.save(1, {"w": 1})
    manager.save(2, {"w": 2})
    print("saving", flush=True)
    manager.close()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_in_close_does_not_wait_for_the_worker(tmp_path: Path) -> None:
    held = Interference.at(tmp_path / "site", "pwrite", 3, action="hold")
    runs = tmp_path / "runs"
    with start_program(INTERRUPTED, runs, "process", tmp_path / "site") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "saving\n"
        held.arrive()
        parent.send_signal(signal.SIGINT)
        assert parent.stdout.readline() == "interrupted\n"
        held.let_go()
        assert parent.wait(TIMEOUT_S) == 0
    assert steps(CheckpointManager(runs)) == [1, 2]


CTRL_C_IN_CLOSE = (
    PROLOGUE
    + """
ready = threading.Event()
def hold():
    ready.wait(60)
disk.hold = hold
manager.save(1, {"w": 1})
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
class Waiting(threading.Thread):
    def run(self):
        while not manager._engine._background._changed._waiters:
            os.sched_yield()
        interrupt()
Waiting(daemon=True).start()
try:
    manager.close()
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("not interrupted")
try:
    CheckpointManager(runs).save(2, {"w": 2})
except Exception as error:
    assert type(error).__name__ == "StoreLocked", error
else:
    raise SystemExit("the lease was given away")
ready.set()
"""
)


@in_background
def test_ctrl_c_in_close_keeps_the_lease_and_finishes_the_save(tmp_path: Path, mode: str) -> None:
    done = run_program(CTRL_C_IN_CLOSE, tmp_path, mode)
    assert (done.returncode, done.stderr) == (0, "")
    assert steps(CheckpointManager(tmp_path)) == [1]


def test_pin_in_time_is_never_undone_by_retention(tmp_path: Path) -> None:
    disk = HeldDisk()
    with held_manager(tmp_path, disk, keep="last(1)") as manager:
        manager.save(1, {"w": 1})
        manager.wait()
        removing = _pause(disk, "unlink")
        manager.save(2, {"w": 2})
        removing.arrive()
        assert not manager._writer.changing.acquire(blocking=False)
        pinned: list[object] = []

        def pin() -> None:
            try:
                manager.pin(1)
                pinned.append("pinned")
            except LookupError as error:
                pinned.append(error)

        thread = threading.Thread(target=pin)
        thread.start()
        removing.let_go()
        thread.join(TIMEOUT_S)
        manager.wait()
        assert (pinned == ["pinned"]) == (1 in steps(manager))
        assert [path.name for path in tmp_path.iterdir() if "ckpt-1." in path.name] == []


class _pause:
    """Holds up the first call of a method of a disk."""

    def __init__(self, disk: HeldDisk, held: str) -> None:
        self._arrived, self._go = threading.Event(), threading.Event()
        meet = disk._meet

        def paused(operation: str, path: Path) -> None:
            if operation == held:
                self._arrived.set()
                assert self._go.wait(TIMEOUT_S)
            meet(operation, path)

        disk._meet = paused  # type: ignore[method-assign]

    def arrive(self) -> None:
        assert self._arrived.wait(TIMEOUT_S)

    def let_go(self) -> None:
        self._go.set()
