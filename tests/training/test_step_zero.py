# SPDX-License-Identifier: Apache-2.0
"""Loops that count from 0: step 0 is saved when due, counted, resumed from and gone back to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Overhead,
    Resume,
    Snapshots,
    UnsupportedState,
)
from tests.cli.running import run, run_json
from tests.support.runs import manager_on
from tests.support.surface import Loop, data_files


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def saved_steps(
    directory: Path,
    steps: Iterable[int],
    *,
    step_s: float = 1.0,
    save_policy: Any = None,
    **options: Any,
) -> list[int]:
    """Train the given steps, keep everything, and return the steps that are saved."""
    clock = Clock()
    config = CheckpointConfig(**{"keep": "all", **options})
    with manager_on(directory, config, clock=clock, save_policy=save_policy) as manager:
        for step in steps:
            clock.now += step_s
            manager.step_end(step, {"n": step})
    return [one.step for one in manager.checkpoints()]


@pytest.mark.parametrize(
    ("interval", "saved"),
    [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (4, [0, 4, 6]), (100, [0, 6])],
)
def test_loop_from_zero_saves_step_0_and_each_multiple(
    tmp_path: Path, interval: int, saved: list[int]
) -> None:
    assert saved_steps(tmp_path, range(7), save_checkpoint_steps=interval) == saved


@pytest.mark.parametrize(("interval", "saved"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (4, [4, 5])])
def test_loop_from_one_saves_the_same_steps_as_before(
    tmp_path: Path, interval: int, saved: list[int]
) -> None:
    assert saved_steps(tmp_path, range(1, 6), save_checkpoint_steps=interval) == saved


@pytest.mark.parametrize(("step_s", "saved"), [(4.0, [2, 4]), (11.0, [0, 1, 2, 3, 4])])
def test_step_0_by_seconds_is_saved_when_the_seconds_have_passed(
    tmp_path: Path, step_s: float, saved: list[int]
) -> None:
    steps = saved_steps(
        tmp_path,
        range(5),
        step_s=step_s,
        save_checkpoint_steps=None,
        save_checkpoint_seconds=10,
    )
    assert steps == saved


def test_step_0_by_overhead_is_saved_to_learn_the_cost(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, [0], save_policy=Overhead(0.5)) == [0]


def test_step_0_that_no_policy_saved_is_saved_at_the_end(tmp_path: Path) -> None:
    steps = saved_steps(
        tmp_path, [0], step_s=1.0, save_checkpoint_steps=None, save_checkpoint_seconds=10
    )
    assert steps == [0]


def test_step_0_that_is_saved_is_not_saved_again(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, [0, 0], save_checkpoint_steps=1) == [0]


def test_step_after_a_failed_save_of_step_0_is_saved(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(save_checkpoint_steps=100)) as manager:
        with pytest.raises(UnsupportedState):
            manager.step_end(0, {"n": object()})
        handle = manager.step_end(1, {"n": 1})
        assert handle is not None
        assert manager.step_end(2, {"n": 2}) is None


def test_step_that_goes_back_to_0_is_saved(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, [1, 2, 0], save_checkpoint_steps=2) == [2, 0]


def test_next_step_is_0_for_a_fresh_start_and_1_after_step_0(tmp_path: Path) -> None:
    trained = []
    for _ in range(2):
        with CheckpointManager(tmp_path, CheckpointConfig(save_checkpoint_steps=100)) as manager:
            start = manager.resume({"n": -1})
            trained.append((start.step, start.next_step, start.is_fresh))
            manager.step_end(start.next_step, {"n": start.next_step})
    assert trained == [(0, 0, True), (0, 1, False)]
    assert [one.step for one in CheckpointManager(tmp_path).checkpoints()] == [0, 1]


def test_next_step_of_a_new_run_beside_others_is_0(tmp_path: Path) -> None:
    saved_steps(tmp_path, range(3), save_checkpoint_steps=1)
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(None, Resume(start="new")).next_step == 0
        assert manager.step_end(0, {"n": 0}) is not None


@pytest.mark.parametrize("snapshot_steps", [1, None], ids=["memory", "disk"])
def test_rollback_to_step_0_goes_on_with_step_1(tmp_path: Path, snapshot_steps: int | None) -> None:
    state = {"n": 0}
    config = CheckpointConfig(save_checkpoint_steps=1 if snapshot_steps is None else 100)
    with CheckpointManager(tmp_path, config, snapshots=Snapshots(snapshot_steps)) as manager:
        for step in range(2):
            state["n"] = step
            manager.step_end(step, state)
        found = manager.rollback(state)
        assert (found.step, found.next_step, state["n"]) == (0, 1, 0)
        manager.step_end(found.next_step, state)


def test_step_0_is_listed_counted_and_pruned_like_any_other(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, range(4), save_checkpoint_steps=1) == [0, 1, 2, 3]
    assert "ckpt-0.ckpt" in run("ls", tmp_path, "-q").stdout
    run_json("prune", tmp_path, "--keep", "last(1) | every(2)", "--yes")
    assert data_files(tmp_path) == ["ckpt-0.ckpt", "ckpt-2.ckpt", "ckpt-3.ckpt"]


def test_retention_removes_step_0_when_its_turn_comes(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, range(4), save_checkpoint_steps=1, keep="last(2)") == [2, 3]


def test_latest_of_a_run_that_ended_step_0_is_step_0(tmp_path: Path) -> None:
    saved_steps(tmp_path, [0])
    manager = CheckpointManager(tmp_path)
    latest = manager.latest()
    assert latest is not None
    assert latest.step == 0
    assert manager.load(0) == {"n": 0}


def test_callback_keeps_the_numbering_of_mindspore(tmp_path: Path) -> None:
    callback = ModelCheckpoint("net", str(tmp_path), CheckpointConfig(save_checkpoint_steps=1))
    loop = Loop((callback,))
    loop.begin()
    callback.step_end(loop)
    assert data_files(tmp_path) == []
    loop.run_step()
    assert data_files(tmp_path) == ["net-1_1.ckpt"]
    loop.end()
