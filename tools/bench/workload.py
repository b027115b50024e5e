# SPDX-License-Identifier: Apache-2.0
"""What is saved: a model of 200 float32 and bfloat16 tensors from 4 KiB to 64 MiB with values ~ N(0, 0.02)."""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np

State = dict[str, np.ndarray]

_TENSORS = 200
_SMALLEST_BYTES = 4 << 10
_LARGEST_BYTES = 64 << 20
_ROW_ELEMENTS = 64
_SEED = 20_17229


def new_state(size_bytes: int) -> State:
    """Return the model, scaled to about `size_bytes`; the same one every time."""
    rng = np.random.default_rng(_SEED)
    sizes = tensor_sizes(size_bytes)
    rng.shuffle(sizes)
    return {
        f"layer{index:03}.weight": _tensor(rng, size, is_half=index % 2 == 1)
        for index, size in enumerate(sizes)
    }


def tensor_sizes(size_bytes: int) -> list[int]:
    """Return the sizes in bytes: evenly spaced on a logarithmic scale, then scaled until they add up."""
    spread = np.geomspace(_SMALLEST_BYTES, _LARGEST_BYTES, _TENSORS)
    low, high = 0.0, _LARGEST_BYTES / _SMALLEST_BYTES
    for _ in range(60):
        middle = (low + high) / 2
        total = np.clip(spread * middle, _SMALLEST_BYTES, _LARGEST_BYTES).sum()
        low, high = (middle, high) if total < size_bytes else (low, middle)
    row_bytes = _ROW_ELEMENTS * 4
    scaled = np.clip(spread * high, _SMALLEST_BYTES, _LARGEST_BYTES) // row_bytes * row_bytes
    return [int(size) for size in scaled]


def _tensor(rng: np.random.Generator, size_bytes: int, *, is_half: bool) -> np.ndarray:
    dtype = np.dtype(ml_dtypes.bfloat16 if is_half else np.float32)
    rows = size_bytes // dtype.itemsize // _ROW_ELEMENTS
    values = rng.standard_normal((rows, _ROW_ELEMENTS), dtype=np.float32)
    values *= np.float32(0.02)
    return values.astype(dtype) if is_half else values


def size_of(state: Mapping[str, np.ndarray]) -> int:
    """Return the bytes of all tensors."""
    return sum(array.nbytes for array in state.values())
