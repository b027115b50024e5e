# SPDX-License-Identifier: Apache-2.0
"""A change of keys that is interrupted: the checkpoint opens with the old or the new key, and doing it again finishes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ckptmgr import Checkpoint, CkptmgrError, KeyProblem, UnsafeWrite
from ckptmgr.crypto.keys.pem import generate_pair
from ckptmgr.crypto.keys.ring import KeyRing
from ckptmgr.maintenance.rekey import Action, RekeyPlan, open_for_rekeying, reencrypt_checkpoint
from ckptmgr.maintenance.rekey_change import KeyChange
from tests.faults.training import RUNS, ModelProcesses
from tests.support import api
from tests.support.crashmodel import (
    Crash,
    FailingDisk,
    ModelDisk,
    Order,
    every_crash,
    every_failure,
)
from tests.support.rekeying import NEW, OLD, ROTATION, opens, rekey, ring, save_run, save_set

BOTH = (ring(OLD), ring(NEW))


def with_container(disk: ModelDisk) -> None:
    save_run(disk, steps=1)


def with_ckpt(disk: ModelDisk) -> None:
    save_run(disk, steps=1, form="ckpt")


def with_frames(disk: ModelDisk) -> None:
    save_run(disk, steps=1, compression="zstd")


STARTS = {
    "container": with_container,
    "set of two ranks": save_set,
    "ckpt": with_ckpt,
    "compressed": with_frames,
}


def disk_of(name: str) -> ModelDisk:
    disk = ModelDisk()
    STARTS[name](disk)
    disk.settle()
    return disk


def rotate(disk: ModelDisk) -> None:
    rekey(ROTATION, fs=disk, processes=ModelProcesses(disk))


def only(disk: ModelDisk) -> Checkpoint:
    unfinished = (api.State.LEFTOVER, api.State.WRITING)
    (found,) = [one for one in api.listed(RUNS, fs=disk) if one.state not in unfinished]
    assert found.state is api.State.OK, found
    return found


def check(disk: ModelDisk, *, is_finished: bool) -> None:
    """Check that the checkpoint opens as it must, that the rest can be done, and that nothing is left behind."""
    old, new = (opens(only(disk), keys, fs=disk) for keys in BOTH)
    assert old or new
    if is_finished:
        assert (old, new) == (False, True)
    again = disk.restart()
    rotate(again)
    assert [opens(only(again), keys, fs=again) for keys in BOTH] == [False, True]
    assert not [name for name in again.list(RUNS) if name.endswith(".tmp")]


def broken(crashes: Iterator[Crash]) -> list[str]:
    seen, found = set(), []
    for crash in crashes:
        state = (crash.disk.state(), crash.is_finished)
        if state in seen:
            continue
        seen.add(state)
        try:
            check(crash.disk, is_finished=crash.is_finished)
        except Exception as error:  # whatever it is, a promise is broken
            found.append(f"{error!r} after {crash}")
    assert len(seen) >= 10
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("container", Order.WEAK),
        ("set of two ranks", Order.WEAK),
        ("ckpt", Order.JOURNALED),
    ],
)
def test_rekeying_keeps_its_promises_after_every_power_cut(order: Order, name: str) -> None:
    assert broken(every_crash(disk_of(name), rotate, order=order, tears=2)) == []


def test_rekeying_may_be_cut_again_after_a_cut() -> None:
    def crashes() -> Iterator[Crash]:
        firsts = list(every_crash(disk_of("container"), rotate, order=Order.JOURNALED, tears=1))
        for first in firsts[:: max(1, len(firsts) // 4)]:
            yield from every_crash(first.disk, rotate, order=Order.JOURNALED, tears=1)

    assert broken(crashes()) == []


@pytest.mark.slow
def test_rekeying_that_fails_at_any_call_can_be_finished() -> None:
    processes = ModelProcesses(ModelDisk())
    run = lambda disk: rekey(ROTATION, fs=disk, processes=processes)  # noqa: E731
    failures = list(every_failure(disk_of("container"), run))
    assert len(failures) > 20
    left = {failure.disk.state(): failure.disk for failure in failures}
    assert len(left) >= 4
    for disk in left.values():
        check(disk, is_finished=False)


BOTH_GIVEN = KeyChange(keys=ring(OLD, NEW), add=(ring(NEW),), remove=(ring(OLD),))


@pytest.mark.parametrize("name", ["container", "ckpt"])
def test_rekeying_with_both_keys_at_hand_is_finished_after_every_power_cut(name: str) -> None:
    def run(disk: ModelDisk) -> list[Action]:
        processes = ModelProcesses(disk)
        return [one.action for one in rekey(BOTH_GIVEN, fs=disk, processes=processes)]

    crashes = every_crash(disk_of(name), run, order=Order.JOURNALED, tears=1)
    for crash in {crash.disk.state(): crash for crash in crashes}.values():
        again = crash.disk.restart()
        run(again)
        assert run(again) == [Action.NOTHING]
        assert [opens(only(again), keys, fs=again) for keys in BOTH] == [False, True], crash


ANEW = KeyChange(keys=BOTH[0], add=(BOTH[1],), is_exclusive=True)


@pytest.mark.parametrize("name", ["container", "ckpt", "compressed"])
def test_reencryption_keeps_its_promises_after_every_power_cut(name: str) -> None:
    def run(disk: ModelDisk) -> None:
        store = open_for_rekeying(RUNS, ANEW, fs=disk, processes=ModelProcesses(disk))
        reencrypt_checkpoint(store, only(disk), ANEW)

    crashes = every_crash(disk_of(name), run, order=Order.JOURNALED, tears=1)
    for crash in {crash.disk.state(): crash for crash in crashes}.values():
        assert any(opens(only(crash.disk), keys, fs=crash.disk) for keys in BOTH), crash
        again = crash.disk.restart()
        run(again)
        assert [opens(only(again), keys, fs=again) for keys in BOTH] == [False, True], crash
        assert not [name for name in again.list(RUNS) if name.endswith(".tmp")]


def test_reencryption_to_a_public_key_is_finished_after_every_power_cut() -> None:
    private, public = generate_pair("x25519")
    change = KeyChange(keys=ring(OLD), add=(ring(public),), is_exclusive=True)

    def run(disk: ModelDisk) -> RekeyPlan:
        store = open_for_rekeying(RUNS, change, fs=disk, processes=ModelProcesses(disk))
        return reencrypt_checkpoint(store, only(disk), change)

    crashes = every_crash(disk_of("container"), run, order=Order.JOURNALED, tears=1)
    lefts = {crash.disk.state(): crash.disk for crash in crashes}
    assert len(lefts) >= 10
    for disk in lefts.values():
        again = disk.restart()
        run(again)
        assert [opens(only(again), ring(one), fs=again) for one in (OLD, private)] == [False, True]
        assert run(again).action is Action.NOTHING


def known(disk: ModelDisk, keys: KeyRing) -> api.Key | None:
    """Return the key of the manifest, if these keys open it."""
    try:
        read = api.place(RUNS, fs=disk, keys=keys).read_manifest(only(disk).name)
    except CkptmgrError:
        return None
    return None if read is None or read.auth is None else read.auth.key


def finished(work: Callable[[ModelDisk], object], disk: ModelDisk) -> bool:
    """Return whether something succeeds; it is refused otherwise."""
    try:
        work(disk)
    except (UnsafeWrite, KeyProblem):
        return False
    return True


@pytest.mark.parametrize("who", ["old", "new", "new, by id"])
def test_reencryption_that_was_cut_and_then_rekeyed_is_not_done_under_a_key_that_the_old_ones_know(
    who: str,
) -> None:
    private, public = generate_pair("x25519")
    anew = KeyChange(keys=ring(OLD), add=(ring(public),), is_exclusive=True)
    change = {
        "old": KeyChange(keys=ring(OLD), add=(ring(public),), remove=(ring(OLD),)),
        "new": KeyChange(keys=ring(private), remove=(ring(OLD),)),
        "new, by id": KeyChange(keys=ring(private), remove_ids=(OLD.key_id,)),
    }[who]

    def run(disk: ModelDisk) -> None:
        store = open_for_rekeying(RUNS, anew, fs=disk, processes=ModelProcesses(disk))
        reencrypt_checkpoint(store, only(disk), anew)

    def remove_old(disk: ModelDisk) -> None:
        rekey(change, fs=disk, processes=ModelProcesses(disk))

    crashes = every_crash(disk_of("container"), run, order=Order.JOURNALED, tears=1)
    count = 0
    for disk in {crash.disk.state(): crash.disk for crash in crashes}.values():
        secret, again = known(disk, ring(OLD)), disk.restart()
        finished(remove_old, again)
        if finished(run, again):
            count += 1
            assert opens(only(again), ring(private), fs=again)
            assert known(again, ring(private)) not in (None, secret)
    assert count >= 3


class _Unsynced:
    def __init__(self, file: api.OutputFile) -> None:
        self.reserve, self.write_at, self.close = file.reserve, file.write_at, file.close

    def sync(self) -> None:
        pass


class WithoutHeaderSync(FailingDisk):
    def change(self, path: object) -> api.OutputFile:
        return _Unsynced(super().change(path))  # type: ignore[arg-type]


class WithoutDirectorySync(FailingDisk):
    def sync_directory(self, path: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("forgetful", [WithoutHeaderSync, WithoutDirectorySync])
def test_rekeying_that_does_not_sync_is_found_out(
    forgetful: Callable[[ModelDisk], api.FileSystem],
) -> None:
    disk = disk_of("container")

    def run(one: ModelDisk) -> None:
        rekey(ROTATION, fs=forgetful(one), processes=ModelProcesses(one))

    assert broken(every_crash(disk, run, order=Order.WEAK))
