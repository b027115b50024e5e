# SPDX-License-Identifier: Apache-2.0
"""Manifests without data: of a directory that is still being copied here they stay, of dead writers they go."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.io.leases import series_tag
from ckptmgr.io.temp_names import is_temp_of, temp_name
from tests.store.test_store import KnownProcesses
from tests.support import api

KEY = b"k" * 32
NAME = "ckpt-100.ckpt"
DAY_S = 24 * 3600


def save(directory: Path, value: float = 1.0, key: bytes | None = None) -> None:
    with CheckpointManager(directory, CheckpointConfig(enc_key=key)) as manager:
        manager.save(100, {"w": np.full(4, value)})


def resumed_step(directory: Path, key: bytes | None = None) -> int:
    with CheckpointManager(directory, CheckpointConfig(enc_key=key)) as manager:
        return manager.resume().step


def copied_manifest(tmp_path: Path) -> Path:
    """Save a checkpoint, copy its manifest alone, with its times, and return where to."""
    save(tmp_path / "run")
    (tmp_path / "copy").mkdir()
    shutil.copy2(tmp_path / "run" / api.manifest_name(NAME), tmp_path / "copy")
    return tmp_path / "copy"


def store_of(directory: Path, *, after_s: float = 0.0) -> api.Place:
    """Return the store of a directory, as seen when so much time has passed since its manifests came."""
    changed_s = (directory / api.manifest_name(NAME)).stat().st_ctime
    processes = KnownProcesses(dead=frozenset({"dead-1"}))
    return api.place(directory, processes=processes, clock=lambda: changed_s + after_s)


def put_unfinished(directory: Path, content: Path, *, writer: str = "dead-1") -> Path:
    """Put a file beside a manifest as a writer leaves it who died before it got its name."""
    path = directory / temp_name(NAME, token=writer, series="ckpt")
    shutil.copy(content, path)
    return path


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_directory_that_is_being_copied_back_loses_no_manifest(
    tmp_path: Path, key: bytes | None
) -> None:
    save(tmp_path / "run", key=key)
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy2(tmp_path / "run" / api.manifest_name(NAME), copy)
    assert resumed_step(copy, key) == 0
    shutil.copy2(tmp_path / "run" / NAME, copy)
    assert resumed_step(copy, key) == 100


@pytest.mark.parametrize(("after_s", "is_removed"), [(DAY_S - 1, False), (DAY_S + 1, True)])
def test_older_manifest_without_data_goes_a_day_after_it_came_whatever_time_it_brought(
    tmp_path: Path, after_s: float, is_removed: bool
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (100, 200):
            manager.save(step, {"w": np.full(4, 1.0)})
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (api.manifest_name(NAME), api.manifest_name("ckpt-200.ckpt"), "ckpt-200.ckpt"):
        shutil.copy2(tmp_path / "run" / name, copy)
    assert bool(store_of(copy, after_s=after_s).recover("ckpt")) == is_removed
    assert (copy / api.manifest_name(NAME)).exists() != is_removed


def test_newest_manifest_without_data_never_goes_by_itself(tmp_path: Path) -> None:
    copy = copied_manifest(tmp_path)
    assert store_of(copy, after_s=9 * DAY_S).recover("ckpt") == []
    assert (copy / api.manifest_name(NAME)).exists()


def test_manifest_goes_with_the_unfinished_file_that_it_describes(tmp_path: Path) -> None:
    copy = copied_manifest(tmp_path)
    put_unfinished(copy, tmp_path / "run" / NAME)
    assert len(store_of(copy).recover("ckpt")) == 2
    assert list(copy.iterdir()) == []


def save_other(directory: Path) -> Path:
    save(directory, 2.0)
    return directory / NAME


def shorter(directory: Path) -> Path:
    directory.mkdir()
    (directory / NAME).write_bytes(b"cut")
    return directory / NAME


@pytest.mark.parametrize("other", [save_other, shorter])
def test_manifest_stays_beside_the_unfinished_file_of_a_later_save(
    tmp_path: Path, other: Callable[[Path], Path]
) -> None:
    copy = copied_manifest(tmp_path)
    put_unfinished(copy, other(tmp_path / "other"))
    assert len(store_of(copy).recover("ckpt")) == 1
    assert [path.name for path in copy.iterdir()] == [api.manifest_name(NAME)]


def test_manifest_of_an_overwrite_stays_beside_the_new_data(tmp_path: Path) -> None:
    copy = copied_manifest(tmp_path)
    put_unfinished(copy, tmp_path / "run" / NAME)
    store = store_of(copy)
    new = store.read_manifest(NAME)
    assert new is not None
    store.update_manifest(replace(new, replaces=new))  # the data that it replaces may still come
    assert len(store.recover("ckpt")) == 1
    assert [path.name for path in copy.iterdir()] == [api.manifest_name(NAME)]


def test_manifest_stays_beside_the_unfinished_file_of_a_live_writer(tmp_path: Path) -> None:
    copy = copied_manifest(tmp_path)
    put_unfinished(copy, tmp_path / "run" / NAME, writer="me-1")
    assert store_of(copy).recover("ckpt") == []


@pytest.mark.parametrize("name", ["net-1.ckpt", "n" * 240 + ".ckpt"])
def test_temporary_file_is_known_by_the_name_that_it_was_to_get(name: str) -> None:
    temp = temp_name(name, token="dead-1", series="net")
    assert is_temp_of(temp, name)
    assert not is_temp_of(temp, "x" + name)
    assert not is_temp_of(name, name)
    assert series_tag("net") in temp
