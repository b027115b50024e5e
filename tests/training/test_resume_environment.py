# SPDX-License-Identifier: Apache-2.0
"""`CKPTMGR_RESUME`: the ways out of an error for one start, without a change of the program."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Resume
from ckptmgr.integrations.base import FrameworkManager

NAME = "CKPTMGR_RESUME"


class Halving:
    """An object that loads another array than the stored one."""

    def __init__(self) -> None:
        self.w = np.ones(2)

    def state_dict(self) -> dict[str, object]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.w = state["w"] / 2


def saved(directory: Path) -> Path:
    with CheckpointManager(directory, CheckpointConfig(keep="all")) as manager:
        for step in (1, 2):
            manager.save(step, {"ema": Halving(), "n": step})
    return directory


def test_part_that_may_differ_is_accepted_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(NAME, "may_differ=data, ema")
    with caplog.at_level(logging.WARNING):
        assert CheckpointManager(saved(tmp_path)).resume({"ema": Halving(), "n": 0}).step == 2
    assert [one for one in caplog.messages if f"{NAME}=may_differ=data, ema" in one]


def test_start_goes_back_beside_what_the_program_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "at=1")
    how = Resume(may_differ=["ema"])
    assert CheckpointManager(saved(tmp_path)).resume({"ema": Halving(), "n": 0}, how).step == 1


def test_chosen_checkpoint_wins_over_what_the_program_prefers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NAME, "at=1;may_differ=ema")
    how = Resume(only="healthy")
    assert CheckpointManager(saved(tmp_path)).resume({"ema": Halving(), "n": 0}, how).step == 1


def test_start_takes_the_newest_healthy_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(keep="all")) as manager:
        manager.save(1, {"w": np.ones(2)})
        manager.save(2, {"w": np.full(2, np.nan)})
    monkeypatch.setenv(NAME, "only=healthy")
    assert CheckpointManager(tmp_path).resume({"w": np.zeros(2)}).step == 1


def test_adapter_takes_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "at=1; may_differ=ema")
    manager = FrameworkManager("Adapter", saved(tmp_path))
    assert manager.how == Resume(at=1, may_differ=["ema"])
    assert manager.resume({"ema": Halving(), "n": 0}).step == 1


@pytest.mark.parametrize("text", ["start=new", "may_differ", "at=", "read_back=False"])
def test_other_fields_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(NAME, text)
    with pytest.raises(ValueError, match=NAME):
        CheckpointManager(tmp_path).resume()
