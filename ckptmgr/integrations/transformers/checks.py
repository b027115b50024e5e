# SPDX-License-Identifier: Apache-2.0
"""Refusals and warnings of a `TrainerCheckpoints` before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers.trainer_utils import has_length

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.state.optimizers import all_problems, check_same, schedule_problems
from ckptmgr.state.paths import Path, StateMismatch

CALL = "trainer.train(resume_from_checkpoint=checkpoints.materialize())"
WAYS_OUT = (
    "train with the model, the optimizer and the schedule that were saved, or begin a run in another directory;"
    " from_pretrained, or checkpoints.manager.load('latest', {'model': model}, only='model'), gives it the weights"
)
_SHOWN = 20


def check_arguments(args: Any) -> None:
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
                f"TrainingArguments({name}={value!r}) cannot be had with TrainerCheckpoints: leave it out,"
                " or leave the checkpoints to the Trainer"
            )


def warn_about(args: Any, *, is_resumed: bool) -> None:
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


def kinds_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return type and shape of the weights of a model by their names; no others have them."""
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    return {name: f"{value.dtype}{list(value.shape)}" for name, value in tensors.items()}


def check_model(model: Any, stored: Mapping[str, str]) -> None:
    """Raise StateMismatch if the weights of a model are others: the Trainer only warns."""
    given = kinds_of(model.state_dict())
    lines = [f"{name} is not in the checkpoint" for name in given if name not in stored]
    lines += [f"{name} is only in the checkpoint" for name in stored if name not in given]
    lines += [
        f"{name} is {kind}, stored is {stored[name]}"
        for name, kind in given.items()
        if stored.get(name, kind) != kind
    ]
    if lines:
        more = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
        text = "\n  ".join(lines[:_SHOWN] + more)
        raise StateMismatch(f"the checkpoint is of another model:\n  {text}", hint=WAYS_OUT)


def types_of(optimizer: Mapping[str, Any]) -> list[str]:
    """Return the types of the moments in the state of an optimizer, in their order."""
    moments = optimizer.get("state", {}).values()
    tensors = [value for one in moments if isinstance(one, Mapping) for value in one.values()]
    return [str(one.dtype) for one in tensors if isinstance(one, torch.Tensor)]


def check_pass(loader: Any, passes: int | None, resumed: Checkpoint) -> None:
    """Raise UnsupportedCheckpoint for a step of a later pass over data without a length.

    The Trainer counts the batches to skip from the first pass on, and begins another one where they
    do not suffice: all batches that follow would be others.
    """
    if passes is None or passes < 2 or has_length(loader):
        return
    raise UnsupportedCheckpoint(
        f"was saved in pass {passes} over data without a length, and the Trainer would go on at another batch",
        path=resumed.path,
        hint="give the data set a length (__len__), or let it repeat itself, so that max_steps is one pass",
    )


def check_optimizer(optimizer: Any, scheduler: Any, stored: Mapping[str, Any]) -> None:
    """Raise StateMismatch if an optimizer or a schedule is another than the loaded one."""
    at = Path().key("optimizer")
    # Its groups have the stored names by now; its state belongs to the present parameters.
    loaded = {**optimizer.state_dict(), "param_groups": stored["param_groups"]}
    problems = all_problems(optimizer, loaded, stored["class"], at)
    problems += schedule_problems(scheduler, stored["scheduler"], Path().key("scheduler"))
    check_same(problems, hint=WAYS_OUT)
