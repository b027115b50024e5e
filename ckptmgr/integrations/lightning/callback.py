# SPDX-License-Identifier: Apache-2.0
"""`LightningCheckpoints`: the checkpoints of a `CheckpointManager` as a callback of Lightning.

The state is the dictionary of `trainer.save_checkpoint`,
which the trainer hands to the `CheckpointIO` of its strategy: during a fit that is one of ours, which
keeps the state that the callback asked for, and passes everything else on.

A step is saved when it has ended wholly, which is when the loops of Lightning go on:

* Inside an epoch after `on_advance_end` of its loop: after all hooks of the batch, those of the module too, the
  validation that belongs to the step, and the schedules that it moves.
* At the last batch of an epoch after `on_advance_end` of the loop of epochs, alike.
* A stop is no part of a step. SIGTERM waits for the end of a validation; where `should_stop` ends the training,
  the step is saved before the validation and the hooks of the end of an epoch that follow the stop,
  and before `on_train_end`, in which averaged weights take the place of the trained ones.
* Random numbers are put back at the start of the epoch, or at the first batch: between the load
  and that, the loaders are made, such as of a random split, with the same draws at each start.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from ckptmgr.config.checks import check_options
from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.core.notes import add_note
from ckptmgr.integrations.base import FrameworkManager
from ckptmgr.integrations.lightning.added_state import KEY, AddedState
from ckptmgr.integrations.lightning.aside import StateAside
from ckptmgr.integrations.lightning.checkpoint_io import (
    PACKAGES,
    restored,
    storable,
)
from ckptmgr.integrations.lightning.epoch_setup import begin_epoch_again
from ckptmgr.integrations.lightning.loaders import TrainingLoaders
from ckptmgr.integrations.lightning.manager_io import SCHEME, ManagerIO
from ckptmgr.integrations.lightning.measured import Measured
from ckptmgr.integrations.lightning.optimizers import (
    check_optimizers,
    keep_types,
    note_classes,
    stored_optimizers,
)
from ckptmgr.integrations.lightning.progress import forget_begun_batch, start_next_epoch
from ckptmgr.integrations.lightning.stand_ins import StandIns
from ckptmgr.observe.observers import Observer
from ckptmgr.state.global_random import GlobalRandom

if TYPE_CHECKING:
    from ckptmgr.config.subjects import Resume
    from ckptmgr.core.trust import Trust

_LOG = logging.getLogger(__name__)
_LATEST = "latest"
_StateFunction = Callable[[], dict[str, Any]]
_OLD = ("start", "trusted_keys", "allow_unsealed", "allow_unencrypted")
_PARAMETERS = ("prefix", "resume", "trust", "observe")
_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


def _packages() -> list[str]:
    """Return the packages of Lightning that are imported, or else the first installed one."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    found = [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None]
    if not loaded and not found:
        raise ImportError("LightningCheckpoints needs lightning or pytorch_lightning")
    return loaded or found[:1]


def _bases() -> tuple[Any, ...]:
    return tuple(importlib.import_module(f"{name}.callbacks").Checkpoint for name in _packages())


