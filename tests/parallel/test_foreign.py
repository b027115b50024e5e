# SPDX-License-Identifier: Apache-2.0
"""Layouts of other frameworks, against what these frameworks say each rank holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckptmgr.parallel import (
    LayoutError,
    ParallelLayout,
    from_dtensor,
    from_named_sharding,
    from_placements,
)
from ckptmgr.parallel.mindspore.slices import region_of
from ckptmgr.parallel.redundancy import groups_of


def mesh_of(*sizes: int) -> SimpleNamespace:
    return SimpleNamespace(mesh=np.arange(np.prod(sizes))[::-1].reshape(sizes))


def offsets_and_shape(layout: ParallelLayout, device: int) -> tuple[list[int], list[int]]:
    assert layout.shape is not None
    region = region_of(layout, device, layout.shape)
    return [one.start for one in region], [one.length for one in region]


@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (1, 1), (3, 16)])
@pytest.mark.parametrize(
    "dims", [(0, 1), (1, 0), (0, 0), (None, 1), (1, None), (-1, -2), (None, None)]
)
def test_regions_are_those_torch_computes(
    shape: tuple[int, ...], dims: tuple[int | None, int | None]
) -> None:
    placing = pytest.importorskip("torch.distributed.tensor")
    torch_utils = pytest.importorskip("torch.distributed.tensor._utils")
    compute = getattr(torch_utils, "_compute_local_shape_and_global_offset", None)
    if compute is None:
        pytest.skip("this torch does not tell shapes and offsets without processes")
    placements = [
        placing.Replicate() if dim is None else placing.Shard(dim % len(shape)) for dim in dims
    ]
    layout = from_placements(mesh_of(2, 3), placements, shape=shape)
    for device in range(6):
        coordinate = [int(place) for place in np.unravel_index(device, (2, 3))]
        local, offset = compute(shape, (2, 3), lambda i, at=coordinate: at[i], placements)
        starts, lengths = offsets_and_shape(layout, device)
        assert tuple(lengths) == tuple(local)
        if all(lengths):
            assert tuple(starts) == tuple(offset)


class Strided:
    """Stands for torch's `_StridedShard`, which only FSDP makes."""

    def __init__(self, dim: int, split_factor: int) -> None:
        self.dim = dim
        self.split_factor = split_factor


Strided.__name__ = "_StridedShard"


class Shard:
    def __init__(self, dim: int) -> None:
        self.dim = dim


class Replicate:
    pass


class Partial:
    pass


def test_tensor_parallel_shards_below_fsdp_are_cut_first() -> None:
    layout = from_placements(mesh_of(2, 4), [Strided(0, 4), Shard(0)], shape=(16, 3))
    assert layout.tensor_map == ((0, 1), ())
    # Tensor parallel rank 1 holds rows 4 to 7, of which FSDP rank 1 keeps the second half.
    assert offsets_and_shape(layout, 1 * 4 + 1) == ([6, 0], [2, 3])


def test_regions_below_fsdp_are_those_torch_computes() -> None:
    types = pytest.importorskip("torch.distributed.tensor.placement_types")
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    if not (
        hasattr(types, "_StridedShard") and hasattr(utils, "_compute_local_shape_and_global_offset")
    ):
        pytest.skip("this torch has no strided shards, or does not tell their offsets")
    placements = [types._StridedShard(0, split_factor=4), types.Shard(0)]
    layout = from_placements(mesh_of(2, 4), placements, shape=(16, 3))
    for device in range(8):
        coordinate = [int(place) for place in np.unravel_index(device, (2, 4))]
        local, offset = utils._compute_local_shape_and_global_offset(
            (16, 3), (2, 4), lambda i, at=coordinate: at[i], placements
        )
        assert offsets_and_shape(layout, device) == (list(offset), list(local))


@pytest.mark.parametrize(
    "placements",
    [
        [Strided(0, 3), Shard(0)],
        [Shard(0), Strided(0, 2)],
        [Strided(0, 2), Strided(0, 4)],
    ],
)
def test_other_orders_of_strided_shards_are_refused(placements: list[Any]) -> None:
    with pytest.raises(LayoutError, match="order that is not supported"):
        from_placements(mesh_of(2, 4), placements, shape=(16, 3))


def test_pending_sum_is_refused() -> None:
    with pytest.raises(LayoutError, match="no complete value"):
        from_placements(mesh_of(2), [Partial()], shape=(4,))


def test_shard_along_a_dimension_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayoutError, match="dimension 2 of a tensor of 2"):
        from_placements(mesh_of(2), [Shard(2)], shape=(4, 4))


def test_global_ranks_of_the_mesh_are_kept() -> None:
    layout = from_placements(mesh_of(2, 2), [Shard(0), Replicate()], shape=(4,))
    assert groups_of(layout) == ((3, 2), (1, 0))


def test_dtensor_tells_shape_and_type() -> None:
    tensor = SimpleNamespace(
        device_mesh=mesh_of(2), placements=[Shard(0)], shape=(4, 2), dtype="torch.bfloat16"
    )
    layout = from_dtensor(tensor)
    assert layout.dtype is not None
    assert (layout.shape, layout.dtype.name) == ((4, 2), "bfloat16")


def named_sharding(*spec: object) -> SimpleNamespace:
    mesh = SimpleNamespace(axis_names=("x", "y"), devices=np.empty((2, 4), object))
    return SimpleNamespace(mesh=mesh, spec=spec)


def test_axes_of_a_named_sharding_cut_the_slowest_first() -> None:
    layout = from_named_sharding(named_sharding(("y", "x"), None), shape=(16, 2, 3))
    assert (layout.device_matrix, layout.tensor_map) == ((2, 4), ((0, 1), (), ()))
    assert from_named_sharding(named_sharding("x"), shape=(4,)).tensor_map == ((1,),)


@pytest.mark.parametrize(("spec", "problem"), [(("x", "y"), "more entries"), (("z",), "names 'z'")])
def test_spec_that_does_not_fit_is_refused(spec: tuple[str, ...], problem: str) -> None:
    with pytest.raises(LayoutError, match=problem):
        from_named_sharding(named_sharding(*spec), shape=(8,))


def test_regions_are_those_jax_computes() -> None:
    jax = pytest.importorskip("jax")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("x", "y"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("y", "x"))
    layout = from_named_sharding(sharding, shape=(4, 6))
    for device, index in enumerate(sharding.devices_indices_map((4, 6)).values()):
        starts, lengths = offsets_and_shape(layout, device)
        shape = zip(index, (4, 6), strict=True)
        assert [one.indices(size)[:2] for one, size in shape] == [
            (start, start + length) for start, length in zip(starts, lengths, strict=True)
        ]
