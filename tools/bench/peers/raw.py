# SPDX-License-Identifier: Apache-2.0
"""The bare disk."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tools.bench.busy import busy_processor
from tools.bench.contestant import Background, Contestant
from tools.bench.quiet import rest
from tools.bench.raw_disk import MIB, RawDisk, Shape
from tools.bench.raw_writer import RawWriter
from tools.bench.workload import State

NAME = "raw O_DIRECT"
_TUNED_WITH_BYTES = 512 * MIB


class Library:
    """Writes as many bytes as the model has, from a few buffers."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del state
        self._disk = RawDisk()
        if rest_s:
            self._take_best_shape(directory, min(size_bytes, _TUNED_WITH_BYTES), rest_s)
        self.about = {
            "raw write": str(self._disk.write_shape),
            "raw read": str(self._disk.read_shape),
        }
        self._size_bytes = size_bytes

    def _take_best_shape(self, directory: Path, size_bytes: int, rest_s: float) -> None:
        """Look for the best shape once; the sections after the first one find it written down."""
        found = directory / "raw-shape.json"
        if not found.exists():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                self._disk.tune(Path(scratch) / "tune.raw", size_bytes, partial(rest, rest_s))
            best = (self._disk.write_shape, self._disk.read_shape)
            found.write_text(json.dumps([asdict(shape) for shape in best]))
        shapes = [Shape(**each) for each in json.loads(found.read_text())]
        self._disk.write_shape, self._disk.read_shape = shapes

    def contestants(self) -> list[Contestant]:
        """Return the limit, and the one with the work that those have who keep or check what they read."""
        return [
            Contestant(
                name=NAME,
                mode="limit",
                suffix=".raw",
                actions={
                    "save": lambda path: self._disk.write(path, self._size_bytes),
                    "load": self._disk.read,
                    "load new": self._disk.read_new,
                    "touch": lambda path: self._disk.touch_new(self._size_bytes),
                    "load digested": self._disk.read_digested,
                    "load new digested": self._disk.read_new_digested,
                    "into digested": self._disk.read_again_digested,
                    "load warm digested": self._disk.read_cached_digested,
                    "load busy": self._read_beside_a_busy_processor,
                },
            )
        ]

    def backgrounds(self) -> list[Background]:
        """Return the limit: the cost of the writing alone for a training loop beside it."""
        writer = RawWriter(self._disk.write_shape)
        return [
            Background(
                name=NAME,
                mode="limit",
                start=lambda path: writer.start(path, self._size_bytes),
                close=writer.close,
            )
        ]

    def _read_beside_a_busy_processor(self, path: Path) -> None:
        with busy_processor():
            self._disk.read(path)
