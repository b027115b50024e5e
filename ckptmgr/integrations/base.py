# SPDX-License-Identifier: Apache-2.0
"""The common part of the adapters of frameworks; an adapter keeps the mapping of its framework's events.

| adapter | a step has ended | its save waits for | the training has ended |
|---|---|---|---|
| `lightning` | `on_train_batch_end` | `on_advance_end` of the loop of batches, or of that of epochs | before `on_train_end` |
| `transformers` | `on_step_end` | logs, an evaluation, or the end of the epoch | `on_train_end` |
| `keras` | `on_train_batch_end` | the end of the epoch, if the batch is its last | a stop, or `on_epoch_end` |
| `mindspore` | `on_train_step_end` | the end of the epoch, if the step is its last | a stop, or `on_train_epoch_end` |
| `accelerate` | `step_end` of the loop | nothing | leaving the block |

To add one: make a `FrameworkManager`; call `end_step` once for each step, with the state as it was when
the step ended; refuse by `check_may_begin` a training that does not resume; call the manager's exit
when the training ends, with the error if there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self, Unpack

from ckptmgr.config.config import CheckpointConfig
from ckptmgr.config.subjects import Resume
from ckptmgr.core.arguments import no_effect
from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.old_names import OldResume
from ckptmgr.training.options import resume_options
from ckptmgr.training.resume import Resumption


class FrameworkManager(CheckpointManager):
    """The manager of an adapter, `owner`, whose framework counts its batches, in one process.

    `resume` refuses what another number of processes saved: they divided the data otherwise, and
    the framework would go on at the batch of one of them.

    Attributes:
        how: How the run resumes, from the argument `resume` of the adapter.

    Raises:
        ValueError: There is a coordinator; others as `CheckpointManager`.
    """

    _needs_same_division = True

    def __init__(
        self,
        owner: str,
        directory: str | os.PathLike[str],
        config: CheckpointConfig | None = None,
        *,
        resume: Resume | None = None,
        instead: str = "leave it out",
        gives_batches: bool = False,
        **options: Any,
    ) -> None:
        ranks = options.get("ranks")
        if options.get("coordinator", getattr(ranks, "coordinator", None)) is not None:
            where = f"in {owner}, which saves runs of one process"
            raise no_effect("coordinator=", where, instead)
        old = {"start": options.pop("start")} if "start" in options else {}
        self.how = resume_options(owner, resume, old)
        if self.how.skip_batches and not gives_batches:
            where = f"in {owner}, whose framework asks for the batches"
            raise no_effect("skip_batches", where, "leave the rows out of the data")
        self._owner = owner
        super().__init__(directory, config, **options)

    def resume(
        self, state: object = None, resume: Resume | None = None, **old: Unpack[OldResume]
    ) -> Resumption:
        """As `CheckpointManager.resume`, by default as the adapter was told."""
        return super().resume(state, resume if resume is not None or old else self.how, **old)

    def end_step(
        self, step: int, state: object, *, epoch: int | None, metrics: Mapping[str, float]
    ) -> bool:
        """End a step; return whether the training should stop after it. Raises as `step_end`."""
        self.step_end(step, state, epoch=epoch, metrics=metrics)
        return self.should_stop

    def put_aside(
        self, step: int, state: object, *, epoch: int | None, metrics: Mapping[str, float]
    ) -> None:
        """Note a step that has ended, and copy its state before what may last, such as a validation.

        A stop that comes meanwhile saves the copy. Raises as `note_step`, and what a function of the
        state raises.
        """
        self.note_step(step, state, epoch=epoch, metrics=metrics)
        self._place_loaders()
        if self._aside is not None:
            self._aside.take_last()

    @property
    def saves_after_errors(self) -> bool:
        """Whether the last step is saved when the training fails."""
        return self._config.exception_save

    def end_training(self) -> None:
        """Save the last step now, if it is due at the end: what follows is no part of it.

        Raises:
            UnsupportedState, OSError, CkptmgrError: As `save`.
        """
        self._save_last_step()

    def forget_last_step(self) -> None:
        """Save no step at the end, or after an error, until another one has ended."""
        self._past.unsaved = None

    def resume_newest(
        self, parts: Collection[str] = (), *, of: str = "", state: object = None
    ) -> Resumption:
        """Resume the newest checkpoint, whatever `start` says.

        Raises:
            UnsupportedCheckpoint: Its state lacks one of `parts`: another program saved it, and not
                the adapter for `of`, such as "a fit".
        """
        found = super().resume(state, replace(self.how, start="newest"))
        self.check_parts(found, parts, of=of)
        return found

    def check_parts(self, found: Resumption, parts: Collection[str], *, of: str) -> None:
        """Raise UnsupportedCheckpoint as `resume_newest` does."""
        if found.checkpoint is None or not parts:
            return
        if not (isinstance(found.state, dict) and found.state.keys() >= set(parts)):
            raise UnsupportedCheckpoint(
                f"holds no state of {of} that {self._owner} saved",
                path=self.directory / found.checkpoint.path.name,
                hint="use another directory or prefix",
            )

    def check_may_begin(self, problem: str, *, way_out: str) -> Checkpoint | None:
        """Return the newest checkpoint, which this training does not resume; None without one.

        Raises:
            ValueError: There is one, and the adapter was not told to begin anew beside it.
        """
        newest = self.latest()
        if newest is not None and self.how.start == "newest":
            raise ValueError(
                f"{newest.path} is of step {newest.step}, and {problem}: {way_out}"
                f" {self._owner}(..., resume=Resume(start='new'))"
            )
        return newest


def _as_they_are(callbacks: list[Any]) -> list[Any]:
    return callbacks


def move_to_end(
    callback: object,
    names: Collection[str],
    arrange: Callable[[list[Any]], list[Any]] = _as_they_are,
) -> tuple[list[Any], bool]:
    """Have a callback called after all others of its list, from the next event on.

    It is called once more in the present event, behind the others. No framework gives a callback
    the list that calls it, so the list is taken from the frames above.

    Args:
        callback: The callback whose method runs.
        names: Attributes in which lists of callbacks hold them.
        arrange: Returns the list of the others in which they are called.

    Returns:
        The other callbacks, and whether this call is the last of the event.
    """
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        frame = above
        caller = frame.f_locals.get("self")
        for name in names:
            found = getattr(caller, "__dict__", {}).get(name)
            if isinstance(found, list) and any(one is callback for one in found):
                others = [one for one in found if one is not callback]
                is_last = found[-1] is callback
                if not is_last:
                    found.append(callback)  # the event runs through this list
                setattr(caller, name, [*arrange(others), callback])
                return others, is_last
    return [], True


def found_above(method: str) -> object:
    """Return the framework's object with a method of this name, from the frames above.

    Raises:
        RuntimeError: There is none.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(type(caller), method):
            return caller
        frame = frame.f_back
    raise RuntimeError(f"no object with {method} has called this callback")


class TrainingBlock:
    """A callback that is a context manager around a training; its framework calls nothing on errors.

    The manager is entered while the framework trains.
    """

    manager: FrameworkManager
    _is_entered = False

    def __enter__(self) -> Self:
        self._is_entered = True
        self._training = ExitStack()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the training; after an error as `CheckpointManager` does."""
        self._is_entered = False
        self._leave(error)
        try:
            self._training.__exit__(kind, error, traceback)
        finally:
            self.manager.close()

    def _leave(self, error: BaseException | None) -> None:
        """Give back what the adapter has changed, before the last step is saved."""

    def _check_is_entered(self) -> None:
        if not self._is_entered:
            raise RuntimeError(f"train inside `with {type(self).__name__}(...) as checkpoints:`")