class LightningCheckpoints(*_bases()):  # type: ignore[misc]
    """Saves, deletes and resumes by a `CheckpointConfig`, bit for bit.

    ```
    checkpoints = LightningCheckpoints("runs/digits", CheckpointConfig(keep="last(2)"))
    trainer = Trainer(callbacks=[checkpoints])
    trainer.fit(model, loader, ckpt_path=checkpoints.latest())
    ```

    Steps are those of `trainer.global_step`, or batches where it does not move, metrics those of
    `trainer.callback_metrics` that were measured at the step. A run that gets SIGTERM saves its last
    step before Lightning ends it. `trainer.fit` without `ckpt_path=checkpoints.latest()` is refused
    where there are checkpoints.

    Args:
        directory: Directory of the checkpoints.
        config: When and how to save, what to keep.
        prefix: Name of the series.
        resume: How the run resumes; `Resume(start="new")` allows a start at step 0 beside the present
            checkpoints.
        trust: As for `CheckpointManager`.
        observe: As for `CheckpointManager`.
        old: Fields of the last two as arguments, as in the last release, which warn.

    Attributes:
        manager: The `CheckpointManager`, to list, pin or load checkpoints.

    Raises:
        TypeError, ValueError, NotADirectoryError: An argument is unusable.
        ImportError: Lightning is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        prefix: str = "ckpt",
        resume: Resume | None = None,
        trust: Trust | None = None,
        observe: Observer | Iterable[Observer] | None = None,
        **old: Any,
    ) -> None:
        super().__init__()
        check_options("LightningCheckpoints", old, options=_OLD, parameters=_PARAMETERS)
        self.manager = FrameworkManager(
            "LightningCheckpoints",
            directory,
            config,
            prefix=prefix,
            resume=resume,
            trust=trust,
            observe=observe,
            **old,
        )
        self._io: ManagerIO | None = None
        self._loaders = TrainingLoaders(self.manager, self._put_random_back)
        self._added = AddedState(self._loaders)
        self._measured = Measured()
        self._stand_ins = StandIns()
        self._random: Mapping[str, object] | None = None
        self._is_resumed = False
        self._begins_after_step = False
        self._ended_step: int | None = None
        self._saved_step: int | None = None
        self._is_step_unfinished = False
        self._stop: Callable[[], None] = _nothing
        self._last: tuple[int, _StateFunction, dict[str, Any]] | None = None
        self._has_stepped = True
        self._keeps_aside = self.manager.saves_after_errors
        self._is_between_epochs = False
        self._is_in_epoch = False
        self._metrics: Mapping[str, float] = {}
        self._optimizers: Mapping[str, Any] = {}

    def latest(self) -> str | None:
        """Return the newest checkpoint for `ckpt_path=`; None for a first start."""
        is_there = self.manager.latest() is not None or any(
            one.is_emergency for one in self.manager.checkpoints()
        )
        return f"{SCHEME}{_LATEST}" if is_there else None

    def best(self, metric: str, mode: str = "min") -> str | None:
        """Return the checkpoint with the best value of a metric, for `trainer.test(ckpt_path=...)`."""
        found = self.manager.best(metric, mode)
        return None if found is None else f"{SCHEME}{found.name}"

    # ------------------------------------------------------------------ hooks of Lightning

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Stand between the strategy and its files and loaders.

        Raises:
            ValueError: The strategy saves shards without a `CheckpointIO`, or has several processes.
        """
        strategy = trainer.strategy
        if any(cls.__name__ in _SHARDING for cls in type(strategy).__mro__):
            raise ValueError(
                f"{type(strategy).__name__} saves shards without a CheckpointIO, so LightningCheckpoints cannot; for FSDP2 and"
                " tensor parallel states use ckptmgr.integrations.dcp"
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"LightningCheckpoints saves the state of one process, and there are {trainer.world_size}: use"
                " ModelCheckpoint with the plugin ckptmgr.integrations.lightning.CkptmgrIO"
            )
        self._optimizers = {}
        self._io = ManagerIO(lambda name: self._load(trainer, name), strategy.checkpoint_io)
        strategy.checkpoint_io = self._io
        self._stand_ins.undo()
        if stage == "fit" and not trainer.fast_dev_run:
            self._is_resumed = self._begins_after_step = self._is_step_unfinished = False
            self._last = None
            self._added.begin(trainer)
            self._stand_in_loops(trainer)

    def _stand_in_loops(self, trainer: Any) -> None:
        """Take part where the loops of Lightning have no hook; a search of a finder is left alone."""
        epochs = trainer.fit_loop
        batches = epochs.epoch_loop
        places = (
            (trainer.strategy, "process_dataloader", self._process_dataloader),
            (epochs, "setup_data", self._set_data_up),
            (epochs, "on_advance_start", self._begin_epoch),
            (epochs, "on_advance_end", self._end_epoch),
            (epochs, "on_run_end", self._end_run),
            (batches, "on_advance_end", self._end_batch),
            (batches.val_loop, "_evaluation_step", self._validate_batch),
        )
        for owner, name, function in places:
            self._stand_ins.put(owner, name, partial(self._unless_searching, trainer, function))

    def _unless_searching(
        self, trainer: Any, function: Any, method: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self not in trainer.callbacks:
            return method(*args, **kwargs)
        return function(trainer, method, *args, **kwargs)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to train from scratch beside checkpoints, or with other optimizers.

        Raises:
            ValueError: There are checkpoints, and none of them is resumed.
            StateMismatch: The checkpoint is of optimizers of another class, or of other parameters.
        """
        self._added.fit_started(trainer)
        check_optimizers(trainer, self._optimizers)
        if trainer.fast_dev_run or self._is_resumed:
            return
        step = self._added.count.of(trainer)
        if step and step == self._ended_step:
            return  # a second fit of the same trainer
        self.manager.check_may_begin(
            "this fit does not resume it (Lightning's ckpt_path='last' finds only its own files)",
            way_out="pass ckpt_path=checkpoints.latest() to fit, or start a new run beside it with",
        )
        self.manager.resume()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Give back what Lightning does not resume, such as the metrics.

        Raises:
            RuntimeError: The training begins at another step than the resumed one.
        """
        step = self._added.count.of(trainer)
        if self._is_resumed:
            if step != self._ended_step:
                raise RuntimeError(
                    f"step {self._ended_step} was resumed, but the training begins at step {step}: a callback has loaded"
                    " another checkpoint in between, such as a finder of a learning rate; leave it out of a run that goes on"
                )
            for callback in trainer.callbacks:
                begin_epoch_again(callback, trainer, is_inside=self._added.is_inside_epoch)
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in self._metrics.items()}
        )
        self._metrics = {}
        optimizers, self._optimizers = self._optimizers, {}
        keep_types(trainer, optimizers)
        self._added.training_started(trainer, self.manager.how.may_differ)
        self._measured.forget(trainer)
        self._ended_step = step

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that an epoch runs; of a resumed one Lightning does not say that it starts."""
        self._is_between_epochs = self._begins_after_step = False
        self._is_in_epoch = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that a step has ended: the loops finish it."""
        count, before = self._added.count, self._ended_step or 0
        count.batch_ended(trainer, since=before)
        step = count.of(trainer)
        self._has_stepped = step != before
        if not self._has_stepped:
            self._keeps_aside = True
        elif not trainer.fast_dev_run:
            self._ended_step, self._is_step_unfinished = step, True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Count what a validation measured between two steps to neither."""
        if not self._is_step_unfinished:
            self._measured.forget(trainer)

    def _process_dataloader(self, trainer: Any, method: Any, loader: Any) -> Any:
        made = method(loader)
        return self._loaders.stand_in(made) if trainer.training else made

    def _set_data_up(self, _: Any, method: Any) -> None:
        self._loaders.ask_anew()
        method()

    def _begin_epoch(self, trainer: Any, method: Any) -> None:
        """Put the random numbers back, before a callback or the module draws."""
        loop = trainer.fit_loop
        loop.setup_data()
        if not (loop.restarted_mid_epoch or loop.restarted_on_epoch_end):
            self._is_between_epochs = False
            self._put_random_back()
        method()

    def _validate_batch(self, _: Any, method: Any, *args: Any) -> None:
        """Validate a batch; after SIGTERM the validation goes on, because its step ends with it."""
        try:
            method(*args)
        except SystemExit as error:
            if not _is_sigterm(error):
                raise

    def _end_batch(self, trainer: Any, method: Any, fetcher: Any) -> None:
        """Finish a step inside an epoch, and save it.

        Raises:
            UnsupportedState, OSError, CkptmgrError: As `CheckpointManager.step_end`.
        """
        loop = trainer.fit_loop.epoch_loop
        if self._begins_after_step:  # of a resumed run; Lightning would finish its step once more
            loop._skip_next_val = False
            return
        trainer.fit_loop._restarting = False  # from now on the metrics of plateaus are there
        stops_apart = _stops(trainer) and not _validates(trainer, fetcher)
        trainer.should_stop = trainer.should_stop and not stops_apart
        try:
            method(fetcher)
        except SystemExit as error:
            if _is_sigterm(error):
                self._finish(trainer, is_preempted=True)
            raise
        if stops_apart:
            self._stop = partial(_stop, trainer, method, fetcher)
        if not trainer.is_last_batch:
            is_at_end = 0 <= trainer.max_steps <= trainer.global_step
            self._finish(trainer, is_over=stops_apart or is_at_end or _stops(trainer))
            self._go_on_to_stop()

    def _go_on_to_stop(self) -> None:
        stop, self._stop = self._stop, _nothing
        stop()

    def _end_epoch(self, trainer: Any, method: Any) -> None:
        """Finish the last step of an epoch, and save it. Raises as `_end_batch`."""
        try:
            method()
        except SystemExit as error:
            if _is_sigterm(error):
                self._epoch_ended(trainer, is_preempted=True)
            raise
        self._epoch_ended(trainer, is_over=self._stop is not _nothing)
        self._go_on_to_stop()

    def _epoch_ended(
        self, trainer: Any, *, is_over: bool = False, is_preempted: bool = False
    ) -> None:
        """Finish the last step of an epoch; none ends with it at a stop, or where gradients accumulate."""
        self._is_in_epoch = False
        if trainer.is_last_batch and self._has_stepped:
            self._is_between_epochs = True
            self._loaders.end_pass()
        self._finish(trainer, is_over=is_over, is_preempted=is_preempted)

    def _end_run(self, trainer: Any, method: Any) -> None:
        """Save the last step, if it is due at the end, before the hooks of the end."""
        self._lose_step_before(self._epoch(trainer))
        self.manager.end_training()
        method()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the saves."""
        self.manager.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the last step if `exception_save` asks for it; never raise."""
        try:
            if self._is_in_epoch and self.manager.saves_after_errors:
                self._lose_step_before(trainer.current_epoch)
            self.manager.__exit__(type(exception), exception, exception.__traceback__)
        except Exception as failure:
            add_note(exception, f"ckptmgr: the last step could not be saved: {failure}")
        finally:
            self._uninstall(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Wait for the saves, and give the strategy back its own."""
        try:
            self.manager.close()
        finally:
            self._uninstall(trainer)

    # ------------------------------------------------------------------ saves

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Record the classes of the optimizers, which Lightning does not."""
        note_classes(trainer.optimizers, checkpoint)

    def _finish(self, trainer: Any, *, is_over: bool = False, is_preempted: bool = False) -> None:
        """Save a step that has ended now, if there is one and it is due.

        When the training is over, the last step is saved in any case, also where it ended batches ago.
        """
        if self._is_step_unfinished:
            self._is_step_unfinished = False
            self._end_step(trainer)
        elif is_over or is_preempted:
            self._lose_step_before(self._epoch(trainer))
        if is_preempted and self._last is not None and self._saved_step != self._ended_step:
            step, state, facts = self._last
            self.manager.save(step, state, why="preempted", **facts)
            self._saved_step = step
        elif is_over:
            self.manager.end_training()

    def _lose_step_before(self, epoch: int) -> None:
        """Save no step of an earlier epoch any more: the loaders have begun this one."""
        if self._last is None or self._last[2]["epoch"] == epoch:
            return
        if self._saved_step != self._ended_step:
            _LOG.warning(
                "the training stops before the first step of an epoch has ended: step %d is not saved, so the newest"
                " checkpoint is that of an earlier step",
                self._ended_step,
            )
        self._last = None
        self.manager.forget_last_step()

    def _end_step(self, trainer: Any) -> None:
        step, facts = self._added.count.of(trainer), self._facts(trainer)
        self._measured.forget(trainer)
        state: _StateFunction = lambda: self._state_of(trainer)  # noqa: E731
        if self._keeps_aside or trainer.accumulate_grad_batches > 1:
            state = StateAside(trainer.lightning_module, state())
        self._last = step, state, facts
        handle = self.manager.step_end(step, state, **facts)
        if handle is not None and not handle.has_failed:
            self._saved_step = step

    def _facts(self, trainer: Any) -> dict[str, Any]:
        return {"epoch": self._epoch(trainer), "metrics": self._measured.since(trainer)}

    def _epoch(self, trainer: Any) -> int:
        """Return the epoch of the last batch; after its end Lightning counts the next one."""
        return int(trainer.current_epoch) - (not self._is_in_epoch)

    def _state_of(self, trainer: Any) -> dict[str, Any]:
        """Return the checkpoint of a trainer, which it hands to our `CheckpointIO`."""
        assert self._io is not None  # noqa: S101 - since `setup`
        checkpoint = self._io.taken(trainer)
        fit_loop = checkpoint["loops"]["fit_loop"]
        fit_loop["state_dict"].pop("combined_loader", None)  # the manager has the places
        (start_next_epoch if self._is_between_epochs else forget_begun_batch)(fit_loop)
        added = self._added.to_state(trainer, is_between_epochs=self._is_between_epochs)
        return storable({**checkpoint, "epoch": self._epoch(trainer), KEY: added})

    # ------------------------------------------------------------------ loads

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Note the stored optimizers, which are compared before Lightning loads them."""
        self._optimizers = stored_optimizers(checkpoint)

    def _load(self, trainer: Any, name: str) -> dict[str, Any]:
        """Return a checkpoint by its name; a fit goes on from the newest one.

        Raises:
            ValueError: A fit asks for another checkpoint than the newest.
            CheckpointNotFound: There is none that loads.
        """
        if getattr(trainer.state.fn, "value", None) != "fit":
            return _restored(trainer, self.manager.load(name), name)
        if name != _LATEST:
            raise ValueError(
                f"a fit goes on from the newest checkpoint, and not from {name}: pass ckpt_path=checkpoints.latest()"
            )
        random = GlobalRandom()
        of_start = random.state_dict()
        found = self.manager.resume_newest()
        if found.is_fresh:
            reasons = "; ".join(f"{one.checkpoint.name}: {one.reason}" for one in found.skipped)
            raise CheckpointNotFound(
                f"no checkpoint to resume from{reasons and f' ({reasons})'}",
                path=self.manager.directory,
                hint="ckpt_path=checkpoints.latest() is None for a first start",
            )
        checkpoint = _restored(trainer, found.state, name)
        self._random = random.state_dict()
        random.load_state_dict(of_start)  # the program draws for its data as at each start
        self._begins_after_step = KEY in checkpoint
        self._added.take(trainer, checkpoint, self._stand_ins)
        self._is_resumed = True
        self._ended_step = self._saved_step = found.step
        self._metrics = found.metrics
        warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)  # ours are
        return checkpoint

    def _put_random_back(self) -> None:
        if self._random is not None:
            GlobalRandom().load_state_dict(self._random)
            self._random = None

    def _uninstall(self, trainer: Any) -> None:
        if self._io is not None:
            trainer.strategy.checkpoint_io = self._io.inner
            self._io = None
        self._stand_ins.undo()
        self._added.count.end()


def _restored(trainer: Any, state: object, name: str) -> dict[str, Any]:
    if not isinstance(state, dict) or "state_dict" not in state:
        raise ValueError(f"{name} holds no checkpoint of Lightning")
    holders = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    given = [getattr(one, "hparams", None) for one in holders]
    way_out = "give the module and its data the hyper parameters that they were saved with"
    return restored(state, way_out=way_out, given=given)


def _is_sigterm(error: BaseException) -> bool:
    return any(cls.__name__ == "SIGTERMException" for cls in type(error).__mro__)


def _stops(trainer: Any) -> bool:
    return bool(trainer.should_stop and trainer.fit_loop._can_stop_early)


def _nothing() -> None: ...


def _stop(trainer: Any, finish_batch: Any, fetcher: Any) -> None:
    """Stop as asked, after the validation that Lightning makes because of it."""
    trainer.should_stop = True
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1  # counted once more
    finish_batch(fetcher)


def _validates(trainer: Any, fetcher: Any) -> bool:
    """Whether a validation follows a batch also where no stop asks for it."""
    trainer.should_stop = False
    try:
        return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))
    finally:
        trainer.should_stop = True
