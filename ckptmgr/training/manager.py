# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager`: the explicit API for any training loop.

```
config = CheckpointConfig(save_checkpoint_steps=100)
with CheckpointManager("runs/digits", config, prefix="digits") as manager:
    start = manager.resume(state)  # restores into `state`; next_step is 0 for a fresh start
    for step in range(start.next_step, 1001):
        train_one_step(state)
        manager.step_end(step, state, metrics={"loss": loss})
```

* `state` is any nesting of dicts, lists, numbers, arrays, random number generators, dataclasses and
  objects with `state_dict()`; `ckptmgr.state.tree` has the whole list.
* A completed save survives a power cut. A failed one raises, leaves the earlier checkpoints intact,
  and is due again.
* `resume` tries the checkpoints from the newest to the oldest, verifies each, and reports those
  that it skipped with the reasons.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from ckptmgr.config.config import CheckpointConfig, check_config
from ckptmgr.config.subjects import Snapshots, Stop
from ckptmgr.config.surfaces import MANAGER, ONE_PROCESS, SLICED, check_surface
from ckptmgr.core.arguments import (
    check_metrics,
    checked_count,
    checked_epoch,
    checked_metrics,
    is_function,
    resolve_state,
)
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.core.names import check_directory, check_prefix
from ckptmgr.core.notes import add_note
from ckptmgr.core.place import capabilities_at
from ckptmgr.parallel.team import team_for
from ckptmgr.training.addresses import (
    NO_BARE_FILES,
    check_at_address,
    check_compared,
    checked_place,
)
from ckptmgr.training.options import System, resume_options, run_options

if TYPE_CHECKING:  # a plain save needs none of these
    from ckptmgr.config.subjects import Resume
    from ckptmgr.core.handle import SaveHandle
    from ckptmgr.core.model import Checkpoint, Plan
    from ckptmgr.core.trust import Trust
    from ckptmgr.observe.observers import Observer
    from ckptmgr.parallel.mindspore.context import AutoParallelContext
    from ckptmgr.parallel.team import Ranks
    from ckptmgr.policy.forecast import Forecast
    from ckptmgr.policy.save import SavePolicy
    from ckptmgr.remote.mirror import Mirror
    from ckptmgr.state.tree import FlatState
    from ckptmgr.training.catalog import Catalog
    from ckptmgr.training.data_state import Batches, DataState
    from ckptmgr.training.history import UnsavedStep
    from ckptmgr.training.kept_states import KeptStates
    from ckptmgr.training.notebook import NotebookView
    from ckptmgr.training.old_names import OldOptions, OldResume
    from ckptmgr.training.preemption import Preemption
    from ckptmgr.training.put_aside import PutAside
    from ckptmgr.training.resume import Resumption
    from ckptmgr.training.stop_writer import StopWriter
    from ckptmgr.training.tries import Tries
    from ckptmgr.training.witness import Witness
    from ckptmgr.training.witness_record import Witnessed


# Libraries that every run needs are imported now, the modules of a run when there is one: until then
# the program may have changed into a directory whose files bear their names.
_LIBRARIES = (
    "blake3", "concurrent.futures", "ctypes", "fcntl", "hashlib", "heapq", "hmac", "isal.isal_zlib", "json",
    "mmap", "numpy", "pwd", "queue", "secrets", "select", "signal", "uuid",
)  # fmt: skip
for _library in _LIBRARIES:
    import_module(_library)

_Batch = TypeVar("_Batch")


