# SPDX-License-Identifier: Apache-2.0
"""The parts of a state: what may be filled in place, and how, for each kind of object in its own way."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ckptmgr.state.paths import Path


def local_part(tensor: Any) -> Any:
    """Return what a DTensor holds here; every other tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    import torch

    with torch.no_grad():
        return tensor.to_local()


def holds_slices(target: Any) -> bool:
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


def signature_of(tensor: Any) -> tuple[object, ...]:
    """Return what must be the same for the elements of one tensor to be copied into another."""
    return (tuple(tensor.shape), tensor.dtype, tensor.layout, tensor.is_quantized)


def can_copy_into(tensor: Any) -> bool:
    """Return whether the elements of a torch tensor can be written in place."""
    import torch

    return (
        tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_meta
        and all(
            stride or size < 2 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    )


def fill_array(target: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Copy what was stored into an array, and return the array."""
    np.copyto(target, stored, casting="no")
    return target


def fill_tensor(target: Any, stored: Any) -> Any:
    """Copy what was stored into a torch tensor, and return the tensor."""
    import torch

    with torch.no_grad():
        return target.copy_(stored)


def fill_mindspore(target: Any, stored: np.ndarray) -> Any:
    """Copy what was stored into a tensor or a parameter of MindSpore, and return that."""
    tensor_type = sys.modules["mindspore"].Tensor
    fill = target.set_data if hasattr(target, "set_data") else target.assign_value
    fill(tensor_type(stored, target.dtype))
    return target


def refill(target: Any, stored: Any) -> Any:
    """Give a set or a bytearray the content of another one, and return it."""
    if isinstance(target, bytearray):
        target[:] = stored
        return target
    target.clear()
    target.update(stored)
    return target


def replaced(target: Any, values: Any) -> Any:
    """Return a sequence with these values: a list is the same one, a tuple a new one of the same type."""
    if isinstance(target, list):
        target[:] = values
        return target
    if hasattr(target, "_fields"):
        return type(target)(*values)
    return tuple(values)


def load_into(target: Any, stored: object, path: Path) -> object:
    """Let an object take what was stored as its state, and return the object; an error names its place in the state."""
    try:
        target.load_state_dict(stored)
    except Exception as error:
        error.add_note(f"while restoring {path}; objects before it are already restored")
        raise
    return target
