# SPDX-License-Identifier: Apache-2.0
"""MindSpore parallel strategy files: how each parameter of a network is cut over devices.

Two spellings of one message: protobuf (`.ckpt`) and JSON (`.json`), which the first byte shows.
A file describes one pipeline stage, or all of them merged; in a merged file every parameter is
called `STAGE-name`.

* Reading is strict and bounded: required fields come once, every axis a tensor map names exists and
  is used once, and numbers that would mean an absurd number of devices are refused before anything
  is multiplied out.
* Tensor maps count the axes of the device matrix from the right, from 0; -1 means "not split". A
  file has either one `TensorMap` with a number per tensor dimension, or one `TensorMap` per tensor
  dimension with the axes that split it.

Source: `node_strategy.proto` (package `mindspore.straspb`) and
`parallel/_parallel_serialization.py` of MindSpore 2.10.

>>> layout = StrategyLayout(name="w", device_matrix=(2, 4), tensor_maps=((0, -1),))
>>> layout.axes_by_dimension
((0,), ())
>>> strategy = Strategy(layouts=(layout,), operators=(OperatorStrategy(name="MatMul-op0", stage=0),))
>>> parse_strategy(encode_strategy(strategy, kind="json")) == strategy
True
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from ..errors import FormatError, TruncatedError
from ..strict_json import is_encodable
from .json import read_json, write_json
from .protobuf import read_group, read_protobuf, write_protobuf
from .values import (
    MAX_AXES,
    MAX_DEVICES,
    MAX_STRATEGY_BYTES,
    OperatorStrategy,
    Strategy,
    StrategyLayout,
    check_layout,
    check_operator,
    check_unique,
    check_unsigned,
)

__all__ = [
    "MAX_AXES",
    "MAX_DEVICES",
    "MAX_STRATEGY_BYTES",
    "OperatorStrategy",
    "Strategy",
    "StrategyLayout",
    "encode_strategy",
    "merge_stages",
    "parse_strategy",
    "read_restore_ranks",
    "split_stages",
]

StrategyKind = Literal["protobuf", "json"]

_STAGED = re.compile(r"(0|[1-9][0-9]{0,6})-(.+)", re.DOTALL)


def parse_strategy(data: bytes) -> Strategy:
    """Return the strategy in the bytes of a file, protobuf or JSON."""
    if not data:
        raise TruncatedError("the strategy file is empty", offset=0)
    if len(data) > MAX_STRATEGY_BYTES:
        raise FormatError(f"the strategy file has {len(data)} bytes; {MAX_STRATEGY_BYTES} fit")
    # As a protobuf tag, "{" would start a group, which no version of these messages has.
    return read_json(data) if data.startswith(b"{") else read_protobuf(data)


def encode_strategy(strategy: Strategy, *, kind: StrategyKind = "protobuf") -> bytes:
    """Return the bytes of a strategy file; FormatError for one that could not be read back."""
    check_unsigned(strategy.current_stage, what="current_stage")
    for operator in strategy.operators:
        check_operator(operator)
    parameters = [check_layout(layout).name for layout in strategy.layouts]
    check_unique(parameters, what="parameter")
    for name in parameters + [one.name for one in strategy.operators]:
        if not is_encodable(name):
            raise FormatError("the name holds a lone surrogate, not valid in UTF-8", tensor=name)
    if kind == "protobuf":
        return write_protobuf(strategy)
    check_unique([one.name for one in strategy.operators], what="operator")
    return write_json(strategy)


def read_restore_ranks(data: bytes) -> tuple[int, ...]:
    """Return the ranks that a checkpoint can be restored from, according to a group file."""
    if not data:
        raise TruncatedError("the group file is empty", offset=0)
    return read_group(data)


def merge_stages(strategies: Iterable[Strategy]) -> Strategy:
    """Join the strategies of pipeline stages as MindSpore does: parameters become `STAGE-name`.

    `current_stage` becomes 1. Files of the same stage are taken once.

    Raises:
        FormatError: A file has no operators or no parameters, or two files of one stage differ.
    """
    stages: dict[int, Strategy] = {}
    for strategy in strategies:
        if not strategy.operators or not strategy.layouts:
            raise FormatError("the strategy has no operators or no parameters; nothing to merge")
        known = stages.setdefault(strategy.stage, strategy)
        if known.layouts != strategy.layouts:
            raise FormatError(f"two different strategies are given for stage {strategy.stage}")
    operators: dict[str, OperatorStrategy] = {}
    for stage, strategy in sorted(stages.items()):
        for one in strategy.operators:
            name = one.name if one.name not in operators else f"{stage}-{one.name}"
            operators[name] = replace(one, name=name)
    return Strategy(
        layouts=tuple(
            replace(layout, name=f"{stage}-{layout.name}")
            for stage, strategy in sorted(stages.items())
            for layout in strategy.layouts
        ),
        operators=tuple(operators.values()),
        current_stage=1,
    )


def split_stages(strategy: Strategy) -> dict[int, tuple[StrategyLayout, ...]]:
    """Return the layouts of each pipeline stage, with the parameters' own names.

    A file counts as merged if every name starts with a number and a dash.

    Raises:
        FormatError: Stages are missing: not 0, 1, 2 ...
    """
    staged = [(one, match) for one in strategy.layouts if (match := _STAGED.fullmatch(one.name))]
    if not staged or len(staged) < len(strategy.layouts):
        return {0: strategy.layouts}
    stages: dict[int, list[StrategyLayout]] = {}
    for layout, match in staged:
        stages.setdefault(int(match[1]), []).append(replace(layout, name=match[2]))
    if sorted(stages) != list(range(len(stages))):
        raise FormatError(f"the merged strategy has the stages {sorted(stages)} only")
    return {stage: tuple(stages[stage]) for stage in sorted(stages)}
