# SPDX-License-Identifier: Apache-2.0
"""Slice arithmetic of layouts: which device holds which slice, and which elements a slice has.

Slices are numbered per dimension: the ordinal along a dimension counts its pieces in the order of
the tensor, the optimizer shard as the fastest digit of dimension 0.

`gathered_ranks` returns the source ranks of MindSpore's tensor redistribution. Both layouts are
written over one number of devices; every axis becomes digits of prime size. From its slowest digit
on, a tensor dimension keeps the digits that are equal in both layouts and gathers over the others
of the source. The result holds all ranks that are needed, and often more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ckptmgr.core.regions import Interval, Region
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import ParallelLayout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slicing:
    """The slices of a layout and the devices that hold them."""

    counts: tuple[int, ...]  # slices along each dimension
    ordinals: np.ndarray  # int64[dimensions, devices]: the position of each device's slice
    holders: np.ndarray  # int64[slices, copies]: the devices of each slice, row major


def slicing_of(layout: ParallelLayout) -> Slicing:
    """Return the slices of a layout; raise LayoutError for an impossible optimizer shard."""
    return _slicing(layout.device_matrix, layout.tensor_map, layout.opt_shard_count)


def equal_groups(
    device_matrix: tuple[int, ...], axes: frozenset[int], *, opt_shard_count: int = 1
) -> np.ndarray:
    """Return int64[groups, copies]: the devices that hold the same bytes, in MindSpore's order.

    `axes` are the axes that split the tensor; `opt_shard_count` divides the copies.
    """
    key = np.zeros(prod(device_matrix), np.int64)
    places = _coordinates(device_matrix)
    for axis in sorted(axes):
        key = key * device_matrix[-1 - axis] + places[axis]
    groups = np.argsort(key, kind="stable").reshape(
        prod(device_matrix[-1 - axis] for axis in axes), -1
    )
    copies = groups.shape[1] // opt_shard_count
    return groups.reshape(-1, copies, opt_shard_count).transpose(0, 2, 1).reshape(-1, copies)


def intervals_of(layout: ParallelLayout, shape: Sequence[int]) -> tuple[tuple[Interval, ...], ...]:
    """Return the interval of each slice along each dimension; raise LayoutError for uneven cuts."""
    cut: list[tuple[Interval, ...]] = []
    for dimension, (length, axes) in enumerate(zip(shape, layout.tensor_map, strict=True)):
        pieces = [Interval(0, length)]
        if dimension == 0 and layout.split_rows:
            pieces = _given_rows(layout, length)
        else:
            for axis in axes:
                pieces = _cut_all(pieces, layout.axis_size(axis), layout, dimension)
        if dimension == 0:
            pieces = _cut_all(pieces, layout.opt_shard_count, layout, dimension)
        cut.append(tuple(pieces))
    return tuple(cut)


def region_of(layout: ParallelLayout, device: int, shape: Sequence[int]) -> Region:
    """Return the region of a tensor of `shape` that a device holds; raises as `intervals_of`."""
    ordinals = slicing_of(layout).ordinals[:, device]
    cut = intervals_of(layout, shape)
    return tuple(pieces[ordinal] for pieces, ordinal in zip(cut, ordinals, strict=True))


def full_shape(layout: ParallelLayout, slice_shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a tensor from its layout and the shape of a slice.

    Raises LayoutError for unequal slices of a layout without a shape.
    """
    if layout.shape is not None:
        return layout.shape
    counts = slicing_of(layout).counts
    if layout.split_rows:
        rows = sum(_rows_by_ordinal(layout))
        return (rows, *(n * c for n, c in zip(slice_shape[1:], counts[1:], strict=True)))
    if layout.is_uneven:
        raise LayoutError("slices of unequal size do not tell the shape of the whole tensor")
    return tuple(length * count for length, count in zip(slice_shape, counts, strict=True))


def _coordinates(device_matrix: tuple[int, ...]) -> np.ndarray:
    """Return int64[axes, devices], axes from the right."""
    if not device_matrix:
        return np.zeros((0, 1), np.int64)
    return np.indices(device_matrix).reshape(len(device_matrix), -1)[::-1]


@lru_cache(maxsize=1024)
def _slicing(
    device_matrix: tuple[int, ...], tensor_map: tuple[tuple[int, ...], ...], opt_shard_count: int
) -> Slicing:
    if opt_shard_count > 1 and not tensor_map:
        raise LayoutError("a scalar cannot be cut by an optimizer shard")
    places = _coordinates(device_matrix)
    devices = prod(device_matrix)
    ordinals = np.zeros((len(tensor_map), devices), np.int64)
    counts = []
    for dimension, axes in enumerate(tensor_map):
        for axis in axes:
            ordinals[dimension] = ordinals[dimension] * device_matrix[-1 - axis] + places[axis]
        counts.append(prod(device_matrix[-1 - axis] for axis in axes))
    if opt_shard_count > 1:
        groups = equal_groups(device_matrix, frozenset(a for axes in tensor_map for a in axes))
        position = np.empty(devices, np.int64)
        position[groups] = np.arange(groups.shape[1])
        ordinals[0] = ordinals[0] * opt_shard_count + position % opt_shard_count
        counts[0] *= opt_shard_count
    key = np.zeros(devices, np.int64)
    for ordinal, count in zip(ordinals, counts, strict=True):
        key = key * count + ordinal
    holders = np.argsort(key, kind="stable").reshape(prod(counts), -1)
    return Slicing(counts=tuple(counts), ordinals=ordinals, holders=holders)


