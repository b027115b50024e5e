# SPDX-License-Identifier: Apache-2.0
"""The bytes of torch tensors: over their memory where they are contiguous and on the CPU.

Torch is imported only by functions that are given a tensor.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptmgr.formats.tensor import JOINERS, Tensor

if TYPE_CHECKING:
    import torch


def torch_bytes(value: torch.Tensor) -> memoryview:
    """Return a strided tensor in C order; a view when it is contiguous and on the CPU."""
    if not (value.is_cpu and value.is_contiguous()) or value.is_conj() or value.is_neg():
        value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return memoryview(_exposed(value)).cast("B")[: value.nbytes]


def _joined_tensors(tensors: Sequence[Tensor]) -> list[memoryview] | None:
    """Return the contents of tensors side by side; None if they are not all plain ones on the CPU."""
    import torch

    flat: list[torch.Tensor] = []
    with torch.no_grad():
        for spec, content in tensors:
            if not isinstance(content, partial) or content.func is not torch_bytes:
                return None
            value: torch.Tensor = content.args[0]
            shape = value.shape
            if shape != spec.shape or not value.is_cpu:
                return None
            flat.append(value if len(shape) == 1 else value.reshape(-1))
        groups = [[*group] for _, group in groupby(flat, attrgetter("dtype"))]
        if not _JOINED.issuperset(str(group[0].dtype) for group in groups):
            return None
        return [torch_bytes(torch.cat(group)) for group in groups]


# Without bools, whose bytes may be others than 0 and 1, and types for which torch has no kernel.
_JOINED = frozenset(
    f"torch.{name}"
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
    ]
)
JOINERS[torch_bytes] = _joined_tensors


def memory_of_tensor(tensor: torch.Tensor) -> np.ndarray:
    """Return the bytes of a contiguous tensor on the CPU, over the same memory.

    `tensor.numpy()` would mark the storage as exposed to NumPy, which `engine.change_guard` checks.
    """
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(_exposed(tensor), np.uint8, tensor.nbytes)


# One type for tensors of all sizes, as ctypes takes 20 us to make a type. What uses it cuts it.
_exposed_at: Callable[[int], Any] = (ctypes.c_ubyte * (sys.maxsize >> 1)).from_address
_NOTHING = (ctypes.c_ubyte * 0)()


def _exposed(tensor: torch.Tensor) -> Any:
    """Return the memory that begins with a tensor, and that keeps the tensor alive."""
    if not tensor.nbytes:
        return _NOTHING
    # The zero tensors of autograd have no memory before they are copied.
    tensor = tensor if tensor.data_ptr() else tensor.clone()
    memory = _exposed_at(tensor.data_ptr())
    memory.tensor = tensor
    return memory
