# SPDX-License-Identifier: Apache-2.0
"""`save_only_kept`: a due save that no rule would keep is not made, and the run says why."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    RankFailed,
    Ranks,
    RanksOutOfStep,
)
from ckptmgr.events import Event
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.rank_policy import RankZeroAnswer
from ckptmgr.policy.rules import Finding, Rule
from tests.parallel.ranks import Clock, Meeting, Seat, run_ranks
from tests.support import api
from tests.support.held import HeldDisk
from tests.support.runs import manager_on
from tests.support.surface import Loop, data_files

NAN = math.nan


class Heard:
    """The steps that were saved and those that were passed over, with the reasons."""

    def __init__(self) -> None:
        self.durable: list[int | None] = []
        self.skipped: dict[int | None, str] = {}

    def __call__(self, event: Event) -> None:
        if event.name == "save.durable":
            self.durable.append(event.step)
        elif event.name == "save.skipped":
            self.skipped[event.step] = " ".join(event.notes)


def manager_of(directory: Path, heard: Heard | None = None, **options: Any) -> CheckpointManager:
    """Return a manager that saves each step that is the best so far."""
    named = {name: options.pop(name) for name in ("clock", "fs", "coordinator") if name in options}
    given = {"keep": "best(1, loss, min)", "save_only_kept": True, **options}
    return manager_on(directory, CheckpointConfig(**given), observe=heard, prefix="net", **named)


def train(manager: CheckpointManager, losses: Mapping[int, float | None]) -> None:
    """End steps with losses; None is a step without a metric."""
    for step, loss in losses.items():
        metrics = {"accuracy": 0.5} if loss is None else {"loss": loss}
        manager.step_end(step, {"n": step}, epoch=step // 10, metrics=metrics)


def numbered(losses: Sequence[float | None]) -> dict[int, float | None]:
    return dict(enumerate(losses, 1))


def test_step_that_is_not_among_the_best_is_not_written(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard, keep="best(2, loss, min)") as manager:
        train(manager, numbered([5.0, 4.0, 6.0, 3.0, 9.0, 1.0]))
    assert heard.durable == [1, 2, 4, 6]
    assert heard.skipped == {
        3: "no rule would keep it: best (3rd of 2)",
        5: "no rule would keep it: best (3rd of 2)",
    }
    assert sorted(one.step for one in api.listed(tmp_path)) == [4, 6]


def test_skipped_says_why_the_last_due_step_was_not_saved(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        said = [manager.skipped]
        assert manager.step_end(1, {"n": 1}, metrics={"loss": 1.0}) is not None
        said.append(manager.skipped)
        assert manager.step_end(2, {"n": 2}, metrics={"loss": 2.0}) is None
        said.append(manager.skipped)
        manager.save(2, {"n": 2})
        said.append(manager.skipped)
    assert said == [None, None, "step 2: no rule would keep it: best (2nd of 1)", None]


def test_equal_value_is_saved_because_the_newer_one_is_kept(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard) as manager:
        train(manager, numbered([1.0, 1.0]))
    assert heard.durable == [1, 2]


def test_end_of_the_training_is_saved_although_it_was_passed_over(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard) as manager:
        train(manager, numbered([1.0, 2.0, 3.0]))
    assert heard.durable == [1, 3]
    found = {one.step: one.why for one in api.listed(tmp_path)}
    assert found == {1: "policy", 3: "end"}


def test_preempted_run_saves_its_last_step(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        stops = [manager.should_stop]
        train(manager, {1: 1.0})
        signal.raise_signal(signal.SIGTERM)
        train(manager, {2: 2.0})
        stops.append(manager.should_stop)
    assert stops == [False, True]
    assert {one.step: one.why for one in api.listed(tmp_path)} == {1: "policy", 2: "preempted"}


def test_exception_saves_the_step_that_was_passed_over(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, exception_save=True)

    def fail() -> None:
        with manager:
            train(manager, numbered([1.0, 2.0]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {one.step: one.why for one in api.listed(tmp_path)} == {
        1: "policy",
        2: "exception:ZeroDivisionError",
    }


def test_manual_save_is_made_whatever_its_metric(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        train(manager, {1: 1.0})
        assert manager.save(2, {"n": 2}, metrics={"loss": 9.0}) is not None
    assert sorted(one.step for one in api.listed(tmp_path)) == [1, 2]


def test_passed_over_step_counts_for_the_interval(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard, save_checkpoint_steps=10) as manager:
        train(manager, {step: 1.0 if step < 11 else 40.0 - step for step in range(1, 31)})
    assert heard.durable == [10, 30]
    assert list(heard.skipped) == [20, 30]


def test_step_without_the_metric_gives_way_to_the_next_one_that_has_it(tmp_path: Path) -> None:
    heard = Heard()
    losses = {step: 1.0 if step in (14, 27) else None for step in range(1, 28)}
    with manager_of(tmp_path, heard, save_checkpoint_steps=10) as manager:
        train(manager, losses)
    assert heard.durable == [14, 27]
    reason = "it was given no metric loss (given: accuracy)"
    assert heard.skipped == {10: reason, 20: reason}  # once, though each later step is due


def test_metric_of_a_validation_meets_a_policy_by_time(tmp_path: Path) -> None:
    heard, clock = Heard(), Clock()
    options: dict[str, Any] = {
        "save_checkpoint_steps": None,
        "save_checkpoint_seconds": 60,
        "clock": clock,
    }
    with manager_of(tmp_path, heard, **options) as manager:
        for step in range(1, 101):
            clock.now += 10.0
            train(manager, {step: 1.0 / step if step % 25 == 0 else None})
    assert heard.durable == [25, 50, 75, 100]


def test_missing_metric_and_nan_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manager_of(tmp_path) as manager, caplog.at_level(logging.WARNING):
        train(manager, numbered([None, None, NAN, None, 1.0]))
    (message,) = [
        one.getMessage() for one in caplog.records if "save_only_kept" in one.getMessage()
    ]
    assert message == (
        "save_only_kept: step 1 is not saved: it was given no metric loss (given: accuracy). "
        "The end of the training is saved all the same"
    )


def test_nan_never_ranks_and_counts_for_the_interval(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard, save_checkpoint_steps=2) as manager:
        train(manager, numbered([NAN, NAN, 1.0, 1.0]))
    assert heard.durable == [4]
    assert heard.skipped == {2: "loss is nan, which never ranks"}


def test_resumed_run_ranks_against_the_checkpoints_on_disk(tmp_path: Path) -> None:
    with manager_of(tmp_path) as manager:
        train(manager, {1: 1.0})
    heard, state = Heard(), {"n": 0}
    with manager_of(tmp_path, heard) as manager:
        manager.resume(state)
        train(manager, {2: 2.0, 3: 0.5})
    assert heard.durable == [3]


def test_metric_that_was_recorded_after_a_save_counts(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard) as manager:
        manager.save(1, {"n": 1})
        manager.record(1, {"loss": 0.1})
        train(manager, {2: 0.5, 3: 0.05})
    assert heard.durable == [1, 3]


def test_save_in_flight_is_ranked_against(tmp_path: Path) -> None:
    heard, disk = Heard(), HeldDisk()
    with manager_of(tmp_path, heard, async_save=True, fs=disk) as manager:
        disk.gate.clear()
        train(manager, {1: 1.0})
        disk.arrive()
        train(manager, {2: 2.0})
        assert manager.skipped is not None
        disk.gate.set()
        manager.wait()
        train(manager, {3: 0.5})
    assert heard.durable == [1, 3]


def test_first_save_after_a_rollback_is_made_whatever_its_metric(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard, keep="best(3, loss, min)") as manager:
        train(manager, numbered([1.0, 0.9, 0.8]))
        manager.rollback(steps_back=2)
        train(manager, {2: 7.0, 3: 8.0, 4: 0.1})
    assert heard.durable == [1, 2, 3, 2, 4]


def test_step_that_another_rule_keeps_is_saved(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard, keep="every(4) | best(1, loss, min)") as manager:
        train(manager, numbered([1.0, 2.0, 3.0, 4.0, 5.0, 0.5]))
    assert heard.durable == [1, 4, 6]
    assert heard.skipped[5] == "no rule would keep it: every 4 (1 past 4), best (3rd of 1)"


def test_epochs_and_intervals_of_time_need_no_metric(tmp_path: Path) -> None:
    heard, clock = Heard(), Clock()
    with manager_of(tmp_path, heard, keep="epochs(2)") as manager:
        train(manager, {5: None, 15: None, 25: None})
    assert heard.durable == [5, 25]
    heard = Heard()
    with manager_of(tmp_path / "b", heard, keep="every(1h)", clock=clock) as manager:
        for step in range(1, 8):
            clock.now += 1200.0
            train(manager, {step: None})
    assert heard.durable == [1, 4, 7]


def test_step_0_that_is_passed_over_is_not_made_up_for(tmp_path: Path) -> None:
    heard = Heard()
    with manager_of(tmp_path, heard, save_checkpoint_steps=5) as manager:
        train(manager, {step: NAN if step == 0 else 1.0 for step in range(7)})
    assert heard.durable == [5, 6]


def test_rule_of_the_user_decides_too(tmp_path: Path) -> None:
    class Odd(Rule):
        def __str__(self) -> str:
            return "odd"

        def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding | None]:
            return [self.finding(True, "odd") if one.step % 2 else None for one in history]

    heard = Heard()
    with manager_of(tmp_path, heard, keep=Odd()) as manager:
        train(manager, numbered([1.0, 1.0, 1.0]))
    assert heard.durable == [1, 3]
    assert heard.skipped == {2: "no rule would keep it: odd"}


def test_skipped_names_a_save_that_still_runs(tmp_path: Path) -> None:
    disk = HeldDisk()
    options: dict[str, Any] = {"async_save": True, "back_pressure": "skip", "keep": "last(3)"}
    with manager_of(tmp_path, save_only_kept=False, fs=disk, **options) as manager:
        disk.gate.clear()
        train(manager, {1: 1.0})
        disk.arrive()
        train(manager, {2: 1.0})
        assert manager.skipped == "step 2: an earlier save still runs"
        disk.gate.set()


def test_ranks_decide_by_the_metric_of_rank_0(tmp_path: Path) -> None:
    meeting = Meeting(2)

    def run(rank: int) -> list[str | None]:
        said = []
        with manager_of(tmp_path, coordinator=Seat(meeting, rank)) as manager:
            for step, loss in enumerate([1.0, 2.0, 0.5], 1):
                given = {"loss": loss} if rank == 0 else {}
                manager.step_end(step, {"rank": rank}, metrics=given)
                said.append(manager.skipped)
        return said

    expected = [None, "step 2: no rule would keep it: best (2nd of 1)", None]
    assert [one.must() for one in run_ranks(meeting, run)] == [expected, expected]
    assert [one.step for one in api.listed(tmp_path)] == [3]


def test_metrics_that_fail_on_rank_0_fail_all_ranks_at_once(tmp_path: Path) -> None:
    meeting = Meeting(2)
    config = CheckpointConfig(keep="best(1, loss, min)", save_only_kept=True)

    def run(rank: int) -> None:
        def metrics(_: object) -> dict[str, float]:
            if rank == 0:
                raise ArithmeticError("no such loss")
            return {}

        seat = Seat(meeting, rank)
        callback = ModelCheckpoint("net", str(tmp_path), config, ranks=Ranks(seat), metrics=metrics)
        Loop((callback,)).run_step()

    for one in run_ranks(meeting, run):
        assert isinstance(one.raised, RankFailed)
        assert "no such loss" in str(one.raised)


def test_rank_of_another_version_is_refused() -> None:
    class Other(Seat):
        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            return [{"ok": "yes"}]

    ask = RankZeroAnswer(Other(Meeting(1), 0), timeout_s=9.0)
    with pytest.raises(RanksOutOfStep, match="the same version of ckptmgr"):
        ask(lambda: None)


def callback_of(directory: Path, **options: Any) -> tuple[ModelCheckpoint, dict[str, float]]:
    """Return a callback, and the metrics of its next saves."""
    metrics: dict[str, float] = {}
    given = {"keep": "best(1, loss, min)", "save_only_kept": True, **options}
    return ModelCheckpoint(
        "net", str(directory), CheckpointConfig(**given), metrics=metrics
    ), metrics


def test_callback_passes_over_what_is_not_best(tmp_path: Path) -> None:
    callback, metrics = callback_of(tmp_path)
    loop = Loop((callback,), batch_num=9)
    loop.begin()
    for loss in (2.0, 1.0, 3.0):
        metrics["loss"] = loss
        loop.run_step()
    assert data_files(tmp_path) == ["net-1_2.ckpt"]
    loop.end()
    assert data_files(tmp_path) == ["net-1_2.ckpt", "net-1_3.ckpt"]


def test_callback_saves_at_the_end_of_an_epoch_by_the_metrics_of_its_evaluation(
    tmp_path: Path,
) -> None:
    callback, _ = callback_of(tmp_path, keep="best(1, mae, min)", save_checkpoint_steps=2)
    loop = Loop((callback,), batch_num=2)
    loop.begin()
    for error in (3.0, 1.0, 2.0):
        loop.run_step()
        loop.run_step()
        loop.metrics = {"mae": error}
        callback.epoch_end(loop)
        loop.metrics = None
    assert data_files(tmp_path) == ["net-2_2.ckpt"]


def test_callback_refuses_names_from_a_function(tmp_path: Path) -> None:
    config = CheckpointConfig(keep="best(1, loss, min)", save_only_kept=True)
    with pytest.raises(
        ValueError, match=r"^save_only_kept has no effect in ModelCheckpoint: no rule"
    ):
        ModelCheckpoint(lambda params: "net", str(tmp_path), config)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "save_only_kept needs keep="),
        ({"keep": "last(2) | best(1, loss, min)"}, r"no effect with last\(2\), which keeps every"),
        ({"keep": "daily(7)"}, r"no effect with daily\(7\)"),
        ({"keep": "within(2d) | every(9)"}, r"no effect with within\(2d\)"),
        ({"keep": "all"}, "no effect with all"),
    ],
)
def test_policy_that_keeps_every_new_checkpoint_is_refused(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        CheckpointConfig(save_only_kept=True, **options)


def test_option_is_a_bool() -> None:
    with pytest.raises(ValueError, match="save_only_kept"):
        CheckpointConfig(keep="every(9)", save_only_kept="yes")  # type: ignore[arg-type]
