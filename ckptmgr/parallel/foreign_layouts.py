# SPDX-License-Identifier: Apache-2.0
"""Layouts of PyTorch's DTensor and of JAX's shardings, without importing either framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import ParallelLayout


def from_dtensor(tensor: Any) -> ParallelLayout:
    """Return the layout of a `torch.distributed.tensor.DTensor`.

    Raises:
        LayoutError: As `from_placements`.
    """
    layout = from_placements(tensor.device_mesh, tensor.placements, shape=tuple(tensor.shape))
    return replace(layout, dtype=BY_NAME.get(str(tensor.dtype).removeprefix("torch.")))


def from_placements(
    mesh: Any, placements: Sequence[Any], *, shape: tuple[int, ...]
) -> ParallelLayout:
    """Return the layout that placements on a `DeviceMesh` give a tensor.

    Uneven shards are cut as `torch.chunk` does. Tensor parallelism below FSDP (`_StridedShard`) is
    supported where the shards are even.

    Args:
        mesh: A `DeviceMesh`; its `mesh` holds the global ranks.
        placements: One per mesh dimension.
        shape: Shape of the whole tensor.

    Raises:
        LayoutError: The tensor is a pending sum (`Partial`), or placed in a way that no order of
            axes expresses.
    """
    sizes = tuple(int(size) for size in mesh.mesh.shape)
    plain: list[list[int]] = [[] for _ in shape]
    strided: list[list[int]] = [[] for _ in shape]
    for number, placement in enumerate(placements):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in ("Shard", "_StridedShard"):
            raise LayoutError(
                f"a tensor placed as {placement} is no complete value",
                hint="redistribute it to Shard or Replicate before it is saved",
            )
        dimension = _dimension(int(placement.dim), shape)
        target = plain if kind == "Shard" else strided
        target[dimension].append(number)
        if kind == "_StridedShard":
            _check_strided(number, placement, placements, sizes, shape)
    axes = [
        tuple(len(sizes) - 1 - number for number in (*first, *later))
        for first, later in zip(plain, strided, strict=True)
    ]
    return ParallelLayout(
        device_matrix=sizes,
        tensor_map=tuple(axes),
        shape=shape,
        is_uneven=not any(strided),
        ranks=tuple(int(rank) for rank in mesh.mesh.flatten().tolist()),
    )


def from_named_sharding(sharding: Any, *, shape: tuple[int, ...]) -> ParallelLayout:
    """Return the layout of a `jax.sharding.NamedSharding`; ranks are device positions in its mesh.

    Args:
        sharding: With `mesh` and `spec`.
        shape: Shape of the whole array.

    Raises:
        LayoutError: The spec names an axis the mesh lacks, or has more entries than the array has
            dimensions.
    """
    names = [str(name) for name in sharding.mesh.axis_names]
    spec = tuple(sharding.spec)
    if len(spec) > len(shape):
        raise LayoutError(f"the spec {spec} has more entries than the shape {list(shape)}")
    axes: list[tuple[int, ...]] = []
    for entry in spec + (None,) * (len(shape) - len(spec)):
        given = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        unknown = [name for name in given if name not in names]
        if unknown:
            raise LayoutError(f"the mesh has the axes {names}, but the spec names {unknown[0]!r}")
        axes.append(tuple(len(names) - 1 - names.index(name) for name in given))
    return ParallelLayout(
        device_matrix=tuple(int(size) for size in sharding.mesh.devices.shape),
        tensor_map=tuple(axes),
        shape=shape,
    )


def _dimension(dimension: int, shape: tuple[int, ...]) -> int:
    found = dimension + len(shape) if dimension < 0 else dimension
    if not 0 <= found < len(shape):
        raise LayoutError(
            f"a shard along dimension {dimension} of a tensor of {len(shape)} dimensions"
        )
    return found


def _check_strided(
    number: int,
    placement: Any,
    placements: Sequence[Any],
    sizes: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """Check that a strided shard is the last cut of its dimension, behind plain ones."""
    dimension = _dimension(int(placement.dim), shape)
    others = [
        (index, type(other).__name__)
        for index, other in enumerate(placements)
        if index != number
        and type(other).__name__ in ("Shard", "_StridedShard")
        and _dimension(int(other.dim), shape) == dimension
    ]
    is_last_cut = all(index > number and kind == "Shard" for index, kind in others)
    if not is_last_cut or int(placement.split_factor) != prod(sizes[index] for index, _ in others):
        raise LayoutError(
            f"{placement} on mesh dimension {number} is cut in an order that is not supported",
            hint="redistribute the tensor to plain Shard placements before it is saved",
        )
