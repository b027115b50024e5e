# SPDX-License-Identifier: Apache-2.0
"""JAX arrays on the devices of several processes: the addressable part, and arrays rebuilt from it.

Nothing here imports JAX.
"""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import numpy as np

from ckptmgr.core.regions import Interval, Region, region_shape

_WEAK_ZEROS = {"f": 0.0, "i": 0, "c": 0j}
"""Numbers of Python that make an array weak, by the kind of its elements."""


def is_multi_process(value: Any) -> bool:
    """Return whether a value is a JAX array of which this process holds only a part."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and not value.is_fully_addressable


def is_multi_device(value: Any) -> bool:
    """Return whether a value is a JAX array on several devices, of this process or of others."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, jax.Array) and len(value.sharding.device_set) > 1


def addressable_region(array: Any) -> Region | None:
    """Return the region on the devices of this process; None when it is not one region."""
    shape = tuple(map(int, array.shape))
    regions = {_region(shard.index, shape) for shard in array.addressable_shards}
    if not regions:
        return tuple(Interval(0, 0) for _ in shape)
    hull = tuple(
        Interval(min(one.start for one in along), max(one.stop for one in along))
        for along in zip(*regions, strict=True)
    )
    held = sum(prod(region_shape(region)) for region in regions)
    return hull if held == prod(region_shape(hull)) else None


def addressable_part(array: Any, hull: Region) -> object:
    """Return the addressable elements: the shard itself, or several joined in a copy."""
    shards = {_region(one.index, array.shape): one.data for one in array.addressable_shards}
    if len(shards) == 1:
        return next(iter(shards.values()))
    joined: np.ndarray = np.empty(region_shape(hull), array.dtype)
    for region, data in shards.items():
        joined[_within(region, hull)] = np.asarray(data)
    return joined


def rebuild_array(target: Any, stored: np.ndarray) -> object:
    """Return an array like `target` whose addressable part is `stored`."""
    hull = addressable_region(target) or ()

    def part(index: tuple[slice, ...]) -> np.ndarray:
        found: np.ndarray = stored[_within(_region(index, target.shape), hull)]
        return found

    return sys.modules["jax"].make_array_from_callback(target.shape, target.sharding, part)


def placed_as(target: Any, stored: np.ndarray, *, is_weak: bool = False) -> object:
    """Return an array on the device of `target`, if the program put that there."""
    jax = sys.modules["jax"]
    made = jax.numpy.asarray(stored)
    zero = _WEAK_ZEROS.get(stored.dtype.kind) if is_weak else None
    if zero is not None:  # an update in place is the only public way
        made = jax.numpy.full(stored.shape, zero).at[...].set(made)
    return jax.device_put(made, target.sharding) if target.committed else made


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    return tuple(
        Interval(*one.indices(length)[:2]) for one, length in zip(index, shape, strict=True)
    )


def _within(region: Region, hull: Region) -> tuple[slice, ...]:
    return tuple(
        slice(one.start - outer.start, one.stop - outer.start)
        for one, outer in zip(region, hull, strict=True)
    )
