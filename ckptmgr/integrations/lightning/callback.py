# SPDX-License-Identifier: Apache-2.0
"""`LightningCheckpoints`: the checkpoints of a `CheckpointManager` as a callback of Lightning.

Only public names of Lightning are used. The state is the dictionary of `trainer.save_checkpoint`,
which the trainer hands to the `CheckpointIO` of its strategy: during a fit that is one of ours, which
keeps the state that the callback asked for, and passes everything else on.

When a step is saved, each rule found by failing:

* Inside an epoch after `on_train_batch_end`, also that of the module, such as of an average of its
  weights, which Lightning calls after those of the callbacks.
* Before a validation after `on_validation_end`, alike: Lightning does not repeat the validation of a batch that
  was saved before it, so that early stopping and random numbers would be others.
* At the last batch of an epoch in `on_train_epoch_end`, after the hooks and the validation.
* Random numbers are put back at the start of the epoch, or at the first batch: between the load
  and that, the loaders are made, such as of a random split, with the same draws at each start.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch

from ckptmgr.config.checks import check_options
from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.errors import CheckpointNotFound
from ckptmgr.core.notes import add_note
from ckptmgr.integrations.base import FrameworkManager
from ckptmgr.integrations.lightning.checkpoint_io import (
    PACKAGES,
    restored,
    storable,
)
from ckptmgr.integrations.lightning.loaders import TrainingLoaders
from ckptmgr.integrations.lightning.manager_io import SCHEME, ManagerIO
from ckptmgr.integrations.lightning.module_hooks import ModuleHooks
from ckptmgr.integrations.lightning.optimizers import (
    check_optimizers,
    note_classes,
    stored_optimizers,
)
from ckptmgr.integrations.lightning.progress import start_next_epoch
from ckptmgr.observe.observers import Observer
from ckptmgr.state.global_random import GlobalRandom

if TYPE_CHECKING:
    from ckptmgr.config.subjects import Resume
    from ckptmgr.core.trust import Trust

_LOG = logging.getLogger(__name__)
_LATEST = "latest"
_OLD = ("start", "trusted_keys", "allow_unsealed", "allow_unencrypted")
_PARAMETERS = ("prefix", "resume", "trust", "observe")
_SHARDING = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
_ACCUMULATION = "GradientAccumulationScheduler"
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

    Steps are those of `trainer.global_step`, metrics those of `trainer.callback_metrics`. A run that
    gets SIGTERM saves its last step before Lightning ends it. `trainer.fit` without
    `ckpt_path=checkpoints.latest()` is refused where there are checkpoints.

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
        self._random: Mapping[str, object] | None = None
        self._is_resumed = False
        self._ended_step: int | None = None
        self._saved_step: int | None = None
        self._waits_for: Literal["module", "validation", "epoch"] | None = None
        self._hooks: ModuleHooks | None = None
        self._has_stepped = True
        self._is_between_epochs = False
        self._metrics: Mapping[str, float] = {}
        self._optimizers: Mapping[str, Any] = {}

    def latest(self) -> str | None:
        """Return the newest checkpoint for `ckpt_path=`; None for a first start."""
        return None if self.manager.latest() is None else f"{SCHEME}{_LATEST}"

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
        if stage == "fit" and not trainer.fast_dev_run:
            self._is_resumed = False
            self._loaders.begin()
            process = strategy.process_dataloader

            def process_dataloader(loader: Any) -> Any:
                made = process(loader)
                return self._loaders.stand_in(made) if trainer.training else made

            strategy.process_dataloader = process_dataloader
            saves = partial(self._save_ended_step, trainer)
            self._hooks = ModuleHooks(
                pl_module, {"on_train_batch_end": saves, "on_validation_end": saves}
            )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuse to train from scratch beside checkpoints, or with other optimizers.

        Raises:
            ValueError: There are checkpoints, and none of them is resumed.
            StateMismatch: The checkpoint is of optimizers of another class, or of other parameters.
        """
        optimizers, self._optimizers = self._optimizers, {}
        check_optimizers(trainer, optimizers)
        if trainer.fast_dev_run or self._is_resumed:
            return
        if trainer.global_step and trainer.global_step == self._ended_step:
            return  # a second fit of the same trainer
        self.manager.check_may_begin(
            "this fit does not resume it (Lightning's ckpt_path='last' finds only its own files)",
            way_out="pass ckpt_path=checkpoints.latest() to fit, or start a new run beside it with",
        )
        self.manager.resume()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Give back what Lightning does not resume, such as the metrics; warn of the rest."""
        if self._is_resumed:  # the number of batches for a step is set where an epoch starts
            for callback in trainer.callbacks:
                if any(one.__name__ == _ACCUMULATION for one in type(callback).__mro__):
                    callback.on_train_epoch_start(trainer, pl_module)
        trainer.callback_metrics.update(
            {name: torch.tensor(value) for name, value in self._metrics.items()}
        )
        self._metrics = {}
        self._ended_step = trainer.global_step
        plateaus = [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau]
        if self._is_resumed and any(config.interval == "epoch" for config in plateaus):
            _LOG.warning(
                "Lightning does not step a ReduceLROnPlateau at the end of the epoch that it resumes, so the learning rate may"
                " not be that of an uncut run"
            )

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the random numbers back, before the module draws."""
        self._is_between_epochs = False
        self._put_random_back()

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that an epoch runs; of a resumed one Lightning does not say that it starts."""
        self._is_between_epochs = False
        self._loaders.iterated()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note that a step has ended, and what its save waits for."""
        self._has_stepped = trainer.global_step != self._ended_step
        if trainer.fast_dev_run or not self._has_stepped:
            return
        self._ended_step = trainer.global_step
        if trainer.is_last_batch:
            self._waits_for = "epoch"
        elif _validates(trainer, batch_idx):
            self._waits_for = "validation"
        else:
            self._waits_for = "module"

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Note that the save of a step waits for the module alone."""
        if self._waits_for == "validation":
            self._waits_for = "module"

    def _save_ended_step(self, trainer: Any) -> None:
        """Save, after the hook of the module.

        Raises:
            UnsupportedState, OSError, CkptmgrError: As `CheckpointManager.step_end`.
        """
        if self._waits_for == "module":
            self._step_end(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step of the epoch."""
        if self._waits_for is not None:
            self._is_between_epochs = True
            self._loaders.end_pass()
            self._step_end(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the last step, if it is due at the end, and wait."""
        self.manager.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Save the last step after SIGTERM, or if `exception_save` asks for it; never raise."""
        try:
            if _is_sigterm(exception) and self._ended_step != self._saved_step:
                self._save_preempted(trainer)
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

    def _step_end(self, trainer: Any) -> None:
        self._waits_for = None
        step = trainer.global_step
        state: Any = lambda: self._state_of(trainer)  # noqa: E731
        if 0 <= trainer.max_steps <= step and not trainer.is_last_batch:
            # The trainer counts the epoch as ended before it ends.
            ready = self._state_of(trainer)
            state = lambda: ready  # noqa: E731
        handle = self.manager.step_end(step, state, **_facts(trainer))
        if handle is not None and not handle.has_failed:
            self._saved_step = step

    def _save_preempted(self, trainer: Any) -> None:
        if not self._has_stepped:
            _LOG.warning(
                "SIGTERM came while gradients were accumulated, and Lightning does not save them: the resumed run"
                " does not go on bit for bit"
            )
        self._step_end(trainer)  # the loaders may have gone on
        step = trainer.global_step
        if self._saved_step != step:
            state, facts = (lambda: self._state_of(trainer)), _facts(trainer)
            self.manager.save(step, state, why="preempted", **facts)

    def _state_of(self, trainer: Any) -> dict[str, Any]:
        """Return the checkpoint of a trainer, which it hands to our `CheckpointIO`."""
        assert self._io is not None  # noqa: S101 - since `setup`
        checkpoint = self._io.taken(trainer)
        fit_loop = checkpoint["loops"]["fit_loop"]
        fit_loop["state_dict"].pop("combined_loader", None)  # the manager has the places
        if self._is_between_epochs:
            start_next_epoch(fit_loop)
        return storable(checkpoint)

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
            vars(trainer.strategy).pop("process_dataloader", None)
            self._io = None
        if self._hooks is not None:
            self._hooks.uninstall()
            self._hooks = None


def _facts(trainer: Any) -> dict[str, Any]:
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"epoch": trainer.current_epoch, "metrics": metrics}


def _restored(trainer: Any, state: object, name: str) -> dict[str, Any]:
    if not isinstance(state, dict) or "state_dict" not in state:
        raise ValueError(f"{name} holds no checkpoint of Lightning")
    holders = (trainer.lightning_module, getattr(trainer, "datamodule", None))
    given = [getattr(one, "hparams", None) for one in holders]
    way_out = "give the module and its data the hyper parameters that they were saved with"
    return restored(state, way_out=way_out, given=given)


def _is_sigterm(error: BaseException) -> bool:
    return any(cls.__name__ == "SIGTERMException" for cls in type(error).__mro__)


def _validates(trainer: Any, batch_idx: int) -> bool:
    """Whether a validation follows a batch that is not the last of its epoch."""
    every, between = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or between is None:
        return False
    if every is not None and (trainer.current_epoch + 1) % every:
        return False
    done = trainer.fit_loop.total_batch_idx if every is None else batch_idx
    return bool((done + 1) % between == 0)
