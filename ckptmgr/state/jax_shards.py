# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX that lie on the devices of several processes: what this process holds of one, and one made of that.

Nothing here imports JAX; an array of it brings all that is needed.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from ckptmgr.core.regions import Interval, Region, region_shape


def is_multi_process(value: Any) -> bool:
    """Return whether a value is an array of JAX that this process holds only a part of."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and not value.is_fully_addressable


def is_multi_device(value: Any) -> bool:
    """Return whether a value is an array of JAX on several devices, of this process or of others."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and len(value.sharding.device_set) > 1


def addressable_region(array: Any) -> Region | None:
    """Return the elements that the devices of this process hold together, or None when they are no box."""
    shape = tuple(map(int, array.shape))
    boxes = {_region(shard.index, shape) for shard in array.addressable_shards}
    if not boxes:
        return tuple(Interval(0, 0) for _ in shape)
    hull = tuple(
        Interval(min(one.start for one in along), max(one.stop for one in along))
        for along in zip(*boxes, strict=True)
    )
    held = sum(prod(region_shape(box)) for box in boxes)
    return hull if held == prod(region_shape(hull)) else None


def addressable_part(array: Any, box: Region) -> object:
    """Return the elements that this process holds: those of a device as they are, those of several joined in a copy."""
    shards = {_region(one.index, array.shape): one.data for one in array.addressable_shards}
    if len(shards) == 1:
        return next(iter(shards.values()))
    joined: np.ndarray = np.empty(region_shape(box), array.dtype)
    for region, data in shards.items():
        joined[_within(region, box)] = np.asarray(data)
    return joined


def rebuild_array(target: Any, stored: np.ndarray) -> object:
    """Return an array like `target` with other elements: those that this process is to hold."""
    box = addressable_region(target) or ()

    def part(index: tuple[slice, ...]) -> np.ndarray:
        found: np.ndarray = stored[_within(_region(index, target.shape), box)]
        return found

    return sys.modules["jax"].make_array_from_callback(target.shape, target.sharding, part)


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    return tuple(
        Interval(*one.indices(length)[:2]) for one, length in zip(index, shape, strict=True)
    )


def _within(region: Region, box: Region) -> tuple[slice, ...]:
    return tuple(
        slice(one.start - outer.start, one.stop - outer.start)
        for one, outer in zip(region, box, strict=True)
    )
