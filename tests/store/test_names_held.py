# SPDX-License-Identifier: Apache-2.0
"""Somebody saves under a name while it is removed, moved or rewritten: at every call of the disk, the new file stays whole."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    CkptmgrError,
    StoreLocked,
    load_checkpoint,
    parse_policy,
    save_checkpoint,
)
from ckptmgr.maintenance.prune import undo
from ckptmgr.maintenance.recompress import recompress
from ckptmgr.maintenance.rekey import open_for_rekeying, reencrypt_checkpoint, rekey_checkpoint
from ckptmgr.maintenance.rekey_change import KeyChange
from ckptmgr.maintenance.verify import was_removed
from ckptmgr.store import change_leases
from ckptmgr.store.name_leases import hold_name
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.support import api, rekeying
from tests.support.pruning import carry_out, propose
from tests.support.rekeying import opens, ring
from tests.support.runs import manager_on
from tests.support.saved import flip
from tests.support.visiteddisk import VisitedDisk

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
NEW = 7.0


def save(path: Path, value: float) -> None:
    """Save one file, which belongs to the series `net` and to no run."""
    is_compressed = path.name.endswith(".ckpz")
    save_checkpoint(
        {"w": np.full(3, value, np.float32)},
        path,
        format="ckpt" if path.name.endswith(".ckpt") else "safetensors",
        compression="zstd" if is_compressed else None,
    )


def saved_three(root: Path) -> Path:
    directory = root / "prepared"
    directory.mkdir()
    for step in (1, 2, 3):
        save(directory / f"net-1_{step}.ckpt", float(step))
    return directory


def found(directory: Path, name: str) -> Checkpoint | None:
    return next((c for c in api.listed(directory) if c.name == name), None)


def assert_new(directory: Path, name: str) -> None:
    """Assert that a name holds the checkpoint of the visitor."""
    checkpoint = found(directory, name)
    assert checkpoint is not None
    assert checkpoint.state is api.State.OK
    assert api.verify(api.place(directory), checkpoint).status is api.Status.OK
    assert load_checkpoint(directory / name)["w"].tolist() == [NEW] * 3


def save_new(path: Path) -> None:
    save(path, NEW)


Save = Callable[[Path], None]


class Visitor:
    """Saves a file, unless that is refused because somebody is changing it."""

    def __init__(self, path: Path, save: Save) -> None:
        self._path = path
        self._save = save
        self.has_saved = False

    def __call__(self) -> None:
        with contextlib.suppress(StoreLocked):
            self._save(self._path)
            self.has_saved = True


Act = Callable[[api.FileSystem], object]
Decide = Callable[[Path], Act]


def visits(
    root: Path, name: str, prepared: Path, decide: Decide, *, every: int = 1, save: Save = save_new
) -> Iterator[tuple[Path, Visitor]]:
    """Yield directories in which something was done while another one saved, once for every call of the disk.

    Args:
        root: Where there is room for them.
        name: Of the file that is saved.
        prepared: A directory to begin with.
        decide: Looks at one, and returns the action.
        save: Saves the file.
        every: Leave out all calls but every second, third ..., to save time.

    Raises:
        AssertionError: At the end: that one could always save, or never, so nothing was shown.
    """
    at, is_over, outcomes = 1 - every, False, set[bool]()
    while not is_over:
        at += every
        directory = root / str(at)
        shutil.copytree(prepared, directory)
        visitor = Visitor(directory / name, save)
        disk = VisitedDisk(visitor, at)
        act = decide(directory)
        with contextlib.suppress(CkptmgrError):
            act(disk)
        is_over = not disk.was_visited
        outcomes.add(visitor.has_saved)
        yield directory, visitor
    assert outcomes == {True, False}


def prune(directory: Path, *, at_once: bool = False) -> Act:
    proposal = propose(api.place(directory), parse_policy("last(1)"), now=NOW)
    return lambda fs: carry_out(api.place(directory, fs=fs), proposal, at_once=at_once)


def remove(directory: Path) -> Act:
    chosen = [c for c in api.listed(directory) if c.name != "net-1_3.ckpt"]
    return lambda fs: api.place(directory, fs=fs).remove(chosen)


def put_in_trash(directory: Path) -> Act:
    store = api.place(directory)
    chosen = [c for c in store.scan() if c.name != "net-1_3.ckpt"]
    into = DirectoryTrash(store).new_batch_path(NOW)
    return lambda fs: DirectoryTrash(api.place(directory, fs=fs)).throw_away(chosen, into)


@pytest.mark.parametrize("decide", [prune, partial(prune, at_once=True), remove, put_in_trash])
def test_file_that_is_saved_while_its_name_is_removed_stays(
    fast_path: Path, decide: Decide
) -> None:
    prepared = saved_three(fast_path)
    for directory, visitor in visits(fast_path, "net-1_1.ckpt", prepared, decide, every=2):
        if visitor.has_saved:
            assert_new(directory, "net-1_1.ckpt")
        assert found(directory, "net-1_3.ckpt") is not None


def test_file_that_is_saved_while_its_name_comes_back_from_the_trash_stays(fast_path: Path) -> None:
    prepared = saved_three(fast_path)
    prune(prepared)(api.OsFileSystem())

    def decide(directory: Path) -> Act:
        return lambda fs: undo(api.place(directory, fs=fs))

    for directory, visitor in visits(fast_path, "net-1_1.ckpt", prepared, decide):
        if visitor.has_saved:
            assert_new(directory, "net-1_1.ckpt")
        assert found(directory, "net-1_2.ckpt") is not None


def leftover(root: Path) -> Path:
    """Return a directory with a manifest that has been without its data for long, if the clock is asked tomorrow."""
    directory = saved_three(root)
    (directory / "net-1_1.ckpt").unlink()
    return directory


def test_file_that_is_saved_while_its_leftover_is_collected_stays(
    fast_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The process that cleans up is this one, which cannot go on while the save waits for it.
    monkeypatch.setattr(change_leases, "_ENDING_S", 0.0)

    def decide(directory: Path) -> Act:
        tomorrow = time.time() + 2 * 86_400
        return lambda fs: api.place(directory, fs=fs, clock=lambda: tomorrow).recover("net")

    for directory, visitor in visits(fast_path, "net-1_1.ckpt", leftover(fast_path), decide):
        if visitor.has_saved:
            assert_new(directory, "net-1_1.ckpt")
        else:
            assert not (directory / api.manifest_name("net-1_1.ckpt")).exists()


def test_file_that_is_saved_while_its_name_is_retained_by_another_run_stays(
    fast_path: Path,
) -> None:
    prepared = fast_path / "prepared"
    with CheckpointManager(prepared, prefix="net") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.zeros(3, np.float32)})

    def decide(directory: Path) -> Act:
        def go_on(fs: api.FileSystem) -> None:
            config = CheckpointConfig(keep="last(1)")
            with manager_on(directory, config, fs=fs, prefix="net") as manager:
                manager.resume()
                manager.save(4, {"w": np.zeros(3, np.float32)})

        return go_on

    for directory, visitor in visits(fast_path, "net-1.ckpt", prepared, decide, every=5):
        if visitor.has_saved:
            assert_new(directory, "net-1.ckpt")
        assert found(directory, "net-4.ckpt") is not None


def saved_compressible(root: Path) -> Path:
    directory = root / "prepared"
    config = CheckpointConfig(format="safetensors")
    with CheckpointManager(directory, config, prefix="net") as manager:
        manager.save(1, {"w": np.zeros(3, np.float32)})
    return directory


def compress(directory: Path) -> Act:
    def act(fs: api.FileSystem) -> None:
        store = api.place(directory, fs=fs)
        (checkpoint,) = api.listed(directory)
        recompress(store, checkpoint, level=1, options=api.reading())

    return act


def test_file_that_is_saved_while_its_name_is_compressed_is_compressed_or_stays(
    fast_path: Path,
) -> None:
    name, compressed = "net-1.safetensors", "net-1.safetensors.ckpz"
    prepared = saved_compressible(fast_path)
    for directory, visitor in visits(fast_path, name, prepared, compress, every=3):
        if visitor.has_saved:
            assert_new(directory, name if found(directory, name) else compressed)
        else:
            assert found(directory, compressed) is not None


def test_file_that_is_saved_where_another_one_is_being_compressed_to_stays(fast_path: Path) -> None:
    name, compressed = "net-1.safetensors", "net-1.safetensors.ckpz"
    prepared = saved_compressible(fast_path)
    for directory, visitor in visits(fast_path, compressed, prepared, compress, every=3):
        if visitor.has_saved:
            assert_new(directory, compressed)
        else:
            assert found(directory, name) is None


def test_checkpoint_that_is_removed_while_it_is_verified_is_known_to_be_gone(
    fast_path: Path,
) -> None:
    store = api.place(saved_three(fast_path))
    first, second, third = sorted(store.scan(), key=lambda c: c.name)
    first.path.unlink()
    removed, whole = api.verify(store, first), api.verify(store, third)
    flip(second.path, -1)
    assert was_removed(store, removed)
    assert not was_removed(store, whole)
    assert not was_removed(store, api.verify(store, second))


def test_prune_leaves_no_lease_file_behind_that_was_not_there(fast_path: Path) -> None:
    directory = saved_three(fast_path)
    prune(directory)(api.OsFileSystem())
    undo(api.place(directory))
    assert not list(directory.glob(".*.lease"))


def save_encrypted(path: Path) -> None:
    save_checkpoint(
        {"w": np.full(3, NEW, np.float32)}, path, format="safetensors", enc_key=rekeying.OLD.raw
    )


def change_keys(
    directory: Path, apply: Callable[[api.Place, Checkpoint, KeyChange], object]
) -> Act:
    listing = open_for_rekeying(directory, rekeying.ROTATION)
    (checkpoint,) = listing.scan()

    def act(fs: api.FileSystem) -> None:
        store = open_for_rekeying(directory, rekeying.ROTATION, fs=fs)
        apply(store, checkpoint, rekeying.ROTATION)

    return act


@pytest.mark.slow
@pytest.mark.parametrize("apply", [rekey_checkpoint, reencrypt_checkpoint])
def test_file_that_is_saved_while_its_keys_change_opens_with_one_of_them(
    fast_path: Path, apply: Callable[[api.Place, Checkpoint, KeyChange], object]
) -> None:
    name = "net-1.safetensors.ckpe"
    rekeying.save_run(directory=fast_path / "prepared", steps=1)
    for directory, visitor in visits(
        fast_path,
        name,
        fast_path / "prepared",
        partial(change_keys, apply=apply),
        save=save_encrypted,
        every=3,
    ):
        (found_now,) = open_for_rekeying(directory, rekeying.ROTATION).scan()
        keys = [key for key in (rekeying.OLD, rekeying.NEW) if opens(found_now, ring(key))]
        assert len(keys) == 1
        if visitor.has_saved:
            loaded = load_checkpoint(directory / name, dec_key=keys[0].raw)
            assert loaded["w"].tolist() == [NEW] * 3
        else:
            assert keys == [rekeying.NEW]


def test_file_that_is_saved_while_a_checkpoint_of_its_name_is_pinned_stays(fast_path: Path) -> None:
    prepared = saved_three(fast_path)

    def decide(directory: Path) -> Act:
        def pin(fs: api.FileSystem) -> None:
            with manager_on(directory, fs=fs, prefix="net") as manager:
                manager.pin("net-1_1.ckpt")

        return pin

    for directory, visitor in visits(fast_path, "net-1_1.ckpt", prepared, decide):
        if visitor.has_saved:
            assert_new(directory, "net-1_1.ckpt")


def test_checkpoint_that_is_gone_already_is_no_failure_of_its_removal(fast_path: Path) -> None:
    directory = saved_three(fast_path)
    chosen = [c for c in api.listed(directory) if c.name != "net-1_3.ckpt"]
    for checkpoint in chosen:
        checkpoint.path.unlink()
    assert api.place(directory).remove(chosen) == []


def test_checkpoint_that_has_the_name_of_its_series_is_removed_under_that_lease(
    fast_path: Path,
) -> None:
    store = api.place(saved_three(fast_path))
    chosen = [replace(c, series=c.name) for c in store.scan() if c.name == "net-1_1.ckpt"]
    with store.lease("net-1_1.ckpt"):
        assert store.remove(chosen) == []
    assert found(store.directory, "net-1_1.ckpt") is None


def test_undo_leaves_a_name_in_the_trash_that_somebody_is_saving_under(fast_path: Path) -> None:
    directory = saved_three(fast_path)
    prune(directory)(api.OsFileSystem())
    with hold_name(api.OsFileSystem(), directory, "net-1_1.ckpt"):
        undone = undo(api.place(directory))
    assert undone.taken == ("net-1_1.ckpt",)
    assert found(directory, "net-1_1.ckpt") is None
    assert undo(api.place(directory)).taken == ()
    assert found(directory, "net-1_1.ckpt") is not None


def test_prune_leaves_old_trash_alone_while_it_is_restored(fast_path: Path) -> None:
    directory = saved_three(fast_path)
    prune(directory)(api.OsFileSystem())
    store = api.place(directory)
    old = propose(store, parse_policy("last(1)"), now=NOW + timedelta(days=9))
    with hold_name(api.OsFileSystem(), directory, TRASH_NAME):
        outcome = carry_out(store, old)
    assert outcome.failures == []
    assert outcome.notes == ["left the trash alone: another process restores or removes it"]
    assert len(undo(store).restored) == 2
