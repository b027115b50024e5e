# SPDX-License-Identifier: Apache-2.0
"""The worker process: its inheritance, the faults that it survives, and a save whose worker dies."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, SaveFailed, StoreFull
from ckptmgr.engine import worker_client, worker_protocol
from ckptmgr.engine.worker import NICENESS, Worker, _watch
from ckptmgr.engine.worker_client import WorkerClient
from ckptmgr.memory_config import MIB
from tests.support.descriptors import nothing_stays_open
from tests.support.held import (
    KEY,
    ROOT,
    TIMEOUT_S,
    Interference,
    interfere,
    run_program,
    stop,
    temporary_files,
    wait_for_end,
)
from tests.support.interrupts import is_interrupted
from tests.support.surface import shows


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no descriptor and no child is left behind."""
    with nothing_stays_open():
        yield
        gc.collect()


def manager_of(runs: Path, key: bytes | None = None) -> CheckpointManager:
    return CheckpointManager(runs, CheckpointConfig(async_save="process", enc_key=key))


def save(manager: CheckpointManager, step: int, size: int = 100) -> None:
    handle = manager.save(step, {"w": np.full(size, step, np.uint8)})
    assert handle is not None
    handle.wait(TIMEOUT_S)


def steps(manager: CheckpointManager) -> list[int]:
    return [checkpoint.step for checkpoint in manager.checkpoints()]


def pid_of(manager: CheckpointManager) -> int:
    pid = worker_of(manager).pid
    assert pid is not None
    return pid


def worker_of(manager: CheckpointManager) -> WorkerClient:
    worker = manager._engine._worker
    assert worker is not None
    return worker


def test_worker_is_started_by_the_first_save_and_ended_by_close(runs: Path) -> None:
    with manager_of(runs) as manager:
        assert worker_of(manager).pid is None
        save(manager, 1)
        pid = pid_of(manager)
        save(manager, 2)
        assert pid_of(manager) == pid
    assert worker_of(manager).pid is None
    assert not Path(f"/proc/{pid}").exists()


def test_worker_gives_way_to_the_training(runs: Path) -> None:
    with manager_of(runs) as manager:
        save(manager, 1)
        mine = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid_of(manager)) == min(mine + NICENESS, 19)


def test_worker_inherits_no_key_and_no_descriptor_but_its_own(runs: Path, tmp_path: Path) -> None:
    secret = b"not to be found!"
    ours, theirs = socket.socketpair()
    with ours, theirs, manager_of(runs, secret) as manager:
        save(manager, 1, 3 * MIB)
        proc = Path(f"/proc/{pid_of(manager)}")
        told = (proc / "environ").read_bytes() + (proc / "cmdline").read_bytes()
        assert not shows(told.decode(errors="replace"), secret)
        open_there = [os.readlink(entry) for entry in (proc / "fd").iterdir()]
        assert len([target for target in open_there if target.startswith("socket:")]) == 1
        assert not [t for t in open_there if "memfd" in t or t.startswith(str(tmp_path))]
        assert "memfd" not in (proc / "maps").read_text()
        engine = manager._engine
        assert not shows(f"{engine!r} {engine._worker!r} {vars(engine._worker)!r}", secret)


def test_key_is_in_no_message_and_no_log(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    interfere(monkeypatch, tmp_path / "site", "fsync", 1, action="kill")
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(SaveFailed) as raised,
        manager_of(runs, KEY) as manager,
    ):
        manager.save(1, {"w": 1})
    assert not shows(f"{raised.value!r} {raised.value} {caplog.text}", KEY)


@pytest.mark.slow
def test_main_program_without_a_guard_runs_once(runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from ckptmgr import CheckpointConfig, CheckpointManager\n"
        "print('training')\n"
        f"manager = CheckpointManager({str(runs)!r}, CheckpointConfig(async_save='process'))\n"
        "manager.save(1, {'w': 1})\n"
        "manager.close()\n"
    )
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "training\n", "")
    assert (runs / "ckpt-1.ckpt").exists()


