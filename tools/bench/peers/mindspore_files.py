# SPDX-License-Identifier: Apache-2.0
"""MindSpore: `save_checkpoint` and `load_checkpoint`, in every mode that it shares with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore.common import np_dtype
from mindspore.train import serialization

from tools.bench.contestant import Background, Contestant, Flight, touch
from tools.bench.disk import sync
from tools.bench.modes import MODES, Mode
from tools.bench.workload import State

NAME = "mindspore"


class Library:
    """MindSpore; each save is followed by a sync, which it does not do itself."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"mindspore": mindspore.__version__}
        self._parameters = {name: _parameter(name, array) for name, array in state.items()}

    def contestants(self) -> list[Contestant]:
        """Return every mode it has."""
        return [self._contestant(mode) for mode in MODES if mode.is_in_mindspore]

    def _contestant(self, mode: Mode) -> Contestant:
        def save(path: Path) -> None:
            mindspore.save_checkpoint(self._parameters, str(path), **mode.save_options)
            sync(path)

        def load(path: Path) -> None:
            loaded = mindspore.load_checkpoint(str(path), **mode.load_options)
            touch({name: value.asnumpy() for name, value in loaded.items()})

        return Contestant(
            name=NAME, mode=mode.name, suffix=mode.suffix, actions={"save": save, "load": load}
        )

    def backgrounds(self) -> list[Background]:
        """Return its thread and its forked process."""
        return [self._background("thread"), self._background("process")]

    def _background(self, mode: str) -> Background:
        def start(path: Path) -> Flight:
            mindspore.save_checkpoint(self._parameters, str(path), async_save=mode)

            def wait() -> None:
                # The functions that its own callback waits with.
                serialization._wait_async_thread_save_ckpt()
                serialization._wait_async_process_save_ckpt()
                sync(path)

            return Flight(wait=wait)

        return Background(name=NAME, mode=mode, suffix=".ckpt", start=start)


def _parameter(name: str, array: np.ndarray) -> Any:
    is_half = array.dtype.name == "bfloat16"
    tensor = mindspore.Tensor(array.view(np_dtype.bfloat16) if is_half else array)
    return mindspore.Parameter(tensor, name=name)
