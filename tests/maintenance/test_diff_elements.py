# SPDX-License-Identifier: Apache-2.0
"""Differences of arrays, chunk by chunk, against NumPy's own over whole arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.formats.dtypes import BY_NAME, packed_dtype
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.maintenance.diff_elements import (
    DifferenceTotal,
    ElementDifferences,
    Tolerance,
    sum_of,
)

FLOATS = st.lists(
    st.tuples(st.floats(width=32), st.floats(width=32)) | st.floats(width=32).map(lambda x: (x, x)),
    max_size=40,
)


def differences(
    a: Any, b: Any, *, types: tuple[str, str] | None = None, **tolerance: float
) -> ElementDifferences:
    """Return the differences of two arrays that are added in two chunks."""
    one, other = np.asarray(a), np.asarray(b)
    names = types or (one.dtype.name, other.dtype.name)
    total = DifferenceTotal(BY_NAME[names[0]], BY_NAME[names[1]], Tolerance(**tolerance))
    half = one.size // 2
    for part in (slice(None, half), slice(half, None)):
        total.add(flat_memory(one[part].copy()), flat_memory(other[part].copy()))
    return total.result()


@given(FLOATS, st.sampled_from([0.0, 1e-3]), st.sampled_from([0.0, 1e-3]))
def test_figures_are_those_of_whole_arrays(
    pairs: list[tuple[float, float]], atol: float, rtol: float
) -> None:
    a, b = (np.array([pair[side] for pair in pairs], np.float32) for side in (0, 1))
    found = differences(a, b, atol=atol, rtol=rtol)
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    is_number = np.isfinite(wide_a) & np.isfinite(wide_b)
    distance = np.abs(np.where(is_number, wide_b, 0) - np.where(is_number, wide_a, 0))
    largest = np.maximum(np.abs(wide_a), np.abs(wide_b))
    takes = Tolerance(atol=atol, rtol=rtol).takes
    is_same = np.array([takes(*pair) for pair in zip(wide_a, wide_b, strict=True)], bool)
    if atol == rtol == 0:
        is_same = np.array([x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)], bool)
    assert found.differing == int((~is_same).sum())
    assert found.max_abs == distance[is_number].max(initial=0)
    shares = distance[is_number] / np.where(largest[is_number] > 0, largest[is_number], 1)
    assert found.max_rel == shares.max(initial=0)
    assert found.norm == pytest.approx(math.hypot(*distance[is_number]))
    assert (found.nan_a, found.inf_a) == (np.isnan(a).sum(), np.isinf(a).sum())
    assert (found.nan_b, found.inf_b) == (np.isnan(b).sum(), np.isinf(b).sum())


def test_bytes_decide_between_elements_of_one_type_and_values_between_two_types() -> None:
    zeros, nan = [0.0, np.nan], [-0.0, np.nan]
    assert differences(zeros, nan).differing == 1
    assert differences(zeros, nan, atol=1e-9).differing == 0
    assert differences(np.array(zeros, np.float32), np.array(nan, np.float64)).differing == 0
    assert (
        differences(np.array([np.inf, 1], np.float32), np.array([-np.inf, 1], np.float64)).differing
        == 1
    )


def test_distance_of_large_integers_is_exact() -> None:
    top = 2**63 - 1
    assert differences(np.array([top]), np.array([top - 1])).max_abs == 1
    assert differences(np.array([-top]), np.array([top])).max_abs == 2.0 * top
    assert differences(np.array([0], np.uint64), np.array([2**64 - 1], np.uint64)).max_abs == 2**64
    assert differences(np.array([True]), np.array([3], np.int8)).max_abs == 2
    assert differences(np.array([-1], np.int8), np.array([1], np.uint8)).max_abs == 2


def test_norm_of_numbers_whose_squares_overflow_is_finite() -> None:
    found = differences([3e200, 0.0, 1.0], [0.0, 4e200, 1.0])
    assert found.norm == pytest.approx(5e200)
    assert found.relative_norm == pytest.approx(5 / 3)
    assert differences([1.7e308], [-1.7e308]).norm == math.inf
    assert differences([0.0, 0.0], [0.0, 1.0]).relative_norm is None


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e8m0fnu", "float16"])
def test_short_floats_are_compared_as_numbers(name: str) -> None:
    dtype = BY_NAME[name].to_numpy()
    found = differences(np.array([1, 2, 4]).astype(dtype), np.array([1, 2, 8]).astype(dtype))
    assert (found.differing, found.max_abs, found.max_rel) == (1, 4, 0.5)


def test_complex_numbers_differ_by_the_length_of_the_difference() -> None:
    found = differences(np.array([0j, 1j, complex("nan")]), np.array([3 + 4j, 1j, 0]))
    assert (found.differing, found.max_abs, found.nan_a, found.nan_b) == (2, 5, 1, 0)


def test_packed_elements_are_compared_by_their_bytes() -> None:
    found = differences(
        np.array([1, 2], np.int8), np.array([1, 3], np.int8), types=("int4", "int4")
    )
    assert (found.elements, found.differing, found.max_abs, found.norm) == (2, 1, None, None)
    assert (
        differences(
            np.array([1], np.int8), np.array([1], np.int8), types=("int4", "int8")
        ).differing
        == 1
    )
    dtype, _ = packed_dtype("F4", (4,))
    total = DifferenceTotal(dtype, dtype, Tolerance(atol=9))
    total.add(memoryview(b"ab"), memoryview(b"ac"))
    assert total.result().differing == 1


def test_sum_of_differences_is_that_of_one_array() -> None:
    parts = [differences([1.0, np.nan], [4.0, 1.0]), differences([0.0, np.inf], [4.0, np.inf])]
    total = sum_of(parts)
    assert (total.elements, total.differing, total.max_abs, total.norm) == (4, 3, 4, 5)
    assert (total.nan_a, total.nan_b, total.inf_a, total.inf_b) == (1, 0, 1, 1)
    assert sum_of([]).max_abs is None
