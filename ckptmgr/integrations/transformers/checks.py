# SPDX-License-Identifier: Apache-2.0
"""Refusals and warnings of a `TrainerCheckpoints` before the first step."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
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
_SHOWN, _FLAGS = 20, 8
_LOG = logging.getLogger(__name__)


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
    if is_resumed and args.dataloader_persistent_workers and args.dataloader_num_workers:
        _LOG.warning(
            "persistent workers go on with the draws of an earlier epoch, which a resumed run does not repeat: its"
            " random numbers are others; set dataloader_persistent_workers=False"
        )


def warn_of_loss(args: Any, state: Any) -> None:
    """Warn if the step to resume lies between two logs: the Trainer does not store the sum of losses."""
    is_logged = {
        "no": True,
        "epoch": float(state.epoch or 0.0).is_integer(),
        "steps": state.global_step % max(1, int(args.logging_steps)) == 0,
    }
    if not is_logged.get(str(getattr(args.logging_strategy, "value", args.logging_strategy)), True):
        _LOG.warning(
            "the first loss that the resumed run logs is the mean of its own steps: the Trainer does not store the losses"
            " since the last log before step %d",
            state.global_step,
        )


def frozen_in(model: Any) -> list[str]:
    """Return the names of the parameters that do not train."""
    return [name for name, one in model.named_parameters() if not one.requires_grad]


def restore_frozen(model: Any, stored: Sequence[str] | None, *, may_differ: bool) -> None:
    """Freeze and unfreeze parameters as in the saved step; warn where the program has them otherwise."""
    if stored is None or may_differ:
        return
    others = sorted({*frozen_in(model)} ^ {*stored})
    if not others:
        return
    for name, one in model.named_parameters():
        one.requires_grad_(name not in stored)
    shown = ", ".join(f"{name}: requires_grad is {name not in stored}" for name in others[:_FLAGS])
    _LOG.warning(
        "requires_grad was set otherwise than in the saved run, and is now as stored: %s%s. To keep that of the program:"
        ' TrainerCheckpoints(..., resume=Resume(may_differ=["requires_grad"]))',
        shown,
        f" and {len(others) - _FLAGS} more" if len(others) > _FLAGS else "",
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
