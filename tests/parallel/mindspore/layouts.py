# SPDX-License-Identifier: Apache-2.0
"""Random layouts, and an independent answer to the part of each device: whole tensors cut with NumPy, axis by axis."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import strategies as st

from ckptmgr.parallel import ParallelLayout


@st.composite
def layouts(
    draw: st.DrawFn, *, dimensions: int | None = None, uneven: bool = False
) -> ParallelLayout:
    """Layouts over at most 24 devices; axes of one device and several axes on a dimension included."""
    matrix: list[int] = []
    for size in draw(st.lists(st.integers(1, 4), max_size=4)):
        if prod(matrix) * size <= 24:
            matrix.append(size)
    count = draw(st.integers(0, 3)) if dimensions is None else dimensions
    tensor_map: list[list[int]] = [[] for _ in range(count)]
    for axis in draw(st.permutations(range(len(matrix)))):
        dimension = draw(st.integers(-1, count - 1))
        if dimension >= 0:
            tensor_map[dimension].append(axis)
    layout = ParallelLayout(
        device_matrix=tuple(matrix),
        tensor_map=tuple(map(tuple, tensor_map)),
        is_uneven=uneven,
    )
    copies = layout.replica_count
    divisors = [n for n in range(1, copies + 1) if copies % n == 0] if count else [0]
    shard = draw(st.sampled_from([0, 0, -1, *divisors])) if count else 0
    return ParallelLayout(
        device_matrix=layout.device_matrix,
        tensor_map=layout.tensor_map,
        opt_shard_size=shard,
        opt_shard_step=1 if shard else 0,
        is_uneven=uneven,
    )


def shape_for(layout: ParallelLayout, *, times: int = 1) -> tuple[int, ...]:
    """The smallest shape the layout divides, `times` as long along each dimension."""
    shape = list(layout.pieces)
    if shape:
        shape[0] *= layout.opt_shard_count
    return tuple(length * times for length in shape)


def held_by(layout: ParallelLayout, device: int, whole: np.ndarray) -> np.ndarray:
    """Cut the whole tensor axis by axis down to the part of a device; deliberately simple and slow."""
    coordinates = np.unravel_index(device, layout.device_matrix) if layout.device_matrix else ()
    part = whole
    for dimension, axes in enumerate(layout.tensor_map):
        for axis in axes:
            part = _piece(part, dimension, layout.axis_size(axis), int(coordinates[-1 - axis]))
    shards = layout.opt_shard_count
    if shards > 1:
        used = {axis for axes in layout.tensor_map for axis in axes}
        place = 0
        for axis in reversed(range(len(layout.device_matrix))):
            if axis not in used:
                place = place * layout.axis_size(axis) + int(coordinates[-1 - axis])
        part = _piece(part, 0, shards, place % shards)
    return part


def _piece(part: np.ndarray, dimension: int, count: int, index: int) -> np.ndarray:
    length = part.shape[dimension]
    step = -(-length // count)
    return part.take(range(min(index * step, length), min(index * step + step, length)), dimension)
