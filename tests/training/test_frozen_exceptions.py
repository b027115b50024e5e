# SPDX-License-Identifier: Apache-2.0
"""An exception of the user's code that refuses attributes reaches the user as it is, from every surface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    Ranks,
    load_checkpoint,
    load_state,
    save_checkpoint,
    save_state,
)
from ckptmgr.formats.strict_json import Json


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int = 7


class Unsavable:
    def state_dict(self) -> dict[str, Any]:
        raise FrozenError

    def load_state_dict(self, state: object) -> None:
        raise FrozenError


class Unloadable(Unsavable):
    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}


class Coordinator:
    rank, world = 0, 2

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        raise FrozenError


def fail(*_: object) -> Any:
    raise FrozenError


def save_with(mode: str | bool) -> Callable[[Path], object]:
    def act(directory: Path) -> None:
        config = CheckpointConfig(async_save=mode)
        with CheckpointManager(directory, config) as manager:
            manager.save(1, {"model": Unsavable()})

    return act


def load_in_manager(directory: Path) -> None:
    with CheckpointManager(directory) as manager:
        manager.save(1, {"model": Unloadable()})
        manager.load("latest", {"model": Unloadable()})


def resume(directory: Path) -> None:
    with CheckpointManager(directory) as manager:
        manager.save(1, {"model": Unloadable()})
    with CheckpointManager(directory) as manager:
        manager.resume({"model": Unloadable()})


def load_one_state(directory: Path) -> None:
    save_state({"model": Unloadable()}, directory / "x.ckpt")
    load_state(directory / "x.ckpt", {"model": Unloadable()})


def choose_on_load(directory: Path) -> None:
    save_checkpoint({"w": np.ones(3)}, directory / "x.ckpt")
    load_checkpoint(directory / "x.ckpt", choice_func=fail)


def resume_with_coordinator(directory: Path) -> None:
    with CheckpointManager(directory, ranks=Ranks(Coordinator())) as manager:
        manager.resume()


SURFACES: dict[str, Callable[[Path], object]] = {
    "save_state of an object": lambda d: save_state({"model": Unsavable()}, d / "x.ckpt"),
    "save_state of a function": lambda d: save_state(fail, d / "x.ckpt"),
    "load_state": load_one_state,
    "save": save_with(False),
    "save in a thread": save_with("thread"),
    "load": load_in_manager,
    "resume": resume,
    "save_checkpoint": lambda d: save_checkpoint(Unsavable(), d / "x.ckpt"),
    "choice on save": lambda d: save_checkpoint({"w": np.ones(3)}, d / "x.ckpt", choice_func=fail),
    "choice on load": choose_on_load,
    "coordinator": resume_with_coordinator,
}


@pytest.mark.parametrize("act", SURFACES.values(), ids=SURFACES)
def test_frozen_exception_reaches_the_user(tmp_path: Path, act: Callable[[Path], object]) -> None:
    with pytest.raises(FrozenError) as caught:
        act(tmp_path)
    assert caught.value.code == 7
