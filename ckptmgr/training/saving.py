# SPDX-License-Identifier: Apache-2.0
"""`StateSaver`: makes a job of a state, which the save engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from ckptmgr.core.arguments import resolve_state
from ckptmgr.core.handle import SaveHandle
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.files.load.state import metadata_of
from ckptmgr.files.save.job import Naming, SaveFacts, SaveJob
from ckptmgr.observe.observers import SaveWatch
from ckptmgr.policy.retention import RetentionPolicy
from ckptmgr.policy.save import LastSave
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state import tree
from ckptmgr.training.forecast import Forecaster
from ckptmgr.training.history import RunPast
from ckptmgr.training.parts import RunParts


class _Content(NamedTuple):
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
        forecaster: Forecaster,
    ) -> None:
        self._team = parts.team
        self._clock = parts.clock
        self._retention: RetentionPolicy = parts.config.retention_policy()
        self._writer = writer
        self._naming = naming
        self._engine = engine
        self._past = past
        self._forecaster = forecaster

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
        now = self._clock()
        given, flat = self._flattened(state)
        self._past.saw(step)
        self._writer.prepare()  # the lease, before the choice of a name
        facts = SaveFacts(step=step, at=now, epoch=epoch, why=why, metrics=metrics)
        job = SaveJob(naming=self._naming, facts=facts, retention=self._retention)
        if isinstance(flat, Exception):
            job = replace(job, error=flat)
        else:
            size_bytes = flat.size_bytes
            self._forecaster.before_run(self._writer, lambda: size_bytes)
            job = replace(job, items=[*flat.tensors], metadata=metadata_of(flat))
        handle = self._engine.run(job, self._writer, watch=watch, state=given)
        if handle is not None:
            self._past.progress.note(handle, LastSave(step=step, at=now))
            self._forecaster.after_save(handle, now)
        return handle

    def _flattened(self, state: object) -> _Content:
        """Return the tensors of a state, or an error for the other ranks, which wait for this one.

        With one process the error is raised.
        """
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
            return _Content(given, error)
        return _Content(given, flat)
