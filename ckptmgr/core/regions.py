# SPDX-License-Identifier: Apache-2.0
"""Boxes of a tensor: what two have in common, what one leaves of another, and where its bytes lie.

>>> stored, wanted = (Interval(2, 4), Interval(0, 3)), (Interval(2, 3), Interval(1, 3))
>>> list(byte_runs(stored, wanted, wanted, item_bytes=1))
[ByteRun(source_offset=1, target_offset=0, length=2)]
>>> without(stored, wanted)
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
"""A box of a tensor: one interval per dimension."""


class ByteRun(NamedTuple):
    """Bytes that lie together in the stored slice and in the target; offsets count from the start of each."""

    source_offset: int
    target_offset: int
    length: int


def region_at(start: Sequence[int], lengths: Sequence[int]) -> Region:
    """Return the box of these lengths that begins at `start`."""
    return tuple(Interval(at, at + length) for at, length in zip(start, lengths, strict=True))


def whole_region(shape: Sequence[int]) -> Region:
    """Return the box that is all of a tensor."""
    return tuple(Interval(0, length) for length in shape)


def lengths_of(region: Region) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(one.length for one in region)


def overlap_of(one: Interval, other: Interval) -> Interval | None:
    """Return what two intervals have in common, or None."""
    start, stop = max(one.start, other.start), min(one.stop, other.stop)
    return Interval(start, stop) if start < stop else None


def common(one: Region, other: Region) -> Region | None:
    """Return what two boxes have in common, or None when that is no element."""
    found = [overlap_of(a, b) for a, b in zip(one, other, strict=True)]
    both = tuple(interval for interval in found if interval is not None)
    return both if len(both) == len(found) else None


def without(region: Region, part: Region) -> list[Region]:
    """Return boxes that are together what is left of a region without a part of it."""
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
    """Yield where the wanted elements lie in a stored slice and in a target, by ascending offset.

    Args:
        stored: What the slice holds.
        wanted: A part of both.
        target: What the target holds.
        item_bytes: Bytes of an element.
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
