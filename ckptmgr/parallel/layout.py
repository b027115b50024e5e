# SPDX-License-Identifier: Apache-2.0
"""`ParallelLayout`: how one tensor is cut over devices, in any framework.

Devices form a matrix, row major. An axis of it that splits a tensor dimension cuts that dimension
into as many pieces; devices that differ only along other axes hold the same bytes. Axes are
numbered from the right, from 0, as in MindSpore's files.

>>> layout = ParallelLayout(device_matrix=(2, 4), tensor_map=((0,), ()))
>>> layout.device_count, layout.pieces
(8, (4, 1))
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointFileNotFound, TruncatedCheckpoint
from ckptmgr.formats.dtypes import DType
from ckptmgr.formats.strategy import (
    MAX_STRATEGY_BYTES,
    Strategy,
    StrategyLayout,
    parse_strategy,
    split_stages,
)
from ckptmgr.formats.strategy.values import MAX_DEVICES
from ckptmgr.parallel.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """How one tensor is cut.

    Attributes:
        device_matrix: Devices along each axis, row major.
        tensor_map: For each tensor dimension the axes that split it, the slowest first; axes count
            from the right.
        shape: Shape of the whole tensor, or None when only the files have it.
        dtype: Its element type, or None.
        stages: The pipeline stages that hold it; more than one for a shared parameter.
        opt_shard_size: Pieces the optimizer shard cuts dimension 0 of every slice into; 0 for none,
            -1 for one per replica.
        opt_shard_step: MindSpore's stride of it; unused, as positions in the group decide there,
            too.
        split_rows: Rows of each slice along dimension 0 where they are given one by one; else
            empty.
        field_size: Fields of a multi-field embedding table; else 0.
        is_uneven: Whether the last pieces may be smaller or empty, as `torch.chunk` cuts.
        ranks: The global rank of each device; None counts them up, stage after stage.
    """

    device_matrix: tuple[int, ...]
    tensor_map: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...] | None = None
    dtype: DType | None = None
    stages: tuple[int, ...] = (0,)
    opt_shard_size: int = 0
    opt_shard_step: int = 0
    split_rows: tuple[int, ...] = ()
    field_size: int = 0
    is_uneven: bool = False
    ranks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem is not None:
            raise LayoutError(f"a layout over devices {list(self.device_matrix)} {problem}")

    @property
    def device_count(self) -> int:
        """Devices of one pipeline stage."""
        return prod(self.device_matrix)

    @property
    def pieces(self) -> tuple[int, ...]:
        """The number of pieces of each dimension, without the optimizer shard."""
        return tuple(prod(self.axis_size(axis) for axis in axes) for axes in self.tensor_map)

    @property
    def replica_count(self) -> int:
        """Devices that hold the same slice, before the optimizer shard."""
        return self.device_count // prod(self.pieces)

    @property
    def opt_shard_count(self) -> int:
        """Pieces the optimizer shard cuts each slice into; 1 for none.

        Raises:
            LayoutError: It does not divide the devices that hold a slice, so the holders are
                unknown.
        """
        if self.opt_shard_size == 0:
            return 1
        if self.opt_shard_size == -1:
            return self.replica_count
        if self.replica_count % self.opt_shard_size:
            raise LayoutError(
                f"an optimizer shard of {self.opt_shard_size} does not divide the {self.replica_count} devices that hold"
                " a slice"
            )
        return self.opt_shard_size

    def axis_size(self, axis: int) -> int:
        """Return the devices along an axis, counted from the right."""
        return self.device_matrix[-1 - axis]

    def rank_of(self, device: int, *, stage: int | None = None) -> int:
        """Return the global rank of a device of a stage, by default the first with the tensor."""
        if self.ranks is not None:
            return self.ranks[device]
        return (self.stages[0] if stage is None else stage) * self.device_count + device


Layouts = Mapping[str, ParallelLayout]


def whole() -> ParallelLayout:
    """Return the layout of a single device; `for_shape` gives it the number of dimensions."""
    return ParallelLayout(device_matrix=(), tensor_map=())


def for_shape(layout: ParallelLayout, shape: tuple[int, ...]) -> ParallelLayout:
    """Return a layout for a tensor of `shape`; raise LayoutError unless its map has the dimensions.

    A map without any axis fits every shape. A map of two numbers for a tensor of one dimension is
    MindSpore's notation for two axes on it.
    """
    if layout.shape == shape:
        return layout
    fitted = layout.tensor_map
    if len(fitted) != len(shape):
        axes = tuple(axis for one in fitted for axis in one)
        if axes and len(shape) != 1:
            raise LayoutError(
                f"the tensor map has {len(fitted)} dimensions, but the tensor has the shape {list(shape)}"
            )
        fitted = (axes,) if len(shape) == 1 else ((),) * len(shape)
    return replace(layout, tensor_map=fitted, shape=shape)


def from_strategy_layout(layout: StrategyLayout, *, stage: int = 0) -> ParallelLayout:
    """Return the layout a strategy file gives a parameter."""
    return ParallelLayout(
        device_matrix=layout.device_matrix,
        tensor_map=layout.axes_by_dimension,
        stages=(stage,),
        opt_shard_size=layout.opt_weight_shard_size,
        opt_shard_step=layout.opt_weight_shard_step,
        split_rows=layout.param_split_shape,
        field_size=layout.field,
    )


def from_layout_tuple(value: Any, *, opt_shard_size: int = 0) -> ParallelLayout:
    """Return the layout in a value of MindSpore's `parameter_layout_dict`, or raise LayoutError.

    The value is `(device_matrix, tensor_map, slice_shape, field, ...)`; a tensor map may hold
    tuples of axes. `opt_shard_size` is the size of the optimizer shard group that the value names.
    """
    try:
        matrix, axes = tuple(map(int, value[0])), tuple(map(_axes, value[1]))
        full_shape = tuple(map(int, value[6])) if len(value) > 6 and value[6] else None
        field = int(value[3]) if len(value) > 3 else 0
    except (TypeError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise LayoutError(f"not a value of parameter_layout_dict: {error}") from error
    return ParallelLayout(
        device_matrix=matrix,
        tensor_map=axes,
        shape=full_shape if full_shape is not None and len(full_shape) == len(axes) else None,
        opt_shard_size=opt_shard_size,
        field_size=field,
    )


def read_strategy(path: str | os.PathLike[str]) -> Strategy:
    """Read a strategy file.

    Raises:
        TypeError: It is no file name; the message is MindSpore's.
        CheckpointNotFound: There is no such file.
        CorruptCheckpoint: It is no strategy file, or contradicts itself.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            "For 'build_searched_strategy', the argument 'strategy_filename' should be string, but got"
            f" {type(path)}."
        )
    file = Path(path)
    if not file.is_file():
        raise CheckpointFileNotFound(
            f"For 'build_searched_strategy', no such strategy file: {path}. Please check whether the"
            " 'strategy_filename' exists."
        )
    with file.open("rb") as stream:
        data = stream.read(MAX_STRATEGY_BYTES + 1)
    if not data:
        raise TruncatedCheckpoint(
            f"For 'build_searched_strategy', the strategy file {path} should not be empty. Please check whether the"
            " 'strategy_filename' is correct."
        )
    with translated_errors(os.fspath(path)):
        return parse_strategy(data)


