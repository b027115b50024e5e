# SPDX-License-Identifier: Apache-2.0
"""Saves when training fails: of the last step that ended, never counted by retention.

Those of a callback are called breakpoints: `{prefix}-{epoch}_{step}_breakpoint.{format}`.
"""

from __future__ import annotations

from typing import Any

from ckptmgr.core.handle import SaveStats
from ckptmgr.core.names import breakpoint_name, step_in_epoch
from ckptmgr.core.notes import add_note
from ckptmgr.engine.engine import SaveEngine
from ckptmgr.files.save.job import SaveFacts
from ckptmgr.training.callback_names import CallbackSeries
from ckptmgr.training.callback_values import items_of
from ckptmgr.training.history import UnsavedStep
from ckptmgr.training.run import Run
from ckptmgr.training.saving import StateSaver


def why_of(error: BaseException) -> str:
    """Return the trigger of a save because of an error; it makes the checkpoint an emergency save."""
    return f"exception:{type(error).__name__}"


def save_last_step(
    error: BaseException, last: UnsavedStep, *, saver: StateSaver, engine: SaveEngine
) -> None:
    """Save the last ended step after the background saves; a failure becomes a note of `error`."""
    _finish_saves(error, engine)
    try:
        saver.save_alone(last, why=why_of(error))
    except (Exception, SystemExit) as failure:  # a function of the state may raise either
        add_note(error, f"ckptmgr: the state of step {last.step} could not be saved: {failure}")


def _finish_saves(error: BaseException, engine: SaveEngine) -> None:
    try:
        engine.wait()
    except Exception as failure:
        add_note(error, f"ckptmgr: a save in the background failed: {failure}")


def save_breakpoint(
    error: BaseException,
    params: Any,
    *,
    series: CallbackSeries,
    run: Run,
    steps_before_epoch: int,
) -> None:
    """Save after the background saves; a failure of either becomes a note of `error`.

    `error` stopped the training, `params` are the callback parameters, and `steps_before_epoch` is
    the global step at the start of the present epoch.
    """
    _finish_saves(error, run.engine)
    try:
        step, epoch = int(params.cur_step_num), int(params.cur_epoch_num)
        writer, prefix = series.for_breakpoint()
        position = 0
        if step > steps_before_epoch:
            position = step_in_epoch(step, int(params.batch_num))
        extension = writer.options.extension
        name = breakpoint_name(prefix, epoch, step_in_epoch=position, format=extension)
        facts = SaveFacts(step=step, epoch=epoch, why=why_of(error))
        with run.observers.watch(series=prefix, step=step, why=facts.why) as watch:
            items = items_of(params, run.config, step=step, epoch=epoch)
            saved = writer.save(name, items, facts)
            watch.costs(SaveStats(size_bytes=saved.size_bytes))
            watch.durable(saved.path, epoch=saved.epoch)
            writer.drop_replaced(saved, has_restarts=writer is series.writer)
    except (Exception, SystemExit) as failure:
        add_note(error, f"ckptmgr: the breakpoint checkpoint could not be saved: {failure}")
