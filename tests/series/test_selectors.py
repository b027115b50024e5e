# SPDX-License-Identifier: Apache-2.0
"""`manager.load` names checkpoints as the command line does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, CheckpointNotFound
from tests.cli.running import run, run_json
from tests.support import api

LOSSES = {10: 0.5, 20: 0.25, 30: float("nan"), 40: 0.25}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four checkpoints with losses, of which one is tagged and one is pinned."""
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all"), prefix="net") as manager:
        for step, loss in LOSSES.items():
            manager.save(step, {"step": step}, metrics={"loss": loss, "val:acc": step})
        manager.pin(30)
    assert run("tag", "20", "paper", "--dir", tmp_path).exit_code == 0
    return tmp_path


def loaded(directory: Path, selector: int | str, *, prefix: str = "net") -> object:
    found = CheckpointManager(directory, prefix=prefix).load(selector)
    assert isinstance(found, dict)
    return found["step"]


def inspected(directory: Path, selector: str) -> object:
    return run_json("inspect", selector, "--dir", directory)["summary"]["step"]


@pytest.mark.parametrize(
    ("selector", "step"),
    [
        ("latest", 40),
        (10, 10),
        (np.int64(10), 10),
        ("10", 10),
        ("net-10.ckpt", 10),
        ("best:loss:min", 40),
        ("best:loss:max", 10),
        ("best:val:acc:max", 40),
        ("@pinned", 30),
        ("@tag:paper", 20),
        ("@tag:p*", 20),
        ("11..29", 20),
    ],
)
def test_selector_names_one_checkpoint_here_as_on_the_command_line(
    runs: Path, selector: int | str, step: int
) -> None:
    assert loaded(runs, selector) == step
    text = str(selector)
    assert inspected(runs, str(runs / text) if text == "net-10.ckpt" else text) == step


@pytest.mark.parametrize("digits", [8, 20, 64])
def test_id_names_one_checkpoint_here_as_on_the_command_line(runs: Path, digits: int) -> None:
    (one,) = [c for c in api.listed(runs) if c.step == 20]
    assert one.id is not None
    selector = f"id:{one.id[:digits]}"
    assert (
        loaded(runs, selector),
        loaded(runs, selector.replace(one.id[:8], one.id[:8].upper())),
    ) == (20, 20)
    assert inspected(runs, selector) == 20


@pytest.mark.parametrize(
    "selector",
    ["id:1234567", "id:", "id:nothexdigits", "best", "best:loss", "best::min", "best:loss:least"],
)
def test_incomplete_selector_is_refused_with_the_way_out(runs: Path, selector: str) -> None:
    words = "at least eight hex digits" if selector.startswith("id") else "write best:loss:min"
    with pytest.raises(ValueError, match=words):
        CheckpointManager(runs, prefix="net").load(selector)
    result = run("inspect", selector, "--dir", runs)
    assert (result.exit_code, words in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "selector", [99, "99", "@tag:other", "best:acc:max", "id:00000000", "x.ckpt"]
)
def test_selector_that_names_nothing_says_what_it_could_be(runs: Path, selector: int | str) -> None:
    with pytest.raises(CheckpointNotFound, match="best:METRIC:min") as caught:
        CheckpointManager(runs, prefix="net").load(selector)
    assert caught.value.message == f"no checkpoint {selector!r} in series 'net'"


def test_selector_that_names_several_lists_them(runs: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"names 3 checkpoints: net-10\.ckpt, net-20"):
        CheckpointManager(runs, prefix="net").load("..30")


@pytest.mark.parametrize("selector", ["latest", 10, "best:loss:min"])
def test_wrong_prefix_names_the_series_that_are_there(runs: Path, selector: int | str) -> None:
    hint = "there are other series: 'net' (to step 40); check the prefix"
    with pytest.raises(CheckpointNotFound) as caught:
        CheckpointManager(runs, prefix="nut").load(selector)
    assert caught.value.hint == hint
    result = run("inspect", str(selector), "--dir", runs, "--series", "nut")
    assert (result.exit_code, hint in result.stderr) == (10, True)


def test_metric_is_recorded_and_a_pin_set_by_a_selector(runs: Path) -> None:
    manager = CheckpointManager(runs, prefix="net")
    manager.record("@tag:paper", {"score": 1.0})
    manager.unpin("@pinned")
    manager.pin("best:loss:max")
    assert loaded(runs, "best:score:max") == 20
    assert loaded(runs, "@pinned") == 10
