# SPDX-License-Identifier: Apache-2.0
"""`save_when_measured`: a step whose `step_end` is given the metric is due beside those of the policy."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    EverySteps,
    ModelCheckpoint,
    Never,
    Ranks,
    RanksOutOfStep,
    Snapshots,
)
from tests.parallel.ranks import WORLD, Meeting, Outcome, Seat, run_ranks
from tests.support import api
from tests.support.held import HeldDisk
from tests.support.runs import manager_on

VALUES = {10: 5.0, 20: 4.0, 30: 0.1, 40: 2.0, 50: 3.0}
METRIC: dict[str, Any] = {"save_when_measured": "val"}


def train(
    directory: Path, steps: range, values: Mapping[int, float] = VALUES, **options: Any
) -> list[int]:
    """End steps, of which some are given the metric; return those that were saved."""
    policy = options.pop("save_policy", None)
    config = CheckpointConfig(keep="all", **options)
    with CheckpointManager(directory, config, save_policy=policy) as manager:
        manager.resume()
        for step in steps:
            metrics = {"val": values[step]} if step in values else {"loss": 1.0}
            manager.step_end(step, {"x": step}, metrics=metrics)
    return sorted(one.step for one in api.listed(directory))


def test_measured_steps_are_saved_beside_those_of_the_policy(tmp_path: Path) -> None:
    saved = train(tmp_path, range(1, 52), save_checkpoint_steps=16, **METRIC)
    assert saved == [10, 16, 20, 30, 32, 40, 48, 50, 51]


def test_best_sees_each_measured_step(tmp_path: Path) -> None:
    config = CheckpointConfig(20, keep="last(1) | best(1, val, min)", **METRIC)
    with CheckpointManager(tmp_path, config) as manager:
        for step in range(1, 51):
            metrics = {"val": VALUES[step]} if step in VALUES else {}
            manager.step_end(step, {"x": step}, metrics=metrics)
    best = manager.best("val")
    assert best is not None
    assert (best.step, best.metrics) == (30, {"val": 0.1})


@pytest.mark.parametrize(
    "options", [{"save_checkpoint_steps": None}, {"save_policy": Never()}], ids=["steps", "policy"]
)
def test_measured_steps_and_the_end_are_saved_without_a_policy(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    assert train(tmp_path, range(1, 24), **options, **METRIC) == [10, 20, 23]


def test_measured_step_shifts_no_later_save(tmp_path: Path) -> None:
    assert train(tmp_path, range(1, 9), {3: 1.0}, save_checkpoint_steps=4, **METRIC) == [3, 4, 8]


def test_measured_step_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(None, **METRIC)) as manager:
        manager.save(10, {"x": 10})
        assert manager.step_end(10, {"x": 10}, metrics={"val": 1.0}) is None


def test_measured_step_zero_is_saved(tmp_path: Path) -> None:
    assert train(tmp_path, range(2), {0: 1.0}, save_checkpoint_steps=None, **METRIC) == [0, 1]


def test_value_that_is_no_number_is_measured(tmp_path: Path) -> None:
    saved = train(tmp_path, range(1, 4), {2: math.nan}, save_checkpoint_steps=None, **METRIC)
    assert saved == [2, 3]


def test_measured_step_that_no_rule_would_keep_is_passed_over(tmp_path: Path) -> None:
    config = CheckpointConfig(None, keep="best(1, val, min)", save_only_kept=True, **METRIC)
    with CheckpointManager(tmp_path, config) as manager:
        saved = [
            step
            for step in range(1, 51)
            if manager.step_end(
                step, {"x": step}, metrics={"val": VALUES[step]} if step in VALUES else {}
            )
        ]
    assert saved == [10, 20, 30]


def test_first_step_after_a_rollback_is_saved_whether_measured_or_not(tmp_path: Path) -> None:
    config = CheckpointConfig(None, keep="all", **METRIC)
    with CheckpointManager(tmp_path, config, snapshots=Snapshots(1)) as manager:
        for step in range(1, 11):
            manager.step_end(step, {"x": step}, metrics={"val": 1.0} if step == 10 else {})
        manager.rollback(steps_back=1)
        assert manager.step_end(10, {"x": 10}) is not None


@pytest.mark.parametrize("value", ["", 5, ["val"]])
def test_what_is_no_name_of_a_metric_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="save_when_measured is the name of a metric"):
        CheckpointConfig(save_when_measured=value)


def test_option_beside_saves_of_every_step_says_that_it_has_no_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CheckpointConfig(save_when_measured="val")
    CheckpointManager(tmp_path, config, save_policy=EverySteps(2))
    assert not caplog.records
    CheckpointManager(tmp_path, config)
    CheckpointManager(tmp_path, config, save_policy=EverySteps(1, since="save"))
    warning, again = (one.getMessage() for one in caplog.records)
    assert warning == again
    assert "save_when_measured='val' has no effect" in warning
    assert "save_checkpoint_steps=None saves the measured steps alone" in warning


def test_callback_of_mindspore_refuses_the_option(tmp_path: Path) -> None:
    config = CheckpointConfig(100, **METRIC)
    with pytest.raises(ValueError, match=r"^save_when_measured has no effect in ModelCheckpoint"):
        ModelCheckpoint("net", str(tmp_path), config)


# ---------------------------------------------------------------------- ranks


def of_ranks(directory: Path, metric: Mapping[int, str]) -> list[Outcome[list[int]]]:
    meeting = Meeting()

    def train(rank: int) -> list[int]:
        config = CheckpointConfig(None, save_when_measured=metric[rank])
        with CheckpointManager(directory, config, ranks=Ranks(Seat(meeting, rank))) as manager:
            return [
                step
                for step in range(1, 24)
                if manager.step_end(
                    step, {"x": step}, metrics={"val": 0.0} if step in VALUES else {}
                )
            ]

    return run_ranks(meeting, train)


def test_ranks_save_the_measured_steps_together(tmp_path: Path) -> None:
    found = of_ranks(tmp_path, dict.fromkeys(range(WORLD), "val"))
    assert [one.must() for one in found] == [[10, 20]] * WORLD


def test_ranks_with_different_metrics_hear_both_at_the_first_step(tmp_path: Path) -> None:
    for one in of_ranks(tmp_path, {0: "loss", 1: "val", 2: "loss"}):
        assert isinstance(one.raised, RanksOutOfStep)
        words = (
            "rank 1 saves never, or when val is measured, but rank 0 saves never, or when loss is"
        )
        assert words in str(one.raised)
    assert api.listed(tmp_path) == []


# ---------------------------------------------------------------------- what says so


def test_best_of_a_metric_of_unsaved_steps_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(100)) as manager:
        manager.step_end(10, {"x": 10}, metrics={"val": 1.0})
        assert manager.best("other") is None
        assert not caplog.records
        assert [manager.best("val"), manager.best("val")] == [None, None]
    (warning,) = (one.getMessage() for one in caplog.records)
    assert "no checkpoint has val" in warning
    assert "save_when_measured='val'" in warning


def test_best_of_a_metric_whose_save_is_in_flight_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = HeldDisk()
    with (
        caplog.at_level(logging.WARNING),
        manager_on(tmp_path, CheckpointConfig(1, async_save=True), fs=disk) as manager,
    ):
        disk.gate.clear()
        manager.step_end(1, {"x": 1}, metrics={"val": 1.0})
        disk.arrive()
        assert manager.best("val") is None
        disk.gate.set()
    assert not caplog.records


def test_record_for_a_step_that_was_not_saved_names_the_option(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(100)) as manager:
        manager.step_end(10, {"x": 10})
        with pytest.raises(CheckpointNotFound, match="save_when_measured='val'"):
            manager.record(10, {"val": 1.0})
