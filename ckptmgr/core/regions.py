# SPDX-License-Identifier: Apache-2.0
"""Regions of tensors: intersection, subtraction, and the byte runs of one region in another.

>>> stored, wanted = (Interval(2, 4), Interval(0, 3)), (Interval(2, 3), Interval(1, 3))
>>> list(byte_runs(stored, wanted, wanted, item_bytes=1))
[ByteRun(source_offset=1, target_offset=0, length=2)]
>>> subtract(stored, wanted)
[(Interval(start=3, stop=4), Interval(start=0, stop=3)), (Interval(start=2, stop=3), Interval(start=0, stop=1))]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Interval(NamedTuple):
    """Elements `start` to `stop - 1` along a dimension."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """The number of elements."""
        return self.stop - self.start


Region = tuple[Interval, ...]
"""A hyperrectangle of a tensor: one interval per dimension."""


class ByteRun(NamedTuple):
    """A run of bytes that is contiguous in both arrays; offsets count from the array's start."""

    source_offset: int
    target_offset: int
    length: int


def region_at(start: Sequence[int], lengths: Sequence[int]) -> Region:
    """Return the region of these lengths that begins at `start`."""
    return tuple(Interval(at, at + length) for at, length in zip(start, lengths, strict=True))


def whole_region(shape: Sequence[int]) -> Region:
    """Return the region of a whole tensor."""
    return tuple(Interval(0, length) for length in shape)


def regions_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Region]:
    """Yield regions that together are the elements `start` to `stop - 1` in C order, in that order.

    >>> list(regions_of_run((2, 3), 2, 6)) == [region_at((0, 2), (1, 1)), region_at((1, 0), (1, 3))]
    True
    """
    if not shape:
        yield from [()] * (stop - start)
        return
    row_length = prod(shape[1:])
    while start < stop:
        row, skipped = divmod(start, row_length)
        whole_rows = 0 if skipped else (stop - start) // row_length
        if whole_rows:
            yield Interval(row, row + whole_rows), *whole_region(shape[1:])
            start += whole_rows * row_length
            continue
        count = min(stop - start, row_length - skipped)
        for inner in regions_of_run(shape[1:], skipped, skipped + count):
            yield Interval(row, row + 1), *inner
        start += count


def region_shape(region: Region) -> tuple[int, ...]:
    """Return the shape of a region."""
    return tuple(one.length for one in region)


def interval_intersection(one: Interval, other: Interval) -> Interval | None:
    """Return the intersection of two intervals; None when it is empty."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Interval(start, stop) if start < stop else None


def intersection(one: Region, other: Region) -> Region | None:
    """Return the intersection of two regions; None when it is empty."""
    found = [interval_intersection(a, b) for a, b in zip(one, other, strict=True)]
    both = tuple(interval for interval in found if interval is not None)
    return both if len(both) == len(found) else None


def subtract(region: Region, part: Region) -> list[Region]:
    """Return disjoint regions that cover `region` except for `part`, which is inside it."""
    left: list[Region] = []
    for dimension, (outer, inner) in enumerate(zip(region, part, strict=True)):
        sides = (Interval(outer.start, inner.start), Interval(inner.stop, outer.stop))
        left += [
            (*part[:dimension], side, *region[dimension + 1 :]) for side in sides if side.length
        ]
    return left


def byte_runs(
    stored: Region, wanted: Region, target: Region, *, item_bytes: int
) -> Iterator[ByteRun]:
    """Yield the runs of `wanted` (inside both other regions) in two C-ordered arrays, by offset.

    The arrays hold the regions `stored` and `target`.
    """
    whole = len(wanted)
    while whole and wanted[whole - 1] == stored[whole - 1] == target[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    length = prod(one.length for one in wanted[outer:]) * item_bytes
    if not length:
        return
    from_strides, to_strides = _strides(stored, item_bytes), _strides(target, item_bytes)
    starts = [one.start for one in wanted]
    for place in product(*(range(*one) for one in wanted[:outer])):
        at = [*place, *starts[outer:]]
        yield ByteRun(
            sum((x - one.start) * by for x, one, by in zip(at, stored, from_strides, strict=True)),
            sum((x - one.start) * by for x, one, by in zip(at, target, to_strides, strict=True)),
            length,
        )


def _strides(region: Region, item_bytes: int) -> list[int]:
    strides, step = [], item_bytes
    for one in reversed(region):
        strides.append(step)
        step *= one.length
    return strides[::-1]
