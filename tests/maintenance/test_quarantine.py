# SPDX-License-Identifier: Apache-2.0
"""Quarantine: moved and remaining files, and that a crash between the moves loses nothing."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, StoreLocked, UnsafePrune
from ckptmgr.maintenance.quarantine import quarantine
from tests.maintenance.test_repair import saved as save_ranks
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.saved import save_run

NOW = datetime(2026, 3, 1, 10, tzinfo=UTC)
FOLDER = ".ckptmgr-quarantine/20260301T100000.000000Z"


def listed(store: api.Place, step: int) -> Checkpoint:
    (one,) = [one for one in store.scan() if one.step == step]
    return one


def test_data_and_manifest_are_moved_and_the_others_stay(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    store = api.place(tmp_path)
    assert quarantine(store, listed(store, 10), now=NOW) == tmp_path / FOLDER
    assert sorted(os.listdir(tmp_path / FOLDER)) == [first.name, f"{first.name}.manifest.json"]
    assert [one.path for one in store.scan()] == [second]
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


def test_last_one_stays(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    store = api.place(tmp_path)
    with pytest.raises(UnsafePrune, match="last good checkpoint"):
        quarantine(store, listed(store, 10), now=NOW)
    assert path.exists()


def test_series_of_a_live_run_stays(tmp_path: Path) -> None:
    paths = save_run(tmp_path, [10, 20])
    store, other = api.place(tmp_path), api.place(tmp_path)
    with other.lease("net"), pytest.raises(StoreLocked):
        quarantine(store, listed(store, 10), now=NOW)
    assert all(path.exists() for path in paths)


def test_files_of_ranks_stay_for_repair(tmp_path: Path) -> None:
    store = api.place(tmp_path)
    one = save_ranks(tmp_path)
    with pytest.raises(UnsafePrune, match="many ranks"):
        quarantine(store, one, now=NOW)
    assert all((tmp_path / name).exists() for name in one.shards)


def test_link_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    runs, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    paths = save_run(runs, [10, 20])
    elsewhere.mkdir()
    (runs / ".ckptmgr-quarantine").symlink_to(elsewhere)
    store = api.place(runs)
    with pytest.raises(UnsafePrune, match="not a directory"):
        quarantine(store, listed(store, 10), now=NOW)
    assert all(path.exists() for path in paths)


def test_manifest_that_stays_alone_counts_for_nothing_and_nothing_is_lost(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    disk = FailingDisk(api.OsFileSystem(), operation="replace", call=2, is_lasting=True)
    store = api.place(tmp_path, fs=disk)
    with pytest.raises(OSError, match="rror"):
        quarantine(store, listed(store, 20), now=NOW)
    assert (tmp_path / FOLDER / second.name).exists()
    states = {one.path: one.state for one in api.listed(tmp_path)}
    assert states == {first: api.State.OK, second: api.State.MISSING}
