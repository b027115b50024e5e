# SPDX-License-Identifier: Apache-2.0
"""What callbacks of Keras and of MindSpore count, such as `wait` and `best` of `EarlyStopping`.

Neither framework has a state of callbacks. So their public attributes are stored, as far as they
are numbers, texts, arrays, or lists and dicts of them. Those that are parameters of the constructor
are not: Keras changes the sign of `min_delta` in each run.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckptmgr.state.paths import StateMismatch, mismatch

_PLAIN = (bool, int, float, str, np.ndarray, np.generic, type(None))
_NUMBERS = int | float | np.number | np.bool_
_OF_FRAMEWORK = {"model", "params"}


def counts_of(callbacks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return copies of what callbacks count."""
    return [_counts_in(vars(one), one) for one in callbacks]


def _counts_in(attributes: Mapping[str, Any], callback: object) -> dict[str, Any]:
    settings = _settings(callback)
    return {
        name: _copied(value)
        for name, value in attributes.items()
        if not name.startswith("_") and name not in settings and _is_plain(value)
    }


def _first_counts(callback: object) -> dict[str, Any]:
    """Return what a callback counts, also from values of its class: `count = 0`."""
    kinds = [*reversed(type(callback).__mro__)]
    attributes = {name: value for kind in kinds for name, value in vars(kind).items()}
    return _counts_in({**attributes, **vars(callback)}, callback)


def put_counts(
    callbacks: Sequence[Any],
    stored: Sequence[Mapping[str, Any]],
    *,
    owner: str = "KerasCheckpoints",
) -> None:
    """Give callbacks their counts, and set nothing else.

    Raises:
        StateMismatch: They are of another number of callbacks, or of another kind.
    """
    if len(callbacks) != len(stored):
        problem = f"counting= has {len(callbacks)} callbacks, and {len(stored)} were saved"
        raise _mismatch([problem], owner)
    held = list(map(_first_counts, callbacks))
    problems = [
        f"counting= {type(one).__name__}.{name} is {_shown(counts, name)}, stored is a {type(value).__name__}"
        for one, counts, saved in zip(callbacks, held, stored, strict=True)
        for name, value in saved.items()
        if name not in counts or not _fits(counts[name], value)
    ]
    if problems:
        raise _mismatch(problems, owner)
    for one, counts in zip(callbacks, stored, strict=True):
        for name, value in counts.items():
            setattr(one, name, _copied(value))


def without(callbacks: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return the callbacks that are none of others."""
    known = {id(one) for one in others}
    return [one for one in callbacks if id(one) not in known]


def are_same(callbacks: Sequence[Any], stored: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether callbacks are of the classes that are stored as `class`; warn if they are not."""
    found, saved = [type(one).__name__ for one in callbacks], [one["class"] for one in stored]
    if found != saved:
        warnings.warn(
            f"the saved run had the callbacks [{', '.join(saved)}], and this one has [{', '.join(found)}]:"
            " their counts begin anew",
            stacklevel=4,
        )
    return found == saved


class Uncounted:
    """Warns once of callbacks that count, and whose counts are not saved.

    They are those whose numbers or arrays are others at the end of an epoch than at its beginning.

    Args:
        callbacks: Those whose counts are not saved.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = callbacks
        self._before: list[dict[str, Any]] = []

    def begin_epoch(self) -> None:
        """Note the counts."""
        self._before = counts_of(self._callbacks)

    def end_epoch(self) -> None:
        """Warn, if the first epoch has changed some."""
        changed = [
            f"{type(one).__name__}.{name}"
            for one, before, after in zip(
                self._callbacks, self._before, counts_of(self._callbacks), strict=False
            )
            for name, value in after.items()
            if _is_count(value) and not _is_equal(value, before.get(name))
        ]
        self._callbacks = []
        if changed:
            warnings.warn(
                f"{', '.join(changed)}: a resumed run begins anew with these numbers of callbacks;"
                " name the callbacks that count in counting=[...]",
                stacklevel=3,
            )


def _is_equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other)


def _is_count(value: object) -> bool:
    return isinstance(value, _NUMBERS | np.ndarray) and not isinstance(value, bool)


def _mismatch(problems: list[str], owner: str) -> StateMismatch:
    hint = f"pass the same callbacks to {owner}(..., counting=[...])"
    return mismatch("this training", problems, hint=hint)


def _shown(counts: Mapping[str, Any], name: str) -> str:
    return f"a {type(counts[name]).__name__}" if name in counts else "no count of it"


def _fits(held: object, stored: object) -> bool:
    """Return whether a stored value may replace one; many counts are None at first, or infinite."""
    if not _is_plain(stored):
        return False
    if held is None or stored is None:
        return not isinstance(held or stored, str)
    return (_is_number(held) and _is_number(stored)) or type(held) is type(stored)


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBERS) or (isinstance(value, np.ndarray) and value.ndim == 0)


def _settings(callback: object) -> set[str]:
    kinds = (vars(kind).get("__init__") for kind in type(callback).__mro__)
    constructors = [inspect.signature(one) for one in kinds if one is not None]
    return _OF_FRAMEWORK.union(*(one.parameters for one in constructors))


def _is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(_is_plain(one) for one in value)
    return isinstance(value, _PLAIN)


def _copied(value: Any) -> Any:
    """Return a copy of the lists and dicts in a value; arrays are copied where the state is."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value
