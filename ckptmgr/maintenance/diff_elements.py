# SPDX-License-Identifier: Apache-2.0
"""Differences of two arrays of one shape, added up over their chunks in constant memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ckptmgr.formats.dtypes import PACKED_BITS, DType

_BLOCK_ELEMENTS = 1 << 16
"""Elements that are compared at once: their float64 copies stay in the cache of a core."""
_OPAQUE = frozenset([*PACKED_BITS, "int4"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Values are the same if they differ by at most `atol + rtol * max(|a|, |b|)`.

    Without a tolerance the bytes of elements of one type decide, so that 0.0 and -0.0 differ.
    """

    atol: float = 0.0
    rtol: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether there is no tolerance."""
        return self.atol == 0 and self.rtol == 0

    def takes(self, one: float, other: float) -> bool:
        """Return whether two numbers count as the same; NaN is the same as NaN."""
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        if one == other:
            return True
        largest = max(abs(one), abs(other))
        return math.isfinite(largest) and abs(one - other) <= self.atol + self.rtol * largest


@dataclass(frozen=True, slots=True, kw_only=True)
class ElementDifferences:
    """Differences of the elements of two arrays.

    The maxima and the norms are of the places where both have a number, and None for packed
    elements, whose bytes are compared.

    Attributes:
        elements: Number of elements of each.
        differing: Number of those that are not the same.
        max_abs: Largest |b - a|.
        max_rel: Largest |b - a| / max(|a|, |b|), from 0 to 2.
        norm: Euclidean norm of b - a.
        relative_norm: That divided by the norm of a; None where that is 0.
        nan_a: Number of NaN in the first one; likewise `inf_a`, `nan_b` and `inf_b`.
    """

    elements: int
    differing: int
    max_abs: float | None
    max_rel: float | None
    norm: float | None
    relative_norm: float | None
    nan_a: int = 0
    inf_a: int = 0
    nan_b: int = 0
    inf_b: int = 0


def sum_of(parts: Sequence[ElementDifferences]) -> ElementDifferences:
    """Return the differences of several pairs of arrays as of one; without a relative norm."""
    return ElementDifferences(
        elements=sum(one.elements for one in parts),
        differing=sum(one.differing for one in parts),
        max_abs=max((one.max_abs or 0.0 for one in parts), default=None),
        max_rel=max((one.max_rel or 0.0 for one in parts), default=None),
        norm=math.hypot(*(one.norm or 0.0 for one in parts)),
        relative_norm=None,
        nan_a=sum(one.nan_a for one in parts),
        inf_a=sum(one.inf_a for one in parts),
        nan_b=sum(one.nan_b for one in parts),
        inf_b=sum(one.inf_b for one in parts),
    )


class DifferenceTotal:
    """Differences of two arrays so far; `add` takes them chunk by chunk."""

    def __init__(self, a: DType, b: DType, tolerance: Tolerance) -> None:
        self._types = (a.to_numpy(), b.to_numpy())
        self._is_opaque = not _OPAQUE.isdisjoint((a.name, b.name))
        self._is_one_type = a.name == b.name
        self._tolerance = tolerance
        self._elements = self._differing = 0
        self._max_abs = self._max_rel = 0.0
        self._norm, self._norm_a = _Norm(), _Norm()
        self._nan = [0, 0]
        self._inf = [0, 0]

    def add(self, a: memoryview, b: memoryview) -> None:
        """Compare the next elements of both."""
        ours, theirs = (
            np.frombuffer(one, dtype) for one, dtype in zip((a, b), self._types, strict=True)
        )
        for start in range(0, ours.size, _BLOCK_ELEMENTS):
            block = slice(start, start + _BLOCK_ELEMENTS)
            self._add(ours[block], theirs[block])

    def _add(self, a: np.ndarray, b: np.ndarray) -> None:
        self._elements += a.size
        is_other = _differing_bytes(a, b) if self._is_one_type else None
        if self._is_opaque:
            self._differing += a.size if is_other is None else int(is_other.sum())
            return
        with np.errstate(all="ignore"):
            self._add_numbers(a, b, is_other)

    def _add_numbers(self, a: np.ndarray, b: np.ndarray, is_other: np.ndarray | None) -> None:
        wide_a = self._counted(_wide(a), 0)
        self._norm_a.add(np.abs(wide_a[np.isfinite(wide_a)]))
        if is_other is not None and not is_other.any():
            self._nan[1] += int(np.isnan(wide_a).sum())
            self._inf[1] += int(np.isinf(wide_a).sum())
            return
        wide_b = self._counted(_wide(b), 1)
        is_number = np.isfinite(wide_a) & np.isfinite(wide_b)
        distance = _distance(a, b, wide_a, wide_b)
        largest = np.maximum(np.abs(wide_a), np.abs(wide_b))
        if is_other is None or not self._tolerance.is_exact:
            allowed = self._tolerance.atol + self._tolerance.rtol * largest
            is_equal = (wide_a == wide_b) | (np.isnan(wide_a) & np.isnan(wide_b))
            is_other = ~np.where(is_number, distance <= allowed, is_equal)
        self._differing += int(is_other.sum())
        distance, largest = distance[is_number], largest[is_number]
        self._norm.add(distance)
        self._max_abs = max(self._max_abs, float(distance.max(initial=0)))
        share = np.divide(distance, largest, out=np.zeros_like(distance), where=largest > 0)
        self._max_rel = max(self._max_rel, float(share.max(initial=0)))

    def _counted(self, values: np.ndarray, side: int) -> np.ndarray:
        self._nan[side] += int(np.isnan(values).sum())
        self._inf[side] += int(np.isinf(values).sum())
        return values

    def result(self) -> ElementDifferences:
        """Return the differences of all that was added."""
        norm, norm_a = self._norm.value, self._norm_a.value
        is_opaque = self._is_opaque
        return ElementDifferences(
            elements=self._elements,
            differing=self._differing,
            max_abs=None if is_opaque else self._max_abs,
            max_rel=None if is_opaque else self._max_rel,
            norm=None if is_opaque else norm,
            relative_norm=None if is_opaque or norm_a == 0 else norm / norm_a,
            nan_a=self._nan[0],
            inf_a=self._inf[0],
            nan_b=self._nan[1],
            inf_b=self._inf[1],
        )


class _Norm:
    """Euclidean norm of values so far, scaled by the largest one: squares of floats overflow."""

    def __init__(self) -> None:
        self._scale = 0.0
        self._squares = 0.0

    def add(self, sizes: np.ndarray) -> None:
        largest = float(sizes.max(initial=0))
        if largest == 0 or math.isinf(self._scale):
            return
        if largest > self._scale:
            self._squares *= (self._scale / largest) ** 2
            self._scale = largest
        self._squares += float(np.square(sizes / self._scale).sum())

    @property
    def value(self) -> float:
        return self._scale if math.isinf(self._scale) else self._scale * math.sqrt(self._squares)


def _differing_bytes(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which elements of one type differ in a byte."""
    unit = min(a.itemsize, 8)
    words = [one.view(f"u{unit}").reshape(a.size, -1) for one in (a, b)]
    differs: np.ndarray = (words[0] != words[1]).any(axis=1)
    return differs


def _wide(values: np.ndarray) -> np.ndarray:
    """Return numbers as float64, or complex128."""
    return values.astype(np.complex128 if values.dtype.kind == "c" else np.float64)


def _distance(a: np.ndarray, b: np.ndarray, wide_a: np.ndarray, wide_b: np.ndarray) -> np.ndarray:
    """Return |b - a| as float64; of integers exact before it is rounded once."""
    kinds = {a.dtype.kind, b.dtype.kind}
    if kinds <= {"i", "b"} or kinds <= {"u", "b"}:
        widest = np.int64 if "i" in kinds else np.uint64
        one, other = a.astype(widest), b.astype(widest)
        steps = np.maximum(one, other).view(np.uint64) - np.minimum(one, other).view(np.uint64)
        distance: np.ndarray = steps.astype(np.float64)
        return distance
    distance = np.abs(wide_b - wide_a)
    return distance