def _cut_all(
    pieces: Sequence[Interval], count: int, layout: ParallelLayout, dimension: int
) -> list[Interval]:
    found: list[Interval] = []
    for piece in pieces:
        if piece.length % count and not layout.is_uneven:
            raise LayoutError(
                f"dimension {dimension} has {piece.length} elements, which {count} devices cannot share equally"
            )
        step = -(-piece.length // count)
        stops = [min(piece.start + step * n, piece.stop) for n in range(count + 1)]
        found.extend(Interval(*pair) for pair in pairwise(stops))
    return found


def _given_rows(layout: ParallelLayout, length: int) -> list[Interval]:
    rows = _rows_by_ordinal(layout)
    if sum(rows) != length:
        raise LayoutError(f"the slices have {sum(rows)} rows together, but the tensor has {length}")
    return [Interval(*pair) for pair in pairwise(accumulate(rows, initial=0))]


def _rows_by_ordinal(layout: ParallelLayout) -> list[int]:
    """Return the rows of the slices along dimension 0; the layout lists every slice, row major."""
    pieces = layout.pieces
    if len(layout.split_rows) != prod(pieces) or not pieces:
        raise LayoutError(
            f"param_split_shape lists {len(layout.split_rows)} slices, but there are {prod(pieces)}"
        )
    table = np.array(layout.split_rows, np.int64).reshape(pieces[0], -1)
    if (table != table[:, :1]).any():
        raise LayoutError("slices side by side have different numbers of rows")
    return [int(rows) for rows in table[:, 0]]


class Digit(NamedTuple):
    """A digit of device numbers: `number // stride % size`."""

    size: int
    stride: int


def gathered_ranks(source: ParallelLayout, target: ParallelLayout | None, device: int) -> set[int]:
    """Return the source devices that a device of the target gathers from; None is a single device.

    Devices count modulo the number of source devices. Raises LayoutError unless one number of
    devices divides the other.
    """
    counts = source.device_count, 1 if target is None else target.device_count
    if max(counts) % min(counts):
        raise LayoutError(f"Cannot transform device_num from {counts[0]} to {counts[1]}")
    have = _digits_by_dimension(source)
    wanted = [] if target is None else _digits_by_dimension(target)
    if have is None or wanted is None:
        return set(range(source.device_count))
    found = {device}
    for number, digits in enumerate(have):
        for digit in _gathered(digits, wanted[number] if number < len(wanted) else []):
            found = {
                rank + (value - rank // digit.stride % digit.size) * digit.stride
                for rank in found
                for value in range(digit.size)
            }
    return {rank % source.device_count for rank in found}


def _gathered(source: Sequence[Digit], target: Sequence[Digit]) -> Iterator[Digit]:
    is_aligned = True
    for position, digit in enumerate(source):
        other = target[position] if position < len(target) else None
        if not is_aligned or digit != other:
            yield digit
        # Behind digits of different sizes, equal ones no longer mean the same elements.
        is_aligned = is_aligned and (other is None or other.size == digit.size)


def _digits_by_dimension(layout: ParallelLayout) -> list[list[Digit]] | None:
    """Return the digits that split each dimension, slowest first; the optimizer shard last on 0.

    None where an optimizer shard is no product of digits.
    """
    by_axis: list[list[Digit]] = []
    stride = 1
    for axis in range(len(layout.device_matrix)):
        digits = []
        for prime in _primes(layout.axis_size(axis)):
            digits.append(Digit(prime, stride))
            stride *= prime
        by_axis.append(digits)
    found = [
        [digit for axis in axes for digit in reversed(by_axis[axis])] for axes in layout.tensor_map
    ]
    shards = layout.opt_shard_count
    if shards > 1 and found:
        used = {axis for axes in layout.tensor_map for axis in axes}
        free = [
            digit for axis, digits in enumerate(by_axis) if axis not in used for digit in digits
        ]
        fastest: list[Digit] = []
        for digit in free:
            if shards == 1:
                break
            if shards % digit.size:
                return None
            fastest.append(digit)
            shards //= digit.size
        found[0] += reversed(fastest)
    return found


def _primes(number: int) -> Iterator[int]:
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            yield divisor
            number //= divisor
        divisor += 1
