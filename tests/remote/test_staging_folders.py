# SPDX-License-Identifier: Apache-2.0
"""Folders in TMPDIR in which runs write files before their upload: when they go, and when not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, StoreLocked, save_state
from tests.support import api
from tests.support.runs import manager_on

pytest.importorskip("obstore")

from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.staging import staging_directory
from tests.remote.buckets import listed, new_url

pytestmark = pytest.mark.usefixtures("machine")

_DAY_S = 86_400
_STATE = {"w": np.arange(9.0)}
_SELDOM = CheckpointConfig(save_checkpoint_steps=1000)
_UNCLOSED = """
import numpy, os, sys
from ckptmgr import CheckpointConfig, CheckpointManager

state = {"w": numpy.zeros(9)}
managers = [
    CheckpointManager(sys.argv[1], CheckpointConfig(async_save=how), prefix=f"net-{how}")
    for how in (False, True)
]
managers[0].save(1, state)
if not os.fork():
    sys.exit()  # the folder is that of the parent
os.wait()
managers[0].save(2, state)
managers[1].save(1, state)
"""
_KILLED = """
import numpy, os, signal, sys
from ckptmgr import CheckpointManager
from ckptmgr.objects.directory import RemoteDirectory

RemoteDirectory.upload = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
CheckpointManager(sys.argv[1]).save(1, {"w": numpy.zeros(9)})
"""


def _save(url: str) -> None:
    with CheckpointManager(url) as manager:
        manager.save(1, _STATE)


def _run(program: str, url: str, machine: Path) -> int:
    command = [sys.executable, "-c", program, url]
    environment = {**os.environ, "TMPDIR": str(machine)}
    return subprocess.run(command, check=False, env=environment).returncode


def _folders(machine: Path) -> list[Path]:
    return sorted(path for path in machine.glob("*/*") if path.is_dir())


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that puts the clock forward by some seconds."""

    def go(seconds: float) -> None:
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + seconds)

    return go


