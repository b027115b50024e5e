# SPDX-License-Identifier: Apache-2.0
"""Commands and runs that come to one directory at the same time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, StoreLocked
from ckptmgr.io.leases import ProcProcesses, lease_path
from ckptmgr.io.temp_names import temp_name
from ckptmgr.store.change_leases import lease_of_checkpoint, lease_of_name
from ckptmgr.store.name_leases import hold_name
from tests.support import api
from tests.support.cut_overwrites import NAME, fail, save, store_of
from tests.support.saved import save_run


def saved(directory: Path) -> Checkpoint:
    save(directory, "plain", 1)
    (found,) = api.listed(directory)
    return found


def test_checkpoint_that_is_changed_is_not_pruned_meanwhile(tmp_path: Path) -> None:
    checkpoint, store = saved(tmp_path), api.place(tmp_path)
    with lease_of_checkpoint(store, checkpoint):
        for name in ("net", NAME):
            with pytest.raises(StoreLocked), store.lease(name):
                pass
    assert {one.name for one in tmp_path.iterdir()} == {NAME, api.manifest_name(NAME)}


def test_file_that_is_a_series_of_its_own_has_one_lease(tmp_path: Path) -> None:
    checkpoint, store = replace(saved(tmp_path), series=NAME), api.place(tmp_path)
    with lease_of_checkpoint(store, checkpoint):
        assert lease_path(tmp_path, NAME).exists()
    assert not lease_path(tmp_path, NAME).exists()


def test_overwrite_that_goes_on_is_not_taken_for_an_interrupted_one(tmp_path: Path) -> None:
    save(tmp_path, "plain", 1)
    fail(tmp_path, "plain", is_power_cut=True)
    path = tmp_path / api.manifest_name(NAME)
    before = path.read_bytes()
    store = store_of(tmp_path, "plain")
    with hold_name(api.OsFileSystem(), tmp_path, NAME):
        assert not any("finished" in one for one in store.recover("net"))
    assert path.read_bytes() == before
    lease_path(tmp_path, NAME).touch()  # of a writer that died
    assert any("finished" in one for one in store.recover("net"))
    assert not lease_path(tmp_path, NAME).exists()


def test_save_of_any_file_collects_what_a_dead_writer_of_another_one_left(tmp_path: Path) -> None:
    (data,) = save_run(tmp_path / "elsewhere", [10])
    dead = temp_name(data.name, token=f"{ProcProcesses().token().rpartition('-')[0]}-1", series="x")
    data.rename(tmp_path / dead)
    (data.parent / api.manifest_name(data.name)).rename(tmp_path / api.manifest_name(data.name))
    for name in (data.name, "net-7.shards", "net"):
        lease_path(tmp_path, name).touch()
    with lease_of_name(api.place(tmp_path), "other.ckpt"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_leftover_of_a_series_that_somebody_writes_is_not_touched(tmp_path: Path) -> None:
    (data,) = save_run(tmp_path / "elsewhere", [10])
    dead = temp_name(data.name, token=f"{ProcProcesses().token().rpartition('-')[0]}-1", series="x")
    data.rename(tmp_path / dead)
    (data.parent / api.manifest_name(data.name)).rename(tmp_path / api.manifest_name(data.name))
    store = api.place(tmp_path)
    with store.lease("net"), lease_of_name(store, "other.ckpt"):
        pass
    assert (tmp_path / api.manifest_name(data.name)).exists()
