# SPDX-License-Identifier: Apache-2.0
"""The bare disk."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from tools.bench.contestant import Contestant
from tools.bench.quiet import rest
from tools.bench.raw_disk import MIB, RawDisk
from tools.bench.workload import State

NAME = "raw O_DIRECT"
_TUNED_WITH_BYTES = 512 * MIB


class Library:
    """Writes as many bytes as the model has, from a few buffers."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del state
        self._disk = RawDisk()
        if rest_s:
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                size = min(size_bytes, _TUNED_WITH_BYTES)
                self._disk.tune(Path(scratch) / "tune.raw", size, partial(rest, rest_s))
        self.about = {
            "raw write": str(self._disk.write_shape),
            "raw read": str(self._disk.read_shape),
        }
        self._size_bytes = size_bytes

    def contestants(self) -> list[Contestant]:
        """Return the limit."""
        return [
            Contestant(
                name=NAME,
                mode="limit",
                suffix=".raw",
                actions={
                    "save": lambda path: self._disk.write(path, self._size_bytes),
                    "load": self._disk.read,
                },
            )
        ]
