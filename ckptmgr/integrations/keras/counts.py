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

from ckptmgr.state.paths import mismatch

_PLAIN = (bool, int, float, str, np.ndarray, np.generic, type(None))
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
    """Give callbacks their counts; raise StateMismatch for another number of callbacks."""
    if len(callbacks) != len(stored):
        raise mismatch(
            "this fit",
            [f"counting= has {len(callbacks)} callbacks, and {len(stored)} were saved"],
            hint="pass the same callbacks to CheckpointCallback(..., counting=[...])",
        )
    for one, counts in zip(callbacks, stored, strict=True):
        for name, value in counts.items():
            setattr(one, name, value)


def _settings(callback: object) -> set[str]:
    kinds = (vars(kind).get("__init__") for kind in type(callback).__mro__)
    constructors = [inspect.signature(one) for one in kinds if one is not None]
    return _OF_KERAS.union(*(one.parameters for one in constructors))


def _is_plain(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, _PLAIN) for one in value)
    return isinstance(value, _PLAIN)
