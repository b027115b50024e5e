# SPDX-License-Identifier: Apache-2.0
"""Saving states into a series: now, or in the background, alone or with other ranks; then retention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ckptmgr.core.arguments import checked_count, checked_epoch, checked_metrics, resolve_state
from ckptmgr.core.handle import SaveHandle
from ckptmgr.core.model import Checkpoint
from ckptmgr.files.load.state import metadata_of
from ckptmgr.files.save.saver import Publish
from ckptmgr.formats.tensor import Item
from ckptmgr.observe.observers import SaveWatch
from ckptmgr.policy.save import LastSave
from ckptmgr.series.writer import SaveFacts
from ckptmgr.state import tree
from ckptmgr.training.catalog import SeriesCatalog
from ckptmgr.training.history import RunPast
from ckptmgr.training.parts import RunParts


class SavingSeries(SeriesCatalog):
    """A series that states are saved into.

    Args:
        directory: Where it lies; created on the first save.
        prefix: Name of the series.
        parts: Makes what it is saved with.
        snapshots: How many states are kept in memory.
    """

    def __init__(self, directory: Path, prefix: str, parts: RunParts, *, snapshots: int) -> None:
        super().__init__(directory, prefix, parts)
        self._clock: Callable[[], float] = parts.clock
        engine = self._engine
        self._past = RunPast(
            parts.clock, memory=engine.memory, ledger=engine.ledger, snapshots=snapshots
        )
        engine.make_room = self._past.recent.give_way  # what can be loaded gives way to a save

    def save(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        why: str = "manual",
    ) -> SaveHandle | None:
        """Save now; then apply the retention policy. With `async_save` both happen in the background.

        Returns:
            The handle, or None when `back_pressure="skip"` and an earlier save still runs.

        Raises:
            BaseException: An earlier save failed in the background; it is raised once.
            UnsupportedState: Something in the state cannot be stored; names its path.
            StoreFull: Not enough disk space; nothing was changed.
            StoreLocked: Another live process writes this series.
            OSError: From the disk; the earlier checkpoints are intact.
        """
        step, epoch = checked_count("step", step), checked_epoch(epoch)
        checked = checked_metrics(metrics)
        with self._observers.watch(series=self.prefix, step=step, why=why) as watch:
            return self._save(step, state, watch, epoch=epoch, metrics=checked, why=why)

    def _save(
        self,
        step: int,
        state: object,
        watch: SaveWatch,
        *,
        epoch: int | None,
        metrics: Mapping[str, float],
        why: str,
    ) -> SaveHandle | None:
        now = self._clock()
        given, flat = self._flattened(state)
        metadata = None if isinstance(flat, Exception) else metadata_of(flat)
        self._past.saw(step)
        self._writer.prepare()  # before a name is chosen, which another process could take
        if not isinstance(flat, Exception):
            self._forecaster.before_run(self._writer, lambda: flat.size_bytes)

        def write(items: Sequence[Item], publish: Publish) -> Checkpoint:
            # The name not before the save in flight has taken its own.
            checkpoint = self._writer.save_next(
                lambda extension, present: self._reader.free_name(step, present, format=extension),
                items,
                SaveFacts(step=step, at=now, epoch=epoch, why=why, metrics=metrics),
                metadata=metadata,
                publish=publish,
            )
            watch.durable(checkpoint.path)
            self._past.given_up.discard(checkpoint.path)  # once removed, its name is free again
            self._writer.retain(self._config.retention_policy())
            return checkpoint

        if isinstance(flat, Exception):
            handle = self._engine.refuse(flat, write, watch=watch)
        else:
            handle = self._engine.run(self._store, [*flat.tensors], write, watch=watch, state=given)
        if handle is not None:
            self._past.progress.note(handle, LastSave(step=step, at=now))
            self._forecaster.after_save(handle, now)
        return handle

    def _flattened(self, state: object) -> tuple[object, tree.FlatState | Exception]:
        """Return a state and its tensors, or why there are none, for the other ranks to hear of."""
        given = state
        try:
            given = resolve_state(state)
            flat = tree.flatten(given, self._team.slicer)
            if self._team.slicer is not None:
                names = {tensor.spec.name for tensor in flat.tensors}
                self._team.slicer.check_used(names | flat.aliases.keys() | flat.slices.keys())
        except Exception as error:
            if not self._team.is_many:
                raise
            return given, error
        return given, flat

    def before_update(self) -> None:
        """Wait until the state of the last save is copied; call it before the state is changed in place.

        Only with `zero_stall`, where `save` leaves the copying to the background; otherwise, and when the copy is complete,
        it does nothing. All torch optimizers of the process call it before their steps.
        """
        self._engine.before_update()

    def close(self) -> None:
        """Wait for what is in flight and let other processes write this series. Saving again takes it back.

        Raises:
            BaseException: A save failed in the background and nobody has fetched its failure.
        """
        try:
            self._engine.close()
        finally:
            self._past.recent.close()
            if not self._engine.is_busy:  # Ctrl-C does not stop a save, which needs the lease
                self._writer.close()

    def wait(self) -> None:
        """Wait until everything handed over is durable.

        Raises:
            BaseException: A save failed in the background; it is raised once.
        """
        self._engine.wait()
