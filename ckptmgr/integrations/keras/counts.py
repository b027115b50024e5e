# SPDX-License-Identifier: Apache-2.0
"""What callbacks of Keras count, such as `wait` and `best` of `EarlyStopping`.

Keras has no state of callbacks. So their public attributes are stored, as far as they are numbers,
texts, arrays, or lists of them. Those that are parameters of the constructor are not: Keras changes
the sign of `min_delta` in each run.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptmgr.state.paths import StateMismatch, mismatch

_PLAIN = (bool, int, float, str, np.ndarray, np.generic, type(None))
_NUMBERS = (int, float, np.number, np.bool_)
_OF_KERAS = {"model", "params"}


def counts_of(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return copies of what callbacks count."""
    return [
        {
            name: list(value) if isinstance(value, list) else value
            for name, value in vars(one).items()
            if not name.startswith("_") and name not in _settings(one) and _is_plain(value)
        }
        for one in callbacks
    ]


def put_counts(callbacks: Sequence[Any], stored: Sequence[Mapping[str, Any]]) -> None:
    """Give callbacks their counts, and set nothing else.

    Raises:
        StateMismatch: They are of another number of callbacks, or of another kind.
    """
    if len(callbacks) != len(stored):
        raise _mismatch([f"counting= has {len(callbacks)} callbacks, and {len(stored)} were saved"])
    held = counts_of(callbacks)
    problems = [
        f"counting= {type(one).__name__}.{name} is {_shown(counts, name)}, stored is a {type(value).__name__}"
        for one, counts, saved in zip(callbacks, held, stored, strict=True)
        for name, value in saved.items()
        if name not in counts or not _fits(counts[name], value)
    ]
    if problems:
        raise _mismatch(problems)
    for one, counts in zip(callbacks, stored, strict=True):
        for name, value in counts.items():
            setattr(one, name, value)


def _mismatch(problems: list[str]) -> StateMismatch:
    hint = "pass the same callbacks to KerasCheckpoints(..., counting=[...])"
    return mismatch("this fit", problems, hint=hint)


def _shown(counts: Mapping[str, Any], name: str) -> str:
    return f"a {type(counts[name]).__name__}" if name in counts else "no count of it"


def _fits(held: object, stored: object) -> bool:
    """Return whether a stored value may replace one; many counts are None at first, or infinite."""
    if not _is_plain(stored):
        return False
    if held is None or stored is None:
        return not isinstance(held or stored, str)
    both_numbers = isinstance(held, _NUMBERS) and isinstance(stored, _NUMBERS)
    return both_numbers or type(held) is type(stored)


def _settings(callback: object) -> set[str]:
    kinds = (vars(kind).get("__init__") for kind in type(callback).__mro__)
    constructors = [inspect.signature(one) for one in kinds if one is not None]
    return _OF_KERAS.union(*(one.parameters for one in constructors))


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)
