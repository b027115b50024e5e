# SPDX-License-Identifier: Apache-2.0
"""A save that begins while another process holds its lease for a moment, to clean up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import StoreLocked
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.leases import ProcProcesses, hold_lease, lease_path
from ckptmgr.store.change_leases import lease_of_checkpoint, lease_of_name
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.runs import manager_on
from tests.support.saved import only, save_run

_WAIT_S = 30.0
_DEAD = f"process 1 on host\n{ProcProcesses().token().rpartition('-')[0]}-1 0123456789abcdef\n"


class _Rival:
    """A save in a thread, which begins when its lease is held, and `is_refused` at least once."""

    def __init__(self, save: Callable[[api.OsFileSystem], object]) -> None:
        self.is_refused = threading.Event()
        self.error: Exception | None = None
        self._save = save
        self._thread = threading.Thread(target=self._run, daemon=True)

    def begin(self) -> None:
        self._thread.start()
        assert self.is_refused.wait(_WAIT_S)

    def end(self) -> None:
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._save(_Refused(self.is_refused))
        except Exception as error:
            self.error = error
        finally:
            self.is_refused.set()


class _Refused(api.OsFileSystem):
    """A disk that reports when a lease is tried a second time."""

    def __init__(self, is_refused: threading.Event) -> None:
        super().__init__()
        self._is_refused = is_refused
        self._tried: set[Path] = set()

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        if path in self._tried:
            self._is_refused.set()
        self._tried.add(path)
        return super().lock(path, owner=owner)


class _Cleaning(api.OsFileSystem):
    """A disk on which a rival begins while a lease is held, just before its file is removed."""

    def __init__(self, path: Path, rival: _Rival) -> None:
        super().__init__()
        self._path = path
        self._rival = rival

    def unlink(self, path: Path) -> None:
        if path == self._path:
            self._rival.begin()
        super().unlink(path)


def _save_run(directory: Path, fs: api.OsFileSystem) -> None:
    with manager_on(directory, fs=fs, prefix="net") as manager:
        manager.save(1, {"w": np.arange(3.0)})


def _save_file(directory: Path, fs: api.OsFileSystem) -> None:
    with lease_of_name(api.place(directory, fs=fs), "net"):
        pass


def _change(directory: Path, fs: api.OsFileSystem) -> None:
    store = api.place(directory, fs=fs)
    with lease_of_checkpoint(store, only(store)):
        pass


@pytest.mark.parametrize("text", [_DEAD, ""], ids=["killed", "no text"])
@pytest.mark.parametrize("save", [_save_run, _save_file, _change])
def test_save_waits_while_another_process_removes_a_lease_that_was_left(
    tmp_path: Path, save: Callable[[Path, api.OsFileSystem], None], text: str
) -> None:
    save_run(tmp_path, [10])
    path = lease_path(tmp_path, "net")
    path.write_text(text)
    rival = _Rival(partial(save, tmp_path))
    api.place(tmp_path, fs=_Cleaning(path, rival)).recover("other")
    rival.end()
    assert not path.exists()


def test_save_waits_for_the_text_of_a_process_that_has_just_taken_its_lease(
    tmp_path: Path,
) -> None:
    rival = _Rival(partial(_save_file, tmp_path))
    with api.OsFileSystem().lock(lease_path(tmp_path, "net"), owner=""):
        rival.begin()
    rival.end()


def test_save_is_refused_after_half_a_minute_of_cleaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept_s: list[float] = []
    start = time.monotonic()
    monkeypatch.setattr(time, "sleep", slept_s.append)
    monkeypatch.setattr(time, "monotonic", lambda: start + sum(slept_s))
    with (
        hold_lease(api.OsFileSystem(), tmp_path, "net.ckpt", is_cleaning=True),
        pytest.raises(StoreLocked, match=r"'net.ckpt' is being cleaned up by process \d+ on "),
        lease_of_name(api.place(tmp_path), "net.ckpt"),
    ):
        pass
    assert sum(slept_s) == pytest.approx(30, abs=1)
    (said,) = caplog.messages
    assert said.endswith("; waiting for its end, up to 30 s")


def test_cleaning_leaves_the_leases_of_live_processes_alone(tmp_path: Path) -> None:
    disk = FailingDisk(api.OsFileSystem())
    with api.place(tmp_path).lease("net"):
        api.place(tmp_path, fs=disk).recover("other")
    assert "lock" not in disk.calls


class _Released(api.OsFileSystem):
    """A disk on which a process releases its lease after the directory was listed."""

    def list(self, path: Path) -> dict[str, FileStatus]:
        found = super().list(path)
        lease_path(path, "net").unlink()
        return found


def test_cleaning_makes_no_lease_that_was_released_meanwhile(tmp_path: Path) -> None:
    lease_path(tmp_path, "net").touch()
    disk = FailingDisk(_Released())
    api.place(tmp_path, fs=disk).recover("other")
    assert "lock" not in disk.calls
