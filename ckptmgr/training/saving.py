# SPDX-License-Identifier: Apache-2.0
"""`StateSaver`: makes a job of a state, which the save engine runs.

A job holds the state, and beside it the values that the configuration appends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from ckptmgr.config.surfaces import WHOLE_TENSORS
from ckptmgr.core.arguments import checked_count, checked_epoch, checked_metrics, resolve_state
from ckptmgr.core.handle import SaveHandle
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.files.load.state import DATA, as_held_here, state_metadata
from ckptmgr.files.save.job import Naming, SaveFacts, SaveJob
from ckptmgr.formats.tensor import Item
from ckptmgr.io.gc_pause import gc_paused_if_short
from ckptmgr.observe.observers import SaveWatch
from ckptmgr.parallel.team import Team
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state import tree
from ckptmgr.state.arrays import named_tensors
from ckptmgr.training.data_state import DataState
from ckptmgr.training.forecast import Forecaster
from ckptmgr.training.history import RunPast, UnsavedStep
from ckptmgr.training.parts import RunParts


class _Flattened(NamedTuple):
    """The given state, and its tensors or the error that prevented them."""

    given: object
    flat: tree.FlatState | Exception


class StateSaver:
    """Saves the states of a run."""

    def __init__(
        self,
        parts: RunParts,
        *,
        writer: SeriesWriter,
        naming: Naming,
        engine: SaveEngine,
        past: RunPast,
        data: DataState,
        forecaster: Forecaster,
    ) -> None:
        self._parts = parts
        self._writer = writer
        self._naming = naming
        self._engine = engine
        self._past = past
        self._data = data
        self._forecaster = forecaster
        if parts.team.is_many:
            from ckptmgr.parallel.slicer import tensor_specs

            tensor_specs(named_tensors(parts.config.append_dict or {}))  # refuses texts

    def save(
        self,
        step: int,
        state: object,
        watch: SaveWatch,
        *,
        epoch: int | None,
        metrics: Mapping[str, float],
        why: str,
    ) -> SaveHandle | None:
        """Save a state; return the handle, or None if back-pressure skipped the save."""
        with gc_paused_if_short() as end_pause_if_long:
            return self._save(step, state, watch, end_pause_if_long, epoch, metrics, why)

    def _save(
        self,
        step: int,
        state: object,
        watch: SaveWatch,
        end_pause_if_long: Callable[[int], None],
        epoch: int | None,
        metrics: Mapping[str, float],
        why: str,
    ) -> SaveHandle | None:
        now = self._parts.clock()
        given, flat = self._flattened(state)
        self._past.saw(step)
        self._writer.prepare()  # the lease, before the choice of a name
        facts = SaveFacts(step=step, at=now, epoch=epoch, why=why, metrics=metrics)
        job = SaveJob(
            naming=self._naming, facts=facts, retention=self._parts.config.retention_policy()
        )
        if isinstance(flat, Exception):
            job = replace(job, error=flat)
        else:
            size_bytes = flat.size_bytes
            end_pause_if_long(size_bytes)
            self._forecaster.before_run(self._writer, lambda: size_bytes)
            job = self._filled(job, flat)
        handle = self._engine.run(job, self._writer, watch=watch, state=given)
        if handle is not None:
            self._past.progress.note(handle, facts, at=now)
            self._past.costs.saved(step, handle)
            self._forecaster.after_save(handle, now)
        return handle

    def save_alone(self, last: UnsavedStep, *, why: str) -> None:
        """Save the last ended step in the calling thread, without retention.

        Without ranks, a step that is saved is not saved again. The new emergency save replaces the
        earlier ones of the run and of its failed resumptions, with ranks those of this rank. Other
        ranks are neither met nor waited for: a rank saves its own values, under a prefix of
        its own. Raises as `SaveEngine.run_now`.
        """
        parts, writer, naming = self._parts, self._writer, self._naming
        rank = None if parts.team.coordinator is None else parts.team.coordinator.rank
        if rank is not None:
            parts = replace(parts, team=Team(slicer=parts.team.slicer))
            run, name = writer, f"{writer.series}.rank_{rank}"
            writer = parts.writer(run.store.directory, name)
            writer.belong_to(run)
            naming = parts.reader(writer)
        step, epoch = checked_count("step", last.step), checked_epoch(last.epoch)
        saved = self._past.progress.durable
        is_saved = saved.step == step and not (saved.is_start or saved.is_given_up)
        if rank is None and is_saved:
            return
        facts = SaveFacts(
            step=step,
            at=parts.clock(),
            epoch=epoch,
            why=why,
            metrics=checked_metrics(last.metrics),
        )
        flat = tree.flatten(resolve_state(last.state), parts.team.slicer)
        job = self._filled(
            SaveJob(naming=naming, facts=facts), replace(as_held_here(flat), slices={})
        )
        with parts.observers.watch(series=writer.series, step=step, why=why) as watch:
            try:
                handle = self._engine.run_now(job, writer, watch)
                writer.drop_replaced(handle.durable.result())
            finally:
                if rank is not None:
                    writer.close()

    def _filled(self, job: SaveJob, flat: tree.FlatState) -> SaveJob:
        """Return the job with a state, and the appended values; or with the error."""
        items: list[Item] = [*flat.tensors]
        store = self._writer.store
        try:
            self._parts.team.write_strategy(store.directory, fs=store.fs)
            append = self._parts.config.append_values(job.facts.epoch, step=job.facts.step)
            if append:
                from ckptmgr.files.serialization import join_items

                items = join_items(items, named_tensors(append))
            metadata = state_metadata(flat)
            data = self._data.to_text(job.facts.step)
            if data is not None:
                metadata[DATA] = data
        except Exception as error:
            if not self._parts.team.is_many:
                raise
            return replace(job, error=error)
        return replace(job, items=items, metadata=metadata)

    def _flattened(self, state: object) -> _Flattened:
        """Return the tensors of a state, or an error for the other ranks, which wait for this one.

        With one process the error is raised.
        """
        given, team = state, self._parts.team
        try:
            given = resolve_state(state)
            flat = tree.flatten(given, team.slicer)
            if team.slicer is not None:
                names = {tensor.spec.name for tensor in flat.tensors}
                team.slicer.check_used(names | flat.aliases.keys() | flat.slices.keys())
            if flat.slices and self._parts.config.asks_for_integrated_save:
                raise ValueError(f"integrated_save has no effect on slices: {WHOLE_TENSORS}")
        except Exception as error:
            if not team.is_many:
                raise
            return _Flattened(given, error)
        return _Flattened(given, flat)
