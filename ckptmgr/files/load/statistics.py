# SPDX-License-Identifier: Apache-2.0
"""Statistics of one tensor in constant memory: range, mean, counts of NaN and infinity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptmgr.formats.index import READ_BYTES, TensorEntry, check_content
from ckptmgr.formats.source import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """Statistics of the elements of a tensor.

    The minimum, maximum and mean (in float64) ignore NaN; they are None without other elements, and
    for complex numbers and packed elements.
    """

    count: int
    nan_count: int = 0
    inf_count: int = 0
    minimum: float | None = None
    maximum: float | None = None
    mean: float | None = None


def stats_of(source: Source, entry: TensorEntry) -> TensorStats:
    """Return the statistics of one tensor, read in pieces of at most 4 MiB.

    Raises:
        FormatError: A bool is neither 0 nor 1, or the source became shorter.
    """
    if entry.spec.dtype.packed_shape is not None:
        return TensorStats(count=prod(entry.spec.stated_shape))
    dtype = entry.spec.dtype.to_numpy()
    total = _Total()
    for view in chunks_of(source, entry):
        total.add(np.frombuffer(view, dtype))
    return total.stats()


def chunks_of(
    source: Source, entry: TensorEntry, *, chunk_bytes: int = READ_BYTES
) -> Iterator[memoryview]:
    """Yield the content in views of whole elements, which the pieces of the file may cut.

    All views but the last have `chunk_bytes`; the memory of a view is that of the next one, too.

    Raises:
        FormatError: A bool is neither 0 nor 1, or the source became shorter.
    """
    buffer = memoryview(bytearray(min(chunk_bytes, entry.spec.size_bytes)))
    filled = 0
    for piece in entry.pieces:
        done = 0
        while done < piece.length:
            view = buffer[filled : filled + piece.length - done]
            source.read_into(piece.offset + done, view)
            check_content(entry, view, offset=piece.offset + done)
            filled += view.nbytes
            done += view.nbytes
            if filled == buffer.nbytes:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:filled]


class _Total:
    """Statistics of the elements so far."""

    def __init__(self) -> None:
        self._count = self._nan_count = self._inf_count = 0
        self._minimum: float | None = None
        self._maximum: float | None = None
        self._sum = 0.0

    def add(self, values: np.ndarray) -> None:
        self._count += values.size
        if values.dtype.kind == "c":
            self._nan_count += int(np.isnan(values).sum())
            self._inf_count += int(np.isinf(values).sum())
            return
        if values.dtype.kind == "b":
            values = values.view(np.uint8)
        elif values.dtype.kind not in "iu":
            values = self._without_nan(values.astype(np.float64, copy=False))
        if values.size:
            low, high = values.min().item(), values.max().item()
            self._minimum = low if self._minimum is None else min(self._minimum, low)
            self._maximum = high if self._maximum is None else max(self._maximum, high)
            with np.errstate(over="ignore", invalid="ignore"):
                self._sum += float(values.sum(dtype=np.float64))

    def _without_nan(self, values: np.ndarray) -> np.ndarray:
        is_nan = np.isnan(values)
        self._nan_count += int(is_nan.sum())
        self._inf_count += int(np.isinf(values).sum())
        numbers: np.ndarray = values[~is_nan]
        return numbers

    def stats(self) -> TensorStats:
        numbers = self._count - self._nan_count
        return TensorStats(
            count=self._count,
            nan_count=self._nan_count,
            inf_count=self._inf_count,
            minimum=self._minimum,
            maximum=self._maximum,
            mean=None if self._minimum is None else self._sum / numbers,
        )
