# SPDX-License-Identifier: Apache-2.0
"""The contents of a parallel strategy file and their limits. See `strategy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

from ..errors import FormatError

MAX_STRATEGY_BYTES = 64 << 20
"""More than a hundred times what a model of 2000 parameters in 16 stages needs."""
MAX_DEVICES = 1 << 20
"""Devices of one pipeline stage; MindSpore itself stops at 4096."""
MAX_AXES = 64

MAX_UINT32 = (1 << 32) - 1

_MAX_INT32 = (1 << 31) - 1
_MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyLayout:
    """How one parameter is split.

    Attributes:
        name: The parameter; `STAGE-name` in a merged file.
        device_matrix: Devices along each axis, row major.
        tensor_maps: As in the file: one tuple with an axis per tensor dimension, or a tuple of axes
            per tensor dimension.
        param_split_shape: Rows of each slice along dimension 0 if they differ; else empty.
        indices_offset: First row of each slice, for embedding tables; else empty.
        field: Fields of a multi-field embedding table; else 0.
        opt_weight_shard_step: Stride of the optimizer shard in device numbers.
        opt_weight_shard_size: Pieces the optimizer shard cuts each slice into; 0 for none, -1 for
            one per replica.
    """

    name: str
    device_matrix: tuple[int, ...]
    tensor_maps: tuple[tuple[int, ...], ...]
    param_split_shape: tuple[int, ...] = ()
    indices_offset: tuple[int, ...] = ()
    field: int = 0
    opt_weight_shard_step: int = 0
    opt_weight_shard_size: int = 0

    @property
    def device_count(self) -> int:
        """Devices of the stage."""
        return prod(self.device_matrix)

    @property
    def axes_by_dimension(self) -> tuple[tuple[int, ...], ...]:
        """The axes that split each tensor dimension, slowest first; axes count from the right."""
        if len(self.tensor_maps) == 1:
            return tuple(() if axis == -1 else (axis,) for axis in self.tensor_maps[0])
        return tuple(
            tuple(axis for axis in axes if axis != -1) for axes in self.tensor_maps if axes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStrategy:
    """How one operator is split: for each input, the pieces along each dimension."""

    name: str
    stage: int
    strategy: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy file, in file order; MindSpore writes `current_stage` 1 into merged files."""

    layouts: tuple[StrategyLayout, ...]
    operators: tuple[OperatorStrategy, ...] = ()
    current_stage: int = 0

    @property
    def stage(self) -> int:
        """The pipeline stage of the operators, which MindSpore uses."""
        return self.operators[0].stage if self.operators else self.current_stage


def check_layout(layout: StrategyLayout, *, offset: int | None = None) -> StrategyLayout:
    """Return a layout, or raise FormatError if its numbers are inconsistent."""
    problem = _device_problem(layout) or _axis_problem(layout) or _shard_problem(layout)
    if problem is not None:
        raise FormatError(problem, offset=offset, tensor=layout.name)
    return layout


def check_operator(operator: OperatorStrategy, *, offset: int | None = None) -> OperatorStrategy:
    """Return an operator, or raise FormatError unless its numbers are unsigned 32-bit."""
    check_unsigned(operator.stage, what="stage", offset=offset, name=operator.name)
    for number in chain.from_iterable(operator.strategy):
        check_unsigned(number, what="a number of pieces", offset=offset, name=operator.name)
    return operator


def check_unsigned(
    value: int, *, what: str, offset: int | None = None, name: str | None = None
) -> int:
    """Return a number, or raise FormatError unless protobuf can store it as uint32."""
    if not 0 <= value <= MAX_UINT32:
        raise FormatError(
            f"{what} is {value}, outside 0 to {MAX_UINT32}", offset=offset, tensor=name
        )
    return value


def check_unique(names: Sequence[str], *, what: str) -> None:
    """Raise FormatError if a name comes twice: one entry would silently replace the other."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise FormatError(f"{what} {name!r} comes twice")
        seen.add(name)


def _device_problem(layout: StrategyLayout) -> str | None:
    matrix = layout.device_matrix
    if len(matrix) > MAX_AXES:
        return f"the device matrix has {len(matrix)} axes; at most {MAX_AXES} are supported"
    for size in matrix:
        if not 1 <= size <= MAX_DEVICES:
            return f"an axis of the device matrix has {size} devices instead of 1 to {MAX_DEVICES}"
    if prod(matrix) > MAX_DEVICES:
        return f"the device matrix has more than {MAX_DEVICES} devices"
    return None


def _axis_problem(layout: StrategyLayout) -> str | None:
    axes = [axis for axis in chain.from_iterable(layout.tensor_maps) if axis != -1]
    if len(layout.tensor_maps) > MAX_AXES or any(len(m) > MAX_AXES for m in layout.tensor_maps):
        return f"the tensor map has more than {MAX_AXES} dimensions"
    for axis in axes:
        if not 0 <= axis < len(layout.device_matrix):
            return f"the tensor map names axis {axis} of {len(layout.device_matrix)}"
    if len(set(axes)) < len(axes):
        return "the tensor map uses an axis twice"
    return None


def _shard_problem(layout: StrategyLayout) -> str | None:
    numbers = (
        ("opt_weight_shard_size", layout.opt_weight_shard_size, -1, _MAX_INT32),
        ("opt_weight_shard_step", layout.opt_weight_shard_step, 0, _MAX_INT32),
        ("field", layout.field, 0, _MAX_INT32),
        *(("param_split_shape", rows, 0, _MAX_INT64) for rows in layout.param_split_shape),
        *(("indices_offset", row, -_MAX_INT64 - 1, _MAX_INT64) for row in layout.indices_offset),
    )
    for label, value, low, high in numbers:
        if not low <= value <= high:
            return f"{label} is {value}, outside {low} to {high}"
    return None
