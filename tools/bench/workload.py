# SPDX-License-Identifier: Apache-2.0
"""The saved state: values ~ N(0, 0.02) in 200 tensors like those of a model, or in very many tiny ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np

State = dict[str, np.ndarray]

TINY_BYTES = 256
_TENSORS = 200
_SMALLEST_BYTES = 4 << 10
_LARGEST_BYTES = 64 << 20
_ROW_ELEMENTS = 64
_SEED = 20_17229
_POOL_ELEMENTS = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model: `size_bytes` in 200 tensors of 4 KiB to 64 MiB or more, or `tiny_tensors` of 256 bytes each."""

    size_bytes: int
    tiny_tensors: int = 0

    @property
    def tensors(self) -> int:
        """How many tensors there are."""
        return self.tiny_tensors or _TENSORS

    @property
    def total_bytes(self) -> int:
        """The bytes of all tensors: `size_bytes`, give or take what their shapes round."""
        return self.size_bytes if self.tiny_tensors else sum(tensor_sizes(self.size_bytes))

    def new_state(self) -> State:
        """Return the model, the same one every time."""
        if self.tiny_tensors:
            return tiny_state(self.tiny_tensors)
        return new_state(self.size_bytes)


def tiny(tensors: int) -> Workload:
    """Return the workload of `tensors` tensors of 256 bytes."""
    return Workload(size_bytes=tensors * TINY_BYTES, tiny_tensors=tensors)


def new_state(size_bytes: int) -> State:
    """Return 200 float32 and bfloat16 tensors, scaled to about `size_bytes`."""
    rng = np.random.default_rng(_SEED)
    sizes = tensor_sizes(size_bytes)
    rng.shuffle(sizes)
    values = _Values(rng, size_bytes)
    return {
        f"layer{index:03}.weight": values.take(size, is_half=index % 2 == 1)
        for index, size in enumerate(sizes)
    }


def tiny_state(tensors: int) -> State:
    """Return `tensors` float32 tensors of 64 values."""
    rng = np.random.default_rng(_SEED)
    rows = rng.standard_normal((tensors, _ROW_ELEMENTS), dtype=np.float32)
    rows *= np.float32(0.02)
    return {f"layer{index:06}.bias": row.copy() for index, row in enumerate(rows)}


def tensor_sizes(size_bytes: int) -> list[int]:
    """Return the sizes in bytes: evenly spaced on a logarithmic scale, then scaled until they add up."""
    largest = max(_LARGEST_BYTES, size_bytes // 16)
    spread = np.geomspace(_SMALLEST_BYTES, largest, _TENSORS)
    low, high = 0.0, largest / _SMALLEST_BYTES
    for _ in range(60):
        middle = (low + high) / 2
        total = np.clip(spread * middle, _SMALLEST_BYTES, largest).sum()
        low, high = (middle, high) if total < size_bytes else (low, middle)
    row_bytes = _ROW_ELEMENTS * 4
    scaled = np.clip(spread * high, _SMALLEST_BYTES, largest) // row_bytes * row_bytes
    return [int(size) for size in scaled]


class _Values:
    """Hands out random values; past 256 MiB the same ones come again, which no compressor here looks back to."""

    def __init__(self, rng: np.random.Generator, size_bytes: int) -> None:
        elements = min(_POOL_ELEMENTS, max(_ROW_ELEMENTS, size_bytes // 2))
        self._pool = rng.standard_normal(elements, dtype=np.float32)
        self._pool *= np.float32(0.02)
        self._next = 0

    def take(self, size_bytes: int, *, is_half: bool) -> np.ndarray:
        dtype = np.dtype(ml_dtypes.bfloat16 if is_half else np.float32)
        flat = np.empty(size_bytes // dtype.itemsize, dtype)
        done = 0
        while done < flat.size:
            count = min(flat.size - done, self._pool.size - self._next)
            flat[done : done + count] = self._pool[self._next : self._next + count]
            self._next = (self._next + count) % self._pool.size
            done += count
        return flat.reshape(-1, _ROW_ELEMENTS)


def size_of(state: Mapping[str, np.ndarray]) -> int:
    """Return the bytes of all tensors."""
    return sum(array.nbytes for array in state.values())
