# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (without Transformers pyright takes this file for it)
"""`TrainerCheckpoints`: the checkpoints of a `CheckpointManager` as a callback of the Trainer.

* A step is saved where the Trainer itself would save it: after its logs and its evaluation, so that
  their metrics belong to it, and the random numbers are those that the next step sees.
* A stop that comes in an evaluation saves the step as it was before, and the resumed run evaluates it first.
* The Trainer resumes from a directory, which `materialize` makes, and removes when it was read.
* Inside an epoch the Trainer loads the random numbers after the first batch. Those with which the
  epoch began, which order the data, are put back before.
* The Trainer loads another model with a warning, and another optimizer without one. The model is
  compared before, the optimizer when it was loaded: before, no callback sees it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.notes import add_note
from ckptmgr.integrations.base import FrameworkManager, TrainingBlock, found_above
from ckptmgr.integrations.transformers.checks import (
    CALL,
    WAYS_OUT,
    check_arguments,
    check_model,
    check_optimizer,
    check_pass,
    frozen_in,
    kinds_of,
    restore_frozen,
    types_of,
    warn_about,
    warn_of_loss,
)
from ckptmgr.integrations.transformers.files import random_of_trainer, text_of, weights_file
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.state.optimizers import class_of, keep_stored_types
from ckptmgr.state.paths import StateMismatch

_PARTS = {"model", "optimizer", "scheduler", "trainer", "random", "epoch_random", "config"}
_RANDOM = "rng_state.pth"


class TrainerCheckpoints(TrainingBlock, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves, prunes and resumes the runs of a Trainer; a context manager around its training.

    Args:
        directory: Directory of the checkpoints.
        config: When and how to save, and what to keep. Metrics have the names of the Trainer:
            `loss`, `eval_loss` and so on; a checkpoint has those that were logged at its step.
        options: `resume=Resume(start="new")` allows `train()` to begin at step 0 beside the present
            checkpoints, without `materialize()`. Others as for `CheckpointManager`: `prefix`, `stop`,
            `trust` and so on. There are no `ranks`, because only training in one process is
            supported.

    Raises:
        TypeError, ValueError: As `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        **options: Any,
    ) -> None:
        self.manager = FrameworkManager("TrainerCheckpoints", directory, config, **options)
        self._has_key = config is not None and config.enc_key is not None
        self._saved_epoch: dict[str, Any] | None = None
        self._epoch_random: dict[str, object] = {}
        self._passes: int | None = None  # that have begun
        self._resumed_pass: int | None = None
        self._frozen: list[str] | None = None  # parameters at the resumed step
        self._resumed: Checkpoint | None = None
        self._has_asked = False
        self._model: Any = None
        self._stored_model: Mapping[str, str] | None = None
        self._stored_optimizer: Mapping[str, Any] = {}
        self._ended: tuple[Checkpoint, int, float | None] | None = None
        self._pending: tuple[Any, Mapping[str, Any]] | None = None  # of a step whose save waits
        self._metrics: dict[str, float] = {}
        self._is_aside = self._owes_evaluation = self._has_stopped = False
        self._began_from: Checkpoint | None = None
        self._folder = ""
        self._after_save: tuple[object, ...] | None = None
        self._has_warned = False
        self._given = contextlib.ExitStack()  # what `materialize` made

    def _leave(self, error: BaseException | None) -> None:
        self._given.close()
        is_told = isinstance(error, StateMismatch)
        if error is not None and self._resumed is not None and not is_told:  # before the first step
            text = (
                f"ckptmgr: {self._resumed.path} was being resumed; if it does not fit, {WAYS_OUT}"
            )
            add_note(error, text)
        if error is not None and self._pending is not None and not self._is_aside:
            self.manager.note_step(**self._ended_step(*self._pending))

    def materialize(self) -> str | None:
        """Return a directory for `Trainer.train(resume_from_checkpoint=...)`, or None at the start.

        It holds the newest checkpoint that verifies and loads, as the Trainer saves it, and is
        removed when the first step begins, or at the end of the `with` block. With a key its files
        are links into the memory of this process, so that nothing is left in the clear, however the
        process ends.

        Raises:
            RuntimeError: Outside of a `with` block.
            UnsupportedCheckpoint: The newest checkpoint is not that of a Trainer.
            StateMismatch: It is of another model.
            CkptmgrError, OSError: As `CheckpointManager.resume`.
        """
        self._check_is_entered()
        start = self.manager.resume_newest(_PARTS, of="a Trainer")
        self._has_asked, self._resumed = True, None
        if start.checkpoint is None:
            return None
        state: Any = start.state
        # What is compared later is kept without elements.
        self._stored_model = kinds_of(state["model"])
        self._check_model()
        self._stored_optimizer = {
            "class": state.get("optimizer_class"),
            "param_groups": state["optimizer"].get("param_groups"),
            "scheduler": state["scheduler"],
            "types": types_of(state["optimizer"]),
        }
        self._passes = self._resumed_pass = state.get("passes")
        self._owes_evaluation = state.get("owes_evaluation", False)
        self._frozen = state.get("frozen")
        self._resumed = start.checkpoint
        self._given.close()
        self._folder = tempfile.mkdtemp(prefix="ckptmgr-resume-")
        folder = Path(self._folder)
        self._given.callback(shutil.rmtree, folder, ignore_errors=True)
        self._write(
            folder, "model.safetensors", lambda file: file.write(weights_file(state["model"]))
        )
        torch_files = {
            "optimizer.pt": state["optimizer"],
            "scheduler.pt": state["scheduler"],
            _RANDOM: random_of_trainer(state["random"]),
        }
        if "scaler" in state:
            torch_files["scaler.pt"] = state["scaler"]
        for name, content in torch_files.items():
            self._write(folder, name, partial(torch.save, content))
        text = state["trainer"].encode()
        self._write(folder, "trainer_state.json", lambda file: file.write(text))
        self._saved_epoch = {"epoch": state["epoch_random"], "step": state["random"]}
        return str(folder)

    def _write(self, folder: Path, name: str, write: Callable[[Any], object]) -> None:
        """Write a file, or with a key a link to one in memory."""
        place = folder / name
        if self._has_key:
            number = os.memfd_create(name)
            self._given.callback(os.close, number)
            place.symlink_to(f"/proc/{os.getpid()}/fd/{number}")
        with place.open("wb") as file:
            write(file)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot be saved, or is another model than the one to resume."""
        check_arguments(args)
        self._model = kwargs["model"]
        self._check_model()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch for signals; refuse what cannot be saved, or does not fit the checkpoint.

        Raises:
            ValueError: The training does not begin at the newest checkpoint.
            StateMismatch: The checkpoint is of another model, or of another optimizer.
        """
        self._check_is_entered()
        check_arguments(args)
        warn_about(args, is_resumed=self._saved_epoch is not None)
        self._check_start(args, state, kwargs)
        self._training.close()
        self._training.enter_context(self.manager)
        self._pending, self._is_aside, self._has_stopped = None, False, False
        resumed, self._resumed, self._ended = self._resumed, None, None
        self._began_from = resumed
        if resumed is not None and state.global_step >= state.max_steps:
            self._ended = (resumed, state.global_step, state.epoch)
        control.should_training_stop |= self.manager.should_stop

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back the random numbers with which the epoch began that a resumed run is in."""
        self._end_step(control)
        self._after_save = None
        if self._resumed_pass is None:
            self._passes = (self._passes or 0) + 1
        self._resumed_pass = None
        if self._saved_epoch is not None:
            saved, self._saved_epoch = self._saved_epoch, None
            GlobalRandom().load_state_dict(saved["step" if _is_whole(state) else "epoch"])
            if _is_whole(state) and self._evaluate_resumed(state, control):
                # The Trainer loads the random numbers once more before it begins the pass.
                random_now = random_of_trainer(GlobalRandom().state_dict())
                torch.save(random_now, Path(self._folder, _RANDOM))
        self._epoch_random = GlobalRandom().state_dict()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the step before, if it was logged or evaluated meanwhile."""
        self._given.close()
        self._warn_of_draws()
        self._end_step(control)
        self._evaluate_resumed(state, control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save by the policy, after the evaluation that the Trainer makes now, if it makes one."""
        if self._ended is not None:
            self._undo_step(state, kwargs)
            self._evaluate_resumed(state, control)
            return
        if self._has_stopped:
            return
        self._pending = state, kwargs
        self._put_aside(state, control)
        if not (control.should_log or control.should_evaluate or _is_whole(state)):
            self._end_step(control)
            self._after_save = None if self._has_warned else _draws()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the last step of the epoch, unless it is evaluated now."""
        is_cut = not _is_whole(state)  # an evaluation that the uncut run would not make
        if is_cut or not (control.should_log or control.should_evaluate):
            self._end_step(control)
        if is_cut and control.should_training_stop:
            self._training.close()
        self._put_aside(state, control)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Take metrics of the step."""
        self._metrics |= {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        self._put_aside(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the last step, and wait for saves in the background."""
        self._evaluate_resumed(state, control)
        self._given.close()
        self._end_step(control)
        self._training.close()

    def _check_start(self, args: Any, state: Any, kwargs: Mapping[str, Any]) -> None:
        """Compare the state that the Trainer has loaded with the checkpoint; refuse it if it loads none."""
        self._model = kwargs["model"]
        self._check_model()
        self._model = self._stored_model = None
        has_asked, self._has_asked = self._has_asked, False
        problem = f"this training begins at step {state.global_step}, without it"
        way_out = f"write {CALL} to go on from it, or begin a new run beside it with"
        if not has_asked and self.manager.check_may_begin(problem, way_out=way_out) is not None:
            self.manager.resume()
        if self._resumed is None:
            self._passes = self._resumed_pass = None
            return
        if state.global_step != self._resumed.step:
            raise ValueError(
                f"materialize() gave the checkpoint of step {self._resumed.step}, and the training begins at step"
                f" {state.global_step}: write {CALL}"
            )
        check_optimizer(kwargs["optimizer"], kwargs["lr_scheduler"], self._stored_optimizer)
        check_pass(kwargs.get("train_dataloader"), self._resumed_pass, self._resumed)
        if types_of(kwargs["optimizer"].state_dict()) != self._stored_optimizer["types"]:
            stored: Any = self.manager.load(self._resumed, only="optimizer")
            keep_stored_types(kwargs["optimizer"], stored["optimizer"])
        may_differ = "requires_grad" in self.manager.how.may_differ
        restore_frozen(kwargs["model"], self._frozen, may_differ=may_differ)
        warn_of_loss(args, state)

    def _check_model(self) -> None:
        """Raise StateMismatch if the model is known, and another than that of the checkpoint."""
        if self._model is not None and self._stored_model is not None:
            check_model(self._model, self._stored_model)

    def _undo_step(self, state: Any, kwargs: Mapping[str, Any]) -> None:
        """Put back the end of a run, after which the Trainer made a step."""
        assert self._ended is not None  # noqa: S101
        resumed, state.global_step, state.epoch = self._ended
        names = {"model": "model", "optimizer": "optimizer", "scheduler": "lr_scheduler"}
        parts = {part: kwargs[name] for part, name in names.items()}
        self.manager.load(resumed, parts, only=list(parts))

    def _put_aside(self, state: Any, control: Any) -> None:
        """Put the step aside before its evaluation, and after its log."""
        if self._pending is None or self._is_aside or not control.should_evaluate:
            return
        logged = state.log_history[-1:]
        if not control.should_log or [one.get("step") for one in logged] == [state.global_step]:
            self._is_aside = True
            self.manager.put_aside(**self._ended_step(*self._pending, owes_evaluation=True))

    def _evaluate_resumed(self, state: Any, control: Any) -> bool:
        """Evaluate the resumed step, if it was saved before its evaluation; return whether it was."""
        owes, self._owes_evaluation = self._owes_evaluation, False
        if not owes or self._began_from is None:
            return False
        control.should_evaluate, self._metrics = True, {}
        trainer: Any = found_above("_maybe_log_save_evaluate")
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, None, trainer.model, None, state.epoch, None, time.time()
        )
        self.manager.record(self._began_from, self._metrics)
        self._metrics = {}
        return True

    def _end_step(self, control: Any) -> None:
        """End a step for the manager, once."""
        if self._pending is not None:
            stops = self.manager.end_step(**self._ended_step(*self._pending))
            self._pending, self._metrics, self._is_aside = None, {}, False
            control.should_training_stop |= stops
            if stops:
                # The Trainer may train on a batch, and other callbacks end an epoch that is none.
                self._has_stopped = True
                self._training.close()

    def _ended_step(
        self, state: Any, kwargs: Mapping[str, Any], *, owes_evaluation: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of `step_end` for a step."""
        step_random, epoch_random = GlobalRandom().state_dict(), self._epoch_random
        passes = self._passes

        def content() -> dict[str, object]:
            model, optimizer = kwargs["model"], kwargs["optimizer"]
            config = getattr(model, "config", None)
            found = {
                "model": model,
                "optimizer": optimizer,
                "optimizer_class": class_of(optimizer),
                "scheduler": kwargs["lr_scheduler"],
                "trainer": text_of(state),
                "random": step_random,
                "epoch_random": epoch_random,
                "passes": passes,
                "owes_evaluation": owes_evaluation,
                "frozen": frozen_in(model),
                "config": None if config is None else config.to_json_string(),
            }
            scaler = getattr(optimizer, "scaler", None)
            return found if scaler is None else found | {"scaler": scaler}

        facts = {"epoch": int(state.epoch), "metrics": self._metrics}
        return {"step": state.global_step, "state": content, **facts}

    def _warn_of_draws(self) -> None:
        """Warn once if the data draw from the generators of this process."""
        before, self._after_save = self._after_save, None
        if before is None or before == _draws():
            return
        self._has_warned = True
        warnings.warn(
            "between two steps something drew from the global random numbers of this process, such as a"
            " collator that masks: a run that resumes inside an epoch has other draws for its first batches;"
            " draw from the index of the row instead",
            stacklevel=2,
        )


def _is_whole(state: Any) -> bool:
    """Whether an epoch has just ended."""
    return float(state.epoch or 0.0).is_integer()


def _draws() -> tuple[object, ...]:
    """Return a mark of the generators of this process."""
    numpy_state: Any = np.random.get_state()
    return (
        random.getstate(),
        numpy_state[1].tobytes(),
        numpy_state[2],
        torch.get_rng_state().numpy().tobytes(),
    )
