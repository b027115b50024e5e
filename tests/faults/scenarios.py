# SPDX-License-Identifier: Apache-2.0
"""The operations of the store, each with the conditions after a fault in it.

`start` is the disk before, `run` the operation, `must` and `may` the content afterwards, given the acknowledgements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ckptmgr.store.publish import SPACE_MARGIN_BYTES
from tests.faults.training import (
    RUNS,
    Content,
    Trainer,
    check_after_fault,
    disk_with,
    name_of,
    state_of,
)
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash, every_kill
from tests.support.diskimage import Snapshot
from tests.support.failingdisk import FailingDisk

ONE, TWO, THREE, FOUR = (name_of(step) for step in (1, 2, 3, 4))
OLD: Content = {ONE: [10.0], TWO: [20.0]}
NEW: Content = {THREE: [30.0]}
NONE: Content = {}

Wrap = Callable[[ModelDisk], api.FileSystem]


def as_it_is(disk: ModelDisk) -> api.FileSystem:
    """Show the code under test the disk itself."""
    return disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One operation and its promises.

    Attributes:
        values: Of the steps 1, 2, ... that were saved before.
        run: The operation; it notes its promises with `disk.acknowledge`.
        must: The content after a fault, given whether the promise was made.
        may: What may be there.
        keep: The retention policy.
    """

    values: tuple[float, ...]
    run: Callable[[Trainer], None]
    must: Callable[[bool], Content]
    may: Content
    keep: str = "all"

    def start(self, key: bytes | None) -> ModelDisk:
        """Return the disk before."""
        return disk_with(*self.values, key=key)

    def runner(self, key: bytes | None, wrap: Wrap) -> Callable[[ModelDisk], None]:
        """Return the operation for `every_crash` and its like."""
        return lambda disk: self.run(Trainer(disk, fs=wrap(disk), key=key, keep=self.keep))

    def check(self, disk: ModelDisk, key: bytes | None) -> None:
        """Check a disk after a fault."""
        must = self.must(bool(disk.acknowledged))
        check_after_fault(disk, must=must, may=self.may, key=key, keep=self.keep)

    def crashes(self, key: bytes | None, order: Order, wrap: Wrap = as_it_is) -> Iterator[Crash]:
        """Yield the states that a power cut in the operation may leave."""
        return every_crash(self.start(key), self.runner(key, wrap), order=order)

    def crashes_after_death(
        self,
        key: bytes | None,
        order: Order,
        then: Callable[[Trainer], None],
        wrap: Wrap = as_it_is,
    ) -> Iterator[Crash]:
        """Yield the states that a power cut in `then` may leave, for each moment at which the operation before it died."""

        def run(disk: ModelDisk) -> None:
            then(Trainer(disk, fs=wrap(disk), key=key, keep=self.keep))

        for kill in every_kill(self.start(key), self.runner(key, as_it_is)):
            yield from every_crash(kill.disk, run, order=order, tears=1)


def _save_third(trainer: Trainer) -> None:
    with trainer.manager() as manager:
        manager.resume()
        manager.save(3, state_of(30.0))
        trainer.disk.acknowledge("saved")


def _save_first(trainer: Trainer) -> None:
    with trainer.manager() as manager:
        manager.save(1, state_of(10.0))
        trainer.disk.acknowledge("saved")


def _overwrite_second(trainer: Trainer) -> None:
    trainer.overwrite(TWO, 21.0, step=2)
    trainer.disk.acknowledge("overwritten")


def _pin_first(trainer: Trainer) -> None:
    with trainer.manager() as manager:
        manager.pin(1, "paper")
        trainer.disk.acknowledge("pinned")


def _save_on_a_full_disk(trainer: Trainer) -> None:
    full = FailingDisk(trainer.fs or trainer.disk, space_bytes=SPACE_MARGIN_BYTES)
    with replace(trainer, fs=full).manager() as manager:
        assert manager.resume().step == 3
        manager.save(4, state_of(40.0))
        trainer.disk.acknowledge("saved")


