# SPDX-License-Identifier: Apache-2.0
"""Checks of types, and of the counts, metrics and states that a training loop passes in."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import TypeGuard, TypeVar

_COUNT_BITS = 63
_T = TypeVar("_T")


def check_type(name: str, value: object, wanted: type[_T]) -> _T:
    """Return a value of the wanted type; a wrong type is a ValueError, as in MindSpore."""
    if not isinstance(value, wanted):
        # Bytes may be the key in the wrong place.
        is_secret = isinstance(value, bytes | bytearray | memoryview)
        shown = f"<redacted {type(value).__name__}>" if is_secret else value
        raise ValueError(  # noqa: TRY004 - the type that MindSpore raises
            f"The parameter '{name}' must be isinstance of {wanted}, but got {shown}."
        )
    return value


def check_is_bool(name: str, value: object) -> bool:
    """Return a bool; a wrong type is a ValueError, unlike in MindSpore."""
    return check_type(name, value, bool)


def no_effect(option: str, where: str, why: str) -> ValueError:
    """Return the error about an option without effect somewhere, which says what to do instead."""
    return ValueError(f"{option} has no effect {where}: {why}")


def checked_count(name: str, count: int) -> int:
    """Return a step or epoch, also a NumPy integer, as an int of at most 63 bits."""
    try:
        number = operator.index(count)
    except TypeError:
        number = -1
    if number.bit_length() > _COUNT_BITS:  # Python refuses to print the longest
        raise ValueError(f"the {name} has more than {_COUNT_BITS} bits")
    if number < 0 or isinstance(count, bool):
        raise ValueError(f"the {name} is an integer from 0 on, but got {count!r}")
    return number


def checked_epoch(epoch: int | None) -> int | None:
    """Return an epoch as an int, or None."""
    return None if epoch is None else checked_count("epoch", epoch)


def checked_interval(name: str, interval: int) -> int:
    """Return a number of steps or copies, at least 1."""
    number = checked_count(name, interval)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, but got {interval}")
    return number


def checked_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as plain floats; raise TypeError for anything else."""
    _check_is_mapping(metrics)
    checked = {}
    for name, value in (metrics or {}).items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _not_a_number(name, value) from None
    return checked


def check_metrics(metrics: Mapping[str, float] | None) -> None:
    """Raise TypeError for unusable metrics, without a wait for a device that computes one."""
    _check_is_mapping(metrics)
    for name, value in (metrics or {}).items():
        shape = getattr(value, "shape", None)
        if not isinstance(shape, tuple):
            checked_metrics({name: value})
        elif math.prod(shape) != 1:
            raise _not_a_number(name, value)


def _check_is_mapping(metrics: object) -> None:
    if metrics is not None and not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics must be a mapping of names to numbers, but got {type(metrics).__name__}"
        )


def _not_a_number(name: str, value: object) -> TypeError:
    shape = getattr(value, "shape", None)
    of_shape = f" of shape {shape}" if shape else ""
    return TypeError(f"metric {name!r} must be a number, but got {type(value).__name__}{of_shape}")


def resolve_state(state: object) -> object:
    """Return the state, or the result of a function that returns it."""
    return state() if is_function(state) else state


def is_function(state: object) -> TypeGuard[Callable[[], object]]:
    """Return whether a state is given as a function; a model is callable but has `state_dict`."""
    return callable(state) and not hasattr(state, "state_dict")
