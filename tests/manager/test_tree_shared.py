# SPDX-License-Identifier: Apache-2.0
"""Two stored values for one array of the state: only if they are equal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from ckptmgr import CheckpointManager  # noqa: E402 - torch may be absent
from ckptmgr.tree import StateMismatch, flatten, restore  # noqa: E402
from tests.manager.test_leaves import MsParameter  # noqa: E402
from tests.manager.trees import reader  # noqa: E402

MESSAGE = "state['b'] is the same memory as state['a'], stored are two different values"

Make = Callable[[float], Any]

KINDS: dict[str, Make] = {
    "numpy": lambda value: np.full(3, value),
    "torch": lambda value: torch.full((3,), value),
    "transposed": lambda value: np.full((2, 3), value).T,
}


def restored(state: object, target: object) -> object:
    flat = flatten(state)
    return restore(target, flat.skeleton, reader(flat))


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_two_values_for_one_array_are_refused_and_change_nothing(make: Make) -> None:
    target = make(0.0)
    with pytest.raises(StateMismatch, match=re.escape(MESSAGE)):
        restored({"a": make(1.0), "b": make(2.0)}, {"a": target, "b": target})
    assert not target.any()


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_equal_values_for_one_array_are_restored(make: Make, value: float) -> None:
    target = make(0.0)
    restored({"a": make(value), "b": make(value)}, {"a": target, "b": target})
    assert str(target) == str(make(value))


def test_mindspore_parameter_takes_one_value() -> None:
    parameter = MsParameter(np.zeros(3, np.float32))
    stored = [np.full(3, value, np.float32) for value in (1, 2)]
    with pytest.raises(StateMismatch, match="same memory"):
        restored(stored, [parameter, parameter])


def test_views_of_one_array_are_known_to_be_the_same() -> None:
    x = np.zeros(4)
    with pytest.raises(StateMismatch, match="same memory"):
        restored([np.ones(4), np.zeros(4)], [x, x[:]])


def test_empty_arrays_share_nothing() -> None:
    x = np.zeros((0, 3))
    restored([np.zeros((0, 3)), np.zeros((0, 3))], [x, x])


def test_module_with_tied_weights_refuses_those_of_one_without() -> None:
    tied = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    tied.get_submodule("1").register_parameter("weight", tied.get_parameter("0.weight"))
    before = tied.get_parameter("0.weight").detach().clone()
    loose = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    with pytest.raises(StateMismatch, match="same memory"):
        restored(loose, tied)
    assert torch.equal(tied.get_parameter("0.weight"), before)


@pytest.mark.parametrize("second", [1.0, 2.0])
def test_manager_restores_into_a_shared_array_what_is_equal(tmp_path: Path, second: float) -> None:
    x = np.zeros(1 << 16)
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": np.ones(1 << 16), "b": np.full(1 << 16, second)})
        if second == 1.0:
            assert manager.resume({"a": x, "b": x}).step == 1
            assert x.all()
            return
        with pytest.raises(StateMismatch, match="two different values"):
            manager.resume({"a": x, "b": x})
    assert not x.any()
