# SPDX-License-Identifier: Apache-2.0
"""`merge_sliced_parameter`: MindSpore's answers and messages."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.formats.strategy import StrategyLayout
from ckptmgr.parallel import LayoutError, ParallelLayout, SlicedParameter, merge_sliced_parameter
from tests.parallel.mindspore.layouts import held_by, layouts, shape_for

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "merge_sliced_parameter.json").read_text()
)
WITH_SLICES = [case for case in CASES if case.get("slices") and isinstance(case["slices"], list)]
ARGUMENTS: dict[str, tuple[object, object]] = {
    "strategy list": ([SlicedParameter("w", np.zeros(2))], [1]),
    "strategy bad value": ([SlicedParameter("w", np.zeros(2))], {"w": 5}),
    "arg tuple": ((1,), None),
    "arg empty": ([], None),
    "arg None": (None, None),
}


def array(stored: dict[str, Any]) -> np.ndarray:
    return np.array(stored["data"], stored["dtype"]).reshape(stored["shape"])


def slices_of(case: dict[str, Any]) -> list[SlicedParameter]:
    names = case["names"] or ["w"] * len(case["slices"])
    return [SlicedParameter(n, array(s)) for n, s in zip(names, case["slices"], strict=True)]


def strategy_of(case: dict[str, Any]) -> dict[str, StrategyLayout] | None:
    layout = case["layout"]
    if layout is None:
        return None
    return {
        "w": StrategyLayout(
            name="w",
            device_matrix=tuple(layout["dev"]),
            tensor_maps=(tuple(layout["map"]),),
            param_split_shape=tuple(layout.get("split", ())),
            field=layout.get("field", 0),
        )
    }


@pytest.mark.parametrize(
    "case", [c for c in WITH_SLICES if c.get("merged")], ids=lambda c: c["name"]
)
def test_merged_parameter_is_mindspores(case: dict[str, Any]) -> None:
    merged = merge_sliced_parameter(slices_of(case), strategy_of(case))
    np.testing.assert_array_equal(merged.data, array(case["merged"]))
    assert (merged.name, merged.data.dtype.name) == ("w", case["merged"]["dtype"])


@pytest.mark.parametrize("case", [c for c in CASES if c.get("exception")], ids=lambda c: c["name"])
def test_unusable_arguments_give_mindspores_errors(case: dict[str, Any]) -> None:
    slices, strategy = ARGUMENTS.get(case["name"], (None, None))
    if case["name"] not in ARGUMENTS:
        slices, strategy = slices_of(case), strategy_of(case)
    with pytest.raises((TypeError, ValueError)) as caught:
        merge_sliced_parameter(slices, strategy)  # type: ignore[arg-type]
    assert (type(caught.value).__name__, str(caught.value)) == (case["exception"], case["message"])


@given(layouts(), st.integers(1, 2))
def test_slices_of_any_layout_merge_to_the_whole(layout: ParallelLayout, times: int) -> None:
    plain = ParallelLayout(device_matrix=layout.device_matrix, tensor_map=layout.tensor_map)
    shape = shape_for(plain, times=times)
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    slices = [
        SlicedParameter("w", held_by(plain, device, whole)) for device in range(plain.device_count)
    ]
    np.testing.assert_array_equal(merge_sliced_parameter(slices, {"w": plain}).data, whole)


def test_bfloat16_becomes_float32_as_in_mindspore() -> None:
    slices = [SlicedParameter("w", np.ones(2, ml_dtypes.bfloat16))] * 2
    merged = merge_sliced_parameter(slices)
    assert (merged.data.dtype.name, merged.data.tolist()) == ("float32", [1.0] * 4)


def test_mindspores_own_objects_are_taken() -> None:
    tensor = SimpleNamespace(asnumpy=lambda: np.arange(2.0))
    numbers = SimpleNamespace(dim=[2])
    layout = SimpleNamespace(
        dev_matrix=[numbers],
        tensor_map=[SimpleNamespace(dim=[0])],
        param_split_shape=[SimpleNamespace(dim=[])],
        field=0,
    )
    parameter = SimpleNamespace(name="w", data=tensor)
    merged = merge_sliced_parameter([parameter, parameter], {"w": layout})
    assert merged.data.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_element_that_is_no_parameter_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"should be 'Parameter', but got <class 'int'> at index 1"):
        merge_sliced_parameter([SlicedParameter("w", np.zeros(2)), 5])


def test_parameter_that_the_strategy_lacks_is_refused() -> None:
    with pytest.raises(KeyError, match="the parameter name w should be a key"):
        merge_sliced_parameter([SlicedParameter("w", np.zeros(2))], {"v": 1})


def test_slice_of_other_rows_than_the_split_shape_says_is_refused() -> None:
    layout = ParallelLayout(device_matrix=(2,), tensor_map=((0,),), split_rows=(1, 3))
    slices = [SlicedParameter("w", np.zeros(rows)) for rows in (2, 3)]
    with pytest.raises(ValueError, match="device 0 should have the shape"):
        merge_sliced_parameter(slices, {"w": layout})


def test_uneven_slices_of_a_known_shape_are_merged() -> None:
    layout = ParallelLayout(device_matrix=(2,), tensor_map=((0,),), shape=(5,), is_uneven=True)
    slices = [SlicedParameter("w", np.arange(3)), SlicedParameter("w", np.arange(3, 5))]
    assert merge_sliced_parameter(slices, {"w": layout}).data.tolist() == [0, 1, 2, 3, 4]


def test_fields_that_do_not_divide_the_rows_are_refused() -> None:
    layout = ParallelLayout(device_matrix=(1,), tensor_map=((), ()), field_size=2)
    with pytest.raises(LayoutError, match="2 fields"):
        merge_sliced_parameter([SlicedParameter("w", np.zeros((3, 2)))], {"w": layout})
