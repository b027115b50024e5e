# SPDX-License-Identifier: Apache-2.0
"""Manifests whose data is gone, and data whose manifest is gone: their reports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    ModelCheckpoint,
    Resume,
    Resumption,
    Skipped,
    Trust,
    UnprovenCheckpoint,
)
from ckptmgr.io.leases import ProcProcesses
from ckptmgr.io.temp_names import temp_name
from ckptmgr.store.name_leases import hold_name
from ckptmgr.store.recovery import remove_dead_temps
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.cli.running import run, run_json
from tests.support import api
from tests.support.surface import Loop

KEY = b"k" * 32
with_and_without_key = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
TEN, TWENTY, THIRTY = "ckpt-10.ckpt", "ckpt-20.ckpt", "ckpt-30.ckpt"


def save(directory: Path, *steps: int, key: bytes | None = None, **config: Any) -> None:
    with CheckpointManager(directory, CheckpointConfig(enc_key=key, **config)) as manager:
        manager.resume({"step": 0})
        for step in steps:
            manager.save(step, {"step": step})


def resumed(directory: Path, key: bytes | None = None) -> Resumption:
    with CheckpointManager(directory, CheckpointConfig(enc_key=key)) as manager:
        return manager.resume({"step": 0})


def states(directory: Path) -> dict[str, api.State]:
    return {one.name: one.state for one in api.listed(directory)}


def named(skipped: tuple[Skipped, ...]) -> list[str]:
    return [one.checkpoint.name for one in skipped]


@with_and_without_key
def test_newest_whose_data_is_missing_is_told_by_every_command_and_by_resume(
    tmp_path: Path, key: bytes | None
) -> None:
    save(tmp_path, 10, 20, key=key)
    (tmp_path / TWENTY).unlink()
    env = {} if key is None else {"CKPTMGR_KEY": key.hex()}
    verified = run("verify", tmp_path, env=env)
    assert verified.exit_code == 1
    assert f"missing     {TWENTY}: " in verified.stdout
    assert "1 missing, 1 ok" in verified.stdout
    listing = run("ls", tmp_path, env=env)
    assert listing.exit_code == 0
    assert f"{TWENTY}: its data file is missing" in listing.stdout
    assert run_json("ls", tmp_path, env=env)["summary"]["states"] == {"missing": 1, "ok": 1}
    found = resumed(tmp_path, key)
    assert (found.step, named(found.skipped)) == (10, [TWENTY])
    assert found.doubt is not None
    assert TWENTY in found.doubt


def test_latest_on_the_command_line_says_what_it_passes_over(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, 30)
    (tmp_path / TEN).chmod(0o600)
    (tmp_path / TEN).write_bytes(b"cut")
    (tmp_path / THIRTY).unlink()
    result = run("inspect", "latest", "--dir", tmp_path)
    assert result.exit_code == 0
    assert TWENTY in result.stdout
    (told,) = result.stderr.splitlines()
    assert told.startswith(f"ckptmgr: note: latest is not {THIRTY}: its data file is missing")


def test_run_that_goes_on_after_a_missing_checkpoint_leaves_it_behind(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / TWENTY).unlink()
    assert resumed(tmp_path).step == 10
    assert states(tmp_path)[TWENTY] is api.State.MISSING
    save(tmp_path, 15)
    assert states(tmp_path)[TWENTY] is api.State.LEFTOVER
    found = resumed(tmp_path)
    assert (found.step, found.skipped, found.doubt) == (15, (), None)
    assert set(states(tmp_path)) == {TEN, "ckpt-15.ckpt"}


def test_data_that_is_put_back_is_resumed_from(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    shutil.move(tmp_path / TWENTY, tmp_path.with_name("kept"))
    assert resumed(tmp_path).step == 10
    shutil.move(tmp_path.with_name("kept"), tmp_path / TWENTY)
    found = resumed(tmp_path)
    assert (found.step, found.skipped, found.doubt) == (20, (), None)


def test_nothing_but_missing_checkpoints_is_a_fresh_start_that_names_them(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / TEN).unlink()
    (tmp_path / TWENTY).unlink()
    found = resumed(tmp_path)
    assert (found.is_fresh, named(found.skipped)) == (True, [TWENTY, TEN])
    assert found.doubt is not None


def test_older_one_without_data_is_what_a_removal_left_and_goes_with_the_next_start(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10, 20)
    (tmp_path / TEN).unlink()
    assert states(tmp_path)[TEN] is api.State.LEFTOVER
    assert run("verify", tmp_path).exit_code == 0
    found = resumed(tmp_path)
    assert (found.step, found.skipped, found.doubt) == (20, (), None)
    assert not (tmp_path / api.manifest_name(TEN)).exists()


def test_manifests_of_a_directory_that_is_being_copied_wait_for_their_data(tmp_path: Path) -> None:
    save(tmp_path / "run", 10, 20)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in (api.manifest_name(TEN), api.manifest_name(TWENTY), TWENTY):
        shutil.copy2(tmp_path / "run" / name, copy)
    assert resumed(copy).step == 20
    assert (copy / api.manifest_name(TEN)).exists()


def unfinished(directory: Path, data: Path, *, is_live: bool) -> None:
    """Put a file where a save leaves it that was killed before it gave the file its name."""
    host, boot, pid, start = ProcProcesses().token().split("-")
    token = "-".join((host, boot, pid, start if is_live else "1"))
    shutil.copy(data, directory / temp_name(TWENTY, token=token, series="ckpt"))


@pytest.mark.parametrize(
    ("is_live", "state"),
    [(False, api.State.LEFTOVER), (True, api.State.WRITING)],
    ids=["dead", "live"],
)
def test_manifest_beside_the_unfinished_file_that_it_describes_is_of_a_save(
    tmp_path: Path, is_live: bool, state: api.State
) -> None:
    save(tmp_path / "run", 10, 20)
    data = shutil.move(tmp_path / "run" / TWENTY, tmp_path)
    unfinished(tmp_path / "run", Path(data), is_live=is_live)
    assert states(tmp_path / "run")[TWENTY] is state
    assert run("verify", tmp_path / "run").exit_code == 0
    if not is_live:
        found = resumed(tmp_path / "run")
        assert (found.step, found.skipped, found.doubt) == (10, (), None)
        assert set(states(tmp_path / "run")) == {TEN}


def test_unfinished_file_stays_beside_a_manifest_that_the_keys_do_not_prove(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    save(directory, 10, 20)
    data = shutil.move(directory / TWENTY, tmp_path)
    unfinished(directory, Path(data), is_live=False)
    config = CheckpointConfig(enc_key=KEY)
    with CheckpointManager(directory, config, trust=Trust(allow_unencrypted=True)) as manager:
        assert (manager.resume({"step": 0}).step, manager.resume().skipped) == (10, ())
    assert states(directory)[TWENTY] is api.State.LEFTOVER
    assert resumed(directory).skipped == ()
    assert set(states(directory)) == {TEN}


def test_manifest_beside_the_unfinished_file_of_another_save_is_missing(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    other = tmp_path / "other"
    other.mkdir()
    data = bytearray((tmp_path / TWENTY).read_bytes())
    data[-1] ^= 1
    (other / TWENTY).write_bytes(data)
    (tmp_path / TWENTY).unlink()
    unfinished(tmp_path, other / TWENTY, is_live=False)
    assert states(tmp_path)[TWENTY] is api.State.MISSING
    assert named(resumed(tmp_path).skipped) == [TWENTY]


def test_manifest_whose_data_is_in_the_trash_is_one_half_of_a_prune(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    batch = tmp_path / TRASH_NAME / "20260301T101500.000000Z"
    batch.mkdir(parents=True)
    shutil.move(tmp_path / TWENTY, batch)
    assert states(tmp_path)[TWENTY] is api.State.LEFTOVER


def test_copy_in_another_format_makes_the_original_superfluous(tmp_path: Path) -> None:
    save(tmp_path, 10, 20, format="safetensors")
    original = tmp_path / api.manifest_name("ckpt-20.safetensors")
    data = original.read_bytes()
    assert run("convert", tmp_path, "--compression", "zstd").exit_code == 0
    assert not original.exists()
    original.write_bytes(data)  # as after a kill between the two
    assert states(tmp_path)["ckpt-20.safetensors"] is api.State.LEFTOVER


def callback(directory: Path, **config: Any) -> ModelCheckpoint:
    return ModelCheckpoint("net", str(directory), CheckpointConfig(**config))


def train(directory: Path, *, is_resumed: bool) -> None:
    """Train three steps, each saved, as the callback does it."""
    ours = callback(directory)
    loop = Loop(callbacks=(ours,), batch_num=10)
    if is_resumed:
        found = ours.resume()
        assert found is not None
        loop.step = found.checkpoint.step
    loop.run(3)


@pytest.mark.parametrize(
    ("is_resumed", "state"),
    [(True, api.State.LEFTOVER), (False, api.State.MISSING)],
    ids=["resumed", "unrelated"],
)
def test_newest_of_the_run_before_is_superfluous_once_a_run_went_on_from_it(
    tmp_path: Path, is_resumed: bool, state: api.State
) -> None:
    train(tmp_path, is_resumed=False)
    train(tmp_path, is_resumed=is_resumed)
    (tmp_path / "net-1_3.ckpt").unlink()
    assert states(tmp_path)["net-1_3.ckpt"] is state


def test_callback_names_the_missing_newest(tmp_path: Path) -> None:
    train(tmp_path, is_resumed=False)
    (tmp_path / "net-1_3.ckpt").unlink()
    found = callback(tmp_path).resume()
    assert found is not None
    assert (found.checkpoint.name, named(found.skipped)) == ("net-1_2.ckpt", ["net-1_3.ckpt"])
    assert found.doubt is not None
    assert "net-1_3.ckpt" in found.doubt


def test_rollback_names_the_missing_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
        for step in (10, 20, 30):
            manager.save(step, {"step": step})
        (tmp_path / THIRTY).unlink()
        found = manager.rollback({"step": 0}, steps_back=0)
    assert (found.step, named(found.skipped)) == (20, [THIRTY])
    assert found.doubt is not None


def lose_manifest(directory: Path, name: str) -> None:
    (directory / api.manifest_name(name)).unlink()


def test_data_without_manifest_beside_others_is_named_not_passed_over(tmp_path: Path) -> None:
    train(tmp_path, is_resumed=False)
    lose_manifest(tmp_path, "net-1_3.ckpt")
    found = callback(tmp_path).resume()
    assert found is not None
    assert (found.checkpoint.name, named(found.skipped)) == ("net-1_2.ckpt", ["net-1_3.ckpt"])
    assert "no manifest" in found.skipped[0].reason
    lose_manifest(tmp_path, "net-1_2.ckpt")
    lose_manifest(tmp_path, "net-1_1.ckpt")
    with pytest.raises(UnprovenCheckpoint, match=r"net-1_3\.ckpt: belongs .* \(and 2 more\)"):
        callback(tmp_path).resume()
    found = callback(tmp_path).resume(Resume(allow_bare=True))  # as files of MindSpore itself
    assert found is not None
    assert (found.checkpoint.name, found.skipped) == ("net-1_3.ckpt", ())


def test_older_data_without_manifest_is_no_news(tmp_path: Path) -> None:
    train(tmp_path, is_resumed=False)
    lose_manifest(tmp_path, "net-1_1.ckpt")
    found = callback(tmp_path).resume()
    assert found is not None
    assert (found.checkpoint.name, found.skipped) == ("net-1_3.ckpt", ())


def test_data_without_manifest_is_refused_with_a_key(tmp_path: Path) -> None:
    loop = Loop(callbacks=(callback(tmp_path, enc_key=KEY),), batch_num=10)
    loop.run(1)
    lose_manifest(tmp_path, "net-1_1.ckpt")
    with pytest.raises(UnprovenCheckpoint):
        callback(tmp_path, enc_key=KEY).resume()


def other_key(directory: Path) -> None:
    """Put the manifest of another key, and a newer step, into a directory."""
    save(directory / "other", 10, 20, 30, key=b"o" * 32)
    shutil.copy(directory / "other" / api.manifest_name(THIRTY), directory)


def unreadable(directory: Path) -> None:
    """Damage a manifest beyond reading, and lose its data."""
    os.chmod(directory / api.manifest_name(TWENTY), 0o600)
    (directory / api.manifest_name(TWENTY)).write_bytes(b"{")
    (directory / TWENTY).unlink()


@pytest.mark.parametrize(
    ("change", "step", "skipped"),
    [(other_key, 20, []), (unreadable, 10, [TWENTY])],
    ids=["other key", "damaged"],
)
def test_manifest_without_data_that_proves_nothing(
    tmp_path: Path, change: Callable[[Path], None], step: int, skipped: list[str]
) -> None:
    save(tmp_path, 10, 20, key=KEY)
    change(tmp_path)
    found = resumed(tmp_path, KEY)
    assert (found.step, named(found.skipped)) == (step, skipped)


def test_values_are_those_of_the_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
        manager.save(10, {"w": np.full(4, 1.0)})
        manager.save(20, {"w": np.full(4, 2.0)})
    (tmp_path / TWENTY).unlink()
    with CheckpointManager(tmp_path, CheckpointConfig()) as manager:
        state = {"w": np.zeros(4)}
        manager.resume(state)
    assert state["w"].tolist() == [1.0] * 4


def left_without_manifest(directory: Path) -> Path:
    """Leave data whose manifest is in a temporary file, as a disk may that reorders renames."""
    token = f"{ProcProcesses().token().rpartition('-')[0]}-1"
    manifest = directory / api.manifest_name(TWENTY)
    return manifest.rename(directory / temp_name(manifest.name, token=token, series="ckpt"))


@with_and_without_key
def test_data_whose_manifest_has_no_name_yet_is_left_by_a_save(
    tmp_path: Path, key: bytes | None
) -> None:
    save(tmp_path, 10, 20, key=key)
    left_without_manifest(tmp_path)
    assert states(tmp_path)[TWENTY] is api.State.LEFTOVER
    found = resumed(tmp_path, key)
    assert (found.step, found.skipped, found.doubt) == (10, (), None)
    assert set(states(tmp_path)) == {TEN}
    assert not [*tmp_path.glob(".*.tmp")]


@with_and_without_key
def test_data_stays_a_leftover_where_the_manifest_without_a_name_is_not_proven(
    tmp_path: Path, key: bytes | None
) -> None:
    save(tmp_path, 10, 20, key=key)
    temp = left_without_manifest(tmp_path)
    config = CheckpointConfig(enc_key=b"o" * 32)
    with CheckpointManager(tmp_path, config, trust=Trust(allow_unencrypted=key is None)) as manager:
        manager.resume({"step": 0}) if key is None else manager.save(30, {"step": 30})
    assert temp.exists()
    assert states(tmp_path)[TWENTY] is api.State.LEFTOVER


def test_file_without_a_manifest_stays_beside_the_manifest_of_other_data(tmp_path: Path) -> None:
    save(tmp_path, 10, 20)
    temp = left_without_manifest(tmp_path)
    shutil.copy(tmp_path / TEN, tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / TWENTY)
    assert states(tmp_path)[TWENTY] is api.State.UNVERIFIED
    resumed(tmp_path)
    assert (tmp_path / TWENTY).exists()
    assert not temp.exists()


def test_data_that_another_process_saves_stays_beside_the_manifest_without_a_name(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10, 20)
    left_without_manifest(tmp_path)
    with hold_name(api.OsFileSystem(), tmp_path, TWENTY):
        assert resumed(tmp_path).step == 10
        assert states(tmp_path)[TWENTY] is api.State.LEFTOVER
    assert resumed(tmp_path).step == 10
    assert TWENTY not in states(tmp_path)


def test_reaping_after_a_worker_keeps_the_manifest_that_published_data_lacks(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10, 20)
    temp = left_without_manifest(tmp_path)
    store = api.place(tmp_path)
    assert remove_dead_temps(store.fs, tmp_path, store.processes) == []
    assert temp.exists()
