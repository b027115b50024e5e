# SPDX-License-Identifier: Apache-2.0
"""A key of the environment in a directory that no key has to do with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import GOLDEN_FILES, KEY, OTHER_KEY, overwrite, save_run

ENV = {"CKPTMGR_KEY": KEY.raw.hex()}


def test_plain_directory_is_listed_as_plain_with_a_note(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    result = run("ls", tmp_path, env=ENV)
    assert result.exit_code == 0
    assert "2 checkpoints, 288 B, 2 plain" in result.stdout
    assert "the key of the environment is not used" in result.stderr
    assert {item["state"] for item in run_json("ls", tmp_path, env=ENV)["items"]} == {"plain"}


def test_plain_directory_is_verified_and_inspected(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    assert run_json("verify", tmp_path, env=ENV)["summary"]["statuses"] == {"plain": 2}
    result = run("inspect", "latest", "--dir", tmp_path, env=ENV)
    assert (result.exit_code, "state      plain" in result.stdout) == (0, True)


def test_damage_in_a_plain_directory_is_damage(tmp_path: Path) -> None:
    first, _ = save_run(tmp_path, [10, 20])
    overwrite(first, b"cut")
    assert run("verify", tmp_path, env=ENV).exit_code == 1
    assert {item["state"] for item in run_json("ls", tmp_path, env=ENV)["items"]} == {
        "plain",
        "corrupt",
    }


def test_bare_files_are_plain_unless_one_is_encrypted(tmp_path: Path) -> None:
    shutil.copy(GOLDEN_FILES / "st_async.safetensors", tmp_path / "a.safetensors")
    assert run_json("ls", tmp_path, env=ENV)["items"][0]["state"] == "plain"
    shutil.copy(GOLDEN_FILES / "gcm128.ckpt", tmp_path / "CKP-1_1.ckpt")
    states = [item["state"] for item in run_json("ls", tmp_path, env=ENV)["items"]]
    assert states == [api.State.UNPROVEN.value] * 2


@pytest.mark.parametrize("key", [KEY, OTHER_KEY])
def test_one_checkpoint_of_a_key_makes_the_directory_strict(key: object, tmp_path: Path) -> None:
    save_run(tmp_path, [10])
    save_run(tmp_path, [20], series="sealed", options=api.SaveOptions(key=key))  # type: ignore[arg-type]
    items = run_json("ls", tmp_path, env=ENV)["items"]
    assert "unproven" in [item["state"] for item in items]
    assert run("verify", tmp_path, env=ENV).exit_code in (12, 13)


def test_explicit_key_stays_strict(tmp_path: Path) -> None:
    save_run(tmp_path / "run", [10])
    key = key_file(tmp_path)
    for env in (None, ENV):
        listed = run_json("ls", tmp_path / "run", "--key", key, env=env)["items"]
        assert listed[0]["state"] == "unproven"
        assert run("verify", tmp_path / "run", "--key", key, env=env).exit_code == 13


def test_prune_decides_as_before(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    result = run("prune", tmp_path, "--keep", "last(1)", "--yes", env=ENV)
    assert "2 checkpoints unproven" in result.stdout
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


def test_damage_under_a_key_does_not_make_a_directory_plain(tmp_path: Path) -> None:
    (sealed,) = save_run(tmp_path, [10], options=api.SaveOptions(key=KEY))
    overwrite(sealed, b"cut")
    (item,) = run_json("ls", tmp_path, env=ENV)["items"]
    assert (item["state"], item["run"] is None) == ("corrupt", False)
    assert "not used" not in run("ls", tmp_path, env=ENV).stderr
