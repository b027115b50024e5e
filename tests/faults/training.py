# SPDX-License-Identifier: Apache-2.0
"""A tiny training run on a model disk, and the check of everything the store promises after a fault."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, Resumption
from ckptmgr.observe.observers import Observer
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state import tree
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.runs import manager_on

RUNS = Path("/runs/digits")
SERIES = "net"
KEY = bytes(range(32))
KEYS = (None, KEY)
LAST_STEP = 1000

Content = Mapping[str, Collection[float]]
"""Name of a data file to the values it may hold."""


@dataclass(frozen=True, slots=True)
class ModelProcesses:
    """Every process of a model disk but the present one is dead."""

    disk: ModelDisk

    def token(self) -> str:
        """Return boot and process of the disk."""
        return f"boot{self.disk.boot}-{self.disk.process}"

    def is_dead(self, token: str) -> bool | None:
        """Return whether it is somebody else's token."""
        return token != self.token()


@dataclass
class Trainer:
    """Saves states that are known by one number.

    Attributes:
        disk: Where, as a model; for tokens.
        fs: The disk as the code under test sees it; the model itself by default.
        key: Encrypts.
        keep: The retention policy.
    """

    disk: ModelDisk
    fs: api.FileSystem | None = None
    key: bytes | None = None
    keep: str = "all"
    times: Iterator[int] = field(default_factory=lambda: itertools.count(1_700_000_000, 60))

    def manager(self, observe: Observer | None = None) -> CheckpointManager:
        """Return a manager of the run directory."""
        return manager_on(
            RUNS,
            CheckpointConfig(keep=self.keep, enc_key=self.key),
            fs=self.fs or self.disk,
            processes=ModelProcesses(self.disk),
            clock=lambda: float(next(self.times)),
            prefix=SERIES,
            observe=observe,
        )

    def store(self) -> api.Place:
        """Return the store of the run directory."""
        key = None if self.key is None else api.Key(self.key)
        return api.place(
            RUNS,
            fs=self.fs or self.disk,
            keys=key,
            allow_unencrypted=not (key is not None),
            processes=ModelProcesses(self.disk),
        )

    def overwrite(self, name: str, value: float, *, step: int = 1) -> None:
        """Save under a name that may be taken, as the callback does."""
        key = None if self.key is None else api.Key(self.key)
        writer = SeriesWriter(
            self.store(),
            SERIES,
            options=api.SaveOptions(key=key),
            clock=lambda: float(next(self.times)),
            run_id="run",
        )
        try:
            flat = tree.flatten(state_of(value))
            metadata = {**flat.aliases, "ckptmgr.tree": flat.skeleton}
            writer.save(name, [*flat.tensors], api.SaveFacts(step=step), metadata=metadata)
        finally:
            writer.close()


def state_of(value: float) -> dict[str, object]:
    """Return a state that is known by one number."""
    return {"weights": np.full(3, value, np.float32), "value": float(value)}


def saved(manager: CheckpointManager, step: int, value: float) -> Checkpoint:
    """Save a state and return its checkpoint once it is durable."""
    handle = manager.save(step, state_of(value))
    assert handle is not None
    return handle.wait()


def value_of(state: object) -> float:
    """Return the number of a restored state, after checking that its parts agree."""
    assert isinstance(state, dict)
    assert state["weights"].tolist() == [state["value"]] * 3
    value = state["value"]
    assert isinstance(value, float)
    return value


def disk_with(*values: float, key: bytes | None = None, keep: str = "all") -> ModelDisk:
    """Return a disk on which a run has saved `values` as steps 1, 2, ... and ended; everything is durable."""
    disk = ModelDisk()
    with Trainer(disk, key=key, keep=keep).manager() as manager:
        for step, value in enumerate(values, 1):
            manager.save(step, state_of(value))
    disk.settle()
    return disk


def name_of(step: int) -> str:
    """Return the name of the first save of a step."""
    return f"{SERIES}-{step}.ckpt"


def check_after_fault(
    disk: ModelDisk,
    *,
    must: Content,
    may: Content | None = None,
    key: bytes | None = None,
    keep: str = "all",
) -> None:
    """Check that promised checkpoints are there and load, that nothing else is listed, and that a run can go on.

    Args:
        disk: After the fault, as a new process finds it.
        must: The checkpoints that were acknowledged and not given up.
        may: The ones that may be there or not, but only whole.
        key: The key of the run.
        keep: The retention policy of the run that goes on.
    """
    trainer = Trainer(disk, key=key, keep=keep)
    allowed = {**(may or {}), **must}
    check_listing(trainer.store().scan(), must=must, allowed=allowed)
    with trainer.manager() as manager:
        latest = manager.latest()
        resumption = manager.resume()
        check_resumption(resumption, must=must, allowed=allowed)
        assert (latest is None) == resumption.is_fresh
        for checkpoint in manager.checkpoints():
            assert value_of(manager.load(checkpoint)) in allowed[checkpoint.name]
        manager.save(LAST_STEP, state_of(float(LAST_STEP)))
        assert value_of(manager.load(LAST_STEP)) == LAST_STEP
    check_no_leftovers(disk)


def check_listing(found: list[Checkpoint], *, must: Content, allowed: Content) -> None:
    """Check that the whole checkpoints in the listing are at least those that must and at most those that may be there."""
    listed = {c.name for c in found if c.state is not api.State.LEFTOVER}
    assert all(
        c.state in (api.State.OK, api.State.LEFTOVER, api.State.UNVERIFIED) for c in found
    ), found
    assert {c.name for c in found if c.state is api.State.UNVERIFIED} <= {
        name for name in allowed if is_bare(name)
    }
    assert set(must) <= listed <= set(allowed)


def is_bare(name: str) -> bool:
    """Return whether the tests use this name for files that some other program wrote."""
    return name.startswith("bare")


def check_resumption(resumption: Resumption, *, must: Content, allowed: Content) -> None:
    """Check that a run goes on from the newest promise, or from something newer that is whole."""
    if resumption.checkpoint is None:
        assert not must
        return
    assert value_of(resumption.state) in allowed[resumption.checkpoint.name]
    assert not resumption.skipped


def check_no_leftovers(disk: ModelDisk) -> None:
    """Check that a run directory holds nothing but whole pairs of data and manifest, the lease and the start count.

    Where the disk does not tell since when they are there, manifests without data stay.
    """
    names = set(disk.list(RUNS)) - {f".{SERIES}.lease", f".{SERIES}.starts"}
    data = {name for name in names if name.endswith(".ckpt")}
    manifests = {f"{name}.manifest.json" for name in data}
    optional = {name for name in manifests if is_bare(name)}
    if not disk.has_change_times:
        names -= {name for name in names - manifests if name.endswith(".ckpt.manifest.json")}
    assert names | optional == data | manifests, disk.tree()