class CheckpointManager:
    """Saves, verifies, prunes and restores the checkpoints of one training run.

    Args:
        directory: Directory of the checkpoints; created on the first save. Or the address of an
            object store, such as `s3://bucket/run`: a save is written into the temporary folder
            (TMPDIR), and is durable once it is uploaded; see `docs/object-stores.md`.
        config: When and how to save, what to keep; the same as for `ModelCheckpoint`.
        prefix: Name of the series; file names are `<prefix>-<step>.<format>`.
        save_policy: Replaces the steps and seconds of the configuration.
        trust: Keys that must have signed a checkpoint, and what else the run accepts.
        ranks: The processes that save together; None for one.
        stop: How the run stops when a signal or the clock asks it to, for `should_stop`.
        snapshots: Copies of the state in memory, for `rollback`; without it, two that `snapshot`
            makes.
        mirror: An object store that gets a copy of each checkpoint, uploaded in the background: an
            address such as `s3://bucket/run`, or a `Mirror` with a retention policy of its own.
            `resume` downloads its newest checkpoint if that is newer than those here. Not with a
            coordinator.
        observe: One or several functions that take an `Event` of `ckptmgr.observe`.
        context: Parallel settings under MindSpore's names (see `docs/mindspore.md`): a rank of
            several without a coordinator saves into `rank_N` of the directory, and strategy files
            give and get the layout. Default: the context that `set_auto_parallel_context` set.
        old: Arguments under their names of the last release, which warn: `coordinator`, `layout`,
            `trusted_keys`, `grace` and others.

    Raises:
        TypeError, ValueError, NotADirectoryError: An argument is unusable, or contradicts the
            context.
        CkptmgrError: About the strategy file that the context names.
    """

    _needs_same_division = False
    """Whether `resume` refuses what another number of processes saved."""
    _owner = "CheckpointManager"
    _system = System()

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        prefix: str = "ckpt",
        save_policy: SavePolicy | None = None,
        trust: Trust | None = None,
        ranks: Ranks | None = None,
        stop: Stop | None = None,
        snapshots: Snapshots | int | None = None,
        mirror: Mirror | str | None = None,
        observe: Observer | Iterable[Observer] | None = None,
        context: AutoParallelContext | None = None,
        **old: Unpack[OldOptions],
    ) -> None:
        options = run_options(
            self._owner,
            self._system,
            old,
            trust=trust,
            ranks=ranks,
            stop=stop,
            snapshots=snapshots,
        )
        if callable(check_prefix(prefix)):
            raise TypeError("the prefix of a CheckpointManager is a string")
        from ckptmgr.observe.observers import Observers
        from ckptmgr.policy.save import checked_save_policy
        from ckptmgr.training.history import RunPast
        from ckptmgr.training.run import Run
        from ckptmgr.training.saving import StateSaver

        given, checked = checked_place(directory), check_config(config)
        team = team_for(checked, options.ranks, context)
        if not capabilities_at(given).in_place:
            check_at_address(given, checked, team=team, has_mirror=mirror is not None)
            self.directory = given
        else:
            self.directory = check_directory(team.own_directory(given))
        has = {ONE_PROCESS: not team.is_many, SLICED: team.has_layout}
        check_surface(checked, MANAGER, has)
        policy = checked.save_policy() if save_policy is None else checked_save_policy(save_policy)
        self._config = checked
        self._observers = Observers(observe)
        self._run = run = Run(
            checked, options, team, observers=self._observers, has_before_update=True
        )
        self._engine = run.engine
        self._writer = run.writer(self.directory, prefix)
        self._reader = run.reader(self._writer)
        self._past = past = RunPast(run.clock)
        self._due = run.due(policy, lambda: past.progress)
        self._saver = StateSaver(run, writer=self._writer, naming=self._reader, past=past)
        self._mirror = run.uploads(mirror, self._writer, below=given)
        self._snapshots, self._stop = options.snapshots, options.stop
        self._preemption: Preemption | None = None
        self._aside: PutAside | None = None
        self._stop_writer: StopWriter | None = None
        self._tries: Tries | None = None
        self._witness: Witness | None = None
        self._is_witnessed = self._writer.is_first and capabilities_at(given).in_place
        self._is_entered = False
        cut_at = os.environ.get("CKPTMGR_CUT_AT")
        if cut_at is not None:  # of `ckptmgr prove`
            from ckptmgr.training.cut import cut_asked_for

            self._run.companions.append(cut_asked_for(cut_at))
        if self._snapshots != Snapshots():
            self._keep_states()
        if self._stop != Stop():
            self._watch_for_signals()

    @classmethod
    def _on(cls, system: System, *args: Any, **options: Any) -> Self:
        """Return a manager on another clock, disk or processes; for tests."""
        made = cls.__new__(cls)
        made._system = system
        made.__init__(*args, **options)  # type: ignore[misc]
        return made

    def _keep_states(self) -> KeptStates:
        """Return the snapshots, made the first time."""
        if self._past.kept is None:
            from ckptmgr.training.kept_states import KeptStates

            is_there = self._reader.is_there
            kept = KeptStates(self._snapshots, self._run.clock, self._engine, is_there)
            self._past.kept = kept
            self._run.companions.append(kept)
        return self._past.kept

    def _watch_for_signals(self) -> Preemption:
        """Return what decides when the run stops, made the first time."""
        if self._preemption is None:
            from ckptmgr.training.preemption import Preemption
            from ckptmgr.training.save_requests import SaveRequests

            ranks, store = self._run.team.coordinator, self._writer.store
            looks = (ranks is None or ranks.rank == 0) and capabilities_at(self.directory).in_place
            note = store.directory / f".{self.prefix}.save_now" if looks else None
            self._preemption = Preemption(
                grace_s=self._stop.grace,
                after_s=self._stop.after_s,
                coordinator=ranks,
                timeout_s=self._run.team.timeout_s,
                requests=SaveRequests(store.fs, note, self._stop.save_now),
                meets=self._stop != Stop(),
                has_stepped=self._past.unsaved is not None,
            )
            self._run.companions.append(self._preemption)
        return self._preemption

    def _place_loaders(self) -> DataState:
        """Return the places of the loaders, made the first time."""
        if self._saver.data is None:
            from ckptmgr.training.data_state import DataState

            self._saver.data = DataState(has_gone_on=self._past.unsaved is not None)
            self._saver.data.batch_asked = self._watch_for_signals().check
            self._run.companions.insert(0, self._saver.data)  # before the witness, which asks it
            if self._witness is not None:
                self._witness.data = self._marked()
            # Ranks would decide one by one.
            if self._stop.put_aside and not self._run.team.is_many:
                self._put_aside_in(self._saver.data)
        return self._saver.data

    def _put_aside_in(self, data: DataState) -> None:
        """Have states put aside when a pass ends, and have a stop write them."""
        from ckptmgr.state.tree import flatten as flatten_state
        from ckptmgr.training.put_aside import PutAside
        from ckptmgr.training.stop_writer import StopWriter

        # A method of the manager would keep it, and its lease, alive.
        flatten = partial(flatten_state, slicer=self._run.team.slicer)
        self._aside = aside = PutAside(self._past, self._engine, flatten, self._saver.texts)
        data.pass_ended = aside.pass_ended
        self._stop_writer = writer = StopWriter(self._past, aside, data, self._saver.save_at_stop)
        self._saver.alone = writer.writing
        self._watch_for_signals().have_written(writer)
        self._run.companions += [writer, aside]  # the copy is dropped after it is written

    def _count_tries(self) -> Tries:
        """Return what notes how far the run comes, made the first time."""
        if self._tries is None:
            from ckptmgr.training.tries import Tries

            self._tries = Tries()
            self._run.companions.append(self._tries)
        return self._tries

    def _witness_steps(self) -> Witness | None:
        """Return what records the steps, made the first time; None where nothing does."""
        if self._witness is None and self._is_witnessed:
            from ckptmgr.training.witness import Witness

            self._witness = Witness(self._writer, self._past, self._observers)
            self._witness.data = self._marked()
            self._run.companions.append(self._witness)
        return self._witness

    def _marked(self) -> DataState | None:
        """Return the places of the loaders; None with a key, as their marks are of the data."""
        return self._saver.data if self._run.trust.keys is None else None

    @property
    def witness(self) -> Witnessed:
        """Result of the steps that repeat after a resumption; printed, it is one sentence.

        A run that dies after step 1,237 and resumes from 1,200 trains 37 steps again. Their metrics
        as given to `step_end`, the batches of `batches` and the global random numbers are compared with
        those that were recorded, and a difference is said once, or raised: `Resume(on_difference=)`.
        An address has no record, nor have ranks other than the first.
        """
        from ckptmgr.training.witness_record import Witnessed

        return Witnessed() if self._witness is None else self._witness.result

    @property
    def prefix(self) -> str:
        """Name of the series."""
        return self._writer.series

    def resume(
        self,
        state: object = None,
        resume: Resume | None = None,
        **old: Unpack[OldResume],
    ) -> Resumption:
        """Restore the newest checkpoint that verifies and loads.

        With a mirror, one of the same line of runs that is newer there is downloaded first, also
        where the newest one here is damaged; `fetched_from` of the result says so. Where the mirror
        does not answer, `doubt` says so, unless the `Mirror` requires an answer.

        Where several runs share the series, it is that of the run that saved last; but a run that
        neither resumed nor asked for a new start gives way to one that reached a later step.

        Arrays of `state` that can be filled from the file are filled in place, without a second
        copy in memory, unless they are many small ones of at most 64 MiB in all. Every byte is
        verified before the first write: damaged checkpoints change nothing, even if none loads.

        In the middle of a run, the run restarts from the checkpoint: later steps and their
        snapshots are forgotten, and the exit of the manager saves nothing until another step has
        ended.

        Args:
            state: The state to restore into, built as for a fresh start; None returns the stored
                state as new objects.
            resume: Where to start, and which files may count: `Resume(start="new")`, or
                `Resume(at="best:val_loss:min")` to go back to a chosen checkpoint. The first step
                after that is due, so that a later `resume` finds it.
            old: Its fields under their names of the last release, which warn.

        Raises:
            ValueError: `allow_bare`, `on_difference` or `tolerance` in an object store, or
                `on_difference="raise"` with a key.
            UnprovenCheckpoint: With a key or trusted keys: the series has only files without
                manifests.
            UnsupportedState: A value of `state` cannot be stored, so that no save would succeed;
                names its path. Nothing was changed. What `state_dict()` returns is checked later.
            StateMismatch: An intact checkpoint does not fit `state`; names every difference.
                Nothing was changed. Or the restored state is another than the stored one, bit for
                bit, because something changed it while it was loaded; the message says so.
            ResumeFailed: Another rank cannot resume; names it and its error. Nothing was changed.
            RanksMissing: Other ranks did not arrive in time. Nothing was changed.
            CorruptCheckpoint, OSError: The file changed, or became unreadable, after its
                verification; `state` is partly overwritten.
            KeyProblem: There are checkpoints, but this key opens none.
            StoreLocked: Another live process writes this series.
        """
        how = resume_options("resume", resume, old)
        if how.allow_bare and not capabilities_at(self.directory).bare:
            raise ValueError(NO_BARE_FILES)
        check_compared(how, self.directory, self._run.trust)
        from ckptmgr.observe.observers import about
        from ckptmgr.series.candidates import notes_of
        from ckptmgr.training.resume import resume_state, start_fresh

        with self._observers.timed("resume", series=self.prefix) as facts:
            self._engine.wait_until_idle()  # a save in flight would be newer
            if how.start == "new":
                found = start_fresh(state, writer=self._writer, past=self._past)
                self._place_loaders().forget()
                if self._witness is not None:
                    self._witness.start_over()
            else:
                found = resume_state(
                    state,
                    writer=self._writer,
                    reader=self._reader,
                    past=self._past,
                    data=self._place_loaders(),
                    tries=self._count_tries(),
                    witness=self._witness_steps(),
                    how=how,
                    needs_same_division=self._needs_same_division,
                    fetch=None if self._mirror is None else self._mirror.fetch,
                )
            self._bring_to_mirror()
            if found.checkpoint is not None:
                facts |= about(found.checkpoint)
            facts["figures"] = {"skipped": len(found.skipped), "starts": found.starts}
            doubts = () if found.doubt is None else (found.doubt,)
            fetched = () if found.fetched_from is None else (f"took {found.fetched_from}",)
            facts["notes"] = (*notes_of(found.skipped), *doubts, *fetched, *found.notes)
        return found

    @property
    def should_stop(self) -> bool:
        """Whether the run should leave its loop, because SIGTERM or SIGUSR1 asked it to stop.

        `while step < steps and not manager.should_stop:` is enough: leaving the `with` block saves
        the last step, also where the policy never saves. The first call begins to watch for the
        signals, which end nothing from then on, until the manager is closed; handlers that were
        there before are called, too. Only the main thread can begin to watch, and a warning says
        so elsewhere; from then on any thread may ask. Ctrl-C is an exception as ever.

        The answer changes when a step ends, the same on all ranks. With `grace` the run goes on
        while there is time for a save, as long as the last one took.
        """
        return self._watch_for_signals().ask()

    def batches(
        self,
        loader: Iterable[_Batch],
        *,
        name: str = "batches",
        epoch: int | None = None,
        random: Sequence[object] = (),
    ) -> Batches[_Batch]:
        """Return the batches of a loader; after `resume`, from where the run was saved, bit for bit.

        Saves then also hold where the loader stands, and the global random numbers (see
        `GlobalRandom`); neither need be in the state. The first pass after `resume` continues the
        saved one: after the last batch of an epoch it is empty. A pass that was left by `break` is
        continued, too, unless a step has ended since.

        A loader with `state_dict` and `load_state_dict` (StatefulDataLoader of torchdata) continues
        at once. Any other is iterated again from the beginning of the pass, in the same order, and
        the batches that were used are skipped.

        Args:
            loader: Any iterable of batches. It draws its order inside its iteration.
            name: Name of the loader, for a run with several.
            epoch: Given to `set_epoch` of the loader, its sampler or its dataset before a new pass.
            random: Generators that the loader draws from, besides the global ones and those that
                are attributes of it, of its sampler or of its dataset.

        Raises:
            ValueError: `epoch` without `set_epoch`, or no count; another loader is iterated under
                this name.
            TypeError: One of `random` is no generator.
            StateMismatch: The loader has fewer batches than were used, or other generators.
        """
        from ckptmgr.training.data_state import Batches

        return Batches(
            self._place_loaders(), loader, name=name, epoch=checked_epoch(epoch), random=random
        )

    def step_end(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle | None:
        """Save if the policy says so, or a signal or a note asks for it (`Stop`); call it after every step.

        Args:
            step: Global step, counted from 0 or from 1. With `save_checkpoint_steps` its multiples
                are due, 0 among them, or where steps are skipped the first after each.
            state: The state, or a function that returns it (called only for a save or a snapshot).
            epoch: Epoch number.
            metrics: Name to value, for `best(...)`.

        Returns:
            The handle of the save, or None when none was due, or when `skipped` says why a due one
            was not made.

        Raises:
            TypeError, ValueError: The step, the epoch or a metric is unusable, also when no save is
                due; the earlier step stays the one that the exit saves.
            BaseException: An earlier save failed in the background; it is raised once.
            StateMismatch: The first step after a resumption is no later one; or, with
                `Resume(on_difference="raise")`, one that comes again is another. It is not saved.
            UnsupportedState: A value of the state cannot be stored; names its path. Without ranks,
                and with a state that is no function, the first call finds it.
        """
        step, epoch = checked_count("step", step), checked_epoch(epoch)
        stop = self._watch_for_signals()
        stop.check()
        self.note_step(step, state, epoch=epoch, metrics=metrics)
        if self._witness is None and (metrics or self._saver.data is not None):
            self._witness_steps()
        for one in self._run.companions:
            one.step_ended(step)
        if self._stop.signals and self._is_entered:
            stop.hold_sigterm()
        self._engine.check()
        is_due = self._due.at_step(step, self._writer, epoch=epoch, metrics=lambda: metrics)
        if self._due.is_active and not is_function(state):
            self._run.forecaster.before_run(
                self._writer,
                lambda: self._flattened(state).size_bytes,
                # Ranks are notified together, in a save.
                refuses=not (self._run.team.is_many or is_due),
            )
        if self._snapshots.every is not None and step % self._snapshots.every == 0:
            self.snapshot(step, state, epoch=epoch, metrics=metrics)
        if not (is_due or stop.is_save_asked):
            return None
        if step == 0:
            self._past.progress.demand()
        why = "policy" if is_due else "preempted" if stop.is_ending else "manual"
        return self.save(step, state, epoch=epoch, metrics=metrics, why=why)

    def note_step(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Take a step for the last one, which an exit saves; `step_end` does so, too.

        It is for callbacks of frameworks that fail after a step has ended and before they may save
        it, such as in an evaluation. Args and errors are those of `step_end`.
        """
        step, epoch = checked_count("step", step), checked_epoch(epoch)
        check_metrics(metrics)
        self._past.ended(step, state, epoch, metrics)

    @property
    def skipped(self) -> str | None:
        """Why the last due step was not saved: `save_only_kept`, or `back_pressure="skip"`."""
        return self._due.skipped

    def save(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
        why: str = "manual",
    ) -> SaveHandle | None:
        """Save now, then apply the retention policy; with `async_save` both in the background.

        Returns:
            The handle, or None when `back_pressure="skip"` and an earlier save still runs.

        Raises:
            BaseException: An earlier save failed in the background; it is raised once.
            UnsupportedState: A value of the state cannot be stored; names its path.
            StoreFull: Not enough disk space; nothing was changed. `on_error` treats it.
            StoreLocked: Another live process writes this series.
            OSError: From the disk; the earlier checkpoints are intact. `on_error` treats it.
        """
        step, epoch = checked_count("step", step), checked_epoch(epoch)
        checked = checked_metrics(metrics)
        self._past.measured.update(dict.fromkeys(checked, True))
        with self._observers.watch(series=self.prefix, step=step, why=why) as watch:
            handle = self._saver.save(step, state, watch, epoch=epoch, metrics=checked, why=why)
        self._due.skipped = f"step {step}: an earlier save still runs" if handle is None else None
        return handle if handle is None or self._mirror is None else self._mirror.follow(handle)

    def before_update(self) -> None:
        """Wait until the state of the last save is copied; call it before an in-place change.

        It is needed with `zero_stall`, where `save` copies the state in the background; otherwise,
        and after the copy, it returns at once. All torch optimizers of the process call it before
        their steps.
        """
        self._engine.before_update()

    def wait(self) -> None:
        """Wait until every requested save is durable.

        Raises:
            BaseException: A save failed in the background; it is raised once.
        """
        self._engine.wait()

    def close(self) -> None:
        """Wait for the saves in flight and release the lease of the series; a save takes it again.

        With a mirror, also wait for the uploads, up to its limit; a warning and the event
        `mirror.unfinished` name those that are left.

        Raises:
            BaseException: A save failed in the background, and its error was not raised yet.
        """
        try:
            self._engine.close()
        finally:
            for one in self._run.companions:
                one.closing()
            if not self._engine.is_busy:  # Ctrl-C does not stop a save, which needs the lease
                self._writer.close()
            if self._mirror is not None:
                self._mirror.close()

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints of the series, oldest first; in a notebook, a table."""
        from ckptmgr.training.notebook import CheckpointList

        return CheckpointList(self._reader.checkpoints(), self._view)

    def _repr_html_(self) -> str:
        return self._view.page(self._reader.checkpoints())

    @property
    def _view(self) -> NotebookView:
        from ckptmgr.training.notebook import NotebookView

        policy = self._config.retention_policy()
        return NotebookView(self._writer.store, self.prefix, policy=policy, clock=self._run.clock)

    @property
    def _catalog(self) -> Catalog:
        from ckptmgr.training.catalog import Catalog

        return Catalog(
            self._reader, writer=self._writer, engine=self._engine, observers=self._observers
        )

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint without known damage, or None; leftovers raise nothing.

        One whose floats are not finite (`health`) only where the run has no other.
        Where several runs share the series: of this run, if it has saved or resumed; else of the
        one that `resume` would go on from. `run_id` of the checkpoint names it.
        """
        return self._reader.latest()

    def best(self, metric: str, mode: str = "min") -> Checkpoint | None:
        """Return the checkpoint with the best finite value of a metric, or None.

        A warning says once if only steps that were not saved had the metric.

        Args:
            metric: Name as given to `step_end`.
            mode: `min` or `max`.
        """
        found = self._reader.best(metric, mode)
        if found is None:
            self._past.warn_of_unsaved(metric)
        return found

    def load(
        self,
        checkpoint: Checkpoint | int | str,
        state: object = None,
        *,
        only: str | Sequence[str] | None = None,
    ) -> object:
        """Load one checkpoint, verified.

        Args:
            checkpoint: From `checkpoints()`, a step, a file name, or a selector, as on the command
                line: `latest`, `best:loss:min`, `@pinned`, `@tag:paper`, `id:` and at least eight
                hex digits. For `latest` the lookup repeats when the run that writes the series
                removes the found checkpoint.
            state: Restore into this, or None for new objects, each of the kind that was saved:
                torch tensors come back as such.
            only: Name, or names, of entries of the dict that was saved: only these are read and
                compared, as in `load("latest", {"net": net}, only="net")`.

        Raises:
            CheckpointNotFound: There is no such checkpoint, or there are several; or it was removed
                after it was listed.
            ValueError: A selector is not complete.
            StateMismatch: It does not fit `state`, or has no part of a name in `only`, and nothing
                was changed; or the restored state is another than the stored one.
            CorruptCheckpoint, KeyProblem: It is damaged, or the key is wrong.
        """
        return self._catalog.load(checkpoint, state, only=only)

    def pin(
        self, checkpoint: Checkpoint | int | str, name: str = "pinned", *, reason: str = ""
    ) -> None:
        """Protect a checkpoint, given as for `load`, from retention, durably.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            UnsupportedCheckpoint: It has no manifest.
        """
        from ckptmgr.core.model import Pin

        self._catalog.change_pins(checkpoint, lambda pins: (*pins, Pin(name=name, reason=reason)))
        self._bring_to_mirror()

    def unpin(self, checkpoint: Checkpoint | int | str) -> None:
        """Remove all pins of a checkpoint."""
        self._catalog.change_pins(checkpoint, lambda pins: ())
        self._bring_to_mirror()

    def record(self, checkpoint: Checkpoint | int | str, metrics: Mapping[str, float]) -> None:
        """Add metrics that were measured after the save, durably; the next save ranks by them.

        Until then `best` does not keep the checkpoint: join it with a rule such as `last(2)`.

        Args:
            checkpoint: A checkpoint, its step or its name; a save in flight is waited for.
            metrics: Name to value; they join those of the save, and replace equal names.

        Raises:
            CheckpointNotFound: There is no such checkpoint; retention may have removed it.
            KeyProblem: Its manifest is authenticated or signed under a key that is not given.
            UnsupportedCheckpoint: It has no manifest.
            BaseException: A save failed in the background; it is raised once.
        """
        checked = checked_metrics(metrics)
        self.wait()
        self._catalog.add_metrics(checkpoint, checked)
        self._bring_to_mirror()

    def _bring_to_mirror(self) -> None:
        if self._mirror is not None:
            self._mirror.catch_up()

    def plan(self) -> Plan:
        """Return the plan of the retention policy, without applying it."""
        return self._writer.planned(self._config.retention_policy())

    def forecast(self, state: object = None) -> Forecast:
        """Return the space, memory and time that the run needs; printed, it explains each shortage.

        Args:
            state: The state to be saved, or None for the size of the newest checkpoint.

        Raises:
            CheckpointNotFound: No state was given, and there is no checkpoint.
            OSError: From the disk.
        """
        if state is not None:
            size_bytes = self._flattened(resolve_state(state)).size_bytes
            return self._run.forecaster.forecast(self._writer, size_bytes)
        newest = self.latest()
        if newest is None:
            raise CheckpointNotFound(
                "nothing says how large a checkpoint will be",
                path=self.directory,
                hint="pass the state: manager.forecast(state)",
            )
        return self._run.forecaster.forecast(self._writer, newest.size_bytes)

    def _flattened(self, state: object) -> FlatState:
        from ckptmgr.state.tree import flatten

        return flatten(state, self._run.team.slicer)

    def snapshot(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Copy the state into memory, for `rollback`; return whether it fits into the budget.

        Snapshots are lost with the process; only saves survive it.
        """
        step, epoch = checked_count("step", step), checked_epoch(epoch)

        from ckptmgr.files.load.state import as_held_here

        self._past.saw(step)
        kept = self._keep_states()
        kept.costs.ended(step)
        flat = as_held_here(self._flattened(resolve_state(state)))
        return kept.recent.put(step, flat, epoch=epoch, metrics=checked_metrics(metrics))

    def rollback(self, state: object = None, *, steps_back: int = 1) -> Resumption:
        """Restore the newest state that is at least `steps_back` steps old, from memory or disk.

        The rollback gives up the later checkpoints: no later rollback returns to them. If there are
        any, the next `step_end` saves (unless the policy never does), because a crash before that
        save would resume from them.

        With a coordinator all ranks call it and go back to the same step: one that all of them have
        in memory, or that all load.

        Args:
            state: The state to restore into, or None for new objects.
            steps_back: Steps to go back from the last step of `step_end`, `save` or `snapshot`.

        Raises:
            CheckpointNotFound: Neither memory nor disk has a state that old. Nothing was changed.
            StateMismatch: The stored state does not fit `state`. Nothing was changed. Or the
                restored state is another than the stored one.
            ResumeFailed, RanksMissing, RanksOutOfStep: The ranks cannot go back together. Nothing
                was changed.
        """
        from ckptmgr.training.rollback import go_back

        past = self._past
        target = past.seen_step - steps_back
        self._engine.wait_until_idle()
        found = go_back(
            target,
            state,
            recent=None if past.kept is None else past.kept.recent,
            reader=self._reader,
            writer=self._writer,
            given_up=past.given_up,
        )
        past.go_back(found.step, self.checkpoints())
        if self._witness is not None:
            self._witness.rolled_back()
        return found

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save the last step, if it is unsaved or `exception_save` asks for it; wait and close.

        The step is saved as it was when its pass over `batches` ended. A loop without such a pass
        ends the block with its end: later changes, such as best weights that it loads, are saved.
        """
        if error is None:
            try:
                self._engine.wait()
            finally:  # a failed earlier save must not prevent that of the last step
                try:
                    self._save_last_step()
                finally:
                    self.close()
            if self._preemption is not None:
                self._preemption.check()
            return
        if isinstance(error, NameError) and self._saver.data is not None:
            self._saver.data.explain(error)
        last, self._past.unsaved = self._past.unsaved, None
        if self._preemption is not None and self._preemption.has_ended:
            last = None  # it is saved
        if last is not None and self._is_written(last):
            last = None
        if self._tries is not None:
            self._tries.failed(error)
        try:
            if self._config.exception_save and last is not None:
                from ckptmgr.training.breakpoints import save_last_step

                last = self._as_it_ended(last)
                save_last_step(error, last, saver=self._saver, engine=self._engine)
        finally:
            self._close_after(error)

    def _close_after(self, error: BaseException) -> None:
        try:
            self.close()
        except Exception as failure:
            add_note(error, f"ckptmgr: a save in the background failed: {failure}")

    def _as_it_ended(self, last: UnsavedStep) -> UnsavedStep:
        """Return the last step with the state that it had when its pass ended, if that was copied."""
        return last if self._aside is None else last._replace(state=self._aside.state_of(last))

    def _is_written(self, last: UnsavedStep) -> bool:
        """Return whether a stop had the last step written as it ended."""
        return self._stop_writer is not None and self._stop_writer.has_written(last)

    def _save_last_step(self) -> None:
        past = self._past
        unsaved, past.unsaved = past.unsaved, None
        if unsaved is None or self._is_written(unsaved):
            return
        is_preempted = self._preemption is not None and self._preemption.is_decided
        if self._due.at_end(past.seen_step, is_preempted=is_preempted):
            step, state, epoch, metrics = self._as_it_ended(unsaved)
            why = "preempted" if is_preempted else "end"
            self.save(step, state, epoch=epoch, metrics=metrics, why=why)
