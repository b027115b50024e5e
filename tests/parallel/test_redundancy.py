# SPDX-License-Identifier: Apache-2.0
"""Who holds the same bytes: MindSpore's answers, and the right ones where MindSpore loses parameters."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ckptmgr import CheckpointNotFound, CorruptCheckpoint
from ckptmgr.parallel import (
    LayoutError,
    ParallelLayout,
    get_parameter_redundancy,
    remove_param_redundancy,
)
from ckptmgr.parallel.mindspore.slices import region_of
from ckptmgr.parallel.redundancy import Groups, groups_of
from tests.parallel.mindspore.layouts import layouts, shape_for

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "golden" / "redundancy.json").read_text()
)["cases"]
LOSSES = {"opt_not_dividing", "nested_map_layout", "scalar_empty_tensor_map"}
RECORDED = sorted(name for name, case in CASES.items() if "redundancy" in case)


def answer(case: dict[str, Any], directory: Path) -> dict[str, Groups]:
    if "parameter_layout_dict" in case:
        return get_parameter_redundancy(
            case["parameter_layout_dict"],
            rank=case["get_rank"],
            group_size=case["group_sizes"].__getitem__,
        )
    file = directory / "strategy.ckpt"
    file.write_bytes(base64.b64decode(case["strategy_file_b64"]))
    return get_parameter_redundancy(str(file), case["initial_rank"])


def as_lists(redundancy: dict[str, Groups]) -> dict[str, list[list[int]]]:
    return {name: [list(group) for group in groups] for name, groups in redundancy.items()}


@pytest.mark.parametrize("name", sorted(set(RECORDED) - LOSSES))
def test_groups_are_mindspores(name: str, tmp_path: Path) -> None:
    redundancy = answer(CASES[name], tmp_path)
    assert as_lists(redundancy) == CASES[name]["redundancy"]
    assert list(redundancy) == sorted(redundancy)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(set(RECORDED) - LOSSES))
def test_parameters_are_dealt_out_as_mindspore_does(name: str, keep: int, tmp_path: Path) -> None:
    saved = remove_param_redundancy(answer(CASES[name], tmp_path), keep)
    recorded = CASES[name][f"remove_keep{keep}"]
    assert {str(rank): sorted(names) for rank, names in saved.items()} == recorded


def test_several_axes_on_a_dimension_make_as_many_slices_where_mindspore_sees_two(
    tmp_path: Path,
) -> None:
    redundancy = answer(CASES["nested_map_layout"], tmp_path)
    assert as_lists(redundancy)["w"] == [[0], [4], [2], [6], [1], [5], [3], [7]]


def test_optimizer_shard_that_does_not_divide_keeps_every_slice_where_mindspore_keeps_none(
    tmp_path: Path,
) -> None:
    saved = remove_param_redundancy(answer(CASES["opt_not_dividing"], tmp_path))
    assert saved == {rank: {"w"} for rank in range(8)}


def test_scalar_is_one_group_where_mindspore_crashes(tmp_path: Path) -> None:
    assert answer(CASES["scalar_empty_tensor_map"], tmp_path)["s"] == (tuple(range(8)),)


@pytest.mark.parametrize("pieces", [128, 129, 256, 257, 512])
def test_more_than_128_pieces_stay_apart_where_mindspore_folds_them(pieces: int) -> None:
    layout = ParallelLayout(device_matrix=(pieces,), tensor_map=((0,), ()))
    assert groups_of(layout) == tuple((rank,) for rank in range(pieces))


@given(layouts())
def test_ranks_are_in_one_group_exactly_when_they_hold_the_same_elements(
    layout: ParallelLayout,
) -> None:
    shape = shape_for(layout)
    regions = [region_of(layout, device, shape) for device in range(layout.device_count)]
    expected: dict[object, list[int]] = {}
    for rank, region in enumerate(regions):
        expected.setdefault(region, []).append(rank)
    assert sorted(groups_of(layout)) == sorted(map(tuple, expected.values()))


@given(layouts())
def test_every_slice_is_saved_by_as_many_ranks_as_asked(layout: ParallelLayout) -> None:
    redundancy = {name: groups_of(layout) for name in "abc"}
    saved = remove_param_redundancy(redundancy, 2)
    for name, groups in redundancy.items():
        for group in groups:
            assert sum(name in saved.get(rank, ()) for rank in group) == min(2, len(group))


def test_groups_of_named_ranks_hold_those_names() -> None:
    layout = ParallelLayout(device_matrix=(2, 2), tensor_map=((0,),), ranks=(7, 5, 3, 1))
    assert groups_of(layout) == ((7, 3), (5, 1))


def test_stage_of_this_process_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = {"w": ParallelLayout(device_matrix=(4,), tensor_map=((),))}
    monkeypatch.delenv("RANK_ID", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    assert get_parameter_redundancy(layout) == {"w": ((0, 1, 2, 3),)}
    monkeypatch.setenv("RANK", "6")
    assert get_parameter_redundancy(layout) == {"w": ((4, 5, 6, 7),)}


def test_optimizer_shard_group_of_unknown_size_is_refused_with_the_way_out() -> None:
    value = ((2, 2), (0, -1), (4, 4), 0, True, "g2")
    with pytest.raises(LayoutError, match="group_size=") as caught:
        get_parameter_redundancy({"w": value})
    assert "'w'" in str(caught.value)


@pytest.mark.parametrize("value", [5, ((2,),), ((2,), (3,)), ((0,), ()), (("x",), ())])
def test_layout_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(LayoutError):
        get_parameter_redundancy({"w": value})


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="instead of a file name or a mapping"):
        get_parameter_redundancy(5)  # type: ignore[arg-type]


def test_missing_and_damaged_strategy_files_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no such strategy file"):
        get_parameter_redundancy(tmp_path / "absent.ckpt")
    (tmp_path / "damaged.ckpt").write_bytes(b"\xff")
    with pytest.raises(CorruptCheckpoint, match=r"damaged\.ckpt"):
        get_parameter_redundancy(tmp_path / "damaged.ckpt")


@pytest.mark.parametrize("groups", [(), ((),)])
def test_parameter_held_by_nobody_is_refused_because_it_would_be_lost(groups: Groups) -> None:
    with pytest.raises(ValueError, match="'w' is held by no rank"):
        remove_param_redundancy({"w": groups})


def test_keeping_no_copy_is_refused() -> None:
    with pytest.raises(ValueError, match="keep_redundancy is 0"):
        remove_param_redundancy({}, 0)


def test_numpy_numbers_in_a_layout_are_taken() -> None:
    value = (np.array([2, 2]), np.array([0, -1]), (), 0, True, "", (8, 8))
    assert get_parameter_redundancy({"w": value}, 0) == {"w": ((0, 2), (1, 3))}
