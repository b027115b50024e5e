# SPDX-License-Identifier: Apache-2.0
"""Into an existing state: compare first, then fill.

Comparing names every difference and plans what to do; only a plan without differences is carried out. Random number
generators come last, because loading other objects may draw from them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from ckptmgr.errors import UnsupportedState
from ckptmgr.leaves import framework_of, is_instance_by_name
from ckptmgr.tree_nodes import MAX_DEPTH, Path, StateMismatch, encode_atom

Apply = Callable[[], object]

_SHOWN_DIFFERENCES = 20
_PLAIN = (str, bytes, bool, int, float, complex, type(None), np.generic)


class Restorer:
    """Compares one state with what was stored and fills it; see `tree.restore`."""

    def __init__(self) -> None:
        self._differences: list[str] = []
        self._generators: list[Apply] = []

    def run(self, target: object, stored: object) -> object:
        """Return the restored state.

        Raises:
            StateMismatch: The two differ in structure, shape or type; nothing was changed.
            UnsupportedState: The target is nested too deep.
        """
        try:
            apply = self._plan(target, stored, Path(), 0)
        except RecursionError:
            raise UnsupportedState("the state is nested too deep to restore into") from None
        if self._differences:
            raise _mismatch(self._differences)
        restored = apply()
        for set_state in self._generators:
            set_state()
        return restored

    def _differ(self, path: Path, problem: str) -> Apply:
        self._differences.append(f"{path} {problem}")
        return lambda: None

    def _plan(self, target: Any, stored: Any, path: Path, depth: int) -> Apply:
        """Return what will restore `target` and give the value that takes its place."""
        if depth > MAX_DEPTH:
            raise UnsupportedState(f"{path} is nested more than {MAX_DEPTH} deep")
        if target is None:
            return lambda: stored
        if framework_of(target) is not None and not isinstance(target, np.generic):
            return self._plan_array(target, stored, path)
        if callable(getattr(target, "load_state_dict", None)) and not isinstance(target, type):
            return self._plan_object(target, stored, path)
        if _is_generator(target):
            return self._plan_generator(target, stored, path)
        match target:
            case MutableMapping():
                return self._plan_mapping(target, stored, path, depth)
            case list() | tuple() if not _is_atom(target):
                return self._plan_sequence(target, stored, path, depth)
            case set() | bytearray() if type(stored) is type(target):
                return lambda: _refill(target, stored)
            case frozenset() if isinstance(stored, frozenset):
                return lambda: stored
        if _is_atom(target) and _is_atom(stored):
            return lambda: stored
        return self._differ(path, f"is a {_kind(target)}, stored is {_kind(stored)}")

    def _plan_mapping(
        self, target: MutableMapping[Any, Any], stored: Any, path: Path, depth: int
    ) -> Apply:
        if not isinstance(stored, Mapping):
            return self._differ(path, f"is a {_kind(target)}, stored is {_kind(stored)}")
        for key in target.keys() - stored.keys():
            self._differ(path.key(key), "is not in the checkpoint")
        for key in stored.keys() - target.keys():
            self._differ(path.key(key), "is only in the checkpoint")
        parts: list[tuple[Any, Apply]] = []
        for key, value in stored.items():
            if key in target:
                parts.append((key, self._plan(target[key], value, path.key(key), depth + 1)))

        def apply() -> object:
            for key, part in parts:
                target[key] = part()
            return target

        return apply

    def _plan_sequence(self, target: Any, stored: Any, path: Path, depth: int) -> Apply:
        if not isinstance(stored, list | tuple) or isinstance(stored, list) != isinstance(
            target, list
        ):
            return self._differ(path, f"is a {_kind(target)}, stored is {_kind(stored)}")
        if len(target) != len(stored):
            if all(_is_history(value) for value in (*target, *stored)):
                return lambda: _replaced(target, stored)
            return self._differ(path, f"has {len(target)} elements, stored are {len(stored)}")
        parts: list[Apply] = []
        for index, value in enumerate(stored):
            parts.append(self._plan(target[index], value, path.index(index), depth + 1))

        def apply() -> object:
            return _replaced(target, list(map(_call, parts)))

        return apply

    def _plan_array(self, target: Any, stored: Any, path: Path) -> Apply:
        framework = framework_of(target)
        if framework == "torch":
            return self._plan_tensor(target, stored, path)
        if not isinstance(stored, np.ndarray):
            return self._differ(path, f"is {_described(target)}, stored is {_described(stored)}")
        if framework != "numpy":
            return self._plan_foreign(target, stored, path)
        if (target.shape, target.dtype) != (stored.shape, stored.dtype):
            return self._differ(path, f"is {_described(target)}, stored is {_described(stored)}")
        if not target.flags.writeable:
            return lambda: stored
        return lambda: _fill_array(target, stored)

    def _plan_tensor(self, target: Any, stored: Any, path: Path) -> Apply:
        if framework_of(stored) != "torch" or _signature(target) != _signature(stored):
            return self._differ(path, f"is {_described(target)}, stored is {_described(stored)}")
        if not _can_copy_into(target):
            return lambda: stored
        return lambda: _fill_tensor(target, stored)

    def _plan_foreign(self, target: Any, stored: np.ndarray, path: Path) -> Apply:
        if tuple(target.shape) != stored.shape:
            return self._differ(path, f"is {_described(target)}, stored is {_described(stored)}")
        if is_instance_by_name(target, "mindspore.common.tensor", "Tensor"):
            return lambda: _fill_mindspore(target, stored)
        return lambda: sys.modules["jax"].numpy.asarray(stored)

    def _plan_object(self, target: Any, stored: Any, path: Path) -> Apply:
        if not isinstance(stored, Mapping | list | tuple):
            return self._differ(path, f"is a {_kind(target)}, stored is {_kind(stored)}")
        torch_module = sys.modules.get("torch")
        if torch_module is not None and isinstance(target, torch_module.nn.Module):
            self._compare_module(target, stored, path.state_dict())
        return lambda: _load(target, stored, path)

    def _compare_module(self, target: Any, stored: Any, path: Path) -> None:
        current = target.state_dict()
        if not isinstance(stored, Mapping):
            self._differ(path, f"is a {_kind(current)}, stored is {_kind(stored)}")
            return
        for key in current.keys() - stored.keys():
            self._differ(path.key(key), "is not in the checkpoint")
        for key in stored.keys() - current.keys():
            self._differ(path.key(key), "is only in the checkpoint")
        for key in current.keys() & stored.keys():
            if framework_of(current[key]) == "torch":
                self._plan_tensor(current[key], stored[key], path.key(key))

    def _plan_generator(self, target: Any, stored: Any, path: Path) -> Apply:
        if _generator_kind(target) != _generator_kind(stored):
            return self._differ(
                path, f"is a {_generator_kind(target)}, stored is a {_generator_kind(stored)}"
            )
        self._generators.append(lambda: _set_generator(target, stored))
        return lambda: target


def _mismatch(differences: Sequence[str]) -> StateMismatch:
    shown = sorted(differences)[:_SHOWN_DIFFERENCES]
    if len(differences) > len(shown):
        shown.append(f"... and {len(differences) - len(shown)} more")
    return StateMismatch(
        "the checkpoint does not fit this state; nothing was changed:\n  " + "\n  ".join(shown),
        hint="build the same model and optimizer that was saved, or load the state without a target",
    )


def _is_atom(value: object) -> bool:
    if isinstance(value, bytearray):
        return False
    return encode_atom(value) is not None or type(value).__module__ == "torch"


def _is_history(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, list | tuple | dict) and not value)


def _kind(value: object) -> str:
    return _described(value) if framework_of(value) is not None else type(value).__qualname__


def _described(value: Any) -> str:
    if framework_of(value) is None:
        return f"a {type(value).__qualname__}"
    return f"{value.dtype}{list(value.shape)}"


def _signature(tensor: Any) -> tuple[object, ...]:
    return (tuple(tensor.shape), tensor.dtype, tensor.layout, tensor.is_quantized)


def _can_copy_into(tensor: Any) -> bool:
    import torch

    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and all(
            stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def _fill_array(target: np.ndarray, stored: np.ndarray) -> np.ndarray:
    np.copyto(target, stored, casting="no")
    return target


def _fill_tensor(target: Any, stored: Any) -> Any:
    import torch

    with torch.no_grad():
        return target.copy_(stored)


def _fill_mindspore(target: Any, stored: np.ndarray) -> Any:
    tensor_type = sys.modules["mindspore"].Tensor
    target.set_data(tensor_type(stored, target.dtype))
    return target


def _refill(target: Any, stored: Any) -> Any:
    if isinstance(target, bytearray):
        target[:] = stored
        return target
    target.clear()
    target.update(stored)
    return target


def _replaced(target: Any, values: Any) -> Any:
    if isinstance(target, list):
        target[:] = values
        return target
    if hasattr(target, "_fields"):
        return type(target)(*values)
    return tuple(values)


def _call(apply: Apply) -> object:
    return apply()


def _load(target: Any, stored: object, path: Path) -> object:
    try:
        target.load_state_dict(stored)
    except Exception as error:
        error.add_note(f"while restoring {path}; objects before it are already restored")
        raise
    return target


def _is_generator(value: object) -> bool:
    return bool(_generator_kind(value))


def _generator_kind(value: Any) -> str:
    torch_module = sys.modules.get("torch")
    match value:
        case np.random.Generator():
            return f"Generator({type(value.bit_generator).__name__})"
        case np.random.BitGenerator():
            return type(value).__name__
        case np.random.RandomState():
            return "RandomState"
        case random.Random():
            return "random.Random"
    if torch_module is not None and isinstance(value, torch_module.Generator):
        return f"torch.Generator({value.device})"
    return ""


def _set_generator(target: Any, stored: Any) -> None:
    match target:
        case np.random.Generator():
            target.bit_generator.state = stored.bit_generator.state
        case np.random.BitGenerator():
            target.state = stored.state
        case random.Random():
            target.setstate(stored.getstate())
        case _:
            target.set_state(stored.get_state())