@pytest.fixture(scope="module")
def machine_after_a_kill(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of a machine on which a run ended by SIGKILL at its first upload."""
    place = tmp_path_factory.mktemp("killed")
    (place / "tmp").mkdir()
    assert _run(_KILLED, f"file://{place}/run", place / "tmp") == -signal.SIGKILL
    return place / "tmp"


@pytest.fixture
def killed(machine: Path, machine_after_a_kill: Path) -> Path:
    """The folder that a killed run has left on the machine."""
    shutil.copytree(machine_after_a_kill, machine, dirs_exist_ok=True)
    (folder,) = _folders(machine)
    names = {".ckpt.lease", "ckpt-1.ckpt", "ckpt-1.ckpt.manifest.json"}
    assert {path.name for path in folder.iterdir()} == names
    return folder


def test_closed_run_and_saved_file_leave_nothing(machine: Path) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.resume()
        manager.save(1, _STATE)
        assert len(_folders(machine)) == 1
    save_state(_STATE, f"{url}/net.ckpt")
    assert list(machine.iterdir()) == []


def test_run_that_is_not_closed_leaves_nothing_at_exit(machine: Path, tmp_path: Path) -> None:
    assert _run(_UNCLOSED, f"file://{tmp_path}/run", machine) == 0
    assert len(list((tmp_path / "run").glob("*.manifest.json"))) == 3
    assert list(machine.iterdir()) == []


def test_closed_manager_that_saves_again_has_its_folder_again(machine: Path) -> None:
    url = new_url()
    manager = CheckpointManager(url)
    for step in (1, 2):
        manager.save(step, _STATE)
        manager.close()
    assert [one.step for one in manager.checkpoints()] == [1, 2]
    assert list(machine.iterdir()) == []


def _fail(url: str) -> int:
    """Make a try that ends before it saves; return how many there were before it."""
    found = 0
    with contextlib.suppress(ZeroDivisionError), CheckpointManager(url, _SELDOM) as manager:
        found = len(manager.resume().tries)
        manager.step_end(2, _STATE)
        raise ZeroDivisionError
    return found


def test_tries_without_a_save_are_counted_over_closed_runs(machine: Path) -> None:
    url = new_url()
    _save(url)
    assert [_fail(url) for _ in range(3)] == [0, 1, 2]
    with CheckpointManager(url) as manager:
        assert len(manager.resume().tries) == 3
        manager.save(2, _STATE)
    assert list(machine.iterdir()) == []


@pytest.mark.parametrize("kind", ["run", "file"])
def test_folder_of_a_killed_run_goes_with_the_next_save_elsewhere(
    machine: Path, killed: Path, kind: str
) -> None:
    if kind == "run":
        _save(new_url())
    else:
        save_state(_STATE, f"{new_url()}/net.ckpt")
    assert not killed.exists()
    assert list(machine.iterdir()) == []


def test_folder_of_a_live_run_stays(machine: Path) -> None:
    url = new_url()
    with CheckpointManager(url) as manager:
        manager.save(1, _STATE)
        _save(f"{url}/other")
        assert len(_folders(machine)) == 1
        manager.save(2, _STATE)
        assert [one.step for one in manager.checkpoints()] == [1, 2]


@pytest.mark.parametrize(
    "change",
    [
        lambda lease: lease.write_text(lease.read_text().replace("\n", "\nx", 1)),
        lambda lease: lease.write_text(""),
        lambda lease: lease.unlink(),
    ],
    ids=["other machine", "no text", "no lease"],
)
def test_folder_whose_run_is_not_proven_to_have_ended_stays(
    killed: Path, change: Callable[[Path], object], later: Callable[[float], None]
) -> None:
    change(killed / ".ckpt.lease")
    later(30 * _DAY_S)
    _save(new_url())
    assert (killed / "ckpt-1.ckpt").exists()


def test_folder_whose_lease_a_worker_of_the_killed_run_still_holds_stays(killed: Path) -> None:
    lease = killed / ".ckpt.lease"
    with api.OsFileSystem().lock(lease, owner=lease.read_text()):
        _save(new_url())
    assert (killed / "ckpt-1.ckpt").exists()


def test_empty_folder_goes_when_no_run_can_be_about_to_use_it(
    machine: Path, killed: Path, later: Callable[[float], None]
) -> None:
    for path in killed.iterdir():
        path.unlink()
    _save(new_url())
    assert _folders(machine) == [killed]
    later(_DAY_S / 12)
    _save(new_url())
    assert list(machine.iterdir()) == []


def test_note_of_a_run_that_saved_nothing_goes_after_a_week(
    machine: Path, later: Callable[[float], None]
) -> None:
    url = new_url()
    _save(url)
    _fail(url)
    later(6 * _DAY_S)
    _save(new_url())
    assert len(_folders(machine)) == 1
    later(2 * _DAY_S)
    _save(new_url())
    assert list(machine.iterdir()) == []


def test_run_that_begins_while_its_folder_is_swept_waits_for_that(
    machine_after_a_kill: Path, machine: Path, killed: Path
) -> None:
    url = f"file://{machine_after_a_kill.parent}/run"
    runs = [threading.Thread(target=_save, args=(url,), daemon=True)]

    class Sweeping(api.OsFileSystem):
        def unlink(self, path: Path) -> None:
            if path.parent == killed and runs[0].ident is None:
                runs[0].start()
            super().unlink(path)

    with manager_on(new_url(), fs=Sweeping()) as manager:
        manager.save(1, _STATE)
    runs[0].join()
    with CheckpointManager(url) as manager:
        assert [one.step for one in manager.checkpoints()] == [1]
    assert list(machine.iterdir()) == []


@pytest.mark.parametrize(("sweep_s", "is_saved"), [(5.0, True), (99.0, False)])
def test_file_that_is_saved_while_its_folder_is_swept_waits_for_that(
    machine: Path, killed: Path, monkeypatch: pytest.MonkeyPatch, sweep_s: float, is_saved: bool
) -> None:
    url = new_url()
    folder = staging_directory(url, "net.ckpt")
    folder.mkdir()
    lease = (killed / ".ckpt.lease").read_text()
    start, slept_s = time.monotonic(), [0.0]

    def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        if sum(slept_s) > sweep_s:
            sweep.close()

    with contextlib.ExitStack() as sweep:
        sweep.enter_context(api.OsFileSystem().lock(folder / ".net.ckpt.lease", owner=lease))
        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: start + sum(slept_s))
        with contextlib.nullcontext() if is_saved else pytest.raises(StoreLocked):
            save_state(_STATE, f"{url}/net.ckpt")
    assert len(listed(api.open_objects(url))) == int(is_saved)


def test_other_entries_beside_the_folders_stay(machine: Path, killed: Path) -> None:
    (killed.parent / "notes.txt").write_text("mine")
    killed.rename(machine / "elsewhere")
    killed.symlink_to(machine / "elsewhere")
    _save(new_url())
    assert {path.name for path in killed.parent.iterdir()} == {"notes.txt", killed.name}
    assert (killed / "ckpt-1.ckpt").exists()


class _Removing(api.OsFileSystem):
    """Removes the folder before the lease in it is taken, as another run does at its end."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        if self.times:
            self.times -= 1
            shutil.rmtree(path.parent)
        with super().lock(path, owner=owner) as other:
            yield other


def test_run_begins_while_another_one_removes_the_folder_that_it_found(
    killed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = os.mkdir

    def found(path: Path, mode: int = 0o777) -> None:
        try:
            make(path, mode)
        except FileExistsError:
            if Path(path) == folder:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    url = new_url()
    folder = staging_directory(url, "ckpt")
    folder.mkdir()
    monkeypatch.setattr(os, "mkdir", found)
    with CheckpointManager(url) as manager:
        manager.save(1, _STATE)
        assert [one.step for one in manager.checkpoints()] == [1]


def test_run_begins_while_another_one_removes_the_folder(machine: Path) -> None:
    with manager_on(new_url(), fs=_Removing(3)) as manager:
        manager.save(1, _STATE)
        assert [one.step for one in manager.checkpoints()] == [1]
    with pytest.raises(FileNotFoundError):
        manager_on(new_url(), fs=_Removing(99)).save(1, _STATE)


class _Replacing(_Removing):
    """Removes the folder, and makes it again after the failure: a run that ends, and the next one."""

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        with contextlib.ExitStack() as held:
            try:
                other = held.enter_context(super().lock(path, owner=owner))
            except FileNotFoundError:
                path.parent.mkdir()
                raise
            yield other


def test_run_begins_while_another_one_removes_the_folder_and_begins_again(machine: Path) -> None:
    with manager_on(new_url(), fs=_Replacing(3)) as manager:
        manager.save(1, _STATE)
        assert [one.step for one in manager.checkpoints()] == [1]


def test_save_to_a_bucket_that_is_not_there_is_tried_once(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[str] = []

    def upload(directory: RemoteDirectory, *_: object, **__: object) -> bool:
        attempts.append(directory.objects.url)
        raise FileNotFoundError(errno.ENOENT, "no such bucket", directory.objects.url)

    monkeypatch.setattr(RemoteDirectory, "upload", upload)
    with pytest.raises(FileNotFoundError, match="no such bucket"):
        save_state(_STATE, f"{new_url()}/net.ckpt")
    assert len(attempts) == 1
