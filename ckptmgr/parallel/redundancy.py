# SPDX-License-Identifier: Apache-2.0
"""Groups of ranks that hold the same bytes, and MindSpore's round robin of parameters over them.

The results are MindSpore's (`get_parameter_redundancy`, `remove_param_redundancy` of
`mindspore/train/_utils.py` 2.10), but no parameter is ever lost: more than 128 pieces, several axes
on one dimension and scalars are counted right, and where an optimizer shard does not divide its
group, every rank keeps its own slice instead of none.

`balance` has the default policy, which spreads bytes evenly.

>>> layout = ParallelLayout(device_matrix=(2, 2), tensor_map=((0,), ()))
>>> get_parameter_redundancy({"w": layout}, initial_rank=0)
{'w': ((0, 2), (1, 3))}
>>> remove_param_redundancy({"w": ((0, 2), (1, 3)), "v": ((0, 2), (1, 3))})
{0: {'w'}, 2: {'v'}, 1: {'w'}, 3: {'v'}}
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    ParallelLayout,
    from_layout_tuple,
    from_strategy_layout,
    read_strategy,
)
from ckptmgr.parallel.mindspore.context import AutoParallelContext
from ckptmgr.parallel.mindspore.placement import MindSporePlacement, placement_of
from ckptmgr.parallel.mindspore.slices import equal_groups

Groups = tuple[tuple[int, ...], ...]
"""Ranks that hold the same bytes, one tuple for each distinct slice."""

_OPT_SHARD_GROUP = 5  # position in a value of parameter_layout_dict


def get_parameter_redundancy(
    layout_obj: str | os.PathLike[str] | Mapping[str, Any],
    initial_rank: int | None = None,
    *,
    rank: int | None = None,
    group_size: Callable[[str], int] | None = None,
    context: AutoParallelContext | None = None,
) -> dict[str, Groups]:
    """Return for every parameter, sorted by name, the groups of ranks that hold the same bytes.

    Args:
        layout_obj: A strategy file, or parameter names with a `ParallelLayout` or a value of
            MindSpore's `parameter_layout_dict`.
        initial_rank: First rank of this pipeline stage; None for the stage that `rank` is in.
        rank: A global rank; None for the `global_rank` of the context, or `RANK_ID` or `RANK` in
            the environment.
        group_size: Returns the size of an optimizer shard group by its name; needed for a
            `parameter_layout_dict` that names one, unless the context has
            `enable_parallel_optimizer`.
        context: Parallel settings; default: those of `set_auto_parallel_context`.

    Raises:
        LayoutError: A layout contradicts itself.
        ValueError: A layout contradicts the context.
        CheckpointNotFound, CorruptCheckpoint: About the strategy file.
    """
    placement = placement_of(context)
    if isinstance(layout_obj, Mapping):
        layouts = {
            name: _layout(name, one, group_size, placement) for name, one in layout_obj.items()
        }
    elif isinstance(layout_obj, (str, os.PathLike)):
        layouts = {one.name: from_strategy_layout(one) for one in read_strategy(layout_obj).layouts}
    else:
        raise TypeError(f"layout_obj is {type(layout_obj)} instead of a file name or a mapping")
    layouts = dict(placement.fitted(layouts))
    if initial_rank is None:
        devices = next((layout.device_count for layout in layouts.values()), 1)
        initial_rank = (placement.own_rank if rank is None else rank) // devices * devices
    return {name: groups_of(layouts[name], first_rank=initial_rank) for name in sorted(layouts)}


def groups_of(layout: ParallelLayout, *, first_rank: int = 0) -> Groups:
    """Return the groups of ranks that hold the same bytes.

    `first_rank` is that of the first device, for layouts that do not name their ranks.
    """
    axes = frozenset(axis for one in layout.tensor_map for axis in one)
    try:
        shards = layout.opt_shard_count
    except LayoutError:
        # The holders are unknown: all copies are kept.
        axes, shards = frozenset(range(len(layout.device_matrix))), 1
    return _groups(layout.device_matrix, axes, shards, layout.ranks or first_rank)


def remove_param_redundancy(
    param_redundancy_dict: Mapping[str, Groups], keep_redundancy: int = 1
) -> dict[int, set[str]]:
    """Return the parameters that each rank saves, in MindSpore's round robin by name.

    Args:
        param_redundancy_dict: As `get_parameter_redundancy` returns it.
        keep_redundancy: Copies to keep of each slice, 1 or more; fewer where there are fewer.

    Raises:
        ValueError: No copy is to be kept, or a parameter is held by no rank: it would be lost.
    """
    if keep_redundancy < 1:
        raise ValueError(f"keep_redundancy is {keep_redundancy}; at least one copy must be kept")
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name, groups in param_redundancy_dict.items():
        if not groups or not all(groups):
            raise ValueError(f"{name!r} is held by no rank, so it would be lost")
        for group in groups:
            names_of.setdefault(tuple(group), []).append(name)
    saved: dict[int, set[str]] = {}
    for copy in range(keep_redundancy):
        for group, names in names_of.items():
            for index, name in enumerate(names):
                saved.setdefault(group[(copy + index) % len(group)], set()).add(name)
    return saved


def _layout(
    name: str,
    value: ParallelLayout | Sequence[Any],
    group_size: Callable[[str], int] | None,
    placement: MindSporePlacement,
) -> ParallelLayout:
    if isinstance(value, ParallelLayout):
        return value
    layout = from_layout_tuple(value)
    group = value[_OPT_SHARD_GROUP] if len(value) > _OPT_SHARD_GROUP else ""
    if not group:
        return layout
    if group_size is None and placement.is_sharded:
        return from_layout_tuple(value, opt_shard_size=placement.shard_size or -1)
    if group_size is None:
        raise LayoutError(
            f"{name!r} is cut over the optimizer shard group {str(group)!r}, whose size is not known",
            hint="pass group_size=mindspore.communication.get_group_size, or a context with enable_parallel_optimizer=True",
        )
    return from_layout_tuple(value, opt_shard_size=group_size(group))


@lru_cache(maxsize=1024)
def _groups(
    device_matrix: tuple[int, ...],
    axes: frozenset[int],
    opt_shard_count: int,
    ranks: tuple[int, ...] | int,
) -> Groups:
    devices = equal_groups(device_matrix, axes, opt_shard_count=opt_shard_count).tolist()
    if isinstance(ranks, int):
        return tuple(tuple(ranks + device for device in group) for group in devices)
    return tuple(tuple(ranks[device] for device in group) for group in devices)
