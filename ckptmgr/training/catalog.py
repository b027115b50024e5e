# SPDX-License-Identifier: Apache-2.0
"""Load and pin single checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ckptmgr.core.errors import CheckpointNotFound, CkptmgrError
from ckptmgr.core.model import Checkpoint, Pin
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.observe.observers import Observers, about
from ckptmgr.series.reader import SeriesReader
from ckptmgr.series.selectors import LATEST
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state.part import checked_parts
from ckptmgr.store.manifest.model import Manifest
from ckptmgr.training.history import save_when_measured


class Catalog:
    """Loads and pins checkpoints of a run."""

    def __init__(
        self,
        reader: SeriesReader,
        *,
        writer: SeriesWriter,
        engine: SaveEngine,
        observers: Observers,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._engine = engine
        self._observers = observers

    def load(
        self,
        checkpoint: Checkpoint | int | str,
        state: object,
        *,
        only: str | Sequence[str] | None = None,
    ) -> object:
        """Load one checkpoint; see `CheckpointManager.load`."""
        parts = checked_parts(only)
        while True:
            found = self._reader.find(checkpoint)
            try:
                return self._load(found, state, parts)
            except (CkptmgrError, OSError) as error:
                if self._reader.is_there(found):
                    raise
                if checkpoint != LATEST:
                    raise self._reader.removed(found) from error

    def _load(self, found: Checkpoint, state: object, only: Sequence[str] | None) -> object:
        with self._observers.timed("load", **about(found)):
            loaded = self._reader.read(found, state, only=only)
            if state is not None:
                self._engine.before_update()
            return loaded.put_back(state)

    def change_pins(
        self,
        checkpoint: Checkpoint | int | str,
        change: Callable[[tuple[Pin, ...]], tuple[Pin, ...]],
    ) -> None:
        """Change the pins of one checkpoint durably, on rank 0."""
        self._change(checkpoint, lambda one: replace(one, pins=change(one.pins)))

    def add_metrics(self, checkpoint: Checkpoint | int | str, metrics: Mapping[str, float]) -> None:
        """Add metrics to one checkpoint durably, on rank 0; a name that is there gets the new value."""
        try:
            self._change(checkpoint, lambda one: replace(one, metrics={**one.metrics, **metrics}))
        except CheckpointNotFound as error:
            if not isinstance(checkpoint, int):
                raise
            raise CheckpointNotFound(
                error.message,
                path=error.path,
                hint="only a step that was saved takes metrics, until retention removes it: "
                + save_when_measured(next(iter(metrics), "val_loss")),
            ) from None

    def _change(
        self, checkpoint: Checkpoint | int | str, change: Callable[[Manifest], Manifest]
    ) -> None:
        if not self._writer.is_first:
            return
        self._writer.check_can_change()
        name = checkpoint.name if isinstance(checkpoint, Checkpoint) else checkpoint
        self._writer.open()
        with self._writer.changing:
            found = self._reader.find(name)
            # A command that overwrites this file holds only the lease of its name.
            with self._writer.store.lease(found.name):
                self._writer.store.change_manifest(found, change)
