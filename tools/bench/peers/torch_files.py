# SPDX-License-Identifier: Apache-2.0
"""`torch.save` and `torch.load`, also with `mmap=True`."""

from __future__ import annotations

from pathlib import Path

import torch

from tools.bench.contestant import Contestant
from tools.bench.disk import sync
from tools.bench.peers.torch_tensors import tensors_of, touch_tensors
from tools.bench.workload import State

NAME = "torch.save"


class Library:
    """Plain torch files; each save is followed by a sync."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"torch": torch.__version__}
        self._tensors = tensors_of(state)

    def contestants(self) -> list[Contestant]:
        """Return it."""
        return [
            Contestant(
                name=NAME,
                mode="plain",
                suffix=".pt",
                actions={
                    "save": self._save,
                    "load": lambda path: _load(path, is_mapped=False),
                    "load mmap": lambda path: _load(path, is_mapped=True),
                },
            )
        ]

    def _save(self, path: Path) -> None:
        torch.save(self._tensors, path)
        sync(path)


def _load(path: Path, *, is_mapped: bool) -> None:
    touch_tensors(torch.load(path, weights_only=True, mmap=is_mapped))
