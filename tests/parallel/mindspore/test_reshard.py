# SPDX-License-Identifier: Apache-2.0
"""From N ranks to M: bytes copied as planned against whole tensors cut with NumPy, and MindSpore's lists of ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.core.regions import Interval, byte_runs
from ckptmgr.parallel import (
    LayoutError,
    ParallelLayout,
    plan_region,
    plan_slice,
    rank_list_for_transform,
    read_layouts,
)
from ckptmgr.parallel.mindspore.reshard import needed_ranks
from ckptmgr.parallel.mindspore.slices import gathered_ranks, region_of
from tests.parallel.mindspore.layouts import held_by, layouts, shape_for

GOLDEN = Path(__file__).parents[2] / "golden" / "transform"
RANKS: dict[str, dict[str, list[int]]] = json.loads(
    (GOLDEN / "rank_list_for_transform.json").read_text()
)
ITEM_BYTES = 4


def strategy_file(name: str) -> Path | None:
    if name == "full":
        return None
    return GOLDEN / "strategies" / (f"{name[:-5]}.json" if "_json" in name else f"{name}.ckpt")


def common_shape(one: ParallelLayout, other: ParallelLayout) -> tuple[int, ...]:
    return tuple(map(lcm, shape_for(one), shape_for(other)))


def gather(
    source: ParallelLayout, target: ParallelLayout, whole: np.ndarray, device: int
) -> np.ndarray:
    """Read by the plan, byte for byte, from the parts of the source ranks by the slow slicer."""
    region = region_of(target, device, whole.shape)
    found = np.full([one.length for one in region], -1, whole.dtype)
    buffer = found.reshape(-1).view(np.uint8)
    for part in plan_slice(source, target, shape=whole.shape, device=device):
        stored = np.ascontiguousarray(held_by(source, part.holders[-1], whole))
        for run in byte_runs(part.stored, part.wanted, region, item_bytes=ITEM_BYTES):
            data = stored.reshape(-1).view(np.uint8)[run.source_offset :][: run.length]
            buffer[run.target_offset :][: run.length] = data
    return found


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data(), st.integers(0, 3))
def test_planned_bytes_are_the_slices_of_the_target(data: st.DataObject, dimensions: int) -> None:
    source, target = (data.draw(layouts(dimensions=dimensions)) for _ in range(2))
    shape = common_shape(source, target)
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    for device in range(target.device_count):
        expected = held_by(target, device, whole)
        np.testing.assert_array_equal(gather(source, target, whole, device), expected)


@given(
    layouts(dimensions=2, uneven=True),
    layouts(dimensions=2, uneven=True),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_planned_bytes_of_uneven_slices_are_those_of_the_target(
    source: ParallelLayout, target: ParallelLayout, rows: int, columns: int
) -> None:
    whole = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    for device in range(target.device_count):
        expected = held_by(target, device, whole)
        np.testing.assert_array_equal(gather(source, target, whole, device), expected)


def test_runs_join_what_lies_together_on_both_sides() -> None:
    stored = (Interval(0, 8), Interval(0, 4), Interval(0, 2))
    wanted = (Interval(2, 6), Interval(0, 4), Interval(0, 2))
    assert list(byte_runs(stored, wanted, wanted, item_bytes=2)) == [(32, 0, 64)]


def test_runs_of_a_scalar_are_its_bytes() -> None:
    assert list(byte_runs((), (), (), item_bytes=4)) == [(0, 0, 4)]


def test_empty_region_has_no_runs() -> None:
    empty = (Interval(0, 0), Interval(0, 4))
    assert list(byte_runs(empty, empty, empty, item_bytes=4)) == []


def test_only_wanted_bytes_are_planned() -> None:
    source = ParallelLayout(device_matrix=(4,), tensor_map=((0,), ()))
    target = ParallelLayout(device_matrix=(8,), tensor_map=((0,), ()))
    (part,) = plan_slice(source, target, shape=(64, 16), device=3)
    runs = byte_runs(part.stored, part.wanted, part.wanted, item_bytes=2)
    assert (part.holders, sum(run.length for run in runs)) == ((1,), 64 * 16 * 2 // 8)


def test_shared_parameter_is_held_by_every_stage() -> None:
    shared = ParallelLayout(device_matrix=(2,), tensor_map=((0,),), stages=(0, 2))
    (part,) = plan_region(shared, (4,), (Interval(2, 4),))
    assert part.holders == (1, 5)


def test_named_ranks_are_the_holders() -> None:
    named = ParallelLayout(device_matrix=(2,), tensor_map=((),), ranks=(6, 3))
    (part,) = plan_region(named, (4,), (Interval(0, 4),))
    assert part.holders == (6, 3)


@pytest.mark.parametrize("pair", sorted(RANKS))
def test_rank_lists_are_mindspores(pair: str) -> None:
    source, target = map(strategy_file, pair.split("->"))
    found = {rank: rank_list_for_transform(int(rank), source, target) for rank in RANKS[pair]}
    assert found == RANKS[pair]


@given(st.data(), st.integers(1, 3))
def test_ranks_of_the_list_hold_all_that_is_planned(data: st.DataObject, dimensions: int) -> None:
    source, target = (data.draw(layouts(dimensions=dimensions)) for _ in range(2))
    counts = source.device_count, target.device_count
    if max(counts) % min(counts):
        with pytest.raises(LayoutError, match="Cannot transform device_num"):
            gathered_ranks(source, target, 0)
        return
    shape = common_shape(source, target)
    for device in range(target.device_count):
        ranks = gathered_ranks(source, target, device)
        for part in plan_slice(source, target, shape=shape, device=device):
            assert ranks & set(part.holders)


def test_optimizer_shard_that_is_no_product_of_digits_is_gathered_from_everywhere() -> None:
    source = ParallelLayout(device_matrix=(3, 2), tensor_map=((),), opt_shard_size=3)
    assert gathered_ranks(source, replace(source, opt_shard_size=0), 0) == set(range(6))


def test_rank_that_the_target_does_not_have_is_refused() -> None:
    layouts_of_file = read_layouts(GOLDEN / "strategies" / "dp2_mp2.ckpt")
    with pytest.raises(LayoutError, match="there is no rank 4 among 4"):
        needed_ranks(4, layouts_of_file, layouts_of_file)


def test_parameter_that_the_target_lacks_needs_no_rank() -> None:
    rows = ParallelLayout(device_matrix=(2,), tensor_map=((0,),))
    source = {"w": rows, "gone": replace(rows, tensor_map=((), (0,)))}
    assert needed_ranks(0, source, {"w": rows}) == [0]


def test_rank_that_is_no_number_is_refused_with_mindspores_message() -> None:
    with pytest.raises(TypeError, match=r"The rank_id should be a int\."):
        rank_list_for_transform("0")  # type: ignore[arg-type]


def test_source_strategy_without_parameters_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "empty.ckpt"
    file.write_bytes(b"\x08\x00")
    with pytest.raises(ValueError, match="src_strategy_file is empty"):
        rank_list_for_transform(0, file)
