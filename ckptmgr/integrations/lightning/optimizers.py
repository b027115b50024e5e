# SPDX-License-Identifier: Apache-2.0
"""The optimizers and schedules of a fit, compared with the stored ones before Lightning loads them.

Lightning loads the state of another class, and leaves out what one of both lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptmgr.state.optimizers import (
    all_problems,
    check_same,
    class_of,
    keep_stored_types,
    schedule_problems,
)
from ckptmgr.state.paths import Path

_CLASSES = "ckptmgr_optimizers"
_STATES = "optimizer_states"
_SCHEDULES = "lr_schedulers"
_OF_AVERAGING = "anneal_epochs"


def note_classes(optimizers: list[Any], checkpoint: dict[str, Any]) -> None:
    """Record the classes of optimizers in a checkpoint of Lightning."""
    checkpoint[_CLASSES] = [class_of(one) for one in optimizers]


def stored_optimizers(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the optimizers that a checkpoint describes."""
    return {
        name: checkpoint[name] for name in (_STATES, _CLASSES, _SCHEDULES) if name in checkpoint
    }


def check_optimizers(trainer: Any, stored: Mapping[str, Any]) -> None:
    """Compare optimizers and schedules with `stored_optimizers`, which the module may have emptied.

    Raises:
        StateMismatch: They are of another class, or of other parameters, or of another number.
    """
    if stored.get(_STATES):
        check_same(
            [
                *_optimizer_problems(trainer.optimizers, stored),
                *_schedule_problems(trainer, stored),
            ],
            hint="let configure_optimizers return what the run was saved with; or begin a run with its weights alone, by"
            " module.load_state_dict(checkpoints.manager.load('latest', only='state_dict')['state_dict']),"
            " LightningCheckpoints(..., resume=Resume(start='new')), and fit without ckpt_path",
        )


def keep_types(trainer: Any, stored: Mapping[str, Any]) -> None:
    """Give the moments that Lightning has loaded the types of `stored_optimizers`."""
    for one, state in zip(trainer.optimizers, stored.get(_STATES, ()), strict=False):
        keep_stored_types(one, state)


def _optimizer_problems(
    optimizers: list[Any], stored: Mapping[str, Any]
) -> Iterator[tuple[Path, str]]:
    states, at = stored[_STATES], Path().key(_STATES)
    if len(optimizers) != len(states):
        yield at, f"are {len(states)}, and this fit has {len(optimizers)}"
        return
    classes = stored.get(_CLASSES, ())
    if len(classes) != len(states):  # not recorded; or the module has rewritten the states
        classes = [None] * len(states)
    for index, (one, state, kind) in enumerate(zip(optimizers, states, classes, strict=True)):
        yield from all_problems(one, state, kind, at.index(index))


def _schedule_problems(trainer: Any, stored: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
    states, at = stored.get(_SCHEDULES), Path().key(_SCHEDULES)
    if not states:
        return  # there were none, or the module has emptied them: they start over
    if not schedules and _OF_AVERAGING in states[0]:
        return  # StochasticWeightAveraging takes the others away, and gives its own back later
    if len(schedules) != len(states):
        yield at, f"are {len(states)}, and this fit has {len(schedules)}"
        return
    for index, (one, state) in enumerate(zip(schedules, states, strict=True)):
        yield from schedule_problems(one, state, at.index(index))