FIRST_SAVE = Scenario(
    values=(),
    run=_save_first,
    must=lambda is_saved: {ONE: [10.0]} if is_saved else NONE,
    may={ONE: [10.0]},
)
NEXT_SAVE = Scenario(
    values=(10.0, 20.0),
    run=_save_third,
    must=lambda is_saved: {**OLD, **NEW} if is_saved else OLD,
    may={**OLD, **NEW},
)
OVERWRITE = Scenario(
    values=(10.0, 20.0),
    run=_overwrite_second,
    must=lambda is_saved: {ONE: [10.0], TWO: [21.0] if is_saved else [20.0, 21.0]},
    may=NONE,
)
# The checkpoint that a run was resumed from stays as long as it runs; the first one may go any time after the save.
RETENTION = Scenario(
    values=(10.0, 20.0),
    run=_save_third,
    must=lambda is_saved: {TWO: [20.0], **(NEW if is_saved else NONE)},
    may={**OLD, **NEW},
    keep="last(1)",
)
# On a full disk the older ones go before the save; the one that was resumed from stays.
ROOM = Scenario(
    values=(10.0, 20.0, 30.0),
    run=_save_on_a_full_disk,
    must=lambda is_saved: {**NEW, **({FOUR: [40.0]} if is_saved else NONE)},
    may={**OLD, **NEW, FOUR: [40.0]},
    keep="last(1)",
)
PIN = Scenario(values=(10.0, 20.0), run=_pin_first, must=lambda _: OLD, may=NONE)
SCENARIOS = {
    "first save": FIRST_SAVE,
    "next save": NEXT_SAVE,
    "overwrite": OVERWRITE,
    "retention": RETENTION,
    "room": ROOM,
    "pin": PIN,
}


def resume(trainer: Trainer) -> None:
    """Start a run that does nothing."""
    with trainer.manager() as manager:
        manager.resume()


def keep_only_newest(trainer: Trainer) -> None:
    """Remove all checkpoints but the newest, without having saved anything."""
    store = trainer.store()
    whole = sorted((c for c in store.scan() if c.is_countable), key=lambda c: c.order)
    store.remove(whole[:-1])


def overwrites_of_third(wrap: Wrap = as_it_is) -> Iterator[Crash]:
    """Yield the states that a power cut in an overwrite may leave, of a file whose save died after its rename."""

    def run(disk: ModelDisk) -> None:
        Trainer(disk, fs=wrap(disk)).overwrite(THREE, 31.0, step=3)
        disk.acknowledge("overwritten")

    deaths = every_kill(NEXT_SAVE.start(None), NEXT_SAVE.runner(None, as_it_is))
    renamed = next(death.disk for death in deaths if death.disk.status(RUNS / THREE))
    return every_crash(renamed, run, order=Order.WEAK, tears=0)


def check_third(crash: Crash) -> None:
    """Check a disk of `overwrites_of_third`."""
    is_new = "overwritten" in crash.disk.acknowledged
    third = {THREE: [31.0] if is_new else [30.0, 31.0]}
    check_after_fault(crash.disk, must={**OLD, **third} if is_new else OLD, may=third)


def first_broken(crashes: Iterable[Crash], check: Callable[[Crash], None]) -> str | None:
    """Return the state after the first crash whose check fails, or None; equal disks are checked once."""
    seen = set()
    for crash in crashes:
        state = (what_counts(crash.disk), crash.disk.acknowledged)
        if state not in seen:
            seen.add(state)
            left = crash.disk.copy()
            try:
                check(crash)
            except Exception as error:  # whatever it is, something promised does not hold
                return f"{error!r} after {replace(crash, disk=left)}"
    return None if len(seen) >= 4 else f"only {len(seen)} different disks"


def what_counts(disk: ModelDisk) -> Snapshot:
    """Return the state of a disk without the start count and the lease, which promise nothing."""
    ignored = (".net.lease", ".net.starts", "..net.starts")
    return frozenset(
        item for item in disk.state() if not item[0].rpartition("/")[2].startswith(ignored)
    )


def put_bare(disk: ModelDisk, step: int) -> None:
    """Turn a checkpoint into the file of some other program: without manifest, under another name."""
    disk.unlink(RUNS / f"{name_of(step)}.manifest.json")
    disk.replace(RUNS / name_of(step), RUNS / "bare.ckpt")
    disk.settle()
