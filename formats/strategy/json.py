# SPDX-License-Identifier: Apache-2.0
"""Strategy files in JSON: the keys of the protobuf messages, with items as objects by name.

A tensor map is a list of axes, or where several axes split one dimension, a list of lists.

Source: `_build_json_strategy` in `parallel/_parallel_serialization.py` of MindSpore 2.10.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import FormatError
from ..strict_json import encode_object, parse_object
from .values import (
    OperatorStrategy,
    Strategy,
    StrategyLayout,
    check_layout,
    check_operator,
    check_unsigned,
)

_WHAT = "strategy file"


def read_json(data: bytes) -> Strategy:
    """Return the strategy in a JSON object."""
    top = parse_object(data, what=_WHAT, offset=0)
    operators = _object(top.get("parallel_strategy_item", {}), "parallel_strategy_item")
    layouts = _object(top.get("parallel_layout_item", {}), "parallel_layout_item")
    return Strategy(
        layouts=tuple(_layout(name, value) for name, value in layouts.items()),
        operators=tuple(_operator(name, value) for name, value in operators.items()),
        current_stage=check_unsigned(_number(top, "current_stage", ""), what="current_stage"),
    )


def write_json(strategy: Strategy) -> bytes:
    """Return a strategy as a JSON object."""
    return encode_object(
        {
            "current_stage": strategy.current_stage,
            "parallel_strategy_item": {
                one.name: {"stage": one.stage, "parallel_strategy": [*map(list, one.strategy)]}
                for one in strategy.operators
            },
            "parallel_layout_item": {one.name: _layout_object(one) for one in strategy.layouts},
        },
        what=_WHAT,
    )


def _layout_object(layout: StrategyLayout) -> dict[str, object]:
    maps = layout.tensor_maps
    return {
        "dev_matrix": list(layout.device_matrix),
        "tensor_map": list(maps[0]) if len(maps) == 1 else [*map(list, maps)],
        "param_split_shape": list(layout.param_split_shape),
        "indices_offset": list(layout.indices_offset),
        "field": layout.field,
        "opt_weight_shard_step": layout.opt_weight_shard_step,
        "opt_weight_shard_size": layout.opt_weight_shard_size,
    }


def _operator(name: str, value: object) -> OperatorStrategy:
    item = _object(value, name)
    pieces = item.get("parallel_strategy", [])
    if not isinstance(pieces, list):
        raise FormatError("parallel_strategy is not a list", tensor=name)
    operator = OperatorStrategy(
        name=name,
        stage=_number(item, "stage", name),
        strategy=tuple(_numbers(one, "parallel_strategy", name) for one in pieces),
    )
    return check_operator(operator)


def _layout(name: str, value: object) -> StrategyLayout:
    item = _object(value, name)
    layout = StrategyLayout(
        name=name,
        device_matrix=_numbers(item.get("dev_matrix"), "dev_matrix", name),
        tensor_maps=_tensor_maps(item.get("tensor_map"), name),
        param_split_shape=_numbers(item.get("param_split_shape", []), "param_split_shape", name),
        indices_offset=_numbers(item.get("indices_offset", []), "indices_offset", name),
        field=_number(item, "field", name),
        opt_weight_shard_step=_number(item, "opt_weight_shard_step", name),
        opt_weight_shard_size=_number(item, "opt_weight_shard_size", name),
    )
    return check_layout(layout)


def _tensor_maps(value: object, name: str) -> tuple[tuple[int, ...], ...]:
    if isinstance(value, list) and any(isinstance(axes, list) for axes in value):
        # A dimension may be a plain number among lists; a map of one dimension needs a second,
        # empty one to be distinguished.
        return tuple(
            _numbers(axes if isinstance(axes, list) else [axes], "tensor_map", name)
            for axes in value
        )
    return (_numbers(value, "tensor_map", name),)


def _object(value: object, what: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise FormatError(f"{what!r} in the {_WHAT} is not an object")
    return value


def _number(item: Mapping[str, object], key: str, name: str) -> int:
    value = item.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise FormatError(f"{key} is {type(value).__name__} instead of int", tensor=name or None)
    return value


def _numbers(value: object, key: str, name: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise FormatError(f"{key} is {type(value).__name__} instead of a list", tensor=name)
    for number in value:
        if not isinstance(number, int) or isinstance(number, bool):
            raise FormatError(f"{key} holds {type(number).__name__} instead of int", tensor=name)
    return tuple(value)
