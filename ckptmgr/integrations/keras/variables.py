# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Keras pyright takes this folder for it)
"""Variables of Keras as arrays by their paths, and back.

Keras numbers names in the order in which a process makes objects: `dense_1`. So other numbers are
the same variables, in their order. Everything else that differs is an error: `set_state_tree` of
Keras leaves out paths that it does not know.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ckptmgr.state.paths import StateMismatch, mismatch

_NUMBER = re.compile(r"_\d+(?=[_/]|$)")


def global_seed() -> Any:
    """Return the variable of the seed generator of `keras.random`, made if there is none yet."""
    before = random.getstate()  # its seed is drawn from there
    with _Updates() as updates:
        keras.random.uniform(())
    random.setstate(before)
    return updates.found


class _Updates(keras.StatelessScope):  # type: ignore[misc, unused-ignore]
    """Notes the variable that a function updates, and does not update it."""

    found: Any = None

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Note the variable."""
        self.found = update[0]
        super().add_update(update)


def model_variables(model: Any) -> list[Any]:
    """Return the weights and other variables of a model, such as those of its seed generators.

    Their order is that of the layers, whether these are trained or not.
    """
    of_metrics = {id(one) for one in model.metrics_variables}
    return [one for one in model.variables if id(one) not in of_metrics]


def array_of(variable: Any) -> np.ndarray[Any, Any]:
    """Return the value of a variable; on a CPU it may be a view."""
    found: np.ndarray[Any, Any] = keras.ops.convert_to_numpy(variable.value)
    return found


def values_of(variables: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the values of variables by their paths; raise ValueError for two of one path."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for one in variables:
        if one.path in found:
            raise ValueError(f"two variables of the model are called {one.path}: name their layers")
        found[one.path] = array_of(one)
    return found


def pairs_of(
    part: str, variables: Sequence[Any], stored: Mapping[str, Any]
) -> list[tuple[Any, Any]]:
    """Return the variables with their values; numbers in names depend on layers made before."""
    found = {one.path: one for one in variables}
    if found.keys() != stored.keys():
        here, there = ({without_numbers(path): 0 for path in paths} for paths in (found, stored))
        problems = [f"{part}: {path} is not stored" for path in here if path not in there]
        problems += [f"{part}: {path} is stored only" for path in there if path not in here]
        if not problems and len(found) != len(stored):
            problems = [f"{part}: has {len(found)} variables, stored are {len(stored)}"]
        if problems:
            raise other_model(problems)
        pairs = list(zip(found.values(), stored.values(), strict=True))
    else:
        pairs = [(one, stored[path]) for path, one in found.items()]
    problems = [
        f"{part}: {one.path} has shape {tuple(one.shape)}, stored is {np.shape(value)}"
        for one, value in pairs
        if tuple(one.shape) != np.shape(value)
    ]
    if problems:
        raise other_model(problems)
    return pairs


def without_numbers(name: str) -> str:
    """Return a name or path without the numbers that depend on objects made before."""
    return _NUMBER.sub("", name)


def class_name(optimizer: Any) -> str:
    """Return the class of an optimizer, and of the one that it wraps, such as for a loss scale."""
    inner = getattr(optimizer, "inner_optimizer", None)
    name = type(optimizer).__name__
    return name if inner is None else f"{name} of {class_name(inner)}"


def other_model(problems: list[str]) -> StateMismatch:
    """Return the error of a model that is another than the saved one."""
    return mismatch("this model", problems, hint="build and compile the same model that was saved")
