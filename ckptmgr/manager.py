# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager`: the explicit API for any training loop.

```
with CheckpointManager("runs/digits", CheckpointConfig(save_checkpoint_steps=100), prefix="digits") as manager:
    start = manager.resume(state)              # restores into `state`, or starts at step 0
    for step in range(start.step + 1, 1001):
        train_one_step(state)
        manager.step_end(step, state, metrics={"loss": loss})
```

* `state` is any nesting of dicts, lists, numbers, arrays, random number generators and objects with `state_dict()`.
* A returned save survives a power cut. A failed one raises, leaves the earlier checkpoints intact, and is due again.
* `resume` walks from the newest to the oldest checkpoint, verifies each, and says what it skipped and why.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from ckptmgr import tree
from ckptmgr.config import CheckpointConfig, check_config
from ckptmgr.config_checks import check_trusted_keys
from ckptmgr.crypto.signing import PublicKey
from ckptmgr.errors import CheckpointNotFound
from ckptmgr.forecast import Forecast
from ckptmgr.forecaster import Forecaster
from ckptmgr.formats.tensor import Item
from ckptmgr.fsio import FileSystem
from ckptmgr.going_back import go_back
from ckptmgr.handle import SaveHandle
from ckptmgr.lease import Processes
from ckptmgr.loop_values import (
    checked_count,
    checked_epoch,
    checked_interval,
    checked_metrics,
    given_state,
    is_function,
)
from ckptmgr.model import Checkpoint, Pin, Plan
from ckptmgr.naming import check_directory, check_prefix
from ckptmgr.observe import Observer, Observers, SaveWatch, about
from ckptmgr.parallel.coordinator import Coordinator
from ckptmgr.parallel.layout import ParallelLayout
from ckptmgr.parallel.sharing import Balance
from ckptmgr.parallel.team import team_for
from ckptmgr.progress import Progress
from ckptmgr.recent_states import RecentStates
from ckptmgr.resume import notes_of, without_manifest
from ckptmgr.resuming import find_newest
from ckptmgr.resumption import Resumption
from ckptmgr.run_parts import RunParts
from ckptmgr.save_policy import LastSave, SavePolicy, decide_at_end, decide_at_step
from ckptmgr.saver import Publish
from ckptmgr.series import SaveFacts
from ckptmgr.start_count import count_start
from ckptmgr.stored_state import as_held_here, metadata_of

__all__ = ["CheckpointManager", "Resumption"]

_LOG = logging.getLogger(__name__)
_MANY_STARTS = 3


