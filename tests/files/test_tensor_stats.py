# SPDX-License-Identifier: Apache-2.0
"""Figures of tensors that stream by, against NumPy on the whole array."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckptmgr.files.load.statistics import TensorStats, stats_of
from ckptmgr.formats.dtypes import dtype_of
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.index import READ_BYTES, ContentRun, TensorEntry
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import TensorSpec


def stats(array: np.ndarray, *cuts: int) -> TensorStats:
    """Return the figures of an array that lies in a file in pieces, cut at these bytes."""
    data = array.tobytes()
    edges = [0, *sorted(cuts), len(data)]
    pieces = tuple(ContentRun(a, b - a) for a, b in itertools.pairwise(edges) if b > a)
    spec = TensorSpec(name="w", dtype=dtype_of(array.dtype.name), shape=array.shape)
    return stats_of(BytesSource(data), TensorEntry(spec=spec, pieces=pieces))


@given(
    array=hnp.arrays(np.float32, st.integers(1, 40)),
    cuts=st.lists(st.integers(0, 40), max_size=3),
)
def test_float_figures_agree_with_numpy_however_the_file_is_cut(
    array: np.ndarray, cuts: list[int]
) -> None:
    found = stats(array, *(min(cut, array.nbytes) for cut in cuts))
    numbers = array[~np.isnan(array)].astype(np.float64)
    assert found.count == array.size
    assert found.nan_count == array.size - numbers.size
    assert found.inf_count == np.isinf(array).sum()
    assert found.minimum == (numbers.min() if numbers.size else None)
    assert found.maximum == (numbers.max() if numbers.size else None)
    if numbers.size and np.isfinite(numbers).all():
        assert found.mean == pytest.approx(numbers.mean(), rel=1e-9, abs=1e-30)


def test_tensor_longer_than_one_read_is_joined() -> None:
    array = np.arange(READ_BYTES // 4 + 100, dtype=np.float32)
    found = stats(array, 5, READ_BYTES // 2 + 1)
    assert (found.minimum, found.maximum) == (0, array.size - 1)
    assert found.mean == pytest.approx((array.size - 1) / 2)


def test_integers_are_exact() -> None:
    found = stats(np.array([2**63 - 1, -(2**63)], np.int64))
    assert (found.minimum, found.maximum) == (-(2**63), 2**63 - 1)


def test_bools_count_as_numbers() -> None:
    assert stats(np.array([True, False, True, True])).mean == 0.75


def test_bool_of_another_value_is_an_error() -> None:
    spec = TensorSpec(name="b", dtype=dtype_of("bool"), shape=(2,))
    entry = TensorEntry(spec=spec, pieces=(ContentRun(0, 2),))
    with pytest.raises(FormatError, match="a bool has the value 7"):
        stats_of(BytesSource(b"\x01\x07"), entry)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_small_floats_are_understood(name: str) -> None:
    values = np.array([0.5, np.nan, 2], np.float32)
    dtype = np.dtype(getattr(ml_dtypes, name)) if name != "float16" else np.dtype(name)
    found = stats(values.astype(dtype))
    assert found == TensorStats(count=3, nan_count=1, minimum=0.5, maximum=2, mean=1.25)


def test_complex_numbers_have_no_order_but_nan() -> None:
    found = stats(np.array([complex(np.nan, 0), complex(0, np.inf), 1], np.complex64))
    assert found == TensorStats(count=3, nan_count=1, inf_count=1)


@pytest.mark.parametrize("array", [np.zeros((0, 3), np.float32), np.full(2, np.nan)])
def test_nothing_to_compare_gives_no_range(array: np.ndarray) -> None:
    found = stats(array)
    assert (found.minimum, found.maximum, found.mean) == (None, None, None)
