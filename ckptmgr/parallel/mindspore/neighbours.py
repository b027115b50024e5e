# SPDX-License-Identifier: Apache-2.0
"""The ranks MindSpore's tensor redistribution gathers from when one layout becomes another.

Both layouts are written over one number of devices; every axis becomes digits of prime size. Read from its slowest digit, a
tensor dimension keeps the digits that are the same in both layouts and gathers over the others of the source. So the set is
what varying those digits of the own rank gives; it holds all that is needed, and often more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import ParallelLayout


class Digit(NamedTuple):
    """A digit of device numbers: `number // stride % size`."""

    size: int
    stride: int


def gathered_ranks(source: ParallelLayout, target: ParallelLayout | None, device: int) -> set[int]:
    """Return the source devices gathered from for a device of the target; None as target is a single device.

    Devices count modulo the number of source devices.

    Raises:
        LayoutError: Neither number of devices divides the other.
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
    """Return the digits that split each dimension, the slowest first; the optimizer shard last on dimension 0.

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
