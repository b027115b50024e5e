# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (without Keras pyright takes this folder for it)
"""What a model holds beside its variables: optimizers under any name, buffers, settings of its layers.

Keras has one optimizer, that of `compile`. A model with its own `train_step` holds others as its
attributes, which Keras neither lists nor saves, and which may be built only when they are first used.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import keras

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.integrations.keras.variables import (
    class_name,
    other_model,
    pairs_of,
    values_of,
    without_numbers,
)

OF_COMPILE = "optimizer"
"""Path of the optimizer of `compile`."""
_MOST_SHOWN = 8


def parts_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers and optimizers that a model holds, each once, by paths of attributes."""
    seen: set[int] = set()
    waiting = [("", model)]
    for path, one in waiting:  # which grows
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, keras.Layer | keras.optimizers.Optimizer) or _is_of_torch(one):
            yield path, one
        if isinstance(one, keras.Layer):
            waiting += [(f"{path}.{name}".lstrip("."), value) for name, value in vars(one).items()]
        elif isinstance(one, dict):
            waiting += [(f"{path}[{key!r}]", value) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            waiting += [(f"{path}[{index}]", value) for index, value in enumerate(one)]


def _is_of_torch(one: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(one, torch.optim.Optimizer)


class Optimizers:
    """The optimizers of a model, of which some may not be built yet."""

    def __init__(self) -> None:
        self._late: dict[str, _Late] = {}

    def states(self, model: Any) -> dict[str, dict[str, Any]]:
        """Return the class and the variables of each optimizer by its path."""
        return {
            path: {
                "class": class_name(one),
                "variables": late.values()
                if (late := self._late.get(path))
                else values_of(one.variables),
            }
            for path, one in optimizers_of(model).items()
        }

    def restorers(self, model: Any, stored: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        """Compare the optimizers with stored ones; return the variables with their values.

        Those of an optimizer that is not built yet get theirs when it is built.

        Raises:
            StateMismatch: There are others, of another class, or with other variables.
            UnsupportedState: The model holds an optimizer that is none of Keras.
        """
        found = optimizers_of(model)
        problems = [
            f"{path}: is an optimizer that is not stored" for path in found if path not in stored
        ]
        problems += [
            f"{path}: is an optimizer that is stored only" for path in stored if path not in found
        ]
        for path in found.keys() & stored.keys():
            given, before = class_name(found[path]), stored[path]["class"]
            if before not in (None, given):
                problems.append(f"{path}: is {given}, stored are the variables of {before}")
        if problems:
            raise other_model(problems)
        pairs = []
        for path, one in found.items():
            values = stored[path]["variables"]
            if one.built or len(values) == len(one.variables):
                pairs += pairs_of(path, one.variables, values)
            else:
                late = self._late[path] = _Late(path, one, values, self._late)
                pairs += late.early
        return pairs


class _Late:
    """An optimizer that has stored variables before it is built."""

    def __init__(
        self, path: str, optimizer: Any, stored: Mapping[str, Any], waiting: dict[str, _Late]
    ) -> None:
        self._path, self._optimizer, self._stored = path, optimizer, stored
        self._waiting = waiting
        counted = Counter(map(without_numbers, stored))
        by_name = {without_numbers(name): name for name in stored}
        self._names = {
            by_name[name]: one
            for one in optimizer.variables
            if counted[name := without_numbers(one.path)] == 1
        }
        self.early = [(one, stored[name]) for name, one in self._names.items()]
        vars(optimizer).pop("build", None)  # of an earlier restore
        self._build = optimizer.build
        optimizer.build = self._build_with_values

    def values(self) -> dict[str, Any]:
        """Return the variables: of those that exist the present values."""
        return {
            **self._stored,
            **dict(zip(self._names, values_of([*self._names.values()]).values(), strict=True)),
        }

    def _build_with_values(self, variables: Any) -> None:
        del self._optimizer.build, self._waiting[self._path]
        self._build(variables)
        early = {id(one) for one in self._names.values()}
        for variable, value in pairs_of(self._path, self._optimizer.variables, self._stored):
            if id(variable) not in early:
                variable.assign(value)


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return the optimizers by their paths; raise UnsupportedState for one of torch."""
    first = getattr(model, "optimizer", None)
    found, known = {} if first is None else {OF_COMPILE: first}, {id(first)}
    for path, one in parts_of(model):
        if _is_of_torch(one):
            raise UnsupportedState(
                f"the model holds a {type(one).__name__} of torch as {path}, whose state KerasCheckpoints does not save",
                hint="use an optimizer of keras.optimizers",
            )
        if isinstance(one, keras.optimizers.Optimizer) and id(one) not in known:
            found[path] = one
    return found


def buffers_of(model: Any) -> dict[str, Any]:
    """Return the buffers of modules of torch in a model, such as the means of its BatchNorm."""
    if keras.backend.backend() != "torch":
        return {}
    wrapper = keras.layers.TorchModuleWrapper
    modules = {path: one for path, one in parts_of(model) if isinstance(one, keras.Layer)}
    modules |= {
        f"{path}.module": one.module for path, one in modules.items() if isinstance(one, wrapper)
    }
    return {
        f"{path}.{name}": buffer
        for path, one in modules.items()
        for name, buffer in one.named_buffers(recurse=path.endswith(".module"))
    }


def pairs_of_buffers(model: Any, stored: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Return the buffers with their values, as tensors; raises as `pairs_of`."""
    found = buffers_of(model)
    problems = [
        f"buffers: {name} is {_shown(found, name)}, stored is {_shown(stored, name)}"
        for name in {**found, **stored}
        if _shown(found, name) != _shown(stored, name)
    ]
    if problems:
        raise other_model(problems)
    return [(one, keras.ops.convert_to_tensor(stored[name])) for name, one in found.items()]


def _shown(arrays: Mapping[str, Any], name: str) -> str:
    return f"of shape {tuple(arrays[name].shape)}" if name in arrays else "none"


def settings_of(model: Any) -> list[dict[str, Any]]:
    """Return for each layer its name, whether it is trained, and its dtype policy."""
    return [
        {"layer": one.name, "trainable": bool(one.trainable), "dtype": one.dtype_policy.name}
        for _, one in parts_of(model)
        if isinstance(one, keras.Layer)
    ]


def warn_of_settings(model: Any, stored: list[dict[str, Any]]) -> None:
    """Warn of layers that have other settings than those that were saved."""
    found = settings_of(model)
    changed = [
        f"{here['layer']}: {name} is {here[name]}, saved was {there[name]}"
        for here, there in zip(found, stored, strict=False)
        for name in ("trainable", "dtype")
        if without_numbers(here["layer"]) == without_numbers(there["layer"])
        and here[name] != there[name]
    ]
    if changed:
        more = [f"and {len(changed) - _MOST_SHOWN} more"] if len(changed) > _MOST_SHOWN else []
        warnings.warn(
            f"layers differ from those of the saved run: {'; '.join([*changed[:_MOST_SHOWN], *more])}; if that is not meant,"
            " set them before fit",
            stacklevel=4,
        )