IN_A_STRANGE_DIRECTORY = """
import os, sys
from ckptmgr import CheckpointConfig, CheckpointManager
assert "" in sys.path
runs, strange = sys.argv[1:]
os.chdir(strange)
with CheckpointManager(runs, CheckpointConfig(async_save="process")) as manager:
    manager.save(1, {"w": 1})
"""


@pytest.mark.slow
def test_worker_takes_no_module_from_the_working_directory(runs: Path, tmp_path: Path) -> None:
    for name in ("queue.py", "numpy.py", "ckptmgr.py"):
        (tmp_path / name).write_text("raise SystemExit('a stranger')")
    done = run_program(IN_A_STRANGE_DIRECTORY, runs, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (runs / "ckpt-1.ckpt").exists()


def test_worker_starts_where_the_working_directory_is_gone(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.syspath_prepend("src")
    gone.rmdir()
    with manager_of(runs) as manager:
        save(manager, 1)
        assert steps(manager) == [1]


def test_relative_directory_means_that_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with manager_of(Path("runs")) as manager:
        save(manager, 1)
        monkeypatch.chdir(tmp_path)
        save(manager, 2)
        assert len(steps(manager)) == 2


def test_process_that_cannot_be_started_is_an_error_of_the_call(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_of(runs) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/no/such/python")
            with pytest.raises(SaveFailed, match="could not be started"):
                manager.save(1, {"w": 1})
        save(manager, 2)
        assert steps(manager) == [2]


@pytest.mark.slow
def test_worker_that_cannot_import_says_so_and_the_next_one_is_fine(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "blake3.py").write_text("raise ImportError('the wheel is broken')")
    with manager_of(runs) as manager:
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path))
            manager.save(1, {"w": 1})
            with pytest.raises(SaveFailed, match=r"died \(exit code 1\)[\s\S]*standard error"):
                manager.wait()
        assert "the wheel is broken" in capfd.readouterr().err
        save(manager, 2)
        assert steps(manager) == [2]


@pytest.mark.slow
def test_worker_that_died_between_saves_is_replaced(
    runs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(runs) as manager:
        save(manager, 1)
        pid = pid_of(manager)
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        save(manager, 2)
        assert pid_of(manager) != pid
        assert steps(manager) == [1, 2]
    assert "died while idle (SIGKILL)" in caplog.text


MOMENTS = [
    *(("pwrite", call) for call in (1, 2)),
    *(("fsync", call) for call in (1, 2, 3, 4, 5)),
    *(("replace", call) for call in (1, 2)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "call"), MOMENTS)
def test_worker_killed_at_any_moment_is_heard_of_and_leaves_no_file(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, call: int
) -> None:
    with CheckpointManager(runs) as manager:
        manager.save(1, {"w": 1.0})
    with manager_of(runs) as manager:
        with monkeypatch.context() as patch:
            interfere(patch, tmp_path / "site", operation, call, action="kill")
            manager.save(2, {"w": 2.0})
            with pytest.raises(SaveFailed, match=r"died \(SIGKILL\)[\s\S]*out-of-memory"):
                manager.wait()
        assert temporary_files(runs) == []
        assert set(steps(manager)) <= {1, 2}
        assert manager.load(1) == {"w": 1.0}
        save(manager, 3)
        assert steps(manager)[-1] == 3


@pytest.mark.parametrize("operation", ["pwrite", "fsync", "replace"])
def test_full_disk_in_the_worker_is_a_full_store_here(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    interfere(monkeypatch, tmp_path / "site", operation, 1, action=str(errno.ENOSPC))
    with manager_of(runs) as manager:
        manager.save(1, {"w": 1.0})
        with pytest.raises(StoreFull, match="became full") as raised:
            manager.wait()
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.path == str(runs / "ckpt-1.ckpt")
        assert raised.value.hint is not None
        assert temporary_files(runs) == []
        save(manager, 2)
        assert steps(manager) == [2]


def test_io_error_in_the_worker_arrives_with_number_and_name(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfere(monkeypatch, tmp_path / "site", "fsync", 1, action=str(errno.EIO))
    with manager_of(runs) as manager:
        manager.save(1, {"w": 1.0})
        with pytest.raises(OSError, match="Input/output error") as raised:
            manager.wait()
        # The first sync is that of the entry of the directory, and the error names what could not be synced.
        assert (raised.value.errno, raised.value.filename) == (errno.EIO, str(runs.parent))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_whole_job_does_not_stop_a_save(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    held = interfere(monkeypatch, tmp_path / "site", "pwrite", 1, action="hold")
    with manager_of(runs) as manager:
        manager.save(1, {"w": 1.0})
        os.kill(pid_of(manager), number)  # it is still starting
        held.arrive()
        os.kill(pid_of(manager), number)
        held.let_go()
        manager.wait()
        assert steps(manager) == [1]


def test_signals_are_not_blocked_in_the_training_itself(runs: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with manager_of(runs) as manager:
        save(manager, 1)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_worker_killed_while_it_writes_leaves_nothing(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = interfere(monkeypatch, tmp_path / "site", "pwrite", 1, action="hold")
    with manager_of(runs) as manager:
        handle = manager.save(1, {"w": 1.0})
        held.arrive()
        assert len(temporary_files(runs)) == 1
        assert [c.state.name for c in manager._writer.store.scan()] == ["WRITING"]
        os.kill(pid_of(manager), signal.SIGKILL)
        assert handle is not None
        assert isinstance(handle.durable.exception(TIMEOUT_S), SaveFailed)
        assert temporary_files(runs) == []
        with pytest.raises(SaveFailed):
            manager.save(2, {"w": 2.0})
        assert list(manager.checkpoints()) == []


def test_next_save_may_be_staged_while_the_worker_is_busy(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = interfere(monkeypatch, tmp_path / "site", "pwrite", 1, action="hold")
    config = CheckpointConfig(async_save="process", back_pressure="coalesce")
    with CheckpointManager(runs, config) as manager:
        manager.save(1, {"w": 1.0})
        held.arrive()
        manager.save(2, {"w": 2.0})
        manager.save(3, {"w": 3.0})
        held.let_go()
        manager.wait()
        assert steps(manager) == [1, 3]


def test_worker_that_does_not_end_is_killed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_client, "_STOP_TIMEOUT_S", 0.0)
    manager = manager_of(runs)
    save(manager, 1)
    manager.wait()
    pid = pid_of(manager)
    stop(pid)
    manager.close()
    assert not Path(f"/proc/{pid}").exists()


def test_close_of_a_client_that_never_started_does_nothing() -> None:
    client = WorkerClient()
    client.close()
    assert client.pid is None


def test_started_client_that_is_dropped_ends_its_worker() -> None:
    client = WorkerClient()
    client.start()
    client.start()
    pid = client.pid
    assert pid is not None
    del client
    wait_for_end(pid)


def test_client_whose_start_is_interrupted_can_be_started() -> None:
    client = WorkerClient()
    for at in (1, 2, 3):  # up to the locks, and before there is a process
        assert is_interrupted(client.start, at=at)
        assert client.pid is None
    client.start()
    assert client.pid is not None
    client.close()


@pytest.mark.slow
def test_description_that_is_too_long_is_refused_and_the_next_save_is_good(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with manager_of(runs) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(worker_protocol, "MAX_MESSAGE_BYTES", 10)
            manager.save(1, {"w": 1})
            with pytest.raises(SaveFailed, match="the description of the state takes"):
                manager.wait()
        save(manager, 2)
        assert steps(manager) == [2]


def test_worker_ends_with_its_connection_where_processes_cannot_be_watched() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        Worker(theirs, _watch(2**22 + 1)).serve()


def test_worker_whose_parent_is_gone_before_it_starts_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "ckptmgr.engine.worker", str(theirs.fileno()), "1"]
        done = subprocess.run(
            command, cwd=ROOT, pass_fds=[theirs.fileno()], timeout=TIMEOUT_S, check=False
        )
    assert done.returncode == 0


def test_interference_is_not_for_the_training(tmp_path: Path) -> None:
    """Control: the code that kills workers leaves other processes alone."""
    Interference.at(tmp_path / "site", "pwrite", 1, action="kill")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import os; os.pwrite(os.memfd_create('x'), b'x', 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0
