# SPDX-License-Identifier: Apache-2.0
"""Two stored values for one array of the state: only if they are equal."""

from __future__ import annotations

import re
from collections.abc import Callable
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from ckptmgr import CheckpointManager, Snapshots  # noqa: E402
from ckptmgr.state.tree import StateMismatch, flatten, restore  # noqa: E402
from tests.state.test_arrays import MsParameter  # noqa: E402
from tests.support.trees import reader  # noqa: E402

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
    with pytest.raises(StateMismatch, match="same object"):
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


Targets = dict[str, Any]

OVERLAPS: dict[str, Callable[[], Targets]] = {
    "numpy": lambda: halves(np.zeros(6)),
    "numpy backwards": lambda: halves(np.zeros(6)[::-1]),
    "numpy strided": lambda: halves(np.zeros(12)[::2]),
    "torch": lambda: halves(torch.zeros(6, dtype=torch.float64)),
    "torch parameter": lambda: halves(torch.nn.Parameter(torch.zeros(6, dtype=torch.float64)).data),
    "torch over numpy": lambda: halves(torch.from_numpy(np.zeros(6))),
}


def halves(whole: Any) -> Targets:
    return {"a": whole[:4], "b": whole[2:]}


def loose(target: Targets, *values: float) -> Targets:
    """Return what fits a target and shares nothing."""
    make = torch.full if isinstance(target["a"], torch.Tensor) else np.full
    kinds = zip(target.items(), values, strict=True)
    return {name: make(tuple(one.shape), value, dtype=one.dtype) for (name, one), value in kinds}


@pytest.mark.parametrize("make", OVERLAPS.values(), ids=OVERLAPS)
def test_two_values_for_arrays_that_overlap_partly_are_refused_and_change_nothing(
    make: Callable[[], Targets],
) -> None:
    target = make()
    with pytest.raises(
        StateMismatch, match=re.escape("state['b'] overlaps state['a'] in memory, stored are two")
    ):
        restored(loose(target, 1.0, 2.0), target)
    assert not any(one.any() for one in target.values())


@pytest.mark.parametrize("make", OVERLAPS.values(), ids=OVERLAPS)
def test_arrays_that_overlap_partly_are_restored_from_equal_values_and_from_themselves(
    make: Callable[[], Targets],
) -> None:
    target = make()
    restored(loose(target, 3.0, 3.0), target)
    assert all((one == 3.0).all() for one in target.values())
    target["a"][0] = 7.0
    flat = flatten(target)
    read = reader(flat)
    target["b"][...] = 0.0
    restore(target, flat.skeleton, read)
    assert [target["a"].tolist(), target["b"].tolist()] == [[7.0, 3.0, 3.0, 3.0], [3.0] * 4]


def test_columns_of_a_matrix_are_apart() -> None:
    matrix = np.zeros((3, 2))
    restored([np.ones(3), np.full(3, 2.0)], [matrix[:, 0], matrix[:, 1]])
    assert matrix.tolist() == [[1.0, 2.0]] * 3


def test_elements_that_overlap_within_one_array_take_one_value() -> None:
    windows = np.lib.stride_tricks.as_strided(np.zeros(4), (3, 2), (8, 8))
    restored([np.array([[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]])], [windows])
    assert windows[2].tolist() == [3.0, 4.0]
    with pytest.raises(StateMismatch, match=re.escape("state[0] overlaps itself in memory")):
        restored([np.arange(6.0).reshape(3, 2)], [windows])


def test_overlap_is_found_between_frameworks_in_shared_memory_and_of_other_types() -> None:
    memory = shared_memory.SharedMemory(create=True, size=64)
    try:
        array = np.ndarray(8, np.float64, memory.buf)
        tensor = torch.frombuffer(memory.buf, dtype=torch.int32, count=4, offset=8)
        with pytest.raises(StateMismatch, match=re.escape("state[1] overlaps state[0]")):
            restored([np.ones(8), torch.ones(4, dtype=torch.int32)], [array, tensor])
        assert not array.any()
        del array, tensor
    finally:
        memory.close()
        memory.unlink()


def test_conjugated_view_takes_what_its_memory_holds() -> None:
    whole = torch.zeros(4, dtype=torch.complex64)
    value = torch.full((4,), 1 + 2j, dtype=torch.complex64)
    restored([value, value.conj().resolve_conj()], [whole, whole.conj()])
    assert whole.tolist() == [1 + 2j] * 4
    with pytest.raises(StateMismatch, match="same memory"):
        restored([value, value.clone()], [whole, whole.conj()])
    negated = whole.conj().imag
    assert negated.is_neg()
    with pytest.raises(StateMismatch, match="overlaps"):
        restored([value, torch.full((4,), 2.0)], [whole, negated])


OBJECTS: dict[str, tuple[Callable[[float], Any], str]] = {
    "list": (lambda value: [value], "object"),
    "dict": (lambda value: {"x": value}, "object"),
    "set": (lambda value: {value}, "object"),
    "bytearray": (lambda value: bytearray([int(value)]), "object"),
    "generator": (lambda value: np.random.default_rng(int(value)), "object"),
    "optimizer": (lambda value: torch.optim.SGD([torch.zeros(2)], lr=value), "object"),
    "module": (lambda value: constant(value), "memory"),
}


def constant(value: float) -> Any:
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, value)
    torch.nn.init.constant_(module.bias, value)
    return module


@pytest.mark.parametrize(("make", "what"), OBJECTS.values(), ids=OBJECTS)
def test_two_values_for_one_object_are_refused_and_equal_ones_restored(
    make: Callable[[float], Any], what: str
) -> None:
    target, before = make(0.0), skeleton_of(make(0.0))
    with pytest.raises(StateMismatch, match=rf"is the same {what} (as|\[)"):
        restored({"a": make(1.0), "b": make(2.0)}, {"a": target, "b": target})
    assert skeleton_of(target) == before
    restored({"a": make(1.0), "b": make(1.0)}, {"a": target, "b": target})
    assert skeleton_of(target) == skeleton_of(make(1.0))


def skeleton_of(state: object) -> str:
    return flatten(state).skeleton


def test_two_generators_over_one_stream_take_one_state() -> None:
    stream = np.random.PCG64(0)
    target = [np.random.Generator(stream), np.random.Generator(stream)]
    with pytest.raises(StateMismatch, match="same object"):
        restored([np.random.default_rng(1), np.random.default_rng(2)], target)


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


def test_every_way_back_refuses_two_values_for_arrays_that_overlap(tmp_path: Path) -> None:
    memory = np.zeros(150_000)
    target = {"a": memory[:100_000], "b": memory[50_000:]}
    state = {"a": np.ones(100_000), "b": np.full(100_000, 2.0)}
    with CheckpointManager(tmp_path, snapshots=Snapshots(1)) as manager:
        manager.save(1, state)
        manager.snapshot(1, state)
        manager.step_end(2, state)
        ways: list[Callable[[], object]] = [
            lambda: manager.rollback(target),
            lambda: manager.load(1, target),
            lambda: manager.resume(target),
        ]
        for way in ways:
            with pytest.raises(StateMismatch, match=re.escape("state['b'] overlaps state['a']")):
                way()
            assert not memory.any()
