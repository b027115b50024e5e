# SPDX-License-Identifier: Apache-2.0
"""The page about 8 GPUs: its programs train alike when they are cut, and one goes on from the other."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager, load_checkpoint
from tests.support.torch_ranks import run_ranks

PAGE = Path(__file__).parents[1] / "docs/train-on-8-gpus.md"
WORLD = 2

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the page is not installed"
)


def program(name: str) -> Any:
    """Return a function of the page."""
    names: dict[str, Any] = {"__name__": "page"}
    (block,) = re.findall(rf"```python\n([^`]*?def {name}\(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 - our own page
    return names[name]


def train(directory: Path, steps: int) -> None:
    """Train on two ranks up to a step."""

    def main() -> None:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
        program("train")(str(directory), steps)
        os._exit(0)

    run_ranks(WORLD, main)


@pytest.fixture(autouse=True)
def _needs_torch() -> None:
    pytest.importorskip("torch")


def test_ranks_that_are_cut_end_as_ranks_that_are_not(tmp_path: Path) -> None:
    train(tmp_path / "whole", 12)
    train(tmp_path / "cut", 5)
    train(tmp_path / "cut", 12)
    whole, cut = (load_checkpoint(tmp_path / name / "net-12.shards") for name in ("whole", "cut"))
    assert whole.keys() == cut.keys()
    assert all(np.array_equal(whole[name], cut[name]) for name in whole)


def test_ranks_go_on_from_one_process_and_one_process_from_ranks(tmp_path: Path) -> None:
    program("train_alone")(str(tmp_path), 4)
    train(tmp_path, 8)
    program("train_alone")(str(tmp_path), 10)
    steps = [one.step for one in CheckpointManager(tmp_path, prefix="net").checkpoints()]
    assert sorted(steps) == [4, 8, 10]
