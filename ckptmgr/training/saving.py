# SPDX-License-Identifier: Apache-2.0
"""`StateSaver`: makes a job of a state, which the save engine runs.

A job holds the state, and beside it the values that the configuration appends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.config.surfaces import WHOLE_TENSORS
from ckptmgr.core.arguments import (
    checked_count,
    checked_epoch,
    checked_metrics,
    no_effect,
    resolve_state,
)
from ckptmgr.core.handle import SaveHandle
from ckptmgr.files.load.state import DATA, SEEN, as_held_here, state_metadata
from ckptmgr.files.save.job import Naming, SaveFacts, SaveJob
from ckptmgr.formats.tensor import Item
from ckptmgr.io.gc_pause import gc_paused_if_short
from ckptmgr.observe.observers import SaveWatch
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state import tree
from ckptmgr.state.arrays import named_tensors
from ckptmgr.state.surroundings import Surroundings
from ckptmgr.training.history import RunPast, UnsavedStep
from ckptmgr.training.put_aside import HeldState
from ckptmgr.training.run import Run

if TYPE_CHECKING:  # a run without loaders needs none of it
    from ckptmgr.training.data_state import DataState


class _Flattened(NamedTuple):
    """The given state, and its tensors or the error that prevented them."""

    given: object
    flat: tree.FlatState | Exception


class StateSaver:
    """Saves the states of a run."""

    def __init__(self, run: Run, *, writer: SeriesWriter, naming: Naming, past: RunPast) -> None:
        self._run = run
        self._writer = writer
        self._naming = naming
        self._past = past
        self.data: DataState | None = None  # of the loaders, once there are any
        self.alone: AbstractContextManager[object] = nullcontext()  # keeps saves of a stop away

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
        now = self._run.clock()
        held = state if isinstance(state, HeldState) else None
        given, flat = self._flattened(state)
        self._past.saw(step)
        self._writer.prepare()  # the lease, before the choice of a name
        facts = SaveFacts(step=step, at=now, epoch=epoch, why=why, metrics=metrics)
        job = SaveJob(
            naming=self._naming, facts=facts, retention=self._run.config.retention_policy()
        )
        if isinstance(flat, Exception):
            job = replace(job, error=flat)
        else:
            size_bytes = flat.size_bytes
            end_pause_if_long(size_bytes)
            if held is None:
                self._past.check_keys(given, flat)
            for one in self._run.companions:
                one.save_asked(self._writer, size_bytes)
            job = self._filled(job, flat, held)
        with self.alone:
            handle = self._run.engine.run(job, self._writer, watch=watch, state=given)
            if handle is not None:
                self._past.progress.note(handle, facts, at=now)
        if handle is not None:
            for one in self._run.companions:
                one.saved(handle, facts)
        return handle

    def save_alone(self, last: UnsavedStep, *, why: str) -> None:
        """Save the last ended step in the calling thread, without retention.

        Without ranks, a step that is saved is not saved again. The new emergency save replaces the
        earlier ones of the run and of its failed resumptions, with ranks those of this rank. Other
        ranks are neither met nor waited for: a rank saves its own values, under a prefix of
        its own. Raises as `SaveEngine.run_now`.
        """
        run, writer, naming = self._run, self._writer, self._naming
        rank = None if run.team.coordinator is None else run.team.coordinator.rank
        if rank is not None:
            run, joint, name = run.alone(), writer, f"{writer.series}.rank_{rank}"
            writer = run.writer(joint.store.directory, name)
            writer.belong_to(joint)
            naming = run.reader(writer)
        step, epoch = checked_count("step", last.step), checked_epoch(last.epoch)
        saved = self._past.progress.durable
        is_saved = saved.step == step and not (saved.is_start or saved.is_given_up)
        if rank is None and is_saved:
            return
        facts = SaveFacts(
            step=step,
            at=run.clock(),
            epoch=epoch,
            why=why,
            metrics=checked_metrics(last.metrics),
        )
        held = last.state if isinstance(last.state, HeldState) else None
        flat = held.flat if held else tree.flatten(resolve_state(last.state), run.team.slicer)
        job = self._filled(
            SaveJob(naming=naming, facts=facts),
            replace(as_held_here(flat), slices={}, objects=flat.objects),
            held,
        )
        with run.observers.watch(series=writer.series, step=step, why=why) as watch:
            try:
                handle = self._run.engine.run_now(job, writer, watch)
                writer.drop_replaced(handle.durable.result())
            finally:
                if rank is not None:
                    writer.close()

    def save_at_stop(self, last: UnsavedStep) -> None:
        """Save the last ended step in the calling thread, once those in the background are saved."""
        self._run.engine.wait_until_idle()
        self.save_alone(last, why="preempted")

    def texts(self, flat: tree.FlatState, step: int) -> dict[str, str]:
        """Return the texts beside the skeleton of a state: its surroundings, and the loaders."""
        past = self._past
        if past.left_out is None:
            from ckptmgr.state.left_out import left_out

            past.left_out = left_out(flat)
        seen = Surroundings.of(
            flat.objects,
            weak=flat.weak,
            empty=past.empty,
            left_out=past.left_out,
            stride=past.stride,
        )
        texts = {
            SEEN: seen.to_text(),
            DATA: None if self.data is None else self.data.to_text(step),
        }
        return {name: text for name, text in texts.items() if text is not None}

    def _filled(self, job: SaveJob, flat: tree.FlatState, held: HeldState | None = None) -> SaveJob:
        """Return the job with a state, and the appended values; or with the error."""
        items: list[Item] = [*flat.tensors]
        store = self._writer.store
        try:
            self._run.team.write_strategy(store.directory, fs=store.fs)
            append = self._run.config.append_values(job.facts.epoch, step=job.facts.step)
            if append:
                from ckptmgr.files.serialization import join_items

                items = join_items(items, named_tensors(append))
            texts = self.texts(flat, job.facts.step) if held is None else held.texts
            metadata = {**state_metadata(flat), **texts}
        except Exception as error:
            if not self._run.team.is_many:
                raise
            return replace(job, error=error)
        return replace(job, items=items, metadata=metadata)

    def _flattened(self, state: object) -> _Flattened:
        """Return the tensors of a state, or an error for the other ranks, which wait for this one.

        With one process the error is raised.
        """
        given, team = state, self._run.team
        if isinstance(state, HeldState):
            return _Flattened(None, state.flat)
        try:
            given = resolve_state(state)
            flat = tree.flatten(given, team.slicer)
            if team.slicer is not None:
                names = {tensor.spec.name for tensor in flat.tensors}
                team.slicer.check_used(names | flat.aliases.keys() | flat.slices.keys())
            if flat.slices and self._run.config.asks_for_integrated_save:
                raise no_effect("integrated_save", "on slices", WHOLE_TENSORS)
        except Exception as error:
            if not team.is_many:
                raise
            return _Flattened(given, error)
        return _Flattened(given, flat)
