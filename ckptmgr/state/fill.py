# SPDX-License-Identifier: Apache-2.0
"""In-place filling of a state's objects, and the check that no memory or object gets two values."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.core.notes import add_note
from ckptmgr.state.flatten import Flattener
from ckptmgr.state.optimizers import keep_stored_types
from ckptmgr.state.overlaps import bytes_for, conflicts, overlapping_targets
from ckptmgr.state.paths import Path, Place


def local_part(tensor: Any) -> Any:
    """Return the local part of a DTensor; every other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    import torch

    with torch.no_grad():
        return tensor.to_local()


def has_dtensors(target: Any) -> bool:
    """Return whether a torch module or optimizer has DTensors for parameters."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    parameters: list[Any] = []
    if isinstance(target, torch.nn.Module):
        parameters = list(target.parameters())
    elif isinstance(target, torch.optim.Optimizer):
        parameters = [one for group in target.param_groups for one in group["params"]]
    return any(hasattr(one, "to_local") for one in parameters)


def are_alike(one: Any, other: Any) -> bool:
    """Return whether two torch tensors have the same shape, type and layout."""
    return bool(
        one.dtype is other.dtype and one.layout is other.layout and one.shape == other.shape
    )


def can_copy_into(tensor: Any) -> bool:
    """Return whether a torch tensor has a separate place for each element (no stride of 0)."""
    import torch

    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and (
            tensor.is_contiguous()
            or all(
                stride or size < 2
                for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
        )
    )


def takes_directly(target: Any, stored: Any) -> bool:
    """Return whether a plain array or tensor certainly takes the elements of a stored one as they are.

    Most do. False means that they are still to be compared.
    """
    kind = type(target)
    if kind is np.ndarray:
        return (
            type(stored) is np.ndarray
            and target.dtype == stored.dtype
            and target.shape == stored.shape
            and target.flags.writeable
        )
    torch = sys.modules.get("torch")
    if torch is None or (kind is not torch.Tensor and kind is not torch.nn.Parameter):
        return False
    return (
        (type(stored) is torch.Tensor or type(stored) is torch.nn.Parameter)
        and are_alike(target, stored)
        and target.layout is torch.strided
        and target.is_cpu
        and target.is_contiguous()
        and not target.is_quantized
    )


def fill_mindspore(target: Any, stored: np.ndarray) -> Any:
    """Copy a stored array into a tensor or parameter of MindSpore, and return that."""
    tensor_type = sys.modules["mindspore"].Tensor
    fill = target.set_data if hasattr(target, "set_data") else target.assign_value
    fill(tensor_type(stored, target.dtype))
    return target


def replace_content(target: Any, stored: Any) -> Any:
    """Give a set, a bytearray or a BytesIO the content of another one, and return it."""
    if isinstance(target, io.BytesIO):
        target.seek(0)
        target.write(stored.getvalue())
        target.truncate()
        target.seek(stored.tell())
        return target
    if isinstance(target, bytearray):
        target[:] = stored
        return target
    target.clear()
    target.update(stored)
    return target


def with_values(target: Any, values: Any) -> Any:
    """Return a sequence with these values: the same list or deque, or a new tuple of its type."""
    if isinstance(target, list):
        target[:] = values
        return target
    if isinstance(target, deque):
        values = list(values)  # they may be those of the target
        target.clear()
        target.extend(values)
        return target
    if hasattr(target, "_fields"):
        return type(target)(*values)
    return tuple(values)


def load_object(target: Any, stored: object, path: Path) -> object:
    """Call `load_state_dict` of an object, and return the object; an error names its path."""
    try:
        target.load_state_dict(stored)
        if isinstance(stored, Mapping):
            keep_stored_types(target, stored)
    except Exception as error:
        add_note(error, f"while restoring {path}; objects before it are already restored")
        raise
    return target


class Fill(NamedTuple):
    """A stored array or torch tensor, and its target of the same shape and type."""

    target: Any
    stored: Any
    place: Place
    via_load_state_dict: bool = False  # the module that owns the target copies it

    @property
    def path(self) -> Path:
        """The path of the target in the state."""
        return Path(*self.place)


def fill_all(fills: Iterable[Fill]) -> None:
    """Copy stored arrays and tensors into their targets, but those that `load_state_dict` copies."""
    torch = sys.modules.get("torch")
    with contextlib.nullcontext() if torch is None else torch.no_grad():
        for target, stored, _, via_load_state_dict in fills:
            if isinstance(target, np.ndarray):
                np.copyto(target, stored, casting="no")
            elif not via_load_state_dict:
                target.copy_(stored)


class SharedTargets:
    """The objects that are to be filled, and the check that none gets two values.

    Args:
        read_contents: Called with a stored value before the contents of its arrays are compared.

    Attributes:
        has_overlaps: Whether targets share memory, or may; known once `problems` returned.
    """

    def __init__(self, *, read_contents: Callable[[Any], None]) -> None:
        self._read_contents = read_contents
        self.has_overlaps = True
        self._objects: dict[object, tuple[Path, object, Any]] = {}

    def add_object(self, key: object, target: object, stored: Any, path: Path) -> str | None:
        """Add an object that is to be filled; return the conflict with an earlier one, or None.

        Targets with the same `key` are one object. The target is held, so that its id stays its
        own.
        """
        other, _, first = self._objects.setdefault(key, (path, target, stored))
        if first is stored:
            return None
        self._read_contents([first, stored])
        if _are_equal(first, stored):
            return None
        return f"is the same object as {other}, stored are two different values"

    def problems(self, fills: Sequence[Fill]) -> list[str]:
        """Return the conflicts between fills, each after its path."""
        targets = dict(enumerate([one.target for one in fills]))
        self.has_overlaps = bool(overlapping_targets(targets))
        if not self.has_overlaps:
            return []
        stored = dict(enumerate([one.stored for one in fills]))
        found = conflicts(targets, stored, self._read_contents)
        return [
            f"{fills[one.later].path} {one.naming(lambda index: str(fills[index].path))}"
            for one in found
        ]


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two stored values are equal bit for bit: NaN equals itself."""
    if isinstance(one, np.ndarray):
        return np.array_equal(bytes_for(one, one), bytes_for(one, other))
    (tensors, skeleton, _), (others, other_skeleton, _) = (
        Flattener().run(value) for value in (one, other)
    )
    return skeleton == other_skeleton and all(
        mine.spec == its.spec and mine.content() == its.content()
        for mine, its in zip(tensors, others, strict=True)
    )
