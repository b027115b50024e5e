# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a series, as whoever runs it looks them up, loads, pins and plans for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckptmgr.core.arguments import resolve_state
from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError
from ckptmgr.core.model import Checkpoint, Pin, Plan
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.observe.observers import about
from ckptmgr.policy.forecast import Forecast
from ckptmgr.series.reader import LATEST
from ckptmgr.state import tree
from ckptmgr.training.forecast import Forecaster
from ckptmgr.training.parts import RunParts


class SeriesCatalog:
    """What there is in a series.

    Args:
        directory: Where it lies.
        prefix: Name of the series.
        parts: Makes what it is looked up with.
    """

    def __init__(self, directory: Path, prefix: str, parts: RunParts) -> None:
        self.directory = directory
        self._config = parts.config
        self._team = parts.team
        self._observers = parts.observers
        self._writer = parts.writer(directory, prefix)
        self._store = self._writer.store
        self._reader = parts.reader(self._writer)
        self._engine: SaveEngine = parts.engine(has_before_update=True)
        self._forecaster = Forecaster(parts.config, parts.observers)

    @property
    def prefix(self) -> str:
        """Name of the series."""
        return self._writer.series

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints of the series, oldest first."""
        return self._reader.checkpoints()

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is not known to be damaged, or None. Never raises because of leftovers."""
        return self._reader.latest()

    def best(self, metric: str, mode: str = "min") -> Checkpoint | None:
        """Return the checkpoint with the best value of a metric, or None when none has it; NaN never wins.

        Args:
            metric: Name as given to `step_end`.
            mode: `min` or `max`.
        """
        return self._reader.best(metric, mode)

    def load(self, checkpoint: Checkpoint | int | str, state: object = None) -> object:
        """Load one checkpoint, verified.

        Args:
            checkpoint: From `checkpoints()`, a step, a file name, or `latest`: the newest, looked for again while the run that
                writes the series removes the one that was found.
            state: Restore into this, or None for new objects.

        Raises:
            CheckpointNotFound: There is no such checkpoint, or it was removed after it was listed.
            CorruptCheckpoint, KeyProblem: It is damaged, or the key is wrong.
        """
        while True:
            found = self._reader.find(checkpoint)
            try:
                return self._load(found, state)
            except (CkptmgrError, OSError) as error:
                if self._reader.is_there(found):
                    raise
                if checkpoint != LATEST:
                    raise self._reader.removed(found) from error

    def _load(self, found: Checkpoint, state: object) -> object:
        with self._observers.timed("load", **about(found)):
            loaded = self._reader.read(found, state)
            if state is not None:
                self._engine.before_update()
            return loaded.put_back(state)

    def pin(
        self, checkpoint: Checkpoint | int | str, name: str = "pinned", *, reason: str = ""
    ) -> None:
        """Never let retention remove a checkpoint; durable when it returns.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            UnsupportedCheckpoint: It has no manifest.
        """
        self._repin(checkpoint, lambda pins: (*pins, Pin(name=name, reason=reason)))

    def unpin(self, checkpoint: Checkpoint | int | str) -> None:
        """Take all pins off a checkpoint."""
        self._repin(checkpoint, lambda pins: ())

    def plan(self) -> Plan:
        """Return what the retention policy would do now, without doing it."""
        return self._writer.planned(self._config.retention_policy())

    def forecast(self, state: object = None) -> Forecast:
        """Return what the run needs and costs: space, memory, time. Print it; what will not do, it says with the way out.

        Args:
            state: What will be saved, or None for as much as the newest checkpoint holds.

        Raises:
            CheckpointNotFound: No state was given, and there is no checkpoint.
            OSError: From the disk.
        """
        if state is not None:
            size_bytes = tree.flatten(resolve_state(state), self._team.slicer).size_bytes
        else:
            newest = self.latest()
            if newest is None:
                raise CheckpointNotFound(
                    "nothing says how large a checkpoint will be",
                    path=self.directory,
                    hint="pass the state: manager.forecast(state)",
                )
            size_bytes = newest.size_bytes
        return self._forecaster.forecast(self._writer, size_bytes)

    def _repin(
        self,
        checkpoint: Checkpoint | int | str,
        change: Callable[[tuple[Pin, ...]], tuple[Pin, ...]],
    ) -> None:
        if not self._writer.is_first:
            return
        name = checkpoint.name if isinstance(checkpoint, Checkpoint) else checkpoint
        self._writer.open()
        with self._writer.changing:
            found = self._reader.find(name)
            # Who overwrites that one file holds no lease but that of its name.
            with self._store.lease(found.name):
                self._store.change_pins(found, change)
