# SPDX-License-Identifier: Apache-2.0
"""The model as torch tensors, which share the memory of the arrays."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tools.bench.contestant import touch
from tools.bench.workload import State

Tensors = dict[str, torch.Tensor]


def tensors_of(state: State) -> Tensors:
    """Return the same values as tensors."""
    return {name: _tensor(array) for name, array in state.items()}


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def empty_like(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Return new tensors to load into."""
    return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}


def touch_tensors(loaded: Mapping[str, torch.Tensor]) -> None:
    """Read one byte of every page."""
    touch({name: each.view(torch.uint8).numpy() for name, each in loaded.items()})
