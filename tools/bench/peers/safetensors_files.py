# SPDX-License-Identifier: Apache-2.0
"""The safetensors library, with NumPy and with torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import safetensors
from safetensors import numpy as safetensors_numpy

from tools.bench.contestant import Action, Contestant, touch
from tools.bench.disk import sync
from tools.bench.workload import State

NUMPY = "safetensors.numpy"
TORCH = "safetensors.torch"


class Library:
    """Both halves; each save is followed by a sync. They map files, and check nothing."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"safetensors": safetensors.__version__}
        self._state = state

    def contestants(self) -> list[Contestant]:
        """Return one or both."""
        found = [_contestant(NUMPY, _numpy_actions(self._state))]
        if importlib.util.find_spec("torch"):
            found.append(_contestant(TORCH, _torch_actions(self._state)))
        return found


def _contestant(name: str, actions: dict[str, Action]) -> Contestant:
    return Contestant(name=name, mode="safetensors", suffix=".safetensors", actions=actions)


def _numpy_actions(state: State) -> dict[str, Action]:
    # This half does not load bfloat16; the same bytes as uint16 cost it the same.
    bits = {
        name: array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        for name, array in state.items()
    }

    def save(path: Path) -> None:
        safetensors_numpy.save_file(bits, path)
        sync(path)

    return _actions(save, lambda path: touch(safetensors_numpy.load_file(path)))


def _torch_actions(state: State) -> dict[str, Action]:
    from safetensors import torch as safetensors_torch

    from tools.bench.peers.torch_tensors import tensors_of, touch_tensors

    tensors = tensors_of(state)

    def save(path: Path) -> None:
        safetensors_torch.save_file(tensors, path)
        sync(path)

    return _actions(save, lambda path: touch_tensors(safetensors_torch.load_file(path)))


def _actions(save: Action, load: Action) -> dict[str, Action]:
    return {"save": save, "load": load, "load warm": load}
