# SPDX-License-Identifier: Apache-2.0
"""Real saver processes that meet errors at, or are killed by, chosen system calls."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ckptmgr.manager import CheckpointManager
from ckptmgr.model import State
from tests.faults.straced import ROOT, save_steps, saver_command, straced_save
from tests.faults.training import SERIES, state_of, value_of

strace = pytest.mark.strace
MAX_CALLS = 40


def check_directory(directory: Path, *, must: set[int], may: set[int]) -> None:
    """Check with a fresh start that what must be there loads, and that nothing else is listed; then go on."""
    with CheckpointManager(directory, prefix=SERIES) as manager:
        resumption = manager.resume()
        found = {checkpoint.step: checkpoint for checkpoint in manager.checkpoints()}
        assert must <= set(found) <= must | may
        for step, checkpoint in found.items():
            assert checkpoint.state is State.OK
            assert value_of(manager.load(checkpoint)) == 10.0 * step
        assert resumption.step == max(found, default=0)
        assert not resumption.skipped
        manager.save(99, state_of(990.0))
    assert temporaries(directory) == []


def temporaries(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.endswith(".tmp")]


# Calls of the third save, counted from its start: the directory is synced, the data, the manifest, the directory, ...
ERRORS = {
    "first fsync": "fsync:error=EIO:when=1",
    "fsync of the data": "fsync:error=EIO:when=2",
    "fsync of the unfinished name": "fsync:error=EIO:when=3",
    "fsync of the manifest": "fsync:error=EIO:when=4",
    "fsync of the directory": "fsync:error=EIO:when=5",
    "disk full while writing": "pwrite64:error=ENOSPC:when=2",
    "disk full while reserving": "fallocate:error=ENOSPC:when=1",
    "i/o error while writing": "pwrite64:error=EIO:when=3",
    "first rename": "renameat:error=EROFS:when=1",
    "second rename": "renameat:error=EROFS:when=2",
}


@strace
@pytest.mark.parametrize("fault", ERRORS)
def test_error_of_a_system_call_reaches_the_caller(tmp_path: Path, fault: str) -> None:
    directory = tmp_path / "run"
    save_steps(directory, 1, 2)
    saver = straced_save(directory, tmp_path / "log", ERRORS[fault], step=3)
    assert saver.is_injected
    assert not saver.is_acknowledged
    assert saver.returncode == 1
    assert "Error" in saver.output.splitlines()[-1] or "hint" in saver.output
    assert temporaries(directory) == []
    check_directory(directory, must={1, 2}, may={3})


@strace
def test_error_of_a_full_disk_names_the_bytes(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_steps(directory, 1)
    saver = straced_save(directory, tmp_path / "log", ERRORS["disk full while reserving"], step=2)
    assert saver.is_injected
    assert "StoreFull" in saver.output
    assert "bytes needed" in saver.output


@strace
def test_failed_sync_of_the_directory_after_the_commit_is_reported(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_steps(directory, 1, 2)
    committed = []
    for call in range(4, 9):
        saver = straced_save(
            directory, tmp_path / "log", f"fsync:error=EIO:when={call}", step=call + 10
        )
        if saver.is_injected and (directory / f"net-{call + 10}.ckpt").exists():
            committed.append(saver.is_acknowledged)
    # The published file stays, but nobody was told that it is durable.
    assert committed == [False]
    check_directory(directory, must={1, 2}, may=set(range(14, 19)))


@strace
def test_interrupted_and_short_writes_are_completed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_steps(directory, 1)
    saver = straced_save(directory, tmp_path / "log", "pwrite64:error=EINTR:when=2", step=2)
    assert saver.is_injected
    assert saver.is_acknowledged
    check_directory(directory, must={1, 2}, may=set())


@strace
def test_signal_while_space_is_reserved_costs_only_the_reservation(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    saver = straced_save(directory, tmp_path / "log", "fallocate:error=EINTR", step=1)
    assert saver.is_injected
    assert saver.is_acknowledged
    check_directory(directory, must={1}, may=set())


@strace
def test_lie_about_a_write_is_found_by_the_reader(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save_steps(directory, 1)
    # The second call writes the 230 bytes of data, the first one the text of the lease.
    saver = straced_save(directory, tmp_path / "log", "pwrite64:retval=230:when=2", step=2)
    assert saver.is_injected
    assert saver.is_acknowledged
    with CheckpointManager(directory, prefix=SERIES) as manager:
        resumption = manager.resume()
    assert resumption.step == 1
    assert [skip.checkpoint.step for skip in resumption.skipped] == [2]


@strace
@pytest.mark.slow
@pytest.mark.parametrize("call", ["openat", "pwrite64", "fsync", "renameat", "unlinkat"])
def test_death_at_every_call_leaves_a_directory_that_goes_on(tmp_path: Path, call: str) -> None:
    base, directory = tmp_path / "base", tmp_path / "run"
    save_steps(base, 1, 2)
    first = first_call(base, tmp_path) if call == "openat" else 1
    killed = 0
    for number in range(first, first + MAX_CALLS):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(base, directory)
        inject = f"{call}:signal=SIGKILL:when={number}"
        saver = straced_save(directory, tmp_path / "log", inject, step=3, keep="last(1)")
        if not saver.is_killed:
            assert saver.is_acknowledged
            break
        killed += 1
        # The second one was resumed from; the first one goes only after the third is durable.
        assert (directory / "net-1.ckpt").exists() or (directory / "net-3.ckpt").exists()
        must = {2, 3} if saver.is_acknowledged else {2}
        check_directory(directory, must=must, may={1, 3})
    assert killed >= 2


def first_call(base: Path, tmp_path: Path) -> int:
    """Return the number of the first openat in the directory; those before load Python and NumPy."""
    directory, log = tmp_path / "probe", tmp_path / "probe.log"
    shutil.copytree(base, directory)
    saver = saver_command(directory, 3, "last(1)")
    subprocess.run(
        ["strace", "-f", "-o", str(log), "-e", "trace=openat", *saver],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    lines = [line for line in log.read_text(errors="replace").splitlines() if "openat(" in line]
    return 1 + next(i for i, line in enumerate(lines) if str(directory) in line)
