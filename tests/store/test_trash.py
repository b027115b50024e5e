# SPDX-License-Identifier: Apache-2.0
"""The trash: files in it come back, whole, whenever the power fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, UnsafePrune
from ckptmgr.maintenance.prune import undo
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.faults.training import ModelProcesses
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk, Order, every_crash, every_failure
from tests.support.saved import save_run

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
RUNS = Path("/runs")
FIRST = "net-1_10.ckpt"
THIRD = "net-3_10.ckpt"


def model_store(disk: ModelDisk | FailingDisk, model: ModelDisk | None = None) -> api.Place:
    """Return the store of the run on a model disk."""
    known = model or disk
    assert isinstance(known, ModelDisk)
    return api.place(RUNS, fs=disk, processes=ModelProcesses(known))


def saved_disk() -> ModelDisk:
    """Return a disk with three durable checkpoints."""
    disk = ModelDisk()
    save_run(RUNS, [10, 20, 30], fs=disk)
    disk.settle()
    return disk


def by_name(store: api.Place) -> dict[str, Checkpoint]:
    """Return the checkpoints of a store by file name."""
    return {checkpoint.name: checkpoint for checkpoint in store.scan()}


def throw_first_two(store: api.Place) -> Path:
    """Throw away all but the newest."""
    into = DirectoryTrash(store).new_batch_path(NOW)
    found = by_name(store)
    failures = DirectoryTrash(store).throw_away([found[FIRST], found["net-2_10.ckpt"]], into)
    if failures:
        raise failures[0]
    return into


def check_whole(store: api.Place, *, must: set[str], may: set[str]) -> None:
    """Check that nothing is listed but whole checkpoints and leftovers, and that all of `must` is."""
    found = by_name(store)
    listed = {name for name, c in found.items() if c.state is not api.State.LEFTOVER}
    assert must <= listed <= must | may
    for name in listed:
        assert found[name].state is api.State.OK
        assert api.verify(store, found[name]).status is api.Status.OK


def test_thrown_away_checkpoint_is_gone_with_its_manifest(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    into = DirectoryTrash(store).new_batch_path(NOW)
    assert DirectoryTrash(store).throw_away([by_name(store)[FIRST]], into) == []
    assert set(by_name(store)) == {"net-2_10.ckpt"}
    assert {path.name for path in into.iterdir()} == {FIRST, api.manifest_name(FIRST)}
    assert into.name == "20260302T120000.000000Z"
    assert into.stat().st_mode & 0o777 == 0o700


def test_bare_file_goes_and_comes_back_without_manifest(tmp_path: Path) -> None:
    for name in ("CKP-1_1.ckpt", "CKP-2_1.ckpt"):
        (tmp_path / name).write_bytes(b"bare")
    store = api.place(tmp_path)
    assert not DirectoryTrash(store).throw_away(
        [by_name(store)["CKP-1_1.ckpt"]], DirectoryTrash(store).new_batch_path(NOW)
    )
    undo(store)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"CKP-1_1.ckpt", "CKP-2_1.ckpt"}


def test_last_good_checkpoint_never_goes(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    with pytest.raises(UnsafePrune):
        DirectoryTrash(store).throw_away(store.scan(), DirectoryTrash(store).new_batch_path(NOW))
    assert not (tmp_path / TRASH_NAME).exists()


def test_trash_that_is_a_link_is_refused(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [10, 20])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "runs" / TRASH_NAME).symlink_to(tmp_path / "elsewhere")
    store = api.place(tmp_path / "runs")
    assert DirectoryTrash(store).batches() == []
    with pytest.raises(UnsafePrune, match="not a directory"):
        throw(store, FIRST)


def throw(store: api.Place, name: str, now: datetime = NOW) -> Path:
    """Throw one checkpoint away in a batch of its own."""
    into = DirectoryTrash(store).new_batch_path(now)
    assert not DirectoryTrash(store).throw_away([by_name(store)[name]], into)
    return into


def test_batches_are_ordered_even_when_the_clock_goes_back(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    store = api.place(tmp_path)
    first = throw(store, FIRST)
    second = throw(store, "net-2_10.ckpt", NOW - timedelta(hours=3))
    assert [batch.path for batch in DirectoryTrash(store).batches()] == [first, second]
    assert DirectoryTrash(store).batches()[1].thrown_at == NOW + timedelta(microseconds=1)


def test_strangers_in_the_trash_are_left_alone(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    throw(store, FIRST)
    stranger = tmp_path / TRASH_NAME / "notes"
    stranger.mkdir()
    (tmp_path / TRASH_NAME / "20260302T120000.000001Z").write_bytes(b"a file")
    (batch,) = DirectoryTrash(store).batches()
    DirectoryTrash(store).discard(batch)
    assert stranger.is_dir()


def test_undo_restores_only_the_last_batch_and_tidies_up(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30])
    store = api.place(tmp_path)
    first = throw(store, FIRST)
    second = throw(store, "net-2_10.ckpt")
    assert [c.name for c in undo(store).restored] == ["net-2_10.ckpt"]
    assert (first.exists(), second.exists()) == (True, False)
    undo(store)
    assert not (tmp_path / TRASH_NAME).exists()
    check_whole(store, must={FIRST, "net-2_10.ckpt", THIRD}, may=set())


def test_undo_never_overwrites_a_newer_checkpoint(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    into = throw(store, FIRST)
    save_run(tmp_path, [10])
    newer = (tmp_path / FIRST).read_bytes()
    undone = undo(store)
    assert (undone.restored, undone.taken) == ((), (FIRST,))
    assert (tmp_path / FIRST).read_bytes() == newer
    assert (into / FIRST).exists()


def test_discard_removes_folder_and_trash(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    throw(store, FIRST)
    (batch,) = DirectoryTrash(store).batches()
    assert batch.size_bytes > 0
    DirectoryTrash(store).discard(batch)
    assert not (tmp_path / TRASH_NAME).exists()


def test_batch_that_another_prune_has_discarded_meanwhile_is_done(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    throw(store, FIRST)
    (batch,) = DirectoryTrash(store).batches()
    for _ in range(2):
        DirectoryTrash(store).discard(batch)
    assert not (tmp_path / TRASH_NAME).exists()


def test_power_cut_while_throwing_away_lists_no_half_checkpoint() -> None:
    for crash in every_crash(
        saved_disk(), lambda disk: throw_first_two(model_store(disk)), order=Order.WEAK
    ):
        store = model_store(crash.disk)
        check_whole(store, must={THIRD}, may={FIRST, "net-2_10.ckpt"})
        if crash.is_finished:
            assert set(by_name(store)) == {THIRD}


def test_power_cut_while_throwing_away_leaves_everything_restorable() -> None:
    for crash in every_crash(
        saved_disk(), lambda disk: throw_first_two(model_store(disk)), order=Order.WEAK
    ):
        store = model_store(crash.disk)
        if any(batch.checkpoints for batch in DirectoryTrash(store).batches()):
            undo(store)
        check_whole(store, must={FIRST, "net-2_10.ckpt", THIRD}, may=set())


def test_power_cut_while_restoring_lists_no_half_checkpoint() -> None:
    disk = saved_disk()
    throw_first_two(model_store(disk))
    disk.settle()
    for crash in every_crash(disk, lambda disk: undo(model_store(disk)), order=Order.WEAK):
        store = model_store(crash.disk)
        may = {FIRST, "net-2_10.ckpt"}
        check_whole(store, must={THIRD, *may} if crash.is_finished else {THIRD}, may=may)


def test_power_cut_while_restoring_can_be_restored_again() -> None:
    disk = saved_disk()
    throw_first_two(model_store(disk))
    disk.settle()
    for crash in every_crash(disk, lambda disk: undo(model_store(disk)), order=Order.WEAK):
        store = model_store(crash.disk)
        if any(batch.checkpoints for batch in DirectoryTrash(store).batches()):
            undo(store)
        check_whole(store, must={FIRST, "net-2_10.ckpt", THIRD}, may=set())


@pytest.mark.slow
@pytest.mark.parametrize("action", ["throw", "undo"])
def test_recovery_after_a_power_cut_loses_no_half_of_a_checkpoint(action: str) -> None:
    disk = saved_disk()
    if action == "undo":
        throw_first_two(model_store(disk))
        disk.settle()

    def act(disk: ModelDisk) -> None:
        (throw_first_two if action == "throw" else undo)(model_store(disk))

    for crash in every_crash(disk, act, order=Order.WEAK):
        store = model_store(crash.disk)
        with store.lease("net"):
            store.recover("net")
        if any(batch.checkpoints for batch in DirectoryTrash(store).batches()):
            undo(store)
        check_whole(store, must={FIRST, "net-2_10.ckpt", THIRD}, may=set())


def test_manifest_of_data_that_was_discarded_is_removed(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path, clock=lambda: 1e12)
    into = throw(store, FIRST)
    (into / api.manifest_name(FIRST)).rename(tmp_path / api.manifest_name(FIRST))
    assert store.recover("net") == []
    (batch,) = DirectoryTrash(store).batches()
    DirectoryTrash(store).discard(batch)
    assert store.recover("net") == [f"removed {api.manifest_name(FIRST)}, whose data file is gone"]


def test_manifest_without_data_stays_while_the_trash_is_unreadable() -> None:
    disk = saved_disk()
    throw_first_two(model_store(disk))
    (batch,) = DirectoryTrash(model_store(disk)).batches()
    disk.replace(batch.path / api.manifest_name(FIRST), RUNS / api.manifest_name(FIRST))
    disk.unlink(batch.path / FIRST)
    failing = FailingDisk(disk, error=errno.EIO, operation="list", call=3, is_lasting=True)
    assert model_store(failing, disk).recover("net") == []
    assert len(model_store(disk).recover("net")) == 1


def test_power_cut_while_discarding_leaves_whole_ones_or_nothing() -> None:
    disk = saved_disk()
    throw_first_two(model_store(disk))
    disk.settle()

    def discard(disk: ModelDisk) -> None:
        store = model_store(disk)
        DirectoryTrash(store).discard(DirectoryTrash(store).batches()[0])

    for crash in every_crash(disk, discard, order=Order.WEAK):
        store = model_store(crash.disk)
        for batch in DirectoryTrash(store).batches():
            assert {c.state for c in batch.checkpoints} <= {api.State.OK}
            discard(crash.disk)
        check_whole(store, must={THIRD}, may=set())


def test_manifest_left_alone_follows_its_data_into_the_trash(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    into = throw(store, FIRST)
    manifest = into / api.manifest_name(FIRST)
    manifest.rename(tmp_path / manifest.name)
    assert by_name(store)[FIRST].state is api.State.LEFTOVER
    DirectoryTrash(store).finish("other")
    assert not manifest.exists()
    DirectoryTrash(store).finish("net")
    assert manifest.exists()
    DirectoryTrash(store).finish("net")


def test_manifest_without_data_anywhere_stays_for_recovery(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    throw(store, FIRST)
    (tmp_path / "net-2_10.ckpt").unlink()
    DirectoryTrash(store).finish("net")
    assert (tmp_path / api.manifest_name("net-2_10.ckpt")).exists()


def test_unreadable_manifest_without_data_belongs_to_the_series_of_its_name(tmp_path: Path) -> None:
    (tmp_path / api.manifest_name("net-1_1.ckpt")).write_bytes(b"{")
    store = api.place(tmp_path)
    assert DirectoryTrash(store).series_of(by_name(store)["net-1_1.ckpt"]) == "net"


def test_undo_holds_the_lease_of_the_series_of_half_thrown_data(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10], series="odd.name")
    save_run(tmp_path, [20])
    store = api.place(tmp_path)
    into = DirectoryTrash(store).new_batch_path(NOW)
    into.mkdir(parents=True)
    path.rename(into / path.name)
    with store.lease("odd.name"), pytest.raises(Exception, match="being written"):
        undo(store)
    assert [c.name for c in undo(store).restored] == [path.name]


@pytest.mark.parametrize("action", ["throw", "undo", "discard"])
def test_failing_disk_loses_nothing(action: str) -> None:
    disk = saved_disk()
    if action != "throw":
        throw_first_two(model_store(disk))
        disk.settle()
    actions: dict[str, Callable[[api.Place], object]] = {
        "throw": throw_first_two,
        "undo": undo,
        "discard": lambda store: DirectoryTrash(store).discard(DirectoryTrash(store).batches()[0]),
    }

    def run(failing: FailingDisk) -> None:
        actions[action](model_store(failing, disk))

    for failure in every_failure(disk, run):
        store = model_store(failure.disk)
        found = by_name(store)
        assert found[THIRD].state is api.State.OK, failure
        assert all(c.state in (api.State.OK, api.State.LEFTOVER) for c in found.values()), failure
        if failure.raised is not None:
            assert isinstance(failure.raised, OSError | UnsafePrune), failure


def test_full_disk_that_refuses_a_folder_changes_nothing() -> None:
    disk = saved_disk()
    before = disk.state()
    failing = FailingDisk(disk, error=errno.ENOSPC, operation="make_directory", call=1)
    with pytest.raises(OSError, match="No space"):
        throw_first_two(model_store(failing, disk))
    assert disk.state() == before
