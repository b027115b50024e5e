# SPDX-License-Identifier: Apache-2.0
"""Listing a directory again: manifests are read once, and every change of a file is seen."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import Checkpoint, CheckpointConfig
from ckptmgr.io.files import FileHead
from ckptmgr.io.filesystem import FileStatus
from tests.faults.training import KEY, RUNS, ModelProcesses, Trainer, disk_with, name_of
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import flip_bit, manifest_of, put, truncate
from tests.support.runs import manager_on
from tests.support.saved import save_run
from tests.support.shard_sets import SET, disk_with_shards, shard

FIRST, SECOND = "net-1_10.ckpt", "net-2_10.ckpt"
LATER = 1e12


class CountingDisk(api.OsFileSystem):
    """The real disk, counting how often manifests are opened."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = 0

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        self.opened += name.endswith(api.MANIFEST_SUFFIX)
        return super().read_head(directory, name, most_bytes=most_bytes)


def by_name(store: api.Place) -> dict[str, Checkpoint]:
    return {checkpoint.name: checkpoint for checkpoint in store.scan()}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Return a directory with two checkpoints."""
    save_run(tmp_path, [10, 20])
    return tmp_path


def test_manifests_that_do_not_change_are_read_once(runs: Path) -> None:
    disk = CountingDisk()
    store = api.place(runs, fs=disk, clock=lambda: LATER)
    first = by_name(store)
    assert disk.opened == 2
    assert by_name(store) == first
    assert disk.opened == 2


@pytest.mark.parametrize("keep", ["all", "last(2)"])
def test_save_lists_the_directory_once_before_and_once_after(tmp_path: Path, keep: str) -> None:
    class ListingDisk(api.OsFileSystem):
        listed = 0

        def list(self, path: Path) -> dict[str, FileStatus]:
            self.listed += 1
            return super().list(path)

    disk = ListingDisk()
    with manager_on(tmp_path, CheckpointConfig(keep=keep), fs=disk) as manager:
        for step in range(3):
            manager.save(step, {"n": step})
        disk.listed = 0
        manager.save(3, {"n": 3})
    assert disk.listed == 2


def test_run_that_keeps_five_checkpoints_reads_only_manifests_that_a_save_concerns(
    tmp_path: Path,
) -> None:
    disk = CountingDisk()
    with manager_on(tmp_path, CheckpointConfig(keep="last(5)"), fs=disk) as manager:
        for step in range(8):
            manager.save(step, {"n": step})
        disk.opened = 0
        manager.save(8, {"n": 8})
    # The new one is listed; under the leases it and the one that goes are looked at again.
    assert disk.opened == 3


def test_manifests_that_changed_just_now_are_read_again(runs: Path) -> None:
    disk = CountingDisk()
    newest_s = max(path.stat().st_ctime for path in runs.iterdir())
    store = api.place(runs, fs=disk, clock=lambda: newest_s)
    store.scan()
    store.scan()
    assert disk.opened == 4


def test_disk_without_change_times_is_read_every_time() -> None:
    disk = disk_with(10.0)
    disk.has_change_times = False
    counting = FailingDisk(disk)
    store = api.place(RUNS, fs=counting, processes=ModelProcesses(disk))
    store.scan()
    store.scan()
    assert counting.calls.count("open") == 2


def rewrite(directory: Path) -> None:
    """Change a manifest in place, to the same size, and give it the time that it had."""
    path = directory / api.manifest_name(FIRST)
    before = path.stat()
    path.chmod(0o600)
    with path.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b'"step": 10', b'"step": 17'))
    path.chmod(before.st_mode)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_manifest_changed_in_place_with_its_old_time_is_read_again(runs: Path) -> None:
    store = api.place(runs, clock=lambda: LATER)
    assert by_name(store)[FIRST].step == 10
    rewrite(runs)
    assert by_name(store)[FIRST].step == 17


def cut(directory: Path) -> None:
    os.truncate(directory / FIRST, 9)


def swap(directory: Path) -> None:
    (directory / api.manifest_name(FIRST)).rename(directory / "kept")
    (directory / api.manifest_name(SECOND)).rename(directory / api.manifest_name(FIRST))


CHANGES: dict[str, tuple[Callable[[Path], object], api.State | None]] = {
    "data cut": (cut, api.State.CORRUPT),
    "data gone": (lambda runs: (runs / FIRST).unlink(), api.State.LEFTOVER),
    "manifest gone": (
        lambda runs: (runs / api.manifest_name(FIRST)).unlink(),
        api.State.UNVERIFIED,
    ),
    "manifest of another": (swap, api.State.CORRUPT),
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_of_a_file_is_seen(runs: Path, change: str) -> None:
    store = api.place(runs, clock=lambda: LATER)
    store.scan()
    apply, state = CHANGES[change]
    apply(runs)
    assert by_name(store)[FIRST].state is state


def test_file_of_a_rank_that_goes_is_seen() -> None:
    disk = disk_with_shards()
    store = api.place(RUNS, fs=disk, processes=ModelProcesses(disk))
    assert by_name(store)[SET].state is api.State.OK
    disk.unlink(RUNS / shard(1))
    assert by_name(store)[SET].state is api.State.CORRUPT


def test_what_could_not_be_read_is_read_again() -> None:
    disk = disk_with(10.0)
    failing = FailingDisk(disk, operation="open", call=1, is_lasting=True)
    store = api.place(RUNS, fs=failing, processes=ModelProcesses(disk))
    assert [c.state for c in store.scan()] == [api.State.CORRUPT]
    failing.mend()
    assert [c.state for c in store.scan()] == [api.State.OK]


def test_what_was_proven_under_one_key_is_not_under_another() -> None:
    disk = disk_with(10.0, key=KEY)
    stores = [
        api.place(RUNS, fs=disk, keys=key, processes=ModelProcesses(disk))
        for key in (api.Key(KEY), api.Key(bytes(32)))
    ]
    states = [[c.state for c in store.scan()] for store in stores * 2]
    assert states == [[api.State.OK], [api.State.OTHER_KEY]] * 2


STEPS = st.integers(1, 3)
Change = Callable[[ModelDisk, str], object]


def pin(disk: ModelDisk, name: str) -> None:
    store = Trainer(disk).store()
    for found in store.scan():
        if (found.name, found.state) == (name, api.State.OK):
            store.change_pins(found, lambda pins: (*pins, api.Pin(name=f"pin {len(pins)}")))


def if_there(change: Change, of: Callable[[str], str]) -> Change:
    def changed(disk: ModelDisk, name: str) -> None:
        if disk.status(RUNS / of(name)) is not None:
            change(disk, of(name))

    return changed


WRITES: list[Change] = [
    lambda disk, name: Trainer(disk).overwrite(name, 5.0, step=int(name[4])),
    pin,
    if_there(flip_bit, manifest_of),
    if_there(lambda disk, name: truncate(disk, name, 7), str),
    if_there(lambda disk, name: disk.unlink(RUNS / name), str),
    if_there(lambda disk, name: disk.unlink(RUNS / name), manifest_of),
    lambda disk, name: put(disk, RUNS / name, b"stranger"),
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(WRITES), STEPS, st.booleans()), max_size=8))
def test_listing_again_says_what_listing_anew_says(
    changes: list[tuple[Change, int, bool]],
) -> None:
    disk = disk_with(10.0, 20.0)
    store = Trainer(disk).store()
    store.scan()
    for change, step, is_listed in changes:
        change(disk, name_of(step))
        if is_listed:
            assert by_name(store) == by_name(Trainer(disk).store())
    assert by_name(store) == by_name(Trainer(disk).store())