class CheckpointManager:
    """Saves, keeps, proves and restores the checkpoints of one training run.

    Args:
        directory: Where the checkpoints lie; created on the first save.
        config: When and how to save, what to keep; the same as for `ModelCheckpoint`.
        prefix: Name of the series; files are called `<prefix>-<step>.<format>`.
        save_policy: Instead of the configuration's steps and seconds.
        clock: Seconds since the epoch; stamps checkpoints and decides about seconds and ages.
        allow_unsealed: With a key or trusted keys, also resume from files that are not authenticated as a whole.
        trusted_keys: Public keys, or their files in PEM: checkpoints whose manifest none of them signed are not resumed from.
            That of the configuration's `signing_key` is always one of them.
        snapshot_steps: Every so many steps `step_end` also copies the state into memory, for `rollback`; None for never.
        snapshots: How many such copies are kept; `memory.snapshot_budget_bytes` bounds them, too.
        observe: A function, or several, that take an `Event` of `ckptmgr.observe`.
        coordinator: The ranks that save together, each its own state; they make the same calls in the same order. Rank 0
            removes and pins. What they save, other numbers of ranks resume: see `docs/sharded-checkpoints.md`.
        rank_timeout_s: How long the ranks wait for each other, and how long a save of all may take.
        layout: Name of a tensor, such as `model/weight`, to how it is cut over the ranks; the state holds their slices.
            DTensors say so themselves.
        keep_redundancy: With `remove_redundancy`: copies to keep of what several ranks have.
        balance: With `remove_redundancy`: `bytes` evens out what the ranks write; `round_robin` deals out whole tensors by
            name, as MindSpore does.
        fs: The disk.
        processes: Tells dead writers from live ones.

    Raises:
        TypeError, ValueError, NotADirectoryError: An argument is unusable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        prefix: str = "ckpt",
        save_policy: SavePolicy | None = None,
        clock: Callable[[], float] = time.time,
        allow_unsealed: bool = False,
        trusted_keys: Iterable[str | os.PathLike[str] | PublicKey] = (),
        snapshot_steps: int | None = None,
        snapshots: int = 2,
        observe: Observer | Iterable[Observer] | None = None,
        coordinator: Coordinator | None = None,
        rank_timeout_s: float = 600.0,
        layout: Mapping[str, ParallelLayout] | None = None,
        keep_redundancy: int = 1,
        balance: Balance = "bytes",
        fs: FileSystem | None = None,
        processes: Processes | None = None,
    ) -> None:
        if callable(check_prefix(prefix)):
            raise TypeError("the prefix of a CheckpointManager is a string")
        self.directory = check_directory(directory)
        self._config = check_config(config)
        self._policy = save_policy if save_policy is not None else self._config.save_policy()
        self._clock = clock
        self._observers = Observers(observe)
        self._team = team_for(
            self._config,
            self._policy,
            coordinator=coordinator,
            timeout_s=rank_timeout_s,
            layout=layout,
            keep_redundancy=keep_redundancy,
            balance=balance,
        )
        parts = RunParts(
            config=self._config,
            team=self._team,
            clock=clock,
            observers=self._observers,
            fs=fs,
            processes=processes,
            allow_unsealed=allow_unsealed,
            trusted_keys=check_trusted_keys(trusted_keys),
        )
        self._writer = parts.writer(self.directory, prefix)
        self._store = self._writer.store
        self._slicer = self._team.slicer
        self._reader = parts.reader(self._writer)
        self._progress = Progress(LastSave(step=0, at=clock()))
        self._engine = parts.engine(has_before_update=True)
        self._forecaster = Forecaster(self._config, self._observers)
        self._seen_step = 0
        self._snapshot_steps = (
            None if snapshot_steps is None else checked_interval("snapshot_steps", snapshot_steps)
        )
        self._recent = RecentStates(
            self._config.memory, time.monotonic, most=checked_interval("snapshots", snapshots)
        )
        self._unsaved: Callable[[], object] | None = None
        self._given_up: set[Path] = set()

    @property
    def prefix(self) -> str:
        """Name of the series."""
        return self._writer.series

    def resume(self, state: object = None) -> Resumption:
        """Restore the newest checkpoint that verifies and loads.

        Arrays of `state` that can take their content from the file do so, without a second copy in memory. Every byte is
        verified before the first one of them is written: damaged checkpoints change nothing, also when none loads.

        In the middle of a run it starts again from there: the steps after the checkpoint, and their snapshots, are forgotten,
        and nothing is saved on leaving until another step has ended.

        Args:
            state: The state to restore into, built as for a fresh start; None gives the stored state as new objects.

        Raises:
            StateMismatch: A whole checkpoint does not fit `state`; names every difference. Nothing was changed.
            ResumeFailed: Another rank cannot resume; names it and its error. Nothing was changed.
            RanksMissing: Other ranks did not come in time. Nothing was changed.
            CorruptCheckpoint, OSError: The file changed, or could no longer be read, after it was verified. `state` is then
                partly overwritten.
            KeyProblem: There are checkpoints, but none opens with this key.
            StoreLocked: Another live process writes this series.
        """
        with self._observers.timed("resume", series=self.prefix) as told:
            found = self._resume(state)
            if found.checkpoint is not None:
                told |= about(found.checkpoint)
            told["figures"] = {"skipped": len(found.skipped), "starts": found.starts}
            doubts = () if found.doubt is None else (found.doubt,)
            told["notes"] = (*notes_of(found.skipped), *doubts)
        return found

    def _resume(self, state: object) -> Resumption:
        self._engine.wait_until_idle()  # going back: what is in flight would be newer
        self._writer.prepare()
        found = find_newest(
            self._writer,
            lambda one: one.series == self.prefix,
            lambda one: self._reader.read(one, state),
            passed_over=lambda present: without_manifest(present, self.prefix),
        )
        if found.newest is None:
            self._start_at(0, None)
            return Resumption(step=0, state=state, metrics={}, skipped=found.skipped)
        checkpoint, loaded = found.newest
        restored = self._writer.agreed(lambda: loaded.compared(state))()
        self._writer.continue_from(checkpoint, loaded.manifest)
        self._start_at(checkpoint.step, checkpoint.run_id)
        if checkpoint.path in self._given_up:  # its past is ours again
            self._given_up.clear()
        is_first = self._writer.is_first
        starts = count_start(self._store, self.prefix, checkpoint) if is_first else 0
        if starts > _MANY_STARTS:
            _LOG.warning(
                "this is start number %d from %s without a newer save: the run may be failing at the same place",
                starts,
                checkpoint.path,
            )
        return Resumption.at(
            checkpoint,
            restored,
            skipped=found.skipped,
            starts=starts,
            doubt=found.doubt,
            kept=loaded.kept,
        )

    def _start_at(self, step: int, run_id: str | None) -> None:
        """Forget what the steps before `resume` left behind.

        Snapshots stay that lie before a checkpoint of this very run; all others are of another past.
        """
        self._progress = Progress(LastSave(step=step, at=self._clock()))
        self._seen_step = step
        self._unsaved = None
        self._recent.drop_after(step if run_id == self._writer.run_id else -1)

    def step_end(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle | None:
        """Save if the policy says so; call it after every step.

        Args:
            step: Global step, from 1.
            state: The state, or a function that returns it (called only when it is saved or copied).
            epoch: Epoch number.
            metrics: Name to value, for `best(...)`.

        Returns:
            The handle of the save, or None when none was due.

        Raises:
            BaseException: An earlier save failed in the background; it is raised once.
        """
        self._unsaved = lambda: self.save(step, state, epoch=epoch, metrics=metrics, why="end")
        self._seen_step = step
        self._engine.check()
        if self._policy.is_active and not is_function(state):
            self._forecaster.before_run(
                self._writer, lambda: tree.flatten(state, self._slicer).size_bytes
            )
        if self._snapshot_steps is not None and step % self._snapshot_steps == 0:
            self.snapshot(step, state, epoch=epoch, metrics=metrics)
        last = self._progress.last
        if not decide_at_step(self._policy, step, self._clock(), last=last).is_due:
            return None
        return self.save(step, state, epoch=epoch, metrics=metrics, why="policy")

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
        self._seen_step = max(self._seen_step, step)
        self._writer.prepare()  # before a name is chosen, which another process could take
        if not isinstance(flat, Exception):
            self._forecaster.before_run(self._writer, lambda: flat.size_bytes)

        def write(items: Sequence[Item], publish: Publish) -> Checkpoint:
            # The name not before the save in flight has taken its own.
            checkpoint = self._writer.save_next(
                lambda extension: self._reader.free_name(step, format=extension),
                items,
                SaveFacts(step=step, at=now, epoch=epoch, why=why, metrics=metrics),
                metadata=metadata,
                publish=publish,
            )
            watch.durable(checkpoint.path)
            self._given_up.discard(checkpoint.path)  # once removed, its name is free again
            self._writer.retain(self._config.retention_policy())
            return checkpoint

        if isinstance(flat, Exception):
            handle = self._engine.refuse(flat, write, watch=watch)
        else:
            handle = self._engine.run(self._store, [*flat.tensors], write, watch=watch, state=given)
        if handle is not None:
            self._progress.note(handle, LastSave(step=step, at=now))
            self._forecaster.after_save(handle, now)
        return handle

    def _flattened(self, state: object) -> tuple[object, tree.FlatState | Exception]:
        """Return a state and its tensors, or why there are none, for the other ranks to hear of."""
        given = state
        try:
            given = given_state(state)
            flat = tree.flatten(given, self._slicer)
            if self._slicer is not None:
                names = {tensor.spec.name for tensor in flat.tensors}
                self._slicer.check_used(names | flat.aliases.keys() | flat.slices.keys())
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

    def snapshot(
        self,
        step: int,
        state: object,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Copy the state into memory, for `rollback`; return whether there was room.

        A snapshot is gone when the process is; what must survive is saved.
        """
        step, epoch = checked_count("step", step), checked_epoch(epoch)
        self._seen_step = max(self._seen_step, step)
        flat = as_held_here(tree.flatten(given_state(state), self._slicer))
        return self._recent.put(step, flat, epoch=epoch, metrics=checked_metrics(metrics))

    def rollback(self, state: object = None, *, steps_back: int = 1) -> Resumption:
        """Go back to the newest state that is at least `steps_back` steps old: from memory, else from disk.

        What it gives up, no later rollback returns. When that includes saves, the next `step_end` saves, unless the policy
        never does: a crash before that would resume from what was given up.

        With a coordinator all ranks call it, and go back to the same step: one that all of them have in memory, or all load.

        Args:
            state: The state to restore into, or None for new objects.
            steps_back: How far, counted from the last step seen by `step_end`, `save` or `snapshot`.

        Raises:
            CheckpointNotFound: Neither memory nor disk has a state that old. Nothing was changed.
            StateMismatch: It does not fit `state`. Nothing was changed.
            ResumeFailed, RanksMissing, RanksOutOfStep: The ranks cannot go back together. Nothing was changed.
        """
        target = self._seen_step - steps_back
        self._engine.wait_until_idle()
        found = go_back(
            target,
            state,
            recent=self._recent,
            reader=self._reader,
            writer=self._writer,
            given_up=self._given_up,
        )
        self._given_up |= {c.path for c in self._reader.checkpoints() if c.step > found.step}
        self._recent.drop_after(found.step)
        self._progress.go_back(found.step, self._clock())
        self._seen_step = found.step
        self._unsaved = None
        return found

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
            checkpoint: From `checkpoints()`, a step, or a file name.
            state: Restore into this, or None for new objects.

        Raises:
            CheckpointNotFound: There is no such checkpoint.
            CorruptCheckpoint, KeyProblem: It is damaged, or the key is wrong.
        """
        found = self._reader.find(checkpoint)
        with self._observers.timed("load", **about(found)):
            loaded = self._reader.read(found, state)
            if state is not None:
                self.before_update()
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
            size_bytes = tree.flatten(given_state(state), self._slicer).size_bytes
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

    def close(self) -> None:
        """Wait for what is in flight and let other processes write this series. Saving again takes it back.

        Raises:
            BaseException: A save failed in the background and nobody has fetched its failure.
        """
        try:
            self._engine.close()
        finally:
            self._recent.close()
            if not self._engine.is_busy:  # Ctrl-C does not stop a save, which needs the lease
                self._writer.close()

    def wait(self) -> None:
        """Wait until everything handed over is durable.

        Raises:
            BaseException: A save failed in the background; it is raised once.
        """
        self._engine.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Save the last step unless it is saved already or training failed; then wait and give the lease back."""
        if error is None:
            try:
                self._engine.wait()
            finally:  # the last step is saved even if the one before it could not be
                try:
                    self._save_last_step()
                finally:
                    self.close()
            return
        try:
            self.close()
        except Exception as failure:
            error.add_note(f"ckptmgr: a save in the background failed: {failure}")

    def _save_last_step(self) -> None:
        unsaved, self._unsaved = self._unsaved, None
        if (
            unsaved is not None
            and decide_at_end(self._policy, self._seen_step, last=self._progress.last).is_due
        ):
            unsaved()

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
            self._store.change_pins(self._reader.find(name), change)
