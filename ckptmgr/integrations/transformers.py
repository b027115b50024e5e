# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# (without Transformers pyright takes this file for it)
"""Checkpoints of the Trainer of Transformers: durable, verified, encrypted, and resumed bit for bit.

```
with CheckpointCallback("runs/bert", CheckpointConfig(save_checkpoint_steps=100)) as checkpoints:
    args = TrainingArguments(..., save_strategy="no")
    trainer = Trainer(model, args, train_dataset=data, callbacks=[checkpoints])
    trainer.train(resume_from_checkpoint=checkpoints.materialize())
```

* A step is saved where the Trainer itself would save it: after its logs and its evaluation, so that
  their metrics belong to it, and the random numbers are those that the next step sees.
* The Trainer resumes from a directory, which `materialize` makes, and removes when it was read.
* Inside an epoch the Trainer loads the random numbers after the first batch. Those with which the
  epoch began, which order the data, are put back before.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save as safetensors_bytes
from transformers import AutoConfig, GenerationConfig, TrainerCallback, TrainerState

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.core.errors import CheckpointNotFound, UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.integrations.hub_folder import is_hub_folder, weights_in
from ckptmgr.state.global_random import GlobalRandom
from ckptmgr.training.manager import CheckpointManager

_PARTS = {"model", "optimizer", "scheduler", "trainer", "random", "epoch_random", "config"}


class CheckpointCallback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Saves, prunes and resumes the runs of a Trainer; a context manager around its training.

    Args:
        directory: Directory of the checkpoints.
        config: When and how to save, and what to keep. Metrics have the names of the Trainer:
            `loss`, `eval_loss` and so on; a checkpoint has those that were logged at its step.
        options: As for `CheckpointManager`: `prefix`, `grace`, `trusted_keys` and others. There is
            no `coordinator`, because only training in one process is supported.

    Raises:
        TypeError, ValueError: As `CheckpointManager`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        **options: Any,
    ) -> None:
        if options.get("coordinator") is not None:
            raise ValueError(
                "coordinator= has no effect in CheckpointCallback, which saves runs of one process: leave it out"
            )
        self.manager = CheckpointManager(directory, config, **options)
        self._has_key = config is not None and config.enc_key is not None
        self._saved_epoch: dict[str, Any] | None = None
        self._epoch_random: dict[str, object] = {}
        self._resumed: Checkpoint | None = None
        self._ended: tuple[Checkpoint, int, float | None] | None = None
        self._is_pending = False
        self._metrics: dict[str, float] = {}
        self._after_save: tuple[object, ...] | None = None
        self._has_warned = False
        self._open = contextlib.ExitStack()  # while the Trainer trains
        self._given = contextlib.ExitStack()  # what `materialize` made
        self._is_entered = False

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the training; after an error as `CheckpointManager` does."""
        self._is_entered = False
        self._given.close()
        try:
            self._open.__exit__(kind, error, traceback)
        finally:
            self.manager.close()

    def materialize(self) -> str | None:
        """Return a directory for `Trainer.train(resume_from_checkpoint=...)`, or None at the start.

        It holds the newest checkpoint that verifies and loads, as the Trainer saves it, and is
        removed when the first step begins, or at the end of the `with` block. With a key its files
        are links into the memory of this process, so that nothing is left in the clear, however the
        process ends.

        Raises:
            RuntimeError: Outside of a `with` block.
            UnsupportedCheckpoint: The newest checkpoint is not that of a Trainer.
            CkptmgrError, OSError: As `CheckpointManager.resume`.
        """
        self._check_is_entered()
        start = self.manager.resume()
        self._resumed = start.checkpoint
        if start.checkpoint is None:
            return None
        state = start.state
        if not isinstance(state, dict) or not state.keys() >= _PARTS:
            raise UnsupportedCheckpoint(
                "holds no state of a Trainer that CheckpointCallback saved",
                path=self.manager.directory / start.checkpoint.path.name,
                hint="use another directory or prefix",
            )
        self._given.close()
        folder = Path(tempfile.mkdtemp(prefix="ckptmgr-resume-"))
        self._given.callback(shutil.rmtree, folder, ignore_errors=True)
        self._write(folder, "model.safetensors", lambda file: file.write(_weights(state["model"])))
        torch_files = {
            "optimizer.pt": state["optimizer"],
            "scheduler.pt": state["scheduler"],
            "rng_state.pth": _random_of_trainer(state["random"]),
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
        """Refuse what cannot be saved."""
        _check_arguments(args)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to watch for signals; refuse what cannot be saved."""
        self._check_is_entered()
        _check_arguments(args)
        _warn_about(args, is_resumed=self._saved_epoch is not None)
        self._open.close()
        self._open.enter_context(self.manager)
        self._is_pending = False
        resumed, self._resumed, self._ended = self._resumed, None, None
        if resumed is not None and state.global_step >= state.max_steps:
            self._ended = (resumed, state.global_step, state.epoch)
        control.should_training_stop |= self.manager.should_stop

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put back the random numbers with which the epoch began that a resumed run is in."""
        self._end_step(state, control, kwargs)
        self._after_save = None
        if self._saved_epoch is not None:
            saved, self._saved_epoch = self._saved_epoch, None
            GlobalRandom().load_state_dict(saved["step" if _is_whole(state) else "epoch"])
        self._epoch_random = GlobalRandom().state_dict()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the step before, if it was logged or evaluated meanwhile."""
        self._given.close()
        self._warn_of_draws()
        self._end_step(state, control, kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save by the policy, after the evaluation that the Trainer makes now, if it makes one."""
        if self._ended is not None:
            self._undo_step(state, kwargs)
            return
        self._is_pending = True
        if not (control.should_log or control.should_evaluate or _is_whole(state)):
            self._end_step(state, control, kwargs)
            self._after_save = None if self._has_warned else _draws()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the last step of the epoch, unless it is evaluated now."""
        is_cut = not _is_whole(state)  # an evaluation that the uncut run would not make
        if is_cut or not (control.should_log or control.should_evaluate):
            self._end_step(state, control, kwargs)
        if is_cut and control.should_training_stop:
            self._open.close()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Take metrics of the step."""
        self._metrics |= {
            name: float(value)
            for name, value in logs.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the last step, and wait for saves in the background."""
        self._given.close()
        self._end_step(state, control, kwargs)
        self._open.close()

    def _undo_step(self, state: Any, kwargs: Mapping[str, Any]) -> None:
        """Put back the end of a run, after which the Trainer made a step."""
        assert self._ended is not None  # noqa: S101
        resumed, state.global_step, state.epoch = self._ended
        names = {"model": "model", "optimizer": "optimizer", "scheduler": "lr_scheduler"}
        parts = {part: kwargs[name] for part, name in names.items()}
        self.manager.load(resumed, parts, only=list(parts))

    def _end_step(self, state: Any, control: Any, kwargs: Mapping[str, Any]) -> None:
        """End a step for the manager, once."""
        if not self._is_pending:
            return
        self._is_pending = False
        metrics, self._metrics = self._metrics, {}
        step_random, epoch_random = GlobalRandom().state_dict(), self._epoch_random

        def content() -> dict[str, object]:
            model, optimizer = kwargs["model"], kwargs["optimizer"]
            config = getattr(model, "config", None)
            found = {
                "model": model,
                "optimizer": optimizer,
                "scheduler": kwargs["lr_scheduler"],
                "trainer": _text_of(state),
                "random": step_random,
                "epoch_random": epoch_random,
                "config": None if config is None else config.to_json_string(),
            }
            scaler = getattr(optimizer, "scaler", None)
            return found if scaler is None else found | {"scaler": scaler}

        self.manager.step_end(state.global_step, content, epoch=int(state.epoch), metrics=metrics)
        control.should_training_stop |= self.manager.should_stop

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

    def _check_is_entered(self) -> None:
        if not self._is_entered:
            raise RuntimeError("train inside `with CheckpointCallback(...) as checkpoints:`")


def from_pretrained(
    cls: Any,
    directory: str | os.PathLike[str],
    *,
    key: bytes | str | None = None,
    prefix: str = "ckpt",
    **options: Any,
) -> Any:
    """Return the model of the newest checkpoint of a run, encrypted or not, for inference.

    A directory in the layout of the Hub is taken, too: `config.json` beside `model.safetensors`, or
    its shards and their index, of which each may be encrypted, under its name or with `.ckpe` at its
    end.

    Args:
        cls: The class of the model, or one of the `Auto` classes.
        directory: Directory of the checkpoints that `CheckpointCallback` saved, or of the model.
        key: Opens the files. A file that is not encrypted is then refused.
        prefix: As for `CheckpointCallback`.
        options: As for `cls.from_pretrained`, such as `dtype`.

    Raises:
        CheckpointNotFound, UnsupportedCheckpoint: There is no checkpoint, or no configuration in it.
        CorruptCheckpoint, KeyProblem, OSError: As `CheckpointManager.load`.
    """
    place = Path(directory)
    if is_hub_folder(place):
        weights = weights_in(place, key)
        return _made(cls, AutoConfig.from_pretrained(place), weights, place, **options)
    config = CheckpointConfig() if key is None else CheckpointConfig(enc_key=key)
    with CheckpointManager(directory, config, prefix=prefix) as manager:
        newest = manager.latest()
        if newest is None:
            raise CheckpointNotFound(
                "there is no checkpoint of a Trainer",
                path=place,
                hint="name the directory, and prefix=, of a CheckpointCallback, or one with config.json and model.safetensors",
            )
        found: Any = manager.load(newest, only=["model", "config"])
    if found["config"] is None:
        raise UnsupportedCheckpoint(
            "has no configuration of Transformers",
            path=newest.path,
            hint="build the model, and load it with load(..., {'model': model}, only='model')",
        )
    weights = {name: torch.as_tensor(value) for name, value in found["model"].items()}
    made = AutoConfig.for_model(**json.loads(found["config"]))
    return _made(cls, made, weights, None, **options)


def _made(
    cls: Any, config: Any, weights: Mapping[str, Any], directory: Path | None, **options: Any
) -> Any:
    """Return a model with these weights, and the generation settings of the directory."""
    if not hasattr(cls, "config_class") or cls.config_class is None:  # an Auto class
        with torch.device("meta"):
            cls = type(cls.from_config(config))
    model = cls.from_pretrained(None, config=config, state_dict=dict(weights), **options)
    if directory is not None and (directory / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _check_arguments(args: Any) -> None:
    """Raise ValueError for a way of training whose state is spread over processes or elsewhere."""
    refused = {
        "fsdp": args.fsdp,
        "deepspeed": args.deepspeed,
        "world_size": args.world_size if args.world_size > 1 else None,
        "enable_jit_checkpoint": getattr(args, "enable_jit_checkpoint", False),
        "restore_callback_states_from_checkpoint": args.restore_callback_states_from_checkpoint,
    }
    for name, value in refused.items():
        if value:
            raise ValueError(
                f"TrainingArguments({name}={value!r}) cannot be had with CheckpointCallback: leave it out,"
                " or leave the checkpoints to the Trainer"
            )


def _warn_about(args: Any, *, is_resumed: bool) -> None:
    """Warn of arguments that save twice, or resume elsewhere."""
    if args.save_strategy != "no":
        warnings.warn(
            f"the Trainer saves checkpoints, too, unencrypted, because of save_strategy={args.save_strategy!r}:"
            ' set TrainingArguments(save_strategy="no")',
            stacklevel=3,
        )
    if is_resumed and args.ignore_data_skip:
        warnings.warn(
            "the resumed run gets the first batches of the epoch again, because of ignore_data_skip=True",
            stacklevel=3,
        )


def _is_whole(state: Any) -> bool:
    """Whether an epoch has just ended."""
    return float(state.epoch or 0.0).is_integer()


def _text_of(state: TrainerState) -> str:
    """Return the state as the Trainer writes it."""
    number = os.memfd_create("trainer_state.json")
    with os.fdopen(number, "rb") as file:
        state.save_to_json(f"/proc/self/fd/{number}")
        return file.read().decode()


def _weights(values: Mapping[str, Any]) -> bytes:
    """Return safetensors; tied weights come twice, because the file has no views."""
    seen: set[int] = set()
    tensors = {}
    for name, value in values.items():
        tensor = torch.as_tensor(value).contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return safetensors_bytes(tensors, metadata={"format": "pt"})


def _random_of_trainer(stored: Mapping[str, Any]) -> dict[str, object]:
    """Return random states as the Trainer stores them."""
    present = GlobalRandom().state_dict()
    GlobalRandom().load_state_dict(stored)
    try:
        found: dict[str, object] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "cpu": torch.get_rng_state(),
        }
        if torch.cuda.is_available():  # pragma: no cover - needs CUDA
            found["cuda"] = torch.cuda.get_rng_state()
    finally:
        GlobalRandom().load_state_dict(present)
    return found


def _draws() -> tuple[object, ...]:
    """Return a mark of the generators of this process."""
    numpy_state: Any = np.random.get_state()
    return (
        random.getstate(),
        numpy_state[1].tobytes(),
        numpy_state[2],
        torch.get_rng_state().numpy().tobytes(),
    )
