# SPDX-License-Identifier: Apache-2.0
"""Join the slices of one parameter in memory: MindSpore's `merge_sliced_parameter`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.formats.strategy import StrategyLayout
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.layout import (
    Layouts,
    ParallelLayout,
    for_shape,
    from_strategy_layout,
    read_layouts,
)
from ckptmgr.parallel.mindspore.context import AutoParallelContext
from ckptmgr.parallel.mindspore.placement import placement_of
from ckptmgr.parallel.mindspore.slices import full_shape, region_of

_FUNCTION = "For 'merge_sliced_parameter',"


class SlicedParameter(NamedTuple):
    """A parameter, or a slice of one. MindSpore's own `Parameter` does as well."""

    name: str
    data: np.ndarray


def merge_sliced_parameter(
    sliced_parameters: list[Any],
    strategy: Mapping[str, Any] | None = None,
    *,
    context: AutoParallelContext | None = None,
) -> SlicedParameter:
    """Join the slices of all ranks of a parameter; bfloat16 becomes float32, as in MindSpore.

    Args:
        sliced_parameters: The slices in the order of ranks: objects with `name` and `data`.
        strategy: Parameter names and their layouts: a `ParallelLayout`, a `StrategyLayout`, or
            MindSpore's `ParallelLayouts`. None stands for the `strategy_ckpt_load_file` of the
            context; without one the slices are joined along dimension 0.
        context: Parallel settings; default: those of `set_auto_parallel_context`.

    Raises:
        TypeError, ValueError, KeyError: An argument is unusable; messages as MindSpore's.
        CkptmgrError: About the strategy file of the context.
    """
    slices = _checked(sliced_parameters)
    if strategy is None:
        strategy = _strategy_of_context(context)
    if strategy and not isinstance(strategy, Mapping):
        raise TypeError(
            f"{_FUNCTION} the argument 'strategy' should be dict, but got {type(strategy)}."
        )
    name = slices[0].name
    arrays = [_widened(one.data) for one in slices]
    if not strategy:
        return SlicedParameter(name, np.concatenate(arrays))
    if name not in strategy:
        raise KeyError(
            f"{_FUNCTION} the parameter name {name} should be a key in the 'strategy'. Please check 'sliced_parameter'"
            " and 'strategy'."
        )
    return SlicedParameter(name, _merged(arrays, _layout(strategy[name])))


def _strategy_of_context(context: AutoParallelContext | None) -> Layouts | None:
    placement = placement_of(context)
    if placement.is_replicated:
        raise ValueError(
            f"{_FUNCTION} the parallel context says parallel_mode='data_parallel', where each rank holds the whole parameter:"
            " there are no slices to merge."
        )
    layouts = None if placement.load_file is None else read_layouts(placement.load_file)
    placement.check_source(layouts, ())
    return layouts


def _checked(sliced_parameters: object) -> list[SlicedParameter]:
    if not isinstance(sliced_parameters, list):
        raise TypeError(
            f"{_FUNCTION} the argument 'sliced_parameters' should be list, but got {type(sliced_parameters)}."
        )
    if not sliced_parameters:
        raise ValueError(f"{_FUNCTION} the argument 'sliced_parameters' should not be empty.")
    slices = [_slice(one, index) for index, one in enumerate(sliced_parameters)]
    name, first = slices[0]
    for index, (other, data) in enumerate(slices):
        if (other, data.ndim, data.shape[1:]) != (name, first.ndim, first.shape[1:]):
            raise ValueError(
                f"{_FUNCTION} please make sure that the elements in 'slice_parameters' have the same name, dimension"
                " length and shape except 0 axis. The name, dimension length, shape except 0 axis should be"
                f" {name}, {first.ndim}, {first.shape[1:]}, but got name: {other}, dimension length: {data.ndim}, shape"
                f" except 0 axis: {data.shape[1:]} at index {index}."
            )
    return slices


def _slice(parameter: Any, index: int) -> SlicedParameter:
    data: Any = getattr(parameter, "data", None)
    if hasattr(data, "asnumpy"):
        data = data.asnumpy()
    if not isinstance(data, np.ndarray) or not hasattr(parameter, "name"):
        raise TypeError(
            f"{_FUNCTION} the element in 'sliced_parameters' should be 'Parameter', but got {type(parameter)} at index"
            f" {index}."
        )
    return SlicedParameter(parameter.name, data)


def _widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _layout(value: Any) -> ParallelLayout:
    if isinstance(value, ParallelLayout):
        return value
    if isinstance(value, StrategyLayout):
        return from_strategy_layout(value)
    try:
        layout = StrategyLayout(
            name="",
            device_matrix=tuple(value.dev_matrix[0].dim),
            tensor_maps=tuple(tuple(one.dim) for one in value.tensor_map),
            param_split_shape=tuple(value.param_split_shape[0].dim),
            field=int(value.field),
        )
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{error}. {_FUNCTION} please make sure that 'strategy' is correct."
        ) from error
    return from_strategy_layout(layout)


def _merged(slices: Sequence[np.ndarray], layout: ParallelLayout) -> np.ndarray:
    if len(slices) != layout.device_count:
        raise ValueError(
            f"{_FUNCTION} the length of 'sliced_parameters' should be equal to device_count. The length of"
            f" 'sliced_parameters' is {len(slices)}, but device_count is {layout.device_count}."
        )
    first = slices[0]
    is_even = all(one.shape == first.shape for one in slices)
    if not is_even and not layout.split_rows and layout.shape is None:
        raise ValueError(
            f"{_FUNCTION} the shape of every parameter in 'sliced_parameters' should be the same when slice manner is"
            " even."
        )
    if layout.field_size and not layout.split_rows:
        return _merged_fields(slices, layout.field_size)
    layout = replace(_fitted(layout, first), opt_shard_size=0)
    count = prod(layout.pieces)
    if layout.split_rows and len(layout.split_rows) != count:
        raise ValueError(
            f"{_FUNCTION} the param_split_shape length in 'strategy' should be {count}, but got"
            f" {len(layout.split_rows)}."
        )
    whole = np.empty(full_shape(layout, first.shape), first.dtype)
    for device, data in enumerate(slices):
        region = region_of(layout, device, whole.shape)
        wanted = tuple(one.length for one in region)
        if data.shape != wanted:
            raise ValueError(
                f"{_FUNCTION} the slice of device {device} should have the shape {wanted}, but got {data.shape}."
            )
        whole[tuple(slice(*one) for one in region)] = data
    return whole


def _fitted(layout: ParallelLayout, first: np.ndarray) -> ParallelLayout:
    if layout.shape is not None:
        return layout
    return replace(for_shape(layout, first.shape), shape=None)


def _merged_fields(slices: Sequence[np.ndarray], field_size: int) -> np.ndarray:
    """Join the slices of an embedding table of several fields, field by field."""
    first = slices[0]
    if (
        first.ndim != 2
        or first.shape[0] % field_size
        or any(s.shape != first.shape for s in slices)
    ):
        raise LayoutError(
            f"an embedding table of {field_size} fields needs equal slices of two dimensions and that many rows each,"
            f" not {list(first.shape)}"
        )
    fields = [one.reshape(field_size, -1, first.shape[1]) for one in slices]
    return np.concatenate(fields, axis=1).reshape(-1, first.shape[1])
