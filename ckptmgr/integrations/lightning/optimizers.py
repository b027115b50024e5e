# SPDX-License-Identifier: Apache-2.0
"""The optimizers of a fit, compared with those of the checkpoint before Lightning loads them.

Lightning loads the state of another class, and leaves out the optimizers that one of both lacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptmgr.state.optimizers import all_problems, check_same, class_of
from ckptmgr.state.paths import Path

_CLASSES = "ckptmgr_optimizers"
_STATES = "optimizer_states"


def note_classes(optimizers: list[Any], checkpoint: dict[str, Any]) -> None:
    """Record the classes of optimizers in a checkpoint of Lightning."""
    checkpoint[_CLASSES] = [class_of(one) for one in optimizers]


def stored_optimizers(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a checkpoint says of its optimizers."""
    return {name: checkpoint[name] for name in (_STATES, _CLASSES) if name in checkpoint}


def check_optimizers(optimizers: list[Any], stored: Mapping[str, Any]) -> None:
    """Compare optimizers with `stored_optimizers`, of which the module may have emptied the states.

    Raises:
        StateMismatch: They are of another class, or of other parameters.
    """
    if stored.get(_STATES):
        check_same(
            _problems(optimizers, stored),
            hint="let configure_optimizers return what the run was saved with; or begin a run with its weights alone, by"
            " module.load_state_dict(checkpoints.manager.load('latest', only='state_dict')['state_dict']),"
            " ManagerCheckpoint(..., start='new'), and fit without ckpt_path",
        )


def _problems(optimizers: list[Any], stored: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    states, at = stored[_STATES], Path().key(_STATES)
    if len(optimizers) != len(states):
        yield at, f"are {len(states)}, and this fit has {len(optimizers)}"
        return
    classes = stored.get(_CLASSES, [None] * len(states))
    for index, (one, state, kind) in enumerate(zip(optimizers, states, classes, strict=True)):
        yield from all_problems(one, state, kind, at.index(index))
