# SPDX-License-Identifier: Apache-2.0
"""Which step counts as saved while saves run, fail or are superseded."""

from __future__ import annotations

from ckptmgr.errors import SaveFailed
from ckptmgr.handle import SaveHandle
from ckptmgr.progress import Progress
from ckptmgr.save_policy import LastSave
from tests.manager.test_background import checkpoint

START = LastSave(step=0, at=0.0)


def noted(progress: Progress, step: int) -> SaveHandle:
    handle = SaveHandle()
    progress.note(handle, LastSave(step=step, at=float(step)))
    return handle


def test_save_in_flight_counts_but_has_no_path() -> None:
    progress = Progress(START)
    assert (progress.last, progress.latest_path) == (START, "")
    noted(progress, 2)
    assert (progress.last.step, progress.latest_path) == (2, "")


def test_durable_save_counts_and_has_a_path() -> None:
    progress = Progress(START)
    noted(progress, 2).durable.set_result(checkpoint(2))
    assert (progress.last.step, progress.latest_path) == (2, "/runs/ckpt-2.ckpt")


def test_failed_save_does_not_count() -> None:
    progress = Progress(START)
    noted(progress, 2).durable.set_result(checkpoint(2))
    noted(progress, 4).durable.set_exception(OSError("full"))
    assert (progress.last.step, progress.latest_path) == (2, "/runs/ckpt-2.ckpt")


def test_newest_save_in_flight_counts_until_it_fails() -> None:
    progress = Progress(START)
    first, second, third = (noted(progress, step) for step in (2, 4, 6))
    second.durable.set_exception(SaveFailed("superseded"))
    assert progress.last.step == 6
    first.durable.set_result(checkpoint(2))
    assert (progress.last.step, progress.latest_path) == (6, "/runs/ckpt-2.ckpt")
    third.durable.set_exception(OSError("full"))
    assert progress.last.step == 2


def test_cost_is_what_held_up_the_training_in_flight_and_durable() -> None:
    progress = Progress(START)
    handle = noted(progress, 2)
    handle.stats.blocked_s = 0.5
    assert progress.last == LastSave(step=2, at=2.0, cost_s=0.5)
    handle.stats.blocked_s = 1.5
    handle.durable.set_result(checkpoint(2))
    assert progress.last == LastSave(step=2, at=2.0, cost_s=1.5)
