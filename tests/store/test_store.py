# SPDX-License-Identifier: Apache-2.0
"""What `Store` says about a directory and does to it, where the manager's tests do not reach."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CorruptCheckpoint,
    StoreFull,
    UnsafePrune,
    UnsupportedCheckpoint,
    plan,
    save_checkpoint,
)
from ckptmgr.formats.strategy import Strategy, StrategyLayout, encode_strategy
from ckptmgr.io.leases import series_tag
from ckptmgr.policy.rules import Last
from tests.faults.training import KEY, RUNS, SERIES, ModelProcesses, Trainer, disk_with, name_of
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import copy, flip_bit, manifest_of, put, truncate

ONE, TWO = name_of(1), name_of(2)
TAG = series_tag(SERIES)


@dataclass(frozen=True, slots=True)
class KnownProcesses:
    """Processes of which some are known to be dead, some to be alive."""

    dead: frozenset[str] = frozenset()
    alive: frozenset[str] = frozenset({"me-1"})

    def token(self) -> str:
        return "me-1"

    def is_dead(self, token: str) -> bool | None:
        return True if token in self.dead else False if token in self.alive else None


def by_name(store: api.Place) -> dict[str, Checkpoint]:
    return {checkpoint.name: checkpoint for checkpoint in store.scan()}


def test_directory_that_is_not_there_is_empty() -> None:
    store = Trainer(ModelDisk()).store()
    assert store.scan() == []
    assert store.recover(SERIES) == []
    assert store.read_manifest(ONE) is None


def test_manifest_that_can_be_read_only_once_is_listed_with_what_the_disk_said() -> None:
    disk = disk_with(10.0, key=KEY)
    failing = FailingDisk(disk, operation="open", call=2, is_lasting=True)
    (found,) = api.listed(RUNS, fs=failing, keys=api.Key(bytes(32)))
    assert failing.has_failed
    assert found.state is api.State.CORRUPT
    assert isinstance(found.obstacle, OSError)


def test_names_of_other_programs_are_no_checkpoints() -> None:
    disk = disk_with(10.0)
    for name in (
        "notes.txt",
        ".hidden.ckpt",
        ".x.manifest.json",
        "model.pt",
        ".net.tmp",
        ".a-b.c.d-1.tmp",
    ):
        put(disk, RUNS / name, b"x")
    assert set(by_name(Trainer(disk).store())) == {ONE}


def test_strategy_file_is_no_checkpoint_and_what_only_begins_like_one_is() -> None:
    disk = disk_with(10.0)
    layout = StrategyLayout(name="w", device_matrix=(2,), tensor_maps=((0, -1),))
    content = encode_strategy(Strategy(layouts=(layout,)))
    for name, data in (
        ("strategy.ckpt", content),
        ("cut.ckpt", content[:-1]),
        ("without layouts.ckpt", encode_strategy(Strategy(layouts=()))),
        ("empty.ckpt", b""),
        ("net-1_1.ckpt", content),
    ):
        put(disk, RUNS / name, data)
    assert set(by_name(Trainer(disk).store())) == {
        ONE,
        "cut.ckpt",
        "without layouts.ckpt",
        "empty.ckpt",
        "net-1_1.ckpt",
    }


def test_bare_files_have_the_step_that_their_names_count_to() -> None:
    disk = disk_with(10.0)
    for name in (
        "lenet-1_10.ckpt",
        "lenet-2_3.ckpt",
        "lenet-0_0_breakpoint.ckpt",
        "free.safetensors",
    ):
        put(disk, RUNS / name, b"x")
    found = by_name(Trainer(disk).store())
    assert {name: found[name].step for name in found if name != ONE} == {
        "lenet-1_10.ckpt": 10,
        "lenet-2_3.ckpt": 13,
        "lenet-0_0_breakpoint.ckpt": 0,
        "free.safetensors": 0,
    }
    assert found["lenet-0_0_breakpoint.ckpt"].is_emergency
    assert found["free.safetensors"].series == "free"
    assert {found[name].state for name in found if name != ONE} == {api.State.UNVERIFIED}


@pytest.mark.parametrize(
    ("dead", "state"),
    [({"other-1"}, api.State.LEFTOVER), (set(), api.State.LEFTOVER)],
)
def test_temporary_file_of_a_dead_or_unknown_writer_is_a_leftover(
    dead: set[str], state: api.State
) -> None:
    disk = disk_with(10.0)
    put(disk, RUNS / f".{TWO}.other-1.{TAG}.1-1.tmp", b"x")
    store = api.place(RUNS, fs=disk, processes=KnownProcesses(dead=frozenset(dead)))
    (found,) = [c for c in store.scan() if c.name != ONE]
    assert found.state is state


def test_temporary_file_of_a_live_writer_is_being_written_and_stays() -> None:
    disk = disk_with(10.0)
    name = f".{TWO}.me-1.{TAG}.1-1.tmp"
    put(disk, RUNS / name, b"x")
    store = api.place(RUNS, fs=disk, processes=KnownProcesses())
    assert by_name(store)[name].state is api.State.WRITING
    assert store.recover(SERIES) == []


@pytest.mark.parametrize(
    ("token", "tag", "is_reaped"),
    [
        ("dead-1", TAG, True),
        ("dead-1", series_tag("other"), True),
        ("far-1", TAG, True),
        ("far-1", series_tag("other"), False),
    ],
)
def test_only_temporary_files_of_dead_writers_and_of_the_own_series_are_reaped(
    token: str, tag: str, is_reaped: bool
) -> None:
    disk = disk_with(10.0)
    path = RUNS / f".{TWO}.{token}.{tag}.1-1.tmp"
    put(disk, path, b"x")
    store = api.place(RUNS, fs=disk, processes=KnownProcesses(dead=frozenset({"dead-1"})))
    done = store.recover(SERIES)
    assert (disk.status(path) is None) == is_reaped == bool(done)


def test_older_manifest_without_data_is_a_leftover_that_recovery_removes() -> None:
    disk = disk_with(10.0, 20.0)
    disk.unlink(RUNS / ONE)
    store = Trainer(disk).store()
    assert by_name(store)[ONE].state is api.State.LEFTOVER
    with store.lease(SERIES):  # somebody writes that series
        assert store.recover("other") == []
    assert store.recover(SERIES) == [f"removed {manifest_of(ONE)}, whose data file is gone"]
    assert set(by_name(store)) == {TWO}


def test_newest_manifest_without_data_is_missing_and_stays() -> None:
    disk = disk_with(10.0, 20.0)
    disk.unlink(RUNS / TWO)
    store = Trainer(disk).store()
    assert by_name(store)[TWO].state is api.State.MISSING
    assert store.recover(SERIES) == []
    assert by_name(store)[TWO].state is api.State.MISSING


def test_recovery_that_cannot_clean_up_says_so_and_goes_on() -> None:
    disk = disk_with(10.0, 20.0)
    disk.unlink(RUNS / ONE)
    put(disk, RUNS / f".{TWO}.boot9-9.{TAG}.1-1.tmp", b"x")
    failing = FailingDisk(disk, error=errno.EROFS, operation="unlink", call=1)
    store = Trainer(disk, fs=failing).store()
    first, second = store.recover(SERIES)
    assert first.startswith("could not clean up: [Errno 30]")
    assert second.startswith("removed")


def test_manifest_that_vanishes_during_the_listing_is_a_leftover() -> None:
    class Vanishing(FailingDisk):
        def list(self, path: Path):  # type: ignore[no-untyped-def]  # noqa: ANN202
            entries = super().list(path)
            disk.unlink(RUNS / manifest_of(ONE))
            return entries

    disk = disk_with(10.0)
    (found,) = api.listed(RUNS, fs=Vanishing(disk), processes=ModelProcesses(disk))
    assert (found.state, found.problem) == (
        api.State.LEFTOVER,
        "vanished while the directory was listed",
    )


def test_last_good_checkpoint_is_never_removed() -> None:
    disk = disk_with(10.0, 20.0)
    truncate(disk, TWO, 3)
    store = Trainer(disk).store()
    with pytest.raises(UnsafePrune, match="the last good checkpoint"):
        store.remove([by_name(store)[ONE]])
    assert by_name(store)[ONE].state is api.State.OK


def test_removal_of_nothing_does_nothing() -> None:
    disk = disk_with(10.0)
    operations = len(disk.operations)
    assert Trainer(disk).store().remove([]) == []
    assert len(disk.operations) == operations


def test_removal_of_what_is_gone_is_no_failure() -> None:
    disk = disk_with(10.0, 20.0)
    store = Trainer(disk).store()
    one = by_name(store)[ONE]
    assert store.remove([one]) == store.remove([one]) == []


def test_manifest_that_cannot_be_removed_is_reported() -> None:
    disk = disk_with(10.0, 20.0)
    failing = FailingDisk(disk, error=errno.EROFS, operation="unlink", call=2)
    store = Trainer(disk, fs=failing).store()
    (failure,) = store.remove([by_name(store)[ONE]])
    assert isinstance(failure, OSError)
    assert failure.errno == errno.EROFS
    assert by_name(store)[ONE].state is api.State.LEFTOVER


def test_pins_need_a_manifest() -> None:
    disk = disk_with(10.0)
    disk.unlink(RUNS / manifest_of(ONE))
    store = Trainer(disk).store()
    with pytest.raises(UnsupportedCheckpoint, match="without a manifest cannot be pinned"):
        store.change_pins(by_name(store)[ONE], lambda pins: (*pins, api.Pin(name="x")))


def test_changed_manifest_is_read_back() -> None:
    disk = disk_with(10.0, key=KEY)
    store = Trainer(disk, key=KEY).store()
    manifest = store.read_manifest(ONE)
    assert manifest is not None
    store.update_manifest(replace(manifest, metrics={"loss": 0.5}))
    assert by_name(store)[ONE].metrics == {"loss": 0.5}


def test_manifest_that_has_no_room_is_named_and_stays_as_it_is() -> None:
    disk = disk_with(10.0, key=KEY)
    store = api.place(
        RUNS,
        fs=FailingDisk(disk, space_bytes=0),
        keys=api.Key(KEY),
        allow_unencrypted=True,
    )
    manifest = store.read_manifest(ONE)
    assert manifest is not None
    with pytest.raises(StoreFull, match=f"{ONE}: the disk became full"):
        store.update_manifest(replace(manifest, metrics={"loss": 0.5}))
    with pytest.raises(StoreFull, match=f"{ONE}: the disk became full"):
        store.reauthenticate(ONE, lambda auth: auth)
    assert store.read_manifest(ONE) == manifest


@pytest.mark.parametrize("is_new", [False, True])
def test_manifest_of_an_interrupted_overwrite_is_that_of_the_data_that_is_there(
    is_new: bool,
) -> None:
    disk = disk_with(10.0, 20.0)
    store = Trainer(disk).store()
    old, new = store.read_manifest(ONE), store.read_manifest(TWO)
    assert old is not None
    assert new is not None
    renamed = replace(new, file=replace(new.file, name=ONE), replaces=old)
    store.update_manifest(renamed)
    if is_new:
        copy(disk, TWO, ONE)
    assert store.read_manifest(ONE) == (renamed.without_replaced() if is_new else old)


def test_overwriting_a_damaged_checkpoint_gives_a_whole_one() -> None:
    disk = disk_with(10.0, 20.0)
    flip_bit(disk, TWO)
    truncate(disk, manifest_of(ONE), 9)
    trainer = Trainer(disk)
    trainer.overwrite(TWO, 21.0, step=2)
    trainer.overwrite(ONE, 11.0, step=1)
    assert {c.state for c in trainer.store().scan()} == {api.State.OK}
    with trainer.manager() as manager:
        assert not manager.resume().skipped


def test_unknown_free_space_is_no_obstacle() -> None:
    disk = disk_with(10.0)
    disk.available_bytes = None
    Trainer(disk).store().publisher.check_space(1 << 60)


def test_space_is_checked_with_room_to_spare() -> None:
    disk = disk_with(10.0)
    disk.available_bytes = (1 << 20) + 99
    store = Trainer(disk).store()
    store.publisher.check_space(99)
    with pytest.raises(StoreFull, match="1 missing") as caught:
        store.publisher.check_space(100)
    assert caught.value.errno == errno.ENOSPC


def test_key_problem_leaves_a_checkpoint_listed_as_unverified() -> None:
    disk = disk_with(10.0, key=KEY)
    store = api.place(
        RUNS,
        fs=disk,
        keys=api.Key(bytes(32)),
        allow_unencrypted=True,
        processes=ModelProcesses(disk),
    )
    (found,) = store.scan()
    assert (found.state, found.step) == (api.State.UNVERIFIED, 1)
    assert "is authenticated under key" in str(found.problem)


def test_damaged_manifest_names_itself() -> None:
    disk = disk_with(10.0)
    truncate(disk, manifest_of(ONE), 9)
    with pytest.raises(CorruptCheckpoint, match=r"/net-1\.ckpt\.manifest\.json: not valid JSON"):
        Trainer(disk).store().read_manifest(ONE)


def test_two_stores_of_one_process_never_choose_the_same_temporary_name() -> None:
    disk = disk_with(10.0)
    failing = FailingDisk(disk, error=errno.EROFS, operation="unlink", call=1, is_lasting=True)
    broken = FailingDisk(failing, operation="replace", call=1)
    for _ in range(2):
        with pytest.raises(OSError, match="Input"):
            Trainer(disk, fs=broken).overwrite(TWO, 20.0, step=2)
        broken = FailingDisk(failing, operation="replace", call=1)
    left = [c for c in Trainer(disk).store().scan() if c.state is api.State.WRITING]
    assert len(left) == 4


def test_data_file_that_is_a_link_is_listed_as_damaged_not_overlooked(tmp_path: Path) -> None:
    saved = save_checkpoint({"w": np.zeros(3)}, tmp_path / "x.ckpt")
    elsewhere = tmp_path / "elsewhere"
    saved.path.rename(elsewhere)
    saved.path.symlink_to(elsewhere)
    (found,) = api.listed(tmp_path)
    assert found.state is api.State.CORRUPT
    assert found.problem is not None
    assert "link" in found.problem


def test_name_as_long_as_a_manifest_allows_is_saved(tmp_path: Path) -> None:
    longest = "n" * (255 - len(".ckpt.manifest.json"))
    saved = save_checkpoint({"w": np.zeros(3)}, tmp_path / f"{longest}.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        saved.name,
        f"{saved.name}.manifest.json",
    ]


def test_manifest_that_may_not_be_read_is_unreadable_and_not_corrupt() -> None:
    disk = disk_with(10.0)
    failing = FailingDisk(disk, error=errno.EACCES, operation="open", call=1, is_lasting=True)
    (found,) = Trainer(disk, fs=failing).store().scan()
    assert (found.state, found.is_countable) == (api.State.UNREADABLE, False)
    decided = plan([found], Last(1), found.saved_at)
    assert "not counted: unreadable" in decided.verdicts[0].reasons[0].detail
