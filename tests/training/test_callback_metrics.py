# SPDX-License-Identifier: Apache-2.0
"""Metrics of the saves of a callback: from the network's outputs, the loop, an evaluation, the user."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, ModelCheckpoint
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.modeldisk import ModelDisk
from tests.support.runs import callback_on
from tests.support.surface import KEY, Loop, data_files


class Tensor:
    """A tensor as MindSpore's network returns it."""

    def __init__(self, *values: float) -> None:
        self._values = np.array(values)

    def asnumpy(self) -> np.ndarray:
        return self._values


@dataclass
class MindSporeLoop(Loop):
    """A loop whose parameters have the result of the network; an evaluation may end an epoch."""

    outputs: Callable[[int], object] = lambda step: Tensor(step, step + 1.0)

    def original_args(self) -> Any:
        params = super().original_args()
        params.net_outputs = self.outputs(self.step)
        return params

    def evaluate(self, **metrics: float) -> None:
        """End an epoch as `Model.fit` does: its metrics are there until the epoch has ended."""
        self.metrics = metrics
        for callback in self.callbacks:
            callback.epoch_end(self)
        self.metrics = None


def callback_of(
    directory: Path, *, metrics: Any = None, fs: Any = None, **options: Any
) -> ModelCheckpoint:
    config = CheckpointConfig(**{"save_checkpoint_steps": 1, "keep": "all", **options})
    return callback_on("net", str(directory), config, fs=fs, metrics=metrics)


def recorded(directory: Path) -> list[Mapping[str, float]]:
    """Return the metrics of all checkpoints, oldest first."""
    return [one.metrics for one in sorted(api.listed(directory), key=lambda one: one.order)]


@pytest.mark.parametrize(
    "outputs",
    [Tensor(2.0, 3.0), (Tensor(2.5), Tensor(1.0)), [np.float32(2.5)], 2.5, np.array(2.5)],
    ids=["tensor", "tuple", "list", "number", "array"],
)
def test_loss_is_the_mean_of_the_first_output(tmp_path: Path, outputs: object) -> None:
    MindSporeLoop((callback_of(tmp_path),), outputs=lambda _: outputs).run(1)
    assert recorded(tmp_path) == [{"loss": 2.5}]


@pytest.mark.parametrize("outputs", [None, (), {"loss": 1.0}, np.zeros(3), "text"])
def test_outputs_that_are_no_loss_are_not_recorded(tmp_path: Path, outputs: object) -> None:
    MindSporeLoop((callback_of(tmp_path),), outputs=lambda _: outputs).run(1)
    assert recorded(tmp_path) == [{}]


def test_best_ranks_by_the_loss_of_the_network(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 4.0}
    callback = callback_of(tmp_path, keep="last(1) | best(1, loss, min)")
    MindSporeLoop((callback,), batch_num=9, outputs=lambda step: Tensor(losses.get(step, 9.0))).run(
        4
    )
    assert data_files(tmp_path) == ["net-1_2.ckpt", "net-1_4.ckpt"]


