# SPDX-License-Identifier: Apache-2.0
"""Every power cut, death and failed call in a save with `manifest=False`: the name is old or new."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ckptmgr import load_state
from ckptmgr.files.load.state import state_metadata
from ckptmgr.files.save.single_file import save_named
from ckptmgr.state import tree
from tests.faults.scenarios import first_broken
from tests.faults.training import KEY, KEYS, RUNS, ModelProcesses, state_of, value_of
from tests.support import api
from tests.support.crashmodel import Crash, ModelDisk, Order, every_crash, every_failure, every_kill

NAME = "s.safetensors"
MANIFEST = api.manifest_name(NAME)
OLD, NEW = 10.0, 20.0

with_and_without_key = pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])
each_start = pytest.mark.parametrize("start", ["nothing", "bare", "described", "data missing"])


def save(
    disk: ModelDisk,
    value: float,
    key: bytes | None,
    fs: api.FileSystem | None = None,
    *,
    has_manifest: bool,
) -> None:
    """Save as `save_state` does."""
    trust = api.Trust(keys=None if key is None else api.Key(key), allow_unencrypted=True)
    flat = tree.flatten(state_of(value))
    save_named(
        api.place(RUNS, fs=fs or disk, trust=trust, processes=ModelProcesses(disk)),
        NAME,
        flat.tensors,
        options=api.SaveOptions(
            format="safetensors", key=trust.keys, has_crc=key is None, has_manifest=has_manifest
        ),
        metadata=state_metadata(flat),
    )


def started(start: str, key: bytes | None) -> ModelDisk:
    """Return a disk with what had the name before."""
    disk = ModelDisk()
    disk.make_directory(RUNS, mode=0o700)
    if start != "nothing":
        save(disk, OLD, key, has_manifest=start != "bare")
    if start == "data missing":
        disk.unlink(RUNS / NAME)
    disk.settle()
    return disk


def value_on(disk: ModelDisk, directory: Path, key: bytes | None) -> float | None:
    """Return the value that `load_state` finds under the name, or None where there is no file."""
    for path in directory.iterdir():
        path.unlink()
    for name in (NAME, MANIFEST):
        if disk.status(RUNS / name) is not None:
            with closing(disk.open(RUNS / name)) as file:
                content = bytearray(file.size)
                file.read_into(0, memoryview(content))
            (directory / name).write_bytes(content)
    if not (directory / NAME).exists():
        return None
    return value_of(load_state(directory / NAME, dec_key=key))


def check(crash: Crash, start: str, key: bytes | None, directory: Path) -> None:
    """Check that the name is old or new and as it was described, and that the next save goes on."""
    disk, is_acknowledged = crash.disk, bool(crash.disk.acknowledged)
    value = value_on(disk, directory, key)
    had = OLD if start in ("bare", "described") else None
    assert value in ([NEW] if is_acknowledged else [had, NEW])
    has_manifest = disk.status(RUNS / MANIFEST) is not None
    if value == OLD:
        assert has_manifest == (start == "described")
    if is_acknowledged:  # the removal of a lease file is not synced
        assert {name for name in disk.list(RUNS) if not name.endswith(".lease")} == {NAME}
    save(disk, 30.0, key, has_manifest=False)
    assert set(disk.list(RUNS)) == {NAME}
    assert value_on(disk, directory, key) == 30.0


def run(key: bytes | None, disk: ModelDisk) -> None:
    """Save without a manifest, and acknowledge it."""
    save(disk, NEW, key, has_manifest=False)
    disk.acknowledge("saved")


@each_start
@with_and_without_key
def test_name_without_manifest_is_old_or_new_after_every_power_cut_and_death(
    start: str, key: bytes | None, tmp_path: Path
) -> None:
    def crashes() -> Iterator[Crash]:
        yield from every_crash(started(start, key), lambda disk: run(key, disk), order=Order.WEAK)
        yield from every_kill(started(start, key), lambda disk: run(key, disk))

    assert first_broken(crashes(), lambda crash: check(crash, start, key, tmp_path)) is None


@each_start
def test_name_without_manifest_is_old_or_new_after_every_failed_call(
    start: str, tmp_path: Path
) -> None:
    disk = started(start, KEY)
    for failure in every_failure(
        disk, lambda failing: save(disk.copy(), NEW, KEY, failing, has_manifest=False)
    ):
        value = value_on(failure.disk, tmp_path, KEY)
        had = OLD if start in ("bare", "described") else None
        assert value in ([had, NEW] if failure.raised else [NEW]), failure
        save(failure.disk, 30.0, KEY, has_manifest=False)
        assert set(failure.disk.list(RUNS)) == {NAME}, failure


@with_and_without_key
def test_manifest_beside_a_name_that_had_none_is_old_or_new_after_every_power_cut(
    key: bytes | None, tmp_path: Path
) -> None:
    def overwrite(disk: ModelDisk) -> None:
        save(disk, NEW, key, has_manifest=True)
        disk.acknowledge("saved")

    def check_value(crash: Crash) -> None:
        value = value_on(crash.disk, tmp_path, key)
        assert value in ([NEW] if crash.disk.acknowledged else [OLD, NEW])

    crashes = every_crash(started("bare", key), overwrite, order=Order.WEAK)
    assert first_broken(crashes, check_value) is None
