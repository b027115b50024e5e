# SPDX-License-Identifier: Apache-2.0
"""`ModelCheckpoint`: MindSpore's callback for any training loop.

It accepts any run context whose `original_args()` has `cur_step_num`, `cur_epoch_num`, `batch_num`
and `train_network` (a mapping of names to arrays, an object with `state_dict()`, or a MindSpore
Cell). File names, triggers and retention are those of MindSpore. The order of work differs: a file
is removed only after its successor is durable, a failed save is due again, and only files of this
run, or of a run that it was resumed from, are removed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from ckptmgr.config.config import CheckpointConfig, check_config
from ckptmgr.config.surfaces import CALLBACK, SLICED, UNNUMBERED, check_surface
from ckptmgr.core.arguments import no_effect
from ckptmgr.core.handle import SaveHandle
from ckptmgr.core.notes import add_note
from ckptmgr.files.save.job import SaveFacts, SaveJob
from ckptmgr.observe.observers import Observer, Observers, SaveWatch, about
from ckptmgr.parallel.team import Ranks, team_for
from ckptmgr.policy.save import LastSave
from ckptmgr.series.candidates import notes_of
from ckptmgr.training.breakpoints import save_breakpoint
from ckptmgr.training.callback_hooks import TrainingHooks
from ckptmgr.training.callback_names import CallbackSeries, CallbackTarget, GivenNames
from ckptmgr.training.callback_values import (
    GivenMetrics,
    MetricsSource,
    RunContext,
    items_of,
    network_metadata,
)
from ckptmgr.training.forecast import size_of
from ckptmgr.training.history import Progress
from ckptmgr.training.network_graph import NetworkGraph
from ckptmgr.training.options import System, resume_options, run_options
from ckptmgr.training.resume import Resumed, resume_values
from ckptmgr.training.run import Run

__all__ = ["ModelCheckpoint", "Resumed", "RunContext"]

if TYPE_CHECKING:
    from ckptmgr.config.subjects import Resume
    from ckptmgr.parallel.mindspore.context import AutoParallelContext
    from ckptmgr.series.writer import SeriesWriter
    from ckptmgr.training.old_names import OldRanks, OldResume


class ModelCheckpoint(TrainingHooks):
    """Save checkpoints from a training loop.

    Args:
        prefix: Start of the file names, or a function of the callback parameters that returns the
            whole name.
        directory: Directory of the checkpoints, created if missing, or a function of the callback
            parameters that returns it. Default: the working directory.
        config: When and how to save, what to keep.
        metrics: Name to number for `best(...)`, or a function of the run context that returns such
            a mapping; a mapping is read at each save. Without it, a save records as `loss` the mean
            of the first of `net_outputs`, and the numbers in `metrics`, of the callback parameters;
            `Model.fit` adds its metrics to the checkpoint of the step that it evaluated.
        observe: One or several functions that take an `Event` of `ckptmgr.observe`.
        ranks: The processes that save together, as for `CheckpointManager`, into
            `{prefix}-{epoch}_{step}.shards`. When training begins, or at `resume`, rank 0
            chooses the unused prefix for all ranks. A layout names parameters; the network holds
            slices.
        context: Rank, directory, layout and strategy files, as MindSpore's context says them.
        old: Fields of `Ranks` as arguments, as in the last release, which warn.

    Raises:
        ValueError, TypeError, NotADirectoryError: An argument is unusable; messages as MindSpore's.
    """

    _system = System()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an instance that is also a MindSpore callback if MindSpore is imported."""
        if "mindspore" in sys.modules:
            from ckptmgr.files.load.mindspore_cell import callback_class

            adapter: type[Self] = callback_class(cls)
            return super().__new__(adapter)
        return super().__new__(cls)

    def __init__(
        self,
        prefix: str | Callable[[Any], str] = "CKP",
        directory: str | Callable[[Any], str] | None = None,
        config: CheckpointConfig | None = None,
        *,
        metrics: GivenMetrics | None = None,
        observe: Observer | Iterable[Observer] | None = None,
        ranks: Ranks | None = None,
        context: AutoParallelContext | None = None,
        **old: Unpack[OldRanks],
    ) -> None:
        super().__init__()
        options = run_options("ModelCheckpoint", self._system, old, ranks=ranks)
        given, self._config = GivenNames.checked(prefix, directory), check_config(config)
        team = team_for(self._config, options.ranks, context)
        has = {UNNUMBERED: given.prefix_of is not None, SLICED: team.has_layout}
        check_surface(self._config, CALLBACK, has)
        self._run = run = Run(
            self._config, options, team, observers=Observers(observe), has_before_update=False
        )
        self._engine = run.engine
        self._series = CallbackSeries(given.placed(team.own_directory), run)
        self._progress = progress = Progress(LastSave(step=0, at=run.clock()))
        self._due = run.due(self._config.save_policy(since="save"), lambda: progress)
        self._metrics = MetricsSource(metrics)
        self._last_save: tuple[int, SeriesWriter, SaveHandle] | None = None
        self._params: Any = None
        self._steps_before_epoch = 0
        self._graph = NetworkGraph(self._config, team.coordinator)

    @classmethod
    def _on(cls, system: System, *args: Any, **options: Any) -> Self:
        """Return a callback on another clock, disk or processes; for tests."""
        made = cls.__new__(cls)
        made._system = system
        made.__init__(*args, **options)  # type: ignore[misc]
        return made

    @property
    def latest_ckpt_file_name(self) -> str:
        """Path of the newest durable checkpoint of this run, or an empty string."""
        return self._progress.latest_path

    def begin(self, run_context: RunContext) -> None:
        """Store the run context and warn of a lack of space or memory; called once before training.

        Raises:
            RankFailed, RanksMissing: The ranks failed to agree on a prefix.
        """
        self._params = run_context.original_args()
        self._series.settle()
        if self._series.given.is_fixed and self._due.is_active:
            self._run.forecaster.before_run(
                self._series.writer,
                lambda: size_of(items_of(self._params, self._config, step=0, epoch=0)),
            )

    def epoch_begin(self, run_context: RunContext) -> None:
        """Store the run context."""
        self._params = run_context.original_args()
        self._steps_before_epoch = int(self._params.cur_step_num)

    def step_begin(self, run_context: RunContext) -> None:
        """Store the run context."""
        self._params = run_context.original_args()

    def step_end(self, run_context: RunContext) -> None:
        """Save if the policy says so; called after every step.

        Raises:
            CkptmgrError, OSError: The save failed, or an earlier one in the background; the earlier
                checkpoints are intact, and the next step tries again.
        """
        self._params = run_context.original_args()
        self._engine.check()
        self._save_if_due(run_context, is_end=False)

    def epoch_end(self, run_context: RunContext) -> None:
        """Store the run context, and note the metrics of an evaluation of the last step.

        If there are any, wait until the checkpoint of that step is durable. With `save_only_kept` a
        step that waited for such a metric is saved now, if it is kept.
        """
        self._params = run_context.original_args()
        metrics, now_step = self._metrics.evaluated(self._params), int(self._params.cur_step_num)
        if metrics and self._due.lacks_metric_at == now_step:
            self._save_if_due(run_context, is_end=False)
        elif metrics and self._last_save is not None:
            step, writer, handle = self._last_save
            if step == now_step:
                self._engine.wait_until_idle()
                self._note_metrics(writer, handle, metrics)

    def end(self, run_context: RunContext) -> None:
        """Save the last step if it is unsaved, and wait for all saves; called once after training.

        Raises:
            CkptmgrError, OSError: A save failed, this one or an earlier one in the background.
        """
        self._params = run_context.original_args()
        try:
            self._engine.wait()
        finally:  # a failed earlier save must not prevent that of the last step
            try:
                self._save_if_due(run_context, is_end=True)
            finally:
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._config.exception_save and self._params is not None:
            save_breakpoint(
                error,
                self._params,
                series=self._series,
                run=self._run,
                steps_before_epoch=self._steps_before_epoch,
            )
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            add_note(error, f"ckptmgr: a save in the background failed: {failure}")

    def close(self) -> None:
        """Wait for the saves in flight and release the lease of the series; a save takes it again.

        Raises:
            CkptmgrError, OSError: A save failed in the background, and its error was not raised
                yet.
        """
        try:
            self._engine.close()
        finally:
            if not self._engine.is_busy:  # Ctrl-C does not stop a save, which needs the lease
                self._series.close()

    def resume(self, resume: Resume | None = None, **old: Unpack[OldResume]) -> Resumed | None:
        """Return the newest checkpoint of this prefix in the directory that loads, or None.

        Call it before the training begins: `load_param_into_net(net, found.values)` restores the
        network, and `found.checkpoint` has the step and the epoch to go on from.

        Runs of the same prefix count (`net`, `net_1`, ...). Damaged files are skipped. The run then
        continues that of the checkpoint: the checkpoints of that run count for the retention
        policy, which never removes the resumed one. All ranks resume the same checkpoint.

        Args:
            resume: `Resume(allow_bare=True)` takes, where no checkpoint loads, the newest file of
                this prefix without a manifest, such as MindSpore's own.
            old: `allow_bare` itself, as in the last release, which warns.

        Raises:
            ValueError: Another option is given: a callback begins anew where `resume` is not
                called, and restores no state.
            UnprovenCheckpoint: There are only files without manifests, and `allow_bare` is False.
            KeyProblem: There are checkpoints, but the key of the configuration opens none.
            ResumeFailed, RanksMissing: Another rank cannot resume, or did not arrive.
        """
        how = resume_options("resume", resume, old)
        for name in [one for one in how.given if one != "allow_bare"]:
            if name == "start":
                name, why = "start='new'", "it begins anew where resume is not called"
            else:
                why = "it returns values, and restores no state"
            raise no_effect(name, "in a callback", why)
        self._series.settle()
        writer = self._series.writer
        with self._run.observers.timed("resume", series=writer.series) as facts:
            self._engine.wait_until_idle()
            found = resume_values(
                writer,
                self._run.reader(writer),
                prefix=self._series.given.prefix,
                allow_bare=how.allow_bare,
            )
            if found.newest is not None:
                facts |= about(found.newest[0])
            facts["figures"] = {"skipped": len(found.skipped)}
            doubts = () if found.doubt is None else (found.doubt,)
            facts["notes"] = (*notes_of(found.skipped), *doubts)
        if found.newest is None:
            return None
        checkpoint, (values, kept) = found.newest
        return Resumed(
            checkpoint=checkpoint,
            values=values,
            skipped=found.skipped,
            kept=kept,
            doubt=found.doubt,
        )

    @staticmethod
    def _note_metrics(
        writer: SeriesWriter, handle: SaveHandle, metrics: Mapping[str, float]
    ) -> None:
        if not handle.durable.done() or handle.has_failed:
            return
        checkpoint = handle.durable.result()
        if any(checkpoint.metrics.get(name) != value for name, value in metrics.items()):
            writer.note_metrics(checkpoint, metrics)

    def _save_if_due(self, run_context: RunContext, *, is_end: bool) -> None:
        params = run_context.original_args()
        step, now = int(params.cur_step_num), self._run.clock()
        self._series.settle()
        target = self._series.at(params)
        if not is_end:
            self._graph.write_once(target, params)
        is_due = (
            self._due.at_end(step)
            if is_end
            else self._due.at_step(
                step,
                target.writer,
                epoch=int(params.cur_epoch_num),
                metrics=lambda: self._metrics.at(run_context),
                at=now,
            )
        )
        if not is_due:
            return
        if self._config.remove_redundancy and not self._run.team.is_many:
            # MindSpore raises this only after it has deleted an older checkpoint.
            raise TypeError(
                "The deduplication feature for saving checkpoint can only be used in parallel scenarios, "
                "but got 'stand_alone'."
            )
        facts = SaveFacts(
            step=step,
            at=now,
            epoch=int(params.cur_epoch_num),
            why="end" if is_end else "policy",
        )
        with self._run.observers.watch(series=target.prefix, step=step, why=facts.why) as watch:
            handle, facts = self._save(target, run_context, facts, watch)
        if handle is not None:
            self._last_save = (step, target.writer, handle)
            self._progress.note(handle, facts, at=now)
            for one in self._run.companions:
                one.saved(handle, facts)

    def _save(
        self, target: CallbackTarget, run_context: RunContext, facts: SaveFacts, watch: SaveWatch
    ) -> tuple[SaveHandle | None, SaveFacts]:
        params = run_context.original_args()
        job = SaveJob(
            naming=target.naming(params),
            facts=facts,
            retention=self._config.retention_policy() if target.is_numbered else None,
        )
        target.writer.prepare()
        try:
            store = target.writer.store
            self._run.team.write_strategy(store.directory, fs=store.fs)
            items = items_of(params, self._config, step=facts.step, epoch=facts.epoch or 0)
            slicer = self._run.team.slicer
            metadata = network_metadata(params, self._config)
            if slicer is not None:
                metadata |= slicer.metadata_of(items)
            facts = replace(facts, metrics=self._metrics.at(run_context))
            job = replace(job, facts=facts, items=items, metadata=metadata or None)
        except Exception as error:
            if not self._run.team.is_many:
                raise
            job = replace(job, error=error)
        return self._engine.run(job, target.writer, watch=watch), facts
