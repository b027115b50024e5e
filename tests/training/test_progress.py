# SPDX-License-Identifier: Apache-2.0
"""Which step counts as saved while saves run, fail or are superseded."""

from __future__ import annotations

from ckptmgr import EverySteps, Never, SaveFailed, SaveHandle
from ckptmgr.policy.save import LastSave, decide_at_end, decide_at_step
from ckptmgr.training.history import Progress
from tests.engine.test_background import checkpoint
from tests.support import api

START = LastSave(step=0, at=0.0)


def noted(progress: Progress, step: int) -> SaveHandle:
    handle = SaveHandle()
    progress.note(handle, api.SaveFacts(step=step), at=float(step))
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


def test_going_back_behind_a_save_gives_it_up_until_another_succeeds() -> None:
    progress = Progress(START)
    noted(progress, 10).durable.set_result(checkpoint(10))
    progress.go_back(9, 12.0)
    given_up = LastSave(step=9, at=12.0, is_given_up=True)
    assert (progress.last, progress.latest_path) == (given_up, "/runs/ckpt-10.ckpt")
    handle = noted(progress, 10)
    assert progress.last == LastSave(step=10, at=10.0)
    handle.durable.set_exception(OSError("full"))
    assert progress.last == given_up


def test_going_back_no_further_than_the_last_save_changes_nothing() -> None:
    progress = Progress(START)
    noted(progress, 10).durable.set_result(checkpoint(10))
    progress.go_back(10, 12.0)
    assert progress.last == LastSave(step=10, at=10.0)


def test_going_back_further_keeps_what_was_given_up_given_up() -> None:
    progress = Progress(LastSave(step=10, at=1.0, cost_s=3.0))
    for step in (9, 9, 5):
        progress.go_back(step, 12.0)
        assert progress.last == LastSave(step=step, at=12.0, cost_s=3.0, is_given_up=True)


def test_step_equal_to_what_was_given_up_is_due_and_says_why() -> None:
    last = LastSave(step=9, at=0.0, is_given_up=True)
    decision = decide_at_step(EverySteps(10), 9, 0.0, last=last)
    assert (decision.is_due, decision.reason) == (
        True,
        "a rollback to step 9 gave up the saves after it",
    )
    assert decide_at_end(EverySteps(10), 9, last=last).is_due
    assert not decide_at_step(Never(), 9, 0.0, last=last).is_due
