# SPDX-License-Identifier: Apache-2.0
"""`--key` more than once: a file that is read opens with any of them, a written one is for all of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.cli.exits import Exit
from ckptmgr.crypto.keys.pem import generate_pair
from tests.cli.running import run, run_json
from tests.cli.test_rekey import source, text
from tests.support import api
from tests.support.rekeying import NEW, OLD, OTHER, openers, rekey, ring, save_run
from tests.support.rekeying import ROTATION as TO_NEW
from tests.support.saved import only


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    return ["--key", source(tmp_path, OLD), "--key", source(tmp_path, NEW)]


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_directory_with_old_and_new_keys_is_checked_at_once(
    tmp_path: Path, keys: list[str], form: str
) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, form=form, steps=1)
    rekey(TO_NEW, directory=runs)
    with CheckpointManager(
        runs, CheckpointConfig(keep="all", enc_key=OLD.raw, format=form), prefix="later"
    ) as manager:
        manager.save(2, {"w": np.zeros(3)})
    assert run("verify", runs, *keys[:2]).exit_code == Exit.KEY
    assert run("verify", runs, *keys).exit_code == 0
    states = [one["state"] for one in run_json("ls", runs, *keys)["items"]]
    assert states == ["ok", "ok"]
    out = tmp_path / "out"
    out.mkdir()
    for one in api.listed(runs):
        assert run("decrypt", one.path, "-o", out, *keys).exit_code == 0


def test_half_rekeyed_directory_is_encrypted_anew(tmp_path: Path, keys: list[str]) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs)
    (first, _) = sorted(runs.glob("*.ckpe"))
    rotation = ("--add", keys[3], "--remove", keys[1], "--yes")
    assert run("rekey", first, *keys[:2], *rotation).exit_code == 0
    refused = run("reencrypt", runs, *keys[:2], "--to", keys[3], "--yes")
    assert refused.exit_code == Exit.KEY
    assert "where only its keys were changed" in refused.stderr
    done = run("reencrypt", runs, *keys, "--to", keys[3], "--yes")
    assert (done.exit_code, "2 checkpoints changed" in done.stdout) == (0, True), done.stderr
    for one in api.listed(runs):
        assert openers(one, [ring(OLD), ring(NEW)]) == [1]


@pytest.mark.hpke
def test_encrypt_for_several(tmp_path: Path, keys: list[str]) -> None:
    private, public = generate_pair("x25519")
    alice = text(tmp_path, "alice.pem.pub", public, mode=0o644)
    plain, sealed = tmp_path / "net.safetensors", tmp_path / "net.safetensors.ckpe"
    save_file({"w": np.arange(3.0)}, plain)
    assert run("encrypt", plain, "-o", sealed, *keys, "--key", alice).exit_code == 0
    found = run_json("inspect", sealed)["summary"]["opened_by"]
    assert found == [f"key {OLD.key_id}", f"key {NEW.key_id}", f"X25519 {ring(public).key_id}"]
    opener = text(tmp_path, "alice.pem", private)
    assert run("decrypt", sealed, "-o", tmp_path / "again", "--key", opener).exit_code == 0


def test_key_that_is_given_twice_counts_once(tmp_path: Path, keys: list[str]) -> None:
    plain, sealed = tmp_path / "net.safetensors", tmp_path / "net.safetensors.ckpe"
    save_file({"w": np.arange(3.0)}, plain)
    assert run("encrypt", plain, "-o", sealed, *keys[:2], *keys[:2]).exit_code == 0
    assert run_json("inspect", sealed)["summary"]["opened_by"] == [f"key {OLD.key_id}"]


def test_file_that_takes_one_key_is_not_encrypted_for_two(tmp_path: Path, keys: list[str]) -> None:
    from tests.support.saved import save_run as save_plain

    (path,) = save_plain(tmp_path / "runs", [1])
    result = run("encrypt", path, "-o", tmp_path / "out.ckpt", *keys)
    assert result.exit_code in (Exit.KEY, Exit.REFUSED)
    assert not (tmp_path / "out.ckpt").exists()


def test_convert_keeps_everybody_who_opens_a_file(tmp_path: Path, keys: list[str]) -> None:
    runs = tmp_path / "runs"
    save_run(directory=runs, steps=1)
    assert run("rekey", runs, *keys[:2], "--add", keys[3], "--yes").exit_code == 0
    path = only(api.place(runs)).path
    zstd = ("convert", path, "--compression", "zstd")
    for given in (keys[:2], [*keys, "--key", source(tmp_path, OTHER)]):
        refused = run(*zstd, *given)
        assert refused.exit_code == Exit.REFUSED
        assert f"is encrypted for key {OLD.key_id}, key {NEW.key_id}; given:" in refused.stderr
        assert "--key for each" in refused.stderr
    done = run(*zstd, *keys)
    assert done.exit_code == 0, done.stderr
    assert openers(only(api.place(runs)), [ring(OLD), ring(NEW), ring(OTHER)]) == [0, 1]


@pytest.mark.parametrize("command", ["pin", "convert"])
def test_signing_key_that_is_given_twice_is_a_usage_error(tmp_path: Path, command: str) -> None:
    twice = ("--signing-key", "file:a.pem", "--signing-key", "file:b.pem")
    extra = ("--compression", "none") if command == "convert" else ()
    result = run(command, tmp_path, *extra, *twice)
    assert result.exit_code == Exit.FAILED
    assert "--signing-key is given 2 times" in result.stderr
