# SPDX-License-Identifier: Apache-2.0
"""Runs that lose their lease while they live: it is removed, replaced, or another host that sees no locks takes it.

A disk whose locks always succeed stands for a host that does not see the locks of the others.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, ModelCheckpoint, StoreLocked, parse_policy
from ckptmgr.io.leases import lease_path
from ckptmgr.io.locks import add_worker_text, lock_descriptor
from ckptmgr.maintenance.prune import undo
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.store.change_leases import lease_of_checkpoint, lease_of_name
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.support import api
from tests.support.pruning import carry_out, propose
from tests.support.runs import manager_on
from tests.support.saved import items, save_run
from tests.support.surface import Loop

in_every_mode = pytest.mark.parametrize("mode", [False, "thread", "process"])


class HostAlone(api.OsFileSystem):
    """A disk that locks files for its own host alone: there, one process writes."""

    @contextlib.contextmanager
    def lock(self, path: Path, *, owner: str) -> Iterator[str | None]:
        path.write_text(owner)
        yield None


class Interrupted(HostAlone):
    """Such a disk, on which something happens once, before a file of some name is created."""

    def __init__(self, suffix: str, call: Callable[[], object]) -> None:
        super().__init__()
        self._suffix, self._call, self.is_done = suffix, call, False

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> api.OutputFile:
        if not self.is_done and self._suffix in path.name:
            self.is_done = True
            self._call()
        return super().create(path, mode=mode, owner_of=owner_of)


def whole_files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def remove_lease(runs: Path) -> None:
    lease_path(runs, "ckpt").unlink()


def replace_lease(runs: Path) -> None:
    path = lease_path(runs, "ckpt")
    text = path.read_text()
    path.unlink()
    (path.parent / "inode").touch()  # so that the number of the old one is not used again
    path.write_text(text)
    (path.parent / "inode").unlink()


LOSSES: dict[str, Callable[[Path], object]] = {
    "was removed": remove_lease,
    "lease file was removed": shutil.rmtree,
    "another file has the name": replace_lease,
}


@in_every_mode
@pytest.mark.parametrize("why", LOSSES)
def test_run_whose_lease_is_gone_overwrites_nothing_of_the_next_run(
    tmp_path: Path, mode: bool | str, why: str
) -> None:
    runs = tmp_path / "runs"
    config = CheckpointConfig(async_save=mode, keep="last(1)")
    first = CheckpointManager(runs, config)
    first.save(1, {"w": 1})
    first.wait()
    LOSSES[why](runs)
    lease_path(runs, "ckpt").unlink(missing_ok=True)
    with CheckpointManager(runs, CheckpointConfig(keep="all")) as second:
        for step in (1, 2, 3):
            second.save(step, {"w": -step})
        before = whole_files(runs)
        with pytest.raises(StoreLocked, match="has lost the right to write 'ckpt'") as caught:
            first.save(2, {"w": 2})
        assert whole_files(runs) == before
        assert caught.value.path == str(runs)
        second.save(4, {"w": -4})
    with pytest.raises(StoreLocked):  # also when nobody else is there any more
        first.save(3, {"w": 3})
    first.close()
    resumed = first.resume()
    assert (resumed.step, resumed.state) == (4, {"w": -4})
    first.save(5, {"w": 5})
    first.close()
    assert CheckpointManager(runs).load("latest") == {"w": 5}


@pytest.mark.parametrize("why", ["was removed", "another file has the name"])
def test_loss_is_named_with_the_way_out(tmp_path: Path, why: str) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, {"w": 1})
    LOSSES[why](tmp_path)
    with pytest.raises(StoreLocked, match=why) as caught:
        manager.save(2, {"w": 2})
    assert "resume()" in str(caught.value.hint)
    assert "local_lock" in str(caught.value.hint)


def test_host_that_sees_no_locks_takes_the_lease_and_the_first_one_stops(tmp_path: Path) -> None:
    here = manager_on(tmp_path, CheckpointConfig(keep="last(1)"), fs=HostAlone())
    here.save(1, {"w": 1})
    there = manager_on(tmp_path, fs=HostAlone())
    assert there.resume().step == 1
    there.save(2, {"w": -2})
    there.save(3, {"w": -3})
    before = whole_files(tmp_path)
    with pytest.raises(StoreLocked, match=r"lost .*: process \d+ on .* has taken it"):
        here.save(2, {"w": 2})
    assert here._writer.retain(CheckpointConfig(keep="last(1)").retention_policy()) is not None
    with pytest.raises(StoreLocked):
        here.pin(2)
    here.close()  # and leaves the lease of the other one alone
    assert whole_files(tmp_path) == before
    there.save(4, {"w": -4})
    assert [one.step for one in there.checkpoints()] == [1, 2, 3, 4]


@pytest.mark.parametrize("suffix", ["ckpt-2.ckpt.", "ckpt-2.ckpt.manifest"])
def test_save_that_loses_the_lease_on_its_way_is_not_published(tmp_path: Path, suffix: str) -> None:
    there = manager_on(tmp_path, fs=HostAlone())
    disk = Interrupted(suffix, lambda: there.resume())
    here = manager_on(tmp_path, CheckpointConfig(keep="last(1)"), fs=disk)
    here.save(1, {"w": 1})
    with pytest.raises(StoreLocked, match="has taken it"):
        here.save(2, {"w": 2})
    assert disk.is_done
    here.close()
    there.close()
    assert sorted(whole_files(tmp_path)) == ["ckpt-1.ckpt", "ckpt-1.ckpt.manifest.json"]


def test_save_that_loses_the_lease_between_manifest_and_data_leaves_the_other_alone(
    tmp_path: Path,
) -> None:
    class Late(HostAlone):
        def sync_directory(self, path: Path) -> None:
            super().sync_directory(path)
            if '"replaces": {' in manifest.read_text():
                there.open()

    def writer(fs: HostAlone) -> SeriesWriter:
        store = api.place(tmp_path, fs=fs)
        return SeriesWriter(store, "net", options=api.SaveOptions(), clock=lambda: 1_772_359_200.0)

    (data,) = save_run(tmp_path, [1])
    before, manifest = data.read_bytes(), tmp_path / api.manifest_name(data.name)
    there, here = writer(HostAlone()), writer(Late())
    with pytest.raises(StoreLocked, match="has taken it"):
        here.save(data.name, items(2.0), api.SaveFacts(step=1))
    assert data.read_bytes() == before
    there.save(data.name, items(3.0), api.SaveFacts(step=1))
    assert [one.state for one in api.listed(tmp_path)] == [api.State.OK]
    here.close()
    there.close()


def test_callback_that_has_lost_the_lease_raises(tmp_path: Path) -> None:
    callback = ModelCheckpoint("net", str(tmp_path), CheckpointConfig(save_checkpoint_steps=1))
    loop = Loop(callbacks=(callback,))
    loop.begin()
    loop.run_step()
    lease_path(tmp_path, "net").unlink()
    before = whole_files(tmp_path)
    with pytest.raises(StoreLocked, match="lost the right to write 'net'"):
        loop.run_step()
    assert whole_files(tmp_path) == before


def test_nothing_is_removed_without_the_lease(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    (old,) = (one for one in store.scan() if one.step == 10)
    with store.lease("net"):
        lease_path(tmp_path, "net").unlink()
        with pytest.raises(StoreLocked, match="lost"):
            store.remove([old])
        with pytest.raises(StoreLocked, match="lost"):
            store.remove_copied(old)
    assert old in store.scan()


def test_manifest_is_not_changed_without_the_lease(tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    store = api.place(tmp_path)
    (checkpoint,) = store.scan()
    for name in ("net", checkpoint.name):
        with lease_of_checkpoint(store, checkpoint):
            lease_path(tmp_path, name).unlink()
            with pytest.raises(StoreLocked, match=f"write '{name}'"):
                store.change_pins(checkpoint, lambda pins: ())


def test_single_file_is_not_published_without_its_lease(tmp_path: Path) -> None:
    store = api.place(tmp_path)
    with lease_of_name(store, "x.txt"):
        lease_path(tmp_path, "x.txt").unlink()
        with (
            store.publisher.new_file(
                "x.txt", series="x.txt", size_bytes=1, is_rank_file=True
            ) as new,
            new.writing() as file,
        ):
            file.write_at(0, b"x")
            with pytest.raises(StoreLocked, match="lost"):
                new.give_name()
    assert list(tmp_path.iterdir()) == []


@in_every_mode
def test_run_that_began_on_a_full_disk_saves_once_there_is_space(
    tmp_path: Path, mode: bool | str
) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(async_save=mode)) as manager:
        manager.save(1, {"step": 1})
        manager.wait()
        lease_path(tmp_path, "ckpt").write_text("")  # the text that the disk had no room for
        for step in (2, 3):
            manager.save(step, {"step": step})
            manager.wait()
        assert [one.step for one in manager.checkpoints()] == [1, 2, 3]


def test_worker_leaves_the_text_of_another_holder_as_it_is(tmp_path: Path) -> None:
    path, text = tmp_path / ".ckpt.lease", "process 7 on elsewhere\nhost-boot-7-7 aaaa\n"
    with api.OsFileSystem().lock(path, owner="mine\n"):
        descriptor = lock_descriptor(path)
        assert descriptor is not None
        add_worker_text(descriptor, "mine\n", "worker\n")
        assert path.read_text() == "mine\nworker\n"
        path.write_text(text)  # by a host that does not see the lock
        add_worker_text(descriptor, "mine\n", "worker\n")
        assert path.read_text() == text


class Robbed(api.OsFileSystem):
    """A disk on which another host takes the lease of a series while this process takes another lease."""

    def __init__(self, suffix: str) -> None:
        super().__init__()
        self._suffix = suffix

    def lock(self, path: Path, *, owner: str) -> contextlib.AbstractContextManager[str | None]:
        if path.name.endswith(self._suffix):
            lease_path(path.parent, "net").write_text(
                "process 7 on elsewhere\nhost-boot-7-7 aaaa\n"
            )
        return super().lock(path, owner=owner)


@pytest.mark.parametrize("is_undone", [False, True], ids=["prune", "undo"])
def test_prune_and_undo_that_lose_the_lease_on_their_way_move_nothing(
    tmp_path: Path, is_undone: bool
) -> None:
    save_run(tmp_path, [10, 20, 30])
    now, policy = datetime(2026, 3, 2, tzinfo=UTC), parse_policy("last(1)")
    if is_undone:
        store = api.place(tmp_path)
        assert not carry_out(store, propose(store, policy, now=now)).failures
    store = api.place(tmp_path, fs=Robbed(f"{TRASH_NAME}.lease" if is_undone else "10.ckpt.lease"))
    before = sorted(path for path in tmp_path.rglob("*.ckpt"))
    if is_undone:
        with pytest.raises(StoreLocked, match="process 7 on elsewhere has taken it"):
            undo(store)
    else:
        (failure,) = carry_out(store, propose(store, policy, now=now)).failures
        assert "process 7 on elsewhere has taken it" in str(failure)
    assert sorted(path for path in tmp_path.rglob("*.ckpt")) == before


def test_batch_of_the_trash_is_not_removed_without_its_lease(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    now, policy = datetime(2026, 3, 2, tzinfo=UTC), parse_policy("last(1)")
    store = api.place(tmp_path)
    carry_out(store, propose(store, policy, now=now))
    (batch,) = DirectoryTrash(store).batches()

    class Late(api.OsFileSystem):
        """A disk on which the lease of the trash is removed before its batch is opened."""

        def hold_directory(self, path: Path) -> contextlib.AbstractContextManager[None]:
            if path == batch.path:
                lease_path(tmp_path, TRASH_NAME).unlink()
            return super().hold_directory(path)

    with pytest.raises(StoreLocked, match="its lease file was removed"):
        DirectoryTrash(api.place(tmp_path, fs=Late())).discard(batch)
    assert len(list(batch.path.iterdir())) == 2
