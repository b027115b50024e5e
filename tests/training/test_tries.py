# SPDX-License-Identifier: Apache-2.0
"""Tries that end before they save are noted, with the steps that they reached."""

from __future__ import annotations

import errno
import json

import pytest

from ckptmgr import CheckpointConfig
from ckptmgr.training.tries import Tries, tries_from
from tests.faults.training import (
    RUNS,
    SERIES,
    ModelProcesses,
    Trainer,
    check_no_leftovers,
    disk_with,
    state_of,
)
from tests.support.crashmodel import FailingDisk, ModelDisk, Order
from tests.support.manifests import manifest
from tests.support.runs import manager_on

CONFIG = CheckpointConfig(save_checkpoint_steps=1000)
CHECKPOINT = manifest().to_checkpoint(RUNS)
NOTE = RUNS / f".{SERIES}.starts"


class Failure(Exception):
    """Ends a try."""


def attempt(
    disk: ModelDisk, last: int, error: BaseException | None = None, *, saves: bool = False
) -> tuple[int, ...]:
    """Train from the newest checkpoint up to a step; return what the resumption said of tries."""
    found: tuple[int, ...] = ()
    try:
        with manager_on(
            RUNS, CONFIG, fs=disk, processes=ModelProcesses(disk), prefix=SERIES
        ) as manager:
            start = manager.resume(state_of(0.0))
            found = start.tries
            assert start.starts == len(found) + 1
            for step in range(start.next_step, last + 1):
                manager.step_end(step, state_of(step))
            if saves:
                manager.save(last, state_of(last))
            if error is not None:
                raise error
    except BaseException as raised:
        if raised is not error:
            raise
    return found


def test_tries_that_end_at_one_step_are_said_with_the_way_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = disk_with(1.0)
    found = [attempt(disk, 4, Failure()) for _ in range(3)]
    assert found == [(), (4,), (4, 4)]
    (said,) = [one.message for one in caplog.records if "tries" in one.message]
    assert "2 tries from net-1.ckpt ended at step 4" in said
    assert "Resume(at=STEP)" in said


def test_tries_that_end_at_different_steps_are_said_as_such(
    caplog: pytest.LogCaptureFixture,
) -> None:
    disk = disk_with(1.0)
    for last in (4, 3):
        attempt(disk, last, Failure())
    assert attempt(disk, 2) == (4, 3)
    assert "at the steps 4, 3: the machine may go away" in caplog.text


@pytest.mark.parametrize("error", [None, KeyboardInterrupt(), SystemExit(0), SystemExit(143)])
def test_try_that_ended_as_it_was_asked_to_is_taken_back(error: BaseException | None) -> None:
    disk = disk_with(1.0)
    attempt(disk, 4, Failure())
    if error is None:  # the exit saves, and the next resumption is from there
        assert attempt(disk, 1, error) == (4,)
    else:
        assert attempt(disk, 4, error) == (4,)
    assert attempt(disk, 1) == (4,)


def test_look_without_a_step_is_no_try() -> None:
    disk = disk_with(1.0)
    for _ in range(3):
        assert attempt(disk, 0, Failure()) == ()


def test_save_takes_the_try_back() -> None:
    disk = disk_with(1.0)
    attempt(disk, 4, Failure())
    attempt(disk, 4, Failure(), saves=True)
    assert attempt(disk, 4) == ()


def put_note(disk: ModelDisk, content: bytes) -> None:
    file = disk.create(NOTE, mode=0o600)
    file.write_at(0, content)
    file.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 46,
        b"null",
        b"[]",
        b"{}",
        b"[" * 4096,
        b'{"checkpoint": 1, "tries": [4]}',
        json.dumps({"checkpoint": ["net-1.ckpt", 1], "tries": None}).encode(),
        json.dumps({"checkpoint": ["net-1.ckpt", 1], "tries": ["x", 1.5]}).encode(),
        b'{"checkpoint": ["net-1.ckpt", 1], "starts": 3}',
    ],
)
def test_damaged_note_counts_as_absent(content: bytes) -> None:
    disk = disk_with(1.0)
    put_note(disk, content)
    assert attempt(disk, 3, Failure()) == ()
    assert attempt(disk, 3, Failure()) == (3,)


@pytest.mark.parametrize("operation", ["create", "write_at", "close", "replace"])
def test_note_that_cannot_be_kept_is_no_error(operation: str) -> None:
    disk = disk_with(1.0)
    failing = FailingDisk(disk, error=errno.EROFS, operation=operation, call=1)
    tries = Tries()
    tries.begin(Trainer(disk, fs=failing).store(), SERIES, CHECKPOINT)
    tries.step_ended(2)
    assert tries_from(Trainer(disk).store(), SERIES, CHECKPOINT) == ()
    check_no_leftovers(disk)


def test_note_lost_in_a_power_cut_is_no_error() -> None:
    disk = disk_with(1.0)
    attempt(disk, 3, Failure())
    for left in disk.crash_states(Order.WEAK):
        assert attempt(left, 3, Failure()) in ((), (2,), (3,))
