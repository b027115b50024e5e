# SPDX-License-Identifier: Apache-2.0
"""Resharding arithmetic: which bytes of which ranks make up a slice of another layout.

>>> from ckptmgr.core.regions import Interval, byte_runs
>>> rows = ParallelLayout(device_matrix=(2,), tensor_map=((0,), ()))
>>> [part] = plan_region(rows, (4, 3), (Interval(2, 3), Interval(1, 3)))
>>> part.holders, list(byte_runs(part.stored, part.wanted, part.wanted, item_bytes=1))
((1,), [ByteRun(source_offset=1, target_offset=0, length=2)])
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from ckptmgr.core.regions import Region, interval_intersection
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    Layouts,
    ParallelLayout,
    devices_per_stage,
    for_shape,
    read_layouts,
    stage_count,
)
from ckptmgr.parallel.mindspore.context import AutoParallelContext
from ckptmgr.parallel.mindspore.placement import placement_of
from ckptmgr.parallel.mindspore.slices import gathered_ranks, intervals_of, region_of, slicing_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """A part of a region that one slice of the source covers.

    Attributes:
        holders: The ranks that store the slice; any of them is enough.
        stored: The elements of the slice, in the whole tensor.
        wanted: The elements to read, in the whole tensor.
    """

    holders: tuple[int, ...]
    stored: Region
    wanted: Region


def plan_region(
    layout: ParallelLayout, shape: Sequence[int], region: Region
) -> tuple[SourcePart, ...]:
    """Return the slices of a layout that make up a region of a tensor; none for an empty region.

    Args:
        layout: How the tensor is stored.
        shape: Shape of the whole tensor.
        region: The elements to read, inside the shape.

    Raises:
        LayoutError: The layout does not fit the shape.
    """
    layout = for_shape(layout, tuple(shape))
    slicing = slicing_of(layout)
    overlaps = [
        [
            (ordinal, piece, both)
            for ordinal, piece in enumerate(pieces)
            if (both := interval_intersection(piece, one))
        ]
        for pieces, one in zip(intervals_of(layout, shape), region, strict=True)
    ]
    parts = []
    for chosen in product(*overlaps):
        number = 0
        for (ordinal, _, _), count in zip(chosen, slicing.counts, strict=True):
            number = number * count + ordinal
        devices = slicing.holders[number].tolist()
        parts.append(
            SourcePart(
                holders=_ranks(layout, devices),
                stored=tuple(piece for _, piece, _ in chosen),
                wanted=tuple(both for _, _, both in chosen),
            )
        )
    return tuple(parts)


def plan_slice(
    source: ParallelLayout, target: ParallelLayout, *, shape: Sequence[int], device: int
) -> tuple[SourcePart, ...]:
    """Return the parts of the source for a device of the target layout; raises as `plan_region`."""
    return plan_region(source, shape, region_of(for_shape(target, tuple(shape)), device, shape))


def rank_list_for_transform(
    rank_id: int,
    src_strategy_file: str | os.PathLike[str] | None = None,
    dst_strategy_file: str | os.PathLike[str] | None = None,
    *,
    context: AutoParallelContext | None = None,
) -> list[int]:
    """Return the source ranks whose files a rank needs after a change of strategy, descending.

    These are the ranks that MindSpore's `transform_checkpoint_by_rank` requires. Ours works with
    fewer where they hold everything.

    Args:
        rank_id: A rank of the destination.
        src_strategy_file: How the files are cut; None for the `strategy_ckpt_load_file` of the
            context, without one for whole tensors in one file.
        dst_strategy_file: How they are to be cut; None for whole tensors.
        context: Parallel settings; default: those of `set_auto_parallel_context`.

    Raises:
        CheckpointNotFound, CorruptCheckpoint: About a strategy file.
        LayoutError: Neither number of devices divides the other.
    """
    if not isinstance(rank_id, int):
        raise TypeError("The rank_id should be a int.")
    placement = placement_of(context).source(src_strategy_file)
    src_strategy_file = src_strategy_file or placement.load_file
    if src_strategy_file is None:
        return [0]
    source = read_layouts(src_strategy_file)
    placement.check_source(source, ())
    target = None if dst_strategy_file is None else read_layouts(dst_strategy_file)
    if not source:
        raise ValueError("The src_strategy_file is empty.")
    return needed_ranks(rank_id, source, target)


def needed_ranks(rank: int, source: Layouts, target: Layouts | None) -> list[int]:
    """Return MindSpore's list of source ranks for a rank of the target, descending.

    Raises LayoutError for a missing rank, or unless one number of devices divides the other.
    """
    devices = devices_per_stage(source)
    of_target = devices_per_stage(target)
    local, wanted = rank, dict(source)
    if target:
        stages = stage_count(target)
        if not 0 <= rank < stages * of_target:
            raise LayoutError(f"there is no rank {rank} among {stages * of_target}")
        stage, local = divmod(rank, of_target)
        wanted = {
            name: one
            for name, one in source.items()
            if name not in target or stage in target[name].stages
        }
    found: set[int] = set()
    for name, one in wanted.items():
        if target is None or name in target:
            found |= gathered_ranks(one, None if target is None else target[name], local)
    stages_used = {stage for one in wanted.values() for stage in one.stages}
    ranks = {stage * devices + device % devices for stage in stages_used for device in found}
    return sorted(ranks, reverse=True)


def _ranks(layout: ParallelLayout, devices: Sequence[int]) -> tuple[int, ...]:
    if layout.ranks is not None:
        return tuple(layout.rank_of(device) for device in devices)
    return tuple(
        layout.rank_of(device, stage=stage) for stage in layout.stages for device in devices
    )
