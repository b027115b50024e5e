# SPDX-License-Identifier: Apache-2.0
"""A save now, without a stop: a note beside the run, or the signal of `Stop(save_now=)`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Never, Ranks, Stop, StoreLocked
from ckptmgr.io.filesystem import FileStatus, OsFileSystem
from ckptmgr.training.save_requests import SaveRequests
from tests.parallel.ranks import Meeting, Seat, run_ranks

SELDOM = CheckpointConfig(save_checkpoint_steps=100)
NOTE = ".ckpt.save_now"


def steps_in(directory: Path) -> list[int]:
    return [one.step for one in CheckpointManager(directory).checkpoints()]


def run(manager: CheckpointManager, steps: int = 3) -> list[int]:
    """Return the steps that were saved before the exit."""
    with manager:
        return [step for step in range(1, steps + 1) if manager.step_end(step, {"n": step})]


@pytest.mark.parametrize("mode", [False, "thread", "process"])
def test_note_has_the_next_step_saved_and_is_removed(mode: Any, tmp_path: Path) -> None:
    (tmp_path / NOTE).touch()
    config = CheckpointConfig(save_checkpoint_steps=100, async_save=mode)
    assert run(CheckpointManager(tmp_path, config)) == [1]
    assert not (tmp_path / NOTE).exists()
    assert [one.why for one in CheckpointManager(tmp_path).checkpoints()] == ["manual", "end"]


def test_note_counts_where_the_policy_never_saves(tmp_path: Path) -> None:
    (tmp_path / NOTE).touch()
    assert run(CheckpointManager(tmp_path, save_policy=Never())) == [1]


def test_note_of_another_series_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / ".other.save_now").touch()
    assert run(CheckpointManager(tmp_path, SELDOM)) == []
    assert (tmp_path / ".other.save_now").exists()


def test_note_that_is_no_file_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / NOTE).symlink_to("target")
    assert run(CheckpointManager(tmp_path, SELDOM)) == []


def test_save_that_fails_leaves_the_note_for_the_next_step(tmp_path: Path) -> None:
    (tmp_path / NOTE).touch()
    with CheckpointManager(tmp_path, SELDOM) as manager:
        (tmp_path / ".ckpt.lease").mkdir()
        with pytest.raises(StoreLocked):
            manager.step_end(1, {"n": 1})
        assert (tmp_path / NOTE).exists()
        (tmp_path / ".ckpt.lease").rmdir()
        manager.step_end(2, {"n": 2})
        assert not (tmp_path / NOTE).exists()
    assert steps_in(tmp_path) == [2]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Looks:
    """A disk that counts the looks at the note, which belongs to `owner`."""

    def __init__(self, owner: int | None) -> None:
        self._disk, self._owner, self.count = OsFileSystem(), owner, 0

    def status(self, path: Path) -> FileStatus | None:
        found = self._disk.status(path)
        if path.name != NOTE:
            return found
        self.count += 1
        return None if found is None else found._replace(owner=self._owner)


def requests(directory: Path, owner: int | None, clock: Clock) -> tuple[SaveRequests, Looks]:
    looks: Any = Looks(owner)
    return SaveRequests(looks, directory / NOTE, None, clock), looks


def test_note_is_looked_for_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    asked, looks = requests(tmp_path, 0, clock)
    for _ in range(100):
        clock.now += 0.125
        assert not asked.are_there()
    assert looks.count == 13


@pytest.mark.parametrize("owner", [os.geteuid(), 0, None])
def test_note_of_the_user_of_root_or_of_nobody_known_counts(
    owner: int | None, tmp_path: Path
) -> None:
    (tmp_path / NOTE).touch()
    assert requests(tmp_path, owner, Clock())[0].are_there()


def test_note_of_another_user_is_ignored_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NOTE).touch()
    clock = Clock()
    asked, _ = requests(tmp_path, os.geteuid() + 4321, clock)
    assert not asked.are_there()
    clock.now = 2.0
    assert not asked.are_there()
    (warning,) = caplog.messages
    assert f"{NOTE} belongs to uid {os.geteuid() + 4321}, neither the user of this run" in warning


def test_signal_has_the_next_step_saved_and_the_run_go_on(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with CheckpointManager(tmp_path, SELDOM, stop=Stop(save_now="SIGUSR2")) as manager:
        saved = []
        for step in range(1, 6):
            if step in (1, 3):
                signal.raise_signal(signal.SIGUSR2)
            if manager.step_end(step, {"n": step}) is not None:
                saved.append(step)
            assert not manager.should_stop
    assert saved == [1, 3]
    assert signal.getsignal(signal.SIGUSR2) is before


def test_ranks_of_a_program_that_asks_for_nothing_do_not_meet(tmp_path: Path) -> None:
    meeting = Meeting(2)

    def train(rank: int) -> None:
        ranks = Ranks(Seat(meeting, rank))
        with CheckpointManager(tmp_path, save_policy=Never(), ranks=ranks) as manager:
            for step in range(1, 4):
                manager.step_end(step + rank, {"n": step})  # which would be said if they met

    assert [one.raised for one in run_ranks(meeting, train)] == [None, None]


def test_ranks_save_one_step_when_one_gets_the_note(tmp_path: Path) -> None:
    (tmp_path / NOTE).touch()
    meeting = Meeting(2)

    def train(rank: int) -> list[int]:
        seat = Ranks(Seat(meeting, rank))
        return run(CheckpointManager(tmp_path, SELDOM, ranks=seat, stop=Stop(grace=25)), 8)

    assert [one.result for one in run_ranks(meeting, train)] == [[1], [1]]
    assert not (tmp_path / NOTE).exists()
    assert steps_in(tmp_path) == [1, 8]


@pytest.mark.parametrize(
    "name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGKILL", "SIGSTOP", "SIGHUP", "SIGQUIT", "SIGSEGV"]
)
def test_signal_that_stops_is_refused_for_a_save(name: str) -> None:
    with pytest.raises(ValueError, match=f"save_now='{name}': {name} stops a process; take one"):
        Stop(save_now=name)


def test_name_of_no_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="save_now must be the name of a signal such as 'SIGUSR2'"):
        Stop(save_now="USR2")


def test_number_of_a_signal_is_refused() -> None:
    number: Any = signal.SIGUSR2
    with pytest.raises(TypeError, match="save_now must be the name of a signal"):
        Stop(save_now=number)