def layouts_of(strategy: Strategy) -> dict[str, ParallelLayout]:
    """Return the layout of every parameter by its own name, with its stages.

    For a parameter that stages share, the layout of the first one counts. Raises FormatError when
    stages are missing in a merged file.
    """
    found: dict[str, ParallelLayout] = {}
    for stage, layouts in split_stages(strategy).items():
        for layout in layouts:
            known = found.get(layout.name)
            if known is None:
                found[layout.name] = from_strategy_layout(layout, stage=stage)
            else:
                found[layout.name] = replace(known, stages=(*known.stages, stage))
    return found


def read_layouts(path: str | os.PathLike[str]) -> dict[str, ParallelLayout]:
    """Return the layouts in a strategy file; raises as `read_strategy`."""
    strategy = read_strategy(path)
    with translated_errors(os.fspath(path)):
        return layouts_of(strategy)


def stage_count(layouts: Layouts | None) -> int:
    """Return the number of pipeline stages of layouts; 1 for None."""
    stages = (stage for layout in (layouts or {}).values() for stage in layout.stages)
    return 1 + max(stages, default=0)


def devices_per_stage(layouts: Layouts | None) -> int:
    """Return the devices of a stage, 1 for None; raise LayoutError where parameters differ."""
    counts = {layout.device_count: name for name, layout in (layouts or {}).items()}
    if len(counts) > 1:
        (first, one), (second, other) = list(counts.items())[:2]
        raise LayoutError(f"{one!r} is laid out over {first} devices, {other!r} over {second}")
    return next(iter(counts), 1)


def rank_count(layouts: Layouts | None) -> int:
    """Return the number of ranks of layouts; raises as `devices_per_stage`."""
    return stage_count(layouts) * devices_per_stage(layouts)


def rank_of_process() -> int:
    """Return the rank in `RANK_ID` (MindSpore) or `RANK` (torchrun); 0 without either."""
    return rank_in_environment() or 0


def rank_in_environment() -> int | None:
    """Return the rank in `RANK_ID` or `RANK`, or None."""
    for name in ("RANK_ID", "RANK"):
        text = os.environ.get(name, "")
        if text.isdecimal():
            return int(text)
    return None


def _axes(value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(int(axis) for axis in given if int(axis) != -1)


def _problem(layout: ParallelLayout) -> str | None:
    matrix = layout.device_matrix
    if any(size < 1 for size in matrix) or prod(matrix) > MAX_DEVICES:
        return f"has an axis without devices, or more than {MAX_DEVICES} devices"
    axes = [axis for one in layout.tensor_map for axis in one]
    if any(not 0 <= axis < len(matrix) for axis in axes) or len(set(axes)) < len(axes):
        return f"has a tensor map that names a missing axis or one axis twice: {layout.tensor_map}"
    if layout.opt_shard_size < -1 or layout.opt_shard_step < 0:
        return "has a negative optimizer shard"
    if layout.shape is not None and len(layout.shape) != len(layout.tensor_map):
        return f"maps {len(layout.tensor_map)} dimensions of the shape {list(layout.shape)}"
    if layout.ranks is not None and len(set(layout.ranks)) != prod(matrix):
        return "names a rank twice or leaves one out"
    return None
