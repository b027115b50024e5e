# SPDX-License-Identifier: Apache-2.0
"""Every power cut at every moment of every operation of the store, and of the recovery from one."""

from __future__ import annotations

import pytest

from tests.faults.scenarios import (
    NEXT_SAVE,
    ONE,
    OVERWRITE,
    PIN,
    SCENARIOS,
    TWO,
    as_it_is,
    check_third,
    first_broken,
    keep_only_newest,
    overwrites_of_third,
    put_bare,
    resume,
)
from tests.faults.training import (
    KEY,
    KEYS,
    RUNS,
    Content,
    Trainer,
    check_after_fault,
    disk_with,
    value_of,
)
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash

with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])


@with_and_without_key
@pytest.mark.parametrize("name", SCENARIOS)
def test_operation_keeps_its_promises_after_every_power_cut(key: bytes | None, name: str) -> None:
    scenario = SCENARIOS[name]
    crashes = scenario.crashes(key, Order.WEAK)
    assert first_broken(crashes, lambda crash: scenario.check(crash.disk, key)) is None


@pytest.mark.parametrize("name", ["first save", "overwrite", "retention", "room"])
def test_operation_keeps_its_promises_where_manifests_without_data_stay(name: str) -> None:
    scenario = SCENARIOS[name]
    disk = scenario.start(None)
    disk.has_change_times = False
    crashes = every_crash(disk, scenario.runner(None, as_it_is), order=Order.WEAK)
    assert first_broken(crashes, lambda crash: scenario.check(crash.disk, None)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first save", "overwrite", "retention", "room"])
def test_recovery_from_a_death_may_itself_be_cut(name: str) -> None:
    scenario = SCENARIOS[name]
    crashes = scenario.crashes_after_death(KEY, Order.WEAK, resume)
    assert first_broken(crashes, lambda crash: scenario.check(crash.disk, KEY)) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overwrite", "retention", "room"])
def test_recovery_from_a_power_cut_may_itself_be_cut(name: str) -> None:
    scenario = SCENARIOS[name]
    crashes = (
        again
        for crash in scenario.crashes(None, Order.WEAK)
        if needs_recovery(crash.disk)
        for again in every_crash(crash.disk, lambda disk: resume(Trainer(disk)), order=Order.WEAK)
    )
    assert first_broken(crashes, lambda crash: scenario.check(crash.disk, None)) is None


def needs_recovery(disk: ModelDisk) -> bool:
    """Return whether a run that starts on a copy of this disk cleans anything up."""
    trainer = Trainer(disk.copy())
    return bool(trainer.store().recover("net"))


def test_pin_is_there_once_acknowledged() -> None:
    def check(crash: Crash) -> None:
        (one,) = [c for c in Trainer(crash.disk).store().scan() if c.name == ONE]
        assert bool(one.pins) or not crash.disk.acknowledged

    assert first_broken(PIN.crashes(None, Order.WEAK), check) is None


def test_overwritten_bare_file_is_old_or_new_at_every_moment() -> None:
    def overwrite(disk: ModelDisk) -> None:
        Trainer(disk).overwrite("bare.ckpt", 21.0, step=2)
        disk.acknowledge("new")

    def check(crash: Crash) -> None:
        values = [21.0] if crash.disk.acknowledged else [20.0, 21.0]
        check_after_fault(crash.disk, must={ONE: [10.0], "bare.ckpt": values})

    disk = disk_with(10.0, 20.0)
    put_bare(disk, 2)
    assert first_broken(every_crash(disk, overwrite, order=Order.WEAK), check) is None


@pytest.mark.slow
def test_overwrite_after_an_interrupted_overwrite_keeps_one_of_the_three() -> None:
    def overwrite_again(trainer: Trainer) -> None:
        trainer.overwrite(TWO, 22.0, step=2)
        trainer.disk.acknowledge("again")

    values = {
        (): [20.0, 21.0, 22.0],
        ("overwritten",): [21.0, 22.0],
        ("again",): [22.0],
        ("overwritten", "again"): [22.0],
    }

    def check(crash: Crash) -> None:
        must: Content = {ONE: [10.0], TWO: values[crash.disk.acknowledged]}
        check_after_fault(crash.disk, must=must)

    crashes = OVERWRITE.crashes_after_death(None, Order.WEAK, overwrite_again)
    assert first_broken(crashes, check) is None


def test_overwrite_after_a_save_that_died_keeps_what_it_found_or_is_whole() -> None:
    assert first_broken(overwrites_of_third(), check_third) is None


def test_save_beside_a_manifest_whose_data_is_missing_is_absent_or_whole() -> None:
    def save(disk: ModelDisk) -> None:
        Trainer(disk).overwrite(TWO, 21.0, step=2)

    def check(crash: Crash) -> None:
        with Trainer(crash.disk).manager() as manager:
            listed = [one for one in manager.checkpoints() if one.state is api.State.OK]
            assert {value_of(manager.load(one)) for one in listed} <= {10.0, 21.0}

    disk = disk_with(10.0, 20.0)
    disk.unlink(RUNS / TWO)
    disk.settle()
    assert first_broken(every_crash(disk, save, order=Order.WEAK), check) is None


@pytest.mark.slow
def test_removal_after_a_death_does_not_trust_what_is_not_durable() -> None:
    def check(crash: Crash) -> None:
        assert any(c.is_countable for c in Trainer(crash.disk).store().scan())
        check_after_fault(crash.disk, must={}, may=NEXT_SAVE.may)

    crashes = NEXT_SAVE.crashes_after_death(None, Order.WEAK, keep_only_newest)
    assert first_broken(crashes, check) is None


def test_what_was_removed_does_not_come_back() -> None:
    def remove(disk: ModelDisk) -> None:
        keep_only_newest(Trainer(disk))
        disk.acknowledge("removed")

    def check(crash: Crash) -> None:
        names = {name for name in crash.disk.list(RUNS) if name.startswith(ONE)}
        assert not names or not crash.disk.acknowledged

    crashes = every_crash(disk_with(10.0, 20.0), remove, order=Order.WEAK)
    assert first_broken(crashes, check) is None
