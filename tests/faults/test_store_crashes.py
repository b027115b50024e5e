# SPDX-License-Identifier: Apache-2.0
"""Every power cut at every moment of every operation of the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.crashmodel import Crash, ModelDisk, Order, every_crash, every_kill
from tests.faults.training import (
    KEY,
    KEYS,
    RUNS,
    Content,
    Trainer,
    check_after_fault,
    disk_with,
    name_of,
    state_of,
)

pytestmark = pytest.mark.parametrize("order", Order)
with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])

ONE, TWO, THREE = name_of(1), name_of(2), name_of(3)


def checked(crashes: Iterator[Crash], check: Callable[[Crash], None], *, at_least: int) -> None:
    """Check every crash that leaves something new, say which one failed, and see that there were enough of them."""
    seen = set()
    for crash in crashes:
        state = (what_counts(crash.disk), crash.disk.acknowledged)
        if state in seen:
            continue
        seen.add(state)
        before = str(crash)
        try:
            check(crash)
        except Exception as error:
            raise AssertionError(before) from error
    count = len(seen)
    assert count >= at_least


def what_counts(disk: ModelDisk) -> frozenset[tuple[Path, bytes | None]]:
    """Return the state of a disk without the start count and the lease, which promise nothing."""
    ignored = (".net.lease", ".net.starts", "..net.starts")
    return frozenset(item for item in disk.state() if not item[0].name.startswith(ignored))


def saved_as_step(step: int, key: bytes | None, keep: str = "all") -> Callable[[ModelDisk], None]:
    """Return a run that resumes and saves one step."""

    def run(disk: ModelDisk) -> None:
        with Trainer(disk, key=key, keep=keep).manager() as manager:
            manager.resume()
            manager.save(step, state_of(10.0 * step))
            disk.acknowledge("saved")

    return run


@with_and_without_key
def test_first_save_is_absent_or_whole_and_there_once_acknowledged(
    order: Order, key: bytes | None
) -> None:
    def check(crash: Crash) -> None:
        new = {ONE: [10.0]}
        must: Content = new if crash.disk.acknowledged else {}
        check_after_fault(crash.disk, must=must, may=new, key=key)

    checked(every_crash(ModelDisk(), saved_as_step(1, key), order=order), check, at_least=15)


@with_and_without_key
def test_next_save_leaves_earlier_ones_intact(order: Order, key: bytes | None) -> None:
    def check(crash: Crash) -> None:
        old, new = {ONE: [10.0], TWO: [20.0]}, {THREE: [30.0]}
        must = {**old, **new} if crash.disk.acknowledged else old
        check_after_fault(crash.disk, must=must, may=new, key=key)

    disk = disk_with(10.0, 20.0, key=key)
    checked(every_crash(disk, saved_as_step(3, key), order=order), check, at_least=15)


@with_and_without_key
def test_overwritten_checkpoint_is_old_or_new_at_every_moment(
    order: Order, key: bytes | None
) -> None:
    def overwrite(disk: ModelDisk) -> None:
        Trainer(disk, key=key).overwrite(TWO, 21.0, step=2)
        disk.acknowledge("new")

    def check(crash: Crash) -> None:
        values = [21.0] if crash.disk.acknowledged else [20.0, 21.0]
        check_after_fault(crash.disk, must={ONE: [10.0], TWO: values}, key=key)

    disk = disk_with(10.0, 20.0, key=key)
    checked(every_crash(disk, overwrite, order=order), check, at_least=15)


def prune(disk: ModelDisk, *, key: bytes | None = None, keep: str = "last(1)") -> None:
    """Save step 4 and keep only it."""
    saved_as_step(4, key, keep)(disk)


@with_and_without_key
def test_retention_never_removes_before_the_new_one_is_durable(
    order: Order, key: bytes | None
) -> None:
    old, new = {ONE: [1.0], TWO: [2.0], THREE: [3.0]}, {name_of(4): [40.0]}

    def check(crash: Crash) -> None:
        # Whatever is gone, the newest acknowledged one must be there; resumed from is 3, which stays as long as it runs.
        must: Content = {THREE: [3.0], **(new if crash.disk.acknowledged else {})}
        check_after_fault(crash.disk, must=must, may={**old, **new}, key=key, keep="last(1)")

    disk = disk_with(1.0, 2.0, 3.0, key=key)

    crashes = every_crash(disk, lambda d: prune(d, key=key), order=order)
    checked(crashes, check, at_least=15)


def put_bare(disk: ModelDisk) -> None:
    """Leave the data of step 2 without its manifest, as an ordinary file of some other program."""
    disk.unlink(RUNS / f"{TWO}.manifest.json")
    disk.replace(RUNS / TWO, RUNS / "bare.ckpt")
    disk.settle()


def test_overwritten_bare_file_is_old_or_new_at_every_moment(order: Order) -> None:
    def overwrite(disk: ModelDisk) -> None:
        Trainer(disk).overwrite("bare.ckpt", 21.0, step=2)
        disk.acknowledge("new")

    def check(crash: Crash) -> None:
        trainer = Trainer(crash.disk)
        found = {c.name: c for c in trainer.store().scan()}
        values = [21.0] if crash.disk.acknowledged else [20.0, 21.0]
        with trainer.manager() as manager:
            manager.resume()
            state = manager.load(found["bare.ckpt"])
        assert isinstance(state, dict)
        assert state["value"] in values

    disk = disk_with(10.0, 20.0)
    put_bare(disk)
    checked(every_crash(disk, overwrite, order=order), check, at_least=15)


@with_and_without_key
def test_pin_is_there_once_acknowledged_and_the_checkpoint_always(
    order: Order, key: bytes | None
) -> None:
    def pin(disk: ModelDisk) -> None:
        with Trainer(disk, key=key).manager() as manager:
            manager.pin(1, "paper")
            disk.acknowledge("pinned")

    def check(crash: Crash) -> None:
        (one,) = [c for c in Trainer(crash.disk, key=key).store().scan() if c.name == ONE]
        assert bool(one.pins) or not crash.disk.acknowledged
        check_after_fault(crash.disk, must={ONE: [10.0], TWO: [20.0]}, key=key)

    checked(every_crash(disk_with(10.0, 20.0, key=key), pin, order=order), check, at_least=5)


def resume(disk: ModelDisk) -> None:
    """Start a run that does nothing."""
    with Trainer(disk, key=KEY).manager() as manager:
        manager.resume()


def crashes_twice(
    disk: ModelDisk, run: Callable[[ModelDisk], None], order: Order
) -> Iterator[Crash]:
    """Yield what is left when the process dies during `run`, and the power is cut while the next one recovers."""
    for kill in every_kill(disk, run):
        yield from every_crash(kill.disk, resume, order=order)


def test_recovery_of_an_interrupted_overwrite_may_itself_be_interrupted(order: Order) -> None:
    def overwrite(disk: ModelDisk) -> None:
        Trainer(disk, key=KEY).overwrite(TWO, 21.0, step=2)
        disk.acknowledge("new")

    def check(crash: Crash) -> None:
        values = [21.0] if crash.disk.acknowledged else [20.0, 21.0]
        check_after_fault(crash.disk, must={ONE: [10.0], TWO: values}, key=KEY)

    disk = disk_with(10.0, 20.0, key=KEY)
    checked(crashes_twice(disk, overwrite, order), check, at_least=25)


def test_recovery_of_an_interrupted_save_may_itself_be_interrupted(order: Order) -> None:
    def check(crash: Crash) -> None:
        new = {TWO: [20.0]}
        must: Content = {ONE: [10.0], **(new if crash.disk.acknowledged else {})}
        check_after_fault(crash.disk, must=must, may=new, key=KEY)

    disk = disk_with(10.0, key=KEY)
    checked(crashes_twice(disk, saved_as_step(2, KEY), order), check, at_least=25)


def test_recovery_of_an_interrupted_retention_may_itself_be_interrupted(order: Order) -> None:
    old, new = {ONE: [1.0], TWO: [2.0], THREE: [3.0]}, {name_of(4): [40.0]}

    def check(crash: Crash) -> None:
        must: Content = {THREE: [3.0], **(new if crash.disk.acknowledged else {})}
        check_after_fault(crash.disk, must=must, may={**old, **new}, key=KEY, keep="last(1)")

    disk = disk_with(1.0, 2.0, 3.0, key=KEY)
    checked(crashes_twice(disk, lambda d: prune(d, key=KEY), order), check, at_least=25)


def test_overwrite_after_an_interrupted_overwrite_keeps_one_of_the_three(order: Order) -> None:
    def overwrite(disk: ModelDisk, value: float) -> None:
        Trainer(disk).overwrite(TWO, value, step=2)
        disk.acknowledge(str(value))

    def check(crash: Crash) -> None:
        values = {(): [20.0, 21.0, 22.0], ("21.0",): [21.0, 22.0]}.get(
            crash.disk.acknowledged, [22.0]
        )
        check_after_fault(crash.disk, must={ONE: [10.0], TWO: values})

    disk = disk_with(10.0, 20.0)
    kills = every_kill(disk, lambda d: overwrite(d, 21.0))
    crashes = (
        crash
        for kill in kills
        for crash in every_crash(kill.disk, lambda d: overwrite(d, 22.0), order=order, tears=1)
    )
    checked(crashes, check, at_least=50)


def test_prune_after_a_death_does_not_trust_what_is_not_durable(order: Order) -> None:
    def remove_oldest(disk: ModelDisk) -> None:
        store = Trainer(disk).store()
        whole = [c for c in store.scan() if c.is_countable]
        if len(whole) > 1:
            assert store.remove([min(whole, key=lambda c: c.order)]) == []

    def check(crash: Crash) -> None:
        trainer = Trainer(crash.disk)
        assert any(c.is_countable for c in trainer.store().scan())
        check_after_fault(crash.disk, must={}, may={ONE: [10.0], TWO: [20.0]})

    kills = every_kill(disk_with(10.0), saved_as_step(2, None))
    crashes = (c for kill in kills for c in every_crash(kill.disk, remove_oldest, order=order))
    checked(crashes, check, at_least=15)
