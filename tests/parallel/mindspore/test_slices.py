# SPDX-License-Identifier: Apache-2.0
"""What each device holds, against whole tensors cut with NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.regions import Interval
from ckptmgr.parallel import LayoutError, ParallelLayout
from ckptmgr.parallel.layout import for_shape
from ckptmgr.parallel.mindspore.slices import full_shape, intervals_of, region_of, slicing_of
from tests.parallel.mindspore.layouts import held_by, layouts, shape_for

ROWS = ParallelLayout(device_matrix=(4,), tensor_map=((0,), ()))


def cut(whole: np.ndarray, layout: ParallelLayout, device: int) -> np.ndarray:
    region = region_of(layout, device, whole.shape)
    return whole[tuple(slice(*interval) for interval in region)]


@given(layouts(), st.integers(1, 3))
def test_region_of_every_device_is_what_numpy_cuts(layout: ParallelLayout, times: int) -> None:
    shape = shape_for(layout, times=times)
    whole = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for device in range(layout.device_count):
        held = held_by(layout, device, whole)
        np.testing.assert_array_equal(cut(whole, layout, device), held)
        assert full_shape(layout, held.shape) == shape


@given(layouts(dimensions=2, uneven=True), st.integers(0, 9), st.integers(0, 9))
def test_uneven_regions_are_what_torch_chunk_cuts(
    layout: ParallelLayout, rows: int, columns: int
) -> None:
    whole = np.arange(rows * columns).reshape(rows, columns)
    for device in range(layout.device_count):
        np.testing.assert_array_equal(cut(whole, layout, device), held_by(layout, device, whole))


@given(layouts())
def test_holders_of_a_slice_have_its_ordinals(layout: ParallelLayout) -> None:
    slicing = slicing_of(layout)
    for number, devices in enumerate(slicing.holders):
        place = np.unravel_index(number, slicing.counts) if slicing.counts else ()
        for device in devices:
            assert slicing.ordinals[:, device].tolist() == list(place)


def test_dimension_that_cannot_be_shared_equally_is_refused() -> None:
    with pytest.raises(LayoutError, match="dimension 0 has 6 elements, which 4 devices"):
        intervals_of(ROWS, (6, 2))


def test_given_rows_are_the_slices() -> None:
    layout = replace(ROWS, split_rows=(3, 4, 2, 1))
    assert intervals_of(layout, (10, 1))[0] == ((0, 3), (3, 7), (7, 9), (9, 10))
    assert full_shape(layout, (3, 1)) == (10, 1)


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (replace(ROWS, split_rows=(3, 4)), "lists 2 slices, but there are 4"),
        (replace(ROWS, split_rows=(3, 4, 2, 2)), "have 11 rows together"),
        (
            ParallelLayout(device_matrix=(2, 2), tensor_map=((1,), (0,)), split_rows=(6, 5, 4, 5)),
            "side by side",
        ),
    ],
)
def test_given_rows_that_do_not_fit_are_refused(layout: ParallelLayout, problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        intervals_of(layout, (10, 2))


def test_optimizer_shard_that_does_not_divide_the_copies_is_refused() -> None:
    layout = ParallelLayout(device_matrix=(2, 4), tensor_map=((0,),), opt_shard_size=3)
    with pytest.raises(LayoutError, match="does not divide the 2 devices"):
        slicing_of(layout)


def test_scalar_cannot_be_cut_by_an_optimizer_shard() -> None:
    with pytest.raises(LayoutError, match="a scalar"):
        slicing_of(ParallelLayout(device_matrix=(2,), tensor_map=(), opt_shard_size=2))


def test_unequal_slices_do_not_tell_the_shape() -> None:
    uneven = replace(ROWS, is_uneven=True)
    with pytest.raises(LayoutError, match="unequal"):
        full_shape(uneven, (2, 2))
    assert full_shape(replace(uneven, shape=(7, 2)), (2, 2)) == (7, 2)


def test_map_without_axes_fits_every_shape() -> None:
    layout = for_shape(ParallelLayout(device_matrix=(4,), tensor_map=()), (2, 3))
    assert (layout.tensor_map, layout.shape) == (((), ()), (2, 3))
    assert for_shape(layout, (2, 3)) is layout


def test_two_axes_for_one_dimension_are_both_on_it() -> None:
    flat = ParallelLayout(device_matrix=(2, 2), tensor_map=((1,), (0,)))
    assert for_shape(flat, (8,)).tensor_map == ((1, 0),)


def test_map_of_other_dimensions_than_the_tensor_is_refused() -> None:
    with pytest.raises(
        LayoutError, match=r"2 dimensions, but the tensor has the shape \[2, 2, 2\]"
    ):
        for_shape(ROWS, (2, 2, 2))


def test_interval_knows_its_length() -> None:
    assert Interval(2, 5).length == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"device_matrix": (0,)},
        {"device_matrix": (1 << 11, 1 << 11)},
        {"tensor_map": ((1,), ())},
        {"tensor_map": ((0,), (0,))},
        {"opt_shard_size": -2},
        {"opt_shard_step": -1},
        {"shape": (4,)},
        {"ranks": (0, 1, 1, 2)},
    ],
)
def test_layout_that_contradicts_itself_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match="a layout over devices"):
        replace(ROWS, **changed)  # type: ignore[arg-type]
