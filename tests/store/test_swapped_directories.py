# SPDX-License-Identifier: Apache-2.0
"""Another user puts a link in the place of a folder, at every call of the disk: the target of the link stays as it is."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointManager, CkptmgrError, StoreLocked, parse_policy
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.temp_names import temp_name
from ckptmgr.maintenance.prune import undo
from ckptmgr.store.recovery import remove_dead_temps
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.support import api
from tests.support.pruning import carry_out, propose
from tests.support.saved import save_run
from tests.support.visiteddisk import VisitedDisk

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
POLICY = parse_policy("last(1)")

Act = Callable[[api.FileSystem, Path], object]
Swap = Callable[[Path, Path], None]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with two checkpoints, and one that was thrown away."""
    directory = tmp_path_factory.mktemp("prepared") / "runs"
    save_run(directory, [10, 20, 30])
    store = api.place(directory)
    oldest = [c for c in store.scan() if c.name == "net-1_10.ckpt"]
    assert not DirectoryTrash(store).throw_away(oldest, DirectoryTrash(store).new_batch_path(NOW))
    host, boot, _, _ = ProcProcesses().token().split("-")
    dead = temp_name("net-9_10.ckpt", token=f"{host}-{boot}-1-1", series="net")
    (directory / dead).write_bytes(b"left by a process that is gone")
    return directory


def prune(fs: api.FileSystem, directory: Path, *, days: int, at_once: bool) -> None:
    store = api.place(directory, fs=fs)
    proposal = propose(store, POLICY, now=NOW + timedelta(days=days))
    for error in carry_out(store, proposal, at_once=at_once).failures:
        raise error


def take_back(fs: api.FileSystem, directory: Path) -> None:
    undo(api.place(directory, fs=fs))


def recover(fs: api.FileSystem, directory: Path) -> None:
    store = api.place(directory, fs=fs)
    with store.lease("net"):
        store.recover("net")


def reap(fs: api.FileSystem, directory: Path) -> None:
    remove_dead_temps(fs, directory, api.place(directory, fs=fs).processes)


ACTS: dict[str, Act] = {
    "prune": partial(prune, days=0, at_once=False),
    "prune at once": partial(prune, days=0, at_once=True),
    "prune of old trash": partial(prune, days=9, at_once=False),
    "undo": take_back,
    "recovery": recover,
    "reaping of a worker": reap,
}


def put_link(place: Path, victim: Path) -> None:
    place.rename(place.with_name("moved"))
    place.symlink_to(victim)


def swap_batch(directory: Path, victim: Path) -> None:
    for batch in (directory / TRASH_NAME).iterdir():
        put_link(batch, victim / TRASH_NAME / batch.name)
        return


def swap_trash(directory: Path, victim: Path) -> None:
    put_link(directory / TRASH_NAME, victim / TRASH_NAME)


SWAPS: dict[str, Swap] = {"batch": swap_batch, "trash": swap_trash, "directory": put_link}


def content(root: Path) -> dict[Path, bytes]:
    """Return all files below a directory."""
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def swapped_at_every_call(
    root: Path, prepared: Path, act: Act, swap: Swap
) -> Iterator[tuple[Path, int]]:
    """Yield the victims of runs in which a folder was swapped, each before another call of the disk."""
    at, is_over = 1, False
    while not is_over:
        at += 1
        mine, victim = root / f"{at}" / "runs", root / f"{at}" / "victim"
        shutil.copytree(prepared, mine)
        shutil.copytree(prepared, victim)
        (victim / TRASH_NAME / "precious").write_bytes(b"precious")
        for batch in (victim / TRASH_NAME).iterdir():
            if batch.is_dir():
                (batch / "precious").write_bytes(b"precious")

        def swap_once(of: Path = mine, by: Path = victim) -> None:
            with contextlib.suppress(FileNotFoundError):
                swap(of, by)

        disk: VisitedDisk = VisitedDisk(swap_once, at)
        # The first call: from here on it is clear which directory is meant.
        with (
            disk.hold_directory(mine),
            contextlib.suppress(CkptmgrError, OSError),
        ):
            act(disk, mine)
        is_over = not disk.was_visited
        yield victim, at


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "swap"),
    [
        ("prune", "batch"),
        ("prune", "trash"),
        ("prune", "directory"),
        ("prune at once", "directory"),
        ("prune of old trash", "batch"),
        ("prune of old trash", "trash"),
        ("prune of old trash", "directory"),
        ("undo", "batch"),
        ("undo", "trash"),
        ("undo", "directory"),
        ("recovery", "directory"),
        ("reaping of a worker", "directory"),
    ],
)
def test_folder_that_is_swapped_for_a_link_leads_nowhere(
    fast_path: Path, prepared: Path, act: str, swap: str
) -> None:
    calls = 0
    expected = content(prepared)
    for victim, _ in swapped_at_every_call(fast_path, prepared, ACTS[act], SWAPS[swap]):
        there = content(victim)
        extra = {path for path in there if path.name == "precious"}
        assert {path: data for path, data in there.items() if path not in extra} == expected
        assert len(extra) == 2
        calls += 1
    assert calls > 2


def test_run_whose_directory_was_replaced_saves_into_neither(tmp_path: Path) -> None:
    runs, moved = tmp_path / "runs", tmp_path / "moved"
    with CheckpointManager(runs, prefix="net") as manager:
        manager.save(1, {"w": np.ones(3)})
        before = content(runs)
        runs.rename(moved)
        runs.mkdir()
        with pytest.raises(StoreLocked, match="moved or replaced"):
            manager.save(2, {"w": np.ones(3)})
        assert content(runs) == {}
        assert content(moved) == before
        moved_back = tmp_path / "runs"
        moved_back.rmdir()
        moved.rename(moved_back)
        manager.save(3, {"w": np.ones(3)})
