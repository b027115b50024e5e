# SPDX-License-Identifier: Apache-2.0
"""torchsnapshot, synchronous and asynchronous."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from torchsnapshot import Snapshot, StateDict

from tools.bench.contestant import Background, Contestant, Flight
from tools.bench.disk import sync
from tools.bench.peers.torch_tensors import empty_like, tensors_of, touch_tensors
from tools.bench.workload import State

NAME = "torchsnapshot"


class Library:
    """Snapshots of one rank; each is followed by a sync."""

    def __init__(self, state: State, size_bytes: int, *, directory: Path, rest_s: float) -> None:
        del size_bytes, directory, rest_s
        self.about = {"torchsnapshot": metadata.version("torchsnapshot")}
        self._tensors = tensors_of(state)

    def contestants(self) -> list[Contestant]:
        """Return it."""
        return [
            Contestant(name=NAME, mode="plain", actions={"save": self._save, "load": self._load})
        ]

    def backgrounds(self) -> list[Background]:
        """Return its asynchronous form."""
        return [Background(name=NAME, mode="thread", start=self._start)]

    def _save(self, path: Path) -> None:
        Snapshot.take(path=str(path), app_state={"model": StateDict(**self._tensors)})
        sync(path)

    def _load(self, path: Path) -> None:
        loaded = StateDict(**empty_like(self._tensors))
        Snapshot(path=str(path)).restore({"model": loaded})
        touch_tensors(dict(loaded))

    def _start(self, path: Path) -> Flight:
        pending = Snapshot.async_take(
            path=str(path), app_state={"model": StateDict(**self._tensors)}
        )

        def wait() -> None:
            pending.wait()
            sync(path)

        return Flight(wait=wait)
