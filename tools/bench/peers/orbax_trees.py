# SPDX-License-Identifier: Apache-2.0
"""Orbax with JAX and with NumPy arrays: its standard checkpointer, compression off, saves waited for or not."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tools.bench.contestant import Background, Contestant, Flight, touch
from tools.bench.disk import sync
from tools.bench.workload import State

NAME = "orbax"


class Library:
    """Orbax on one host; each save is followed by a sync of everything it wrote."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"orbax": metadata.version("orbax-checkpoint"), "jax": jax.__version__}
        arrays = {name: jax.device_put(array) for name, array in state.items()}
        jax.block_until_ready(arrays)
        self._trees: dict[str, Mapping[str, Any]] = {"jax": arrays, "numpy": state}
        # Weights do not get smaller, and compressing them is most of the cost of a save.
        self._checkpointers = {
            kind: ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))
            for kind in self._trees
        }

    def contestants(self) -> list[Contestant]:
        """Return it with both kinds of arrays."""
        return [self._contestant(kind) for kind in self._trees]

    def _contestant(self, kind: str) -> Contestant:
        def save(path: Path) -> None:
            self._start(kind, path).wait()

        def load(path: Path) -> None:
            touch(self._restored(kind, path))

        return Contestant(
            name=f"{NAME}, {kind}", mode="plain", actions={"save": save, "load": load}
        )

    def _restored(self, kind: str, path: Path) -> Mapping[str, Any]:
        restore_type = np.ndarray if kind == "numpy" else jax.Array
        arguments = {
            name: ocp.RestoreArgs(restore_type=restore_type)
            if kind == "numpy"
            else ocp.ArrayRestoreArgs(restore_type=restore_type, sharding=array.sharding)
            for name, array in self._trees[kind].items()
        }
        restored: Mapping[str, Any] = self._checkpointers[kind].restore(
            path, args=ocp.args.PyTreeRestore(restore_args=arguments)
        )
        return restored

    def backgrounds(self) -> list[Background]:
        """Return it with both kinds of arrays; those of JAX never change, so that nothing is copied."""
        return [
            Background(
                name=NAME,
                mode=f"{kind} arrays",
                start=functools.partial(self._start, kind),
                close=self._checkpointers[kind].close,
            )
            for kind in self._trees
        ]

    def _start(self, kind: str, path: Path) -> Flight:
        checkpointer = self._checkpointers[kind]
        checkpointer.save(path, args=ocp.args.PyTreeSave(self._trees[kind]))

        def wait() -> None:
            checkpointer.wait_until_finished()
            sync(path)

        return Flight(wait=wait)
