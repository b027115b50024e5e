# SPDX-License-Identifier: Apache-2.0
"""The crash tests themselves are tested: with any one step of the protocol left out they must find something."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.faults.forgetful import ForgetfulDisk, Forgotten
from tests.faults.scenarios import (
    NEXT_SAVE,
    OVERWRITE,
    RETENTION,
    Scenario,
    check_third,
    first_broken,
    keep_only_newest,
    overwrites_of_third,
    resume,
)
from tests.faults.training import Trainer, check_after_fault
from tests.support.crashmodel import Crash, ModelDisk, Order

BOTH = (Order.JOURNALED, Order.WEAK)
# A journal keeps changes of a directory in order, so that the syncs between them matter only without one.
ONLY_WEAK = (Order.WEAK,)

CONTROLS = [
    (Forgotten.DATA_SYNC, NEXT_SAVE, BOTH),
    (Forgotten.DATA_SYNC, OVERWRITE, BOTH),
    (Forgotten.MANIFEST_SYNC, NEXT_SAVE, BOTH),
    (Forgotten.MANIFEST_SYNC, OVERWRITE, BOTH),
    (Forgotten.SYNC_BEFORE_MANIFEST, NEXT_SAVE, ONLY_WEAK),
    (Forgotten.SYNC_BEFORE_COMMIT, OVERWRITE, ONLY_WEAK),
    (Forgotten.SYNC_AFTER_COMMIT, NEXT_SAVE, BOTH),
    (Forgotten.SYNC_AFTER_COMMIT, OVERWRITE, ONLY_WEAK),
    (Forgotten.SYNC_AFTER_REMOVAL, RETENTION, ONLY_WEAK),
    (Forgotten.PUBLISH_BEFORE_DELETE, NEXT_SAVE, BOTH),
    (Forgotten.PUBLISH_BEFORE_DELETE, RETENTION, BOTH),
]
CASES = [(what, scenario, order) for what, scenario, orders in CONTROLS for order in orders]


def forgetting(what: Forgotten) -> Callable[[ModelDisk], ForgetfulDisk]:
    return lambda disk: ForgetfulDisk(disk, what)


@pytest.mark.parametrize(("what", "scenario", "order"), CASES)
def test_forgotten_step_is_caught(what: Forgotten, scenario: Scenario, order: Order) -> None:
    crashes = scenario.crashes(None, order, forgetting(what))
    broken = first_broken(crashes, lambda crash: scenario.check(crash.disk, None))
    assert broken is not None


@pytest.mark.parametrize("scenario", [OVERWRITE, RETENTION])
def test_recovery_that_trusts_what_it_sees_is_caught(scenario: Scenario) -> None:
    wrap = forgetting(Forgotten.SYNC_BEFORE_ACTING)
    crashes = scenario.crashes_after_death(None, Order.WEAK, resume, wrap)
    assert first_broken(crashes, lambda crash: scenario.check(crash.disk, None)) is not None


@pytest.mark.slow
def test_overwrite_that_trusts_what_it_sees_is_caught() -> None:
    def overwrite_again(trainer: Trainer) -> None:
        trainer.overwrite("net-2.ckpt", 22.0, step=2)

    def check(crash: Crash) -> None:
        check_after_fault(crash.disk, must={"net-1.ckpt": [10.0], "net-2.ckpt": [20.0, 21.0, 22.0]})

    wrap = forgetting(Forgotten.SYNC_BEFORE_ACTING)
    crashes = OVERWRITE.crashes_after_death(None, Order.WEAK, overwrite_again, wrap)
    assert first_broken(crashes, check) is not None


def test_overwrite_that_trusts_a_save_that_died_is_caught() -> None:
    crashes = overwrites_of_third(forgetting(Forgotten.SYNC_BEFORE_MANIFEST))
    assert first_broken(crashes, check_third) is not None


def test_removal_that_trusts_what_it_sees_is_caught() -> None:
    def check(crash: Crash) -> None:
        assert any(c.is_countable for c in Trainer(crash.disk).store().scan())

    wrap = forgetting(Forgotten.SYNC_BEFORE_ACTING)
    crashes = NEXT_SAVE.crashes_after_death(None, Order.WEAK, keep_only_newest, wrap)
    assert first_broken(crashes, check) is not None


def test_nothing_forgotten_is_nothing_caught() -> None:
    crashes = NEXT_SAVE.crashes(None, Order.WEAK, forgetting(Forgotten.NOTHING))
    assert first_broken(crashes, lambda crash: NEXT_SAVE.check(crash.disk, None)) is None