@pytest.mark.parametrize(
    "options",
    [{}, {"async_save": True}, {"enc_key": KEY}, {"async_save": "process"}],
    ids=["sync", "thread", "encrypted", "process"],
)
def test_evaluation_is_noted_at_the_checkpoint_of_its_step(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    callback = callback_of(tmp_path, keep="last(1) | best(1, mae, min)", **options)
    loop = MindSporeLoop((callback,), batch_num=2, outputs=lambda _: None)
    loop.begin()
    for error in (3.0, 1.0, 2.0):
        loop.run_step()
        loop.run_step()
        loop.evaluate(mae=error)
    loop.end()
    assert data_files(tmp_path) == ["net-2_2.ckpt", "net-3_2.ckpt"]
    with CheckpointManager(tmp_path, CheckpointConfig(enc_key=options.get("enc_key"))) as manager:
        store = manager._writer.store
        assert sorted(one.metrics["mae"] for one in store.scan()) == [1.0, 2.0]


def test_evaluation_of_a_step_that_is_saved_at_the_end_is_noted(tmp_path: Path) -> None:
    callback = callback_of(tmp_path, save_checkpoint_steps=100)
    loop = MindSporeLoop((callback,), outputs=lambda _: 0.5)
    loop.run(2, end=False)
    loop.evaluate(mae=2.0)
    loop.end()
    assert recorded(tmp_path) == [{"loss": 0.5, "mae": 2.0}]


def test_evaluation_of_a_step_without_a_checkpoint_is_noted_at_no_other(tmp_path: Path) -> None:
    callback = callback_of(tmp_path, save_checkpoint_steps=2)
    loop = MindSporeLoop((callback,), outputs=lambda _: None)
    loop.run(3, end=False)
    loop.evaluate(mae=2.0)
    loop.run_step()
    assert recorded(tmp_path) == [{}, {}]
    loop.end()


def test_metrics_that_the_save_has_already_change_no_manifest(tmp_path: Path) -> None:
    callback = callback_of(tmp_path)
    loop = MindSporeLoop((callback,), outputs=lambda _: None, metrics={"mae": 2.0})
    loop.run(1, end=False)
    (manifest,) = tmp_path.glob("*.manifest.json")
    before = manifest.stat().st_ino
    loop.evaluate(mae=2.0)
    assert manifest.stat().st_ino == before
    loop.end()


def test_evaluation_that_cannot_be_noted_is_logged_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = callback_of(tmp_path)
    loop = MindSporeLoop((callback,), outputs=lambda _: None)
    loop.run(1, end=False)
    for manifest in tmp_path.glob("*.manifest.json"):
        manifest.unlink()
    loop.evaluate(mae=2.0)
    loop.end()
    assert "the metrics {'mae': 2.0} are not noted" in caplog.text


def test_evaluation_after_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    disk = FailingDisk(ModelDisk(), operation="sync", call=1)
    callback = callback_of(Path("/runs"), fs=disk, async_save=True)
    loop = MindSporeLoop((callback,), outputs=lambda _: None)
    loop.run(1, end=False)
    loop.evaluate(mae=2.0)
    assert api.listed(Path("/runs"), fs=disk) == []
    with pytest.raises(OSError, match="error"):
        loop.end()


def test_given_mapping_is_read_at_each_save(tmp_path: Path) -> None:
    live: dict[str, float] = {}
    callback = callback_of(tmp_path, metrics=live)
    loop = Loop((callback,))
    loop.begin()
    for value in (3.0, 1.0):
        live["error"] = value
        loop.run_step()
    loop.end()
    assert recorded(tmp_path) == [{"error": 3.0}, {"error": 1.0}]


def test_given_function_gets_the_run_context_and_wins_over_the_loop(tmp_path: Path) -> None:
    callback = callback_of(
        tmp_path, metrics=lambda context: {"loss": context.original_args().cur_step_num}
    )
    MindSporeLoop((callback,), outputs=lambda _: 9.0).run(2)
    assert recorded(tmp_path) == [{"loss": 1.0}, {"loss": 2.0}]


def test_given_function_that_returns_nothing_leaves_the_others(tmp_path: Path) -> None:
    MindSporeLoop((callback_of(tmp_path, metrics=lambda _: None),), outputs=lambda _: 9.0).run(1)
    assert recorded(tmp_path) == [{"loss": 9.0}]


def test_given_metrics_of_another_type_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="metrics is a mapping of names to numbers or a function"):
        callback_of(tmp_path, metrics=["loss"])
    callback = callback_of(tmp_path, metrics={"loss": "low"})
    with pytest.raises(TypeError, match="metric 'loss' must be a number"):
        Loop((callback,)).run(1, end=False)


@pytest.mark.parametrize("surface", ["callback", "manager"])
def test_best_without_any_metric_says_so_once_and_keeps_a_bounded_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, surface: str
) -> None:
    keep = "best(2, loss, min)"
    with caplog.at_level(logging.WARNING):
        if surface == "callback":
            Loop((callback_of(tmp_path, keep=keep),), batch_num=99).run(9)
        else:
            config = CheckpointConfig(save_checkpoint_steps=1, keep=keep)
            with CheckpointManager(tmp_path, config) as manager:
                for step in range(1, 10):
                    manager.step_end(step, {"n": step})
    said = [text for text in caplog.messages if "cannot rank" in text]
    assert len(said) == 1
    assert "best(2, loss, min) cannot rank" in said[0]
    assert "last(5) is kept instead" in said[0]
    assert sorted(one.step for one in api.listed(tmp_path)) == [5, 6, 7, 8, 9]


def test_best_keeps_as_many_unranked_as_it_would_keep_ranked(tmp_path: Path) -> None:
    Loop((callback_of(tmp_path, keep="best(7, loss, min)"),), batch_num=99).run(9)
    assert len(data_files(tmp_path)) == 7


def test_best_whose_metric_arrives_late_says_nothing_and_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = callback_of(tmp_path, keep="best(1, loss, min)")
    loop = Loop((callback,), batch_num=99)
    loop.run(3, end=False)
    for loss in (1.0, 2.0):
        loop.metrics = {"loss": loss}
        loop.run_step()
    loop.end()
    assert data_files(tmp_path) == ["net-1_4.ckpt", "net-1_5.ckpt"]
    assert "cannot rank" not in caplog.text
