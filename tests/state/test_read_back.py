# SPDX-License-Identifier: Apache-2.0
"""A restored state is compared with the stored one."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager, Resume, StateMismatch

torch: Any = pytest.importorskip("torch")

SMALL, LARGE = 8, 1 << 19  # elements; many bytes go straight from the file into the state


def saved(directory: Path, state: object) -> None:
    with CheckpointManager(directory) as manager:
        manager.save(1, state)


def resumed(directory: Path, state: object, **how: Any) -> Any:
    with CheckpointManager(directory) as manager:
        return manager.resume(state, Resume(**how)).state


class Holder:
    """An object of a program; `load` converts what it is given."""

    def __init__(self, value: Any, load: Any = lambda value: value) -> None:
        self.value, self._load = value, load

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        self.value = self._load(stored["value"])


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_object_that_loads_an_array_otherwise_is_an_error_with_path_and_both_types(
    tmp_path: Path, elements: int
) -> None:
    saved(tmp_path, {"a": Holder(np.ones(elements, np.float32))})
    state = {"a": Holder(None, lambda value: value.astype(np.float16))}
    with pytest.raises(StateMismatch) as caught:
        resumed(tmp_path, state)
    wanted = rf"\['a'\].*\['value'\] is float16\[{elements}\], stored is float32\[{elements}\]"
    assert caught.match(wanted)
    assert caught.match("may_differ")


def test_object_that_drops_an_array_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, {"a": Holder(np.ones(3))})
    with pytest.raises(StateMismatch, match=r"\['value'\]"):
        resumed(tmp_path, {"a": Holder(None, lambda _: None)})


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_module_whose_hook_changes_loaded_weights_is_an_error(
    tmp_path: Path, elements: int
) -> None:
    saved(tmp_path, {"net": torch.nn.Linear(elements, 1)})
    net = torch.nn.Linear(elements, 1)

    def add(module: Any, _: object) -> None:
        with torch.no_grad():
            module.weight[0, -1] += 1

    hooked: Any = net
    hooked.register_load_state_dict_post_hook(add)
    with pytest.raises(StateMismatch, match=r"\['weight'\] has other elements"):
        resumed(tmp_path, {"net": net})


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_array_that_a_later_part_of_the_state_overwrites_is_an_error(
    tmp_path: Path, elements: int
) -> None:
    saved(tmp_path, {"a": np.ones(elements), "b": Holder(1)})
    array = np.zeros(elements)

    def overwrite(value: int) -> int:
        array[0] = 7.0
        return value

    with pytest.raises(StateMismatch, match=r"\['a'\] has other elements"):
        resumed(tmp_path, {"a": array, "b": Holder(0, overwrite)})


@pytest.mark.parametrize("name", ["a", "value", "a/value"])
def test_part_that_may_differ_is_restored_without_an_error(tmp_path: Path, name: str) -> None:
    saved(tmp_path, {"a": Holder(np.ones(3))})
    state = {"a": Holder(None, lambda value: value + 1)}
    resumed(tmp_path, state, may_differ=[name])
    assert state["a"].value.tolist() == [2.0, 2.0, 2.0]


def test_comparison_can_be_left_out(tmp_path: Path) -> None:
    saved(tmp_path, {"a": Holder(np.ones(3))})
    resumed(tmp_path, {"a": Holder(None, lambda value: value + 1)}, read_back=False)


def test_plain_value_that_an_object_loads_otherwise_is_a_warning_with_both_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, {"a": Holder(3)})
    with caplog.at_level(logging.WARNING):
        resumed(tmp_path, {"a": Holder(None, lambda value: value + 1)})
    assert "['value'] is 4, stored is 3" in caplog.text


def test_plain_value_that_an_object_loads_otherwise_is_an_error_if_strict(tmp_path: Path) -> None:
    saved(tmp_path, {"a": Holder(3)})
    with pytest.raises(StateMismatch, match=r"\['value'\] is 4, stored is 3"):
        resumed(tmp_path, {"a": Holder(None, lambda value: value + 1)}, strict=True)


def test_counter_that_moves_by_being_read_is_no_difference(tmp_path: Path) -> None:
    class Clock:
        def __init__(self) -> None:
            self._readings = itertools.count()

        def state_dict(self) -> dict[str, int]:
            return {"now": next(self._readings)}

        def load_state_dict(self, stored: dict[str, int]) -> None:
            self._readings = itertools.count(stored["now"] + 5)

    saved(tmp_path, {"clock": Clock()})
    resumed(tmp_path, {"clock": Clock()}, strict=True)


def test_loader_is_not_asked_where_it_stands_before_its_pass(tmp_path: Path) -> None:
    class Loader:
        asked = 0

        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, int]:
            self.asked += 1
            return {"at": self.asked}

        def load_state_dict(self, stored: dict[str, int]) -> None:
            self.asked = 0

    saved(tmp_path, {"loader": Loader()})
    state = {"loader": Loader()}
    resumed(tmp_path, state, strict=True)
    assert state["loader"].asked == 0


def test_generator_that_a_state_dict_draws_from_has_the_stored_state(tmp_path: Path) -> None:
    class Drawing(Holder):
        def state_dict(self) -> dict[str, Any]:
            generator.random()
            return super().state_dict()

    generator = np.random.default_rng(3)
    wanted = generator.bit_generator.state
    saved(tmp_path, {"generator": generator, "net": Holder(1)})
    resumed(tmp_path, {"generator": generator, "net": Drawing(1)})
    assert generator.bit_generator.state == wanted


@pytest.mark.parametrize(
    ("weights", "moments"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.uint8),
        (torch.float32, torch.float64),
    ],
)
def test_moments_come_back_in_their_stored_type_whatever_that_of_the_weights(
    tmp_path: Path, weights: Any, moments: Any
) -> None:
    def made() -> Any:
        weight = torch.nn.Parameter(torch.ones(3, dtype=weights))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.state[weight]["moment"] = torch.tensor([1.2345678, 3.0, 7.0]).to(moments)
        return optimizer

    optimizer = made()
    saved(tmp_path, {"optimizer": optimizer})
    fresh = made()
    fresh.state.clear()
    resumed(tmp_path, {"optimizer": fresh})
    (found,) = fresh.state_dict()["state"].values()
    (wanted,) = optimizer.state_dict()["state"].values()
    assert found["moment"].dtype is moments
    assert torch.equal(found["moment"], wanted["moment"])


def test_optimizer_of_the_program_that_stores_its_moments_converted_keeps_its_own(
    tmp_path: Path,
) -> None:
    class Converting(torch.optim.SGD):  # type: ignore[misc]
        def state_dict(self) -> Any:
            found = super().state_dict()
            moments = {
                key: {"moment": one["moment"].float()} for key, one in found["state"].items()
            }
            return {**found, "state": moments}

    def made() -> Converting:
        return Converting([weight], lr=0.1)

    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = made()
    optimizer.state[weight]["moment"] = torch.ones(3, dtype=torch.bfloat16)
    saved(tmp_path, {"optimizer": optimizer})
    fresh = made()
    resumed(tmp_path, {"optimizer": fresh})
    assert fresh.state[weight]["moment"].dtype is torch.bfloat16


def test_what_pads_the_fields_of_an_array_is_no_difference(tmp_path: Path) -> None:
    padded = np.dtype([("a", "u1"), ("b", "f8")], align=True)
    fresh = np.zeros(3, padded)
    fresh.view(np.uint8)[:] = 7
    saved(tmp_path, {"x": np.zeros(3, padded), "big": np.zeros(LARGE)})
    resumed(tmp_path, {"x": fresh, "big": np.zeros(LARGE)})
    assert fresh["b"].tolist() == [0.0] * 3


def test_load_and_rollback_compare_as_resume_does(tmp_path: Path) -> None:
    state = {"a": Holder(np.ones(3))}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        changed = {"a": Holder(None, lambda value: value + 1)}
        with pytest.raises(StateMismatch, match="has other elements"):
            manager.load("latest", changed)
        manager.snapshot(2, state)
        manager.snapshot(3, state)
        with pytest.raises(StateMismatch, match="has other elements"):
            manager.rollback(changed)
