# SPDX-License-Identifier: Apache-2.0
"""Modules in a state: each stands for the global generator that its functions draw from."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    StateMismatch,
    UnsupportedState,
    load_state,
    save_state,
)
from ckptmgr.state import random as state_random
from ckptmgr.state.paths import TreeError
from ckptmgr.state.tree import flatten, restore, unflatten
from tests.support.trees import reader


@pytest.fixture(autouse=True)
def _same_streams_after() -> Iterator[None]:
    python, legacy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(legacy)


def _manager(directory: Path) -> CheckpointManager:
    return CheckpointManager(directory, CheckpointConfig(), prefix="net")


def test_global_generators_go_on_where_they_were_saved(tmp_path: Path) -> None:
    state = {"python": random, "numpy": np.random}
    random.gauss(0, 1)  # leaves a second number for the next call
    with _manager(tmp_path) as manager:
        manager.save(1, state)
    expected = (random.gauss(0, 1), random.random(), np.random.rand(3).tolist())
    restored = _manager(tmp_path).resume(state).state
    assert restored is state
    assert (state["python"], state["numpy"]) == (random, np.random)
    assert (random.gauss(0, 1), random.random(), np.random.rand(3).tolist()) == expected


def test_global_generator_of_torch_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    with torch.random.fork_rng(devices=[]):
        state = {"torch": torch, "cuda": torch.cuda}
        with _manager(tmp_path) as manager:
            manager.save(1, state)
        expected = torch.rand(3).tolist()
        _manager(tmp_path).resume(state)
        assert torch.rand(3).tolist() == expected


def test_generators_of_all_devices_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    torch: Any = pytest.importorskip("torch")
    # CPU generators in the place of those of two devices
    generators = tuple(torch.Generator().manual_seed(seed) for seed in (1, 2))
    started: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: started.append(1))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    flat = flatten([torch.cuda])
    expected = [torch.rand(2, generator=one).tolist() for one in generators]
    restored: Any = restore([torch.cuda], flat.skeleton, reader(flat))
    assert restored == [torch.cuda]
    assert started
    assert [torch.rand(2, generator=one).tolist() for one in generators] == expected

    plain: Any = unflatten(flat.skeleton, reader(flat))  # also where there is no such device
    assert [one.dtype for one in plain[0]] == [torch.uint8, torch.uint8]
    for bad in (plain[0][0][:5], 7):
        other = flatten([(plain[0][0], bad)])
        with pytest.raises(StateMismatch, match=r"state\[0\]\[1\] (no|the state of a) torch gen"):
            restore([torch.cuda], other.skeleton, reader(other))
    monkeypatch.setattr(torch.cuda, "default_generators", generators[:1])
    with pytest.raises(StateMismatch, match=r"state\[0\] has 1 generators, stored is a tuple of 2"):
        restore([torch.cuda], flat.skeleton, reader(flat))


def test_generator_without_a_target_draws_the_same_numbers(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, [random, np.random])
    expected = [random.random(), np.random.rand()]
    restored: Any = _manager(tmp_path).resume().state
    assert [restored[0].random(), restored[1].rand()] == expected


def test_module_and_generator_of_one_stream_are_one_object() -> None:
    owner = np.random.mtrand._rand
    nodes = json.loads(flatten([np.random, owner]).skeleton)["nodes"]
    assert sum(node == {"shared": 0} for node in nodes) == 2


@pytest.mark.parametrize(
    ("target", "stored", "problem"),
    [
        (random, np.random, "is a python.Random, stored is a numpy.RandomState"),
        (random, 5, "is a python.Random, stored is a "),
    ],
    ids=["other", "number"],
)
def test_module_that_does_not_fit_is_named(target: object, stored: object, problem: str) -> None:
    before = random.getstate()
    flat = flatten({"r": stored})
    with pytest.raises(StateMismatch, match=rf"state\['r'\] {problem}"):
        restore({"r": target}, flat.skeleton, reader(flat))
    assert random.getstate() == before


def test_stored_number_is_no_tuple_of_generators() -> None:
    torch: Any = pytest.importorskip("torch")
    flat = flatten({"r": 5})
    with pytest.raises(StateMismatch, match=r"has \d+ generators, stored is a int"):
        restore({"r": torch.cuda}, flat.skeleton, reader(flat))


def test_other_module_is_refused_with_its_path() -> None:
    with pytest.raises(UnsupportedState, match=r"state\['m'\] is a module"):
        flatten({"m": json})


def test_generators_of_a_real_device_go_on_where_they_were_saved(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    state = {"cuda": torch.cuda}
    with _manager(tmp_path) as manager:
        manager.save(1, state)
    expected = torch.rand(3, device="cuda").tolist()
    _manager(tmp_path).resume(state)
    assert torch.rand(3, device="cuda").tolist() == expected


@pytest.mark.parametrize("place", [-1, 625, 2**31 - 1, True, 1.0])
def test_place_outside_the_buffer_of_a_generator_is_refused(
    place: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    legacy = np.random.RandomState(1).get_state(legacy=False)
    legacy = {**legacy, "state": {**legacy["state"], "pos": place}}
    monkeypatch.setattr(state_random, "_legacy_state", lambda value: legacy)
    save_state({"rng": np.random.RandomState(1)}, tmp_path / "rng.ckpt")
    monkeypatch.undo()
    for into in (None, {"rng": np.random.RandomState(2)}):
        with pytest.raises(CkptmgrError, match="the pos of a MT19937 is not from 0 to 624"):
            load_state(tmp_path / "rng.ckpt", into=into)


@pytest.mark.parametrize("place", [-1, 5, 2**31 - 1])
def test_place_outside_the_buffer_of_a_philox_is_refused(place: int) -> None:
    state = {**np.random.Philox(1).state, "buffer_pos": place}
    with pytest.raises(TreeError, match="the buffer_pos of a Philox is not from 0 to 4"):
        state_random.build_generator("numpy.Generator", state)


def test_state_of_a_legacy_generator_that_is_a_tuple_is_refused() -> None:
    with pytest.raises(TreeError, match="is no dict"):
        state_random.build_generator("numpy.RandomState", np.random.RandomState(1).get_state())
