# SPDX-License-Identifier: Apache-2.0
"""Steps of a restore: planned from the target, outside in; carried out from the parts to the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ckptmgr.state.paths import Path

Visit = tuple[Any, Any, Path]
"""A value still to be compared with its stored value: target, stored value, path."""


class Value(NamedTuple):
    """A restored value that is known before anything is restored."""

    value: object


class Step(NamedTuple):
    """Replaces the last `takes` restored values with the container of these parts."""

    takes: int
    make: Callable[[list[Any]], object]


class Parts(NamedTuple):
    """The visits to a container's parts, and the step after them."""

    visits: list[Visit]
    step: Step


Plan = Value | Step | Parts


def restored_by(steps: Iterable[Step | Value]) -> object:
    """Carry out the steps in order; return the restored value of the last one."""
    values: list[Any] = []
    for step in steps:
        if isinstance(step, Value):
            values.append(step.value)
            continue
        first = len(values) - step.takes
        parts = values[first:]
        del values[first:]
        values.append(step.make(parts))
    return values[0]
