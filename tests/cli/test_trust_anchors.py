# SPDX-License-Identifier: Apache-2.0
"""Every option that takes the file of a key: a file that others could have put there is refused, and a FIFO never hangs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    KeyProblem,
    Trust,
    load_checkpoint,
    open_checkpoint,
)
from ckptmgr.cli.exits import Exit
from ckptmgr.crypto.keys.pem import generate_pair
from tests.cli.running import run, run_process
from tests.support import api
from tests.support.saved import KEY, save_run

SIGNER = api.SigningKey(bytes(range(32)))
PRIVATE, PUBLIC = generate_pair("x25519")
STRANGER = 12_345

# The option, and what its file holds; {} is the file.
SECRETS = {
    "--key": (["ls", "RUNS", "--key", "file:{}"], KEY.raw.hex().encode()),
    "--key passphrase:": (["ls", "RUNS", "--key", "passphrase:file:{}"], b"correct horse"),
    "--key private": (["ls", "RUNS", "--key", "file:{}"], PRIVATE),
    "--signing-key": (["pin", "RUNS/net-1_1.ckpt", "--signing-key", "file:{}"], SIGNER.to_pem()),
    "rekey --remove": (
        ["rekey", "RUNS", "--yes", "--key", "KEY", "--remove", "file:{}"],
        b"x" * 32,
    ),
}
PUBLIC_FILES = {
    "verify --public-key": (
        ["verify", "RUNS", "--public-key", "{}"],
        SIGNER.public_key.to_pem(),
    ),
    "ls --public-key": (["ls", "RUNS", "--public-key", "{}"], SIGNER.public_key.to_pem()),
    "inspect --public-key": (
        ["inspect", "RUNS/net-1_1.ckpt", "--public-key", "{}"],
        SIGNER.public_key.to_pem(),
    ),
    "rekey --add": (["rekey", "RUNS", "--yes", "--key", "KEY", "--add", "file:{}"], PUBLIC),
    "reencrypt --to": (["reencrypt", "RUNS", "--yes", "--key", "KEY", "--to", "file:{}"], PUBLIC),
    "encrypt --key": (["encrypt", "RUNS/net-1_1.ckpt", "-o", "OUT", "--key", "file:{}"], PUBLIC),
    "--key wrapped:": (["ls", "RUNS", "--key", "wrapped:{}"], b"{}"),
}
ALL = {**SECRETS, **PUBLIC_FILES}


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[[str], list[str]]:
    save_run(tmp_path / "runs", [1])
    key = tmp_path / "run.key"
    key.write_text(KEY.raw.hex())
    key.chmod(0o600)

    def of(option: str) -> list[str]:
        replaced = []
        for word in ALL[option][0]:
            word = word.replace("RUNS", str(tmp_path / "runs")).replace("OUT", str(tmp_path))
            replaced.append(
                f"file:{key}" if word == "KEY" else word.replace("{}", str(tmp_path / "anchor"))
            )
        return replaced

    return of


def put(path: Path, content: bytes, mode: int) -> None:
    path.write_bytes(content)
    path.chmod(mode)


@pytest.mark.parametrize("option", ALL)
def test_file_that_everybody_can_write_is_refused(
    option: str, arguments: Callable[[str], list[str]], tmp_path: Path
) -> None:
    put(tmp_path / "anchor", ALL[option][1], 0o666)
    result = run(*arguments(option))
    assert result.exit_code == Exit.KEY, result.output
    assert f"'{tmp_path / 'anchor'}' can be " in result.stderr
    assert "by others (mode 0666)" in result.stderr
    assert "chmod " in result.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("option", ALL)
def test_file_of_another_user_is_refused(
    option: str, arguments: Callable[[str], list[str]], tmp_path: Path
) -> None:
    put(tmp_path / "anchor", ALL[option][1], 0o600)
    os.chown(tmp_path / "anchor", STRANGER, STRANGER)
    result = run(*arguments(option))
    assert result.exit_code == Exit.KEY, result.output
    assert f"'{tmp_path / 'anchor'}' belongs to another user (uid {STRANGER})" in result.stderr
    assert "chown " in result.stderr


@pytest.mark.parametrize("option", ALL)
def test_fifo_is_refused_at_once(
    option: str, arguments: Callable[[str], list[str]], tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "anchor", 0o600)
    result = run(*arguments(option))  # where it hung, pytest-timeout would end it
    assert result.exit_code == Exit.KEY, result.output
    assert "anchor' is not a regular file" in result.stderr


def test_key_file_of_the_environment_is_held_to_the_rule(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [1])
    put(tmp_path / "run.key", KEY.raw.hex().encode(), 0o666)
    result = run("ls", tmp_path / "runs", env={"CKPTMGR_KEY_FILE": str(tmp_path / "run.key")})
    assert result.exit_code == Exit.KEY
    assert "can be used by others (mode 0666)" in result.stderr
    (tmp_path / "run.key").unlink()
    os.mkfifo(tmp_path / "run.key", 0o600)
    found = run_process("ls", tmp_path / "runs", CKPTMGR_KEY_FILE=str(tmp_path / "run.key"))
    assert found.returncode == Exit.KEY
    assert b"is not a regular file" in found.stderr


def test_functions_hold_trusted_keys_to_the_rule(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "runs", [1])
    anchor = tmp_path / "sign.pem.pub"
    put(anchor, SIGNER.public_key.to_pem(), 0o666)

    def uses() -> list[Callable[[], object]]:
        return [
            lambda: CheckpointManager(tmp_path / "runs", trust=Trust(trusted_keys=[anchor])),
            lambda: load_checkpoint(str(path), trusted_keys=[anchor]),
            lambda: open_checkpoint(path, trusted_keys=[anchor]).__enter__(),
        ]

    for use in uses():
        with pytest.raises(KeyProblem, match="can be changed by others"):
            use()
    anchor.unlink()
    os.mkfifo(anchor, 0o644)
    for use in uses():
        with pytest.raises(KeyProblem, match="is not a regular file"):
            use()
    for name in ("enc_key", "enc_recipients", "signing_key"):
        given = [f"file:{anchor}"] if name == "enc_recipients" else f"file:{anchor}"
        with pytest.raises(KeyProblem, match="is not a regular file"):
            CheckpointConfig(format="safetensors", **{name: given})  # type: ignore[arg-type]


def test_public_key_that_others_can_only_read_is_accepted(tmp_path: Path) -> None:
    save_run(tmp_path / "runs", [1])
    put(tmp_path / "sign.pem.pub", SIGNER.public_key.to_pem(), 0o644)
    result = run("ls", tmp_path / "runs", "--public-key", tmp_path / "sign.pem.pub")
    assert result.exit_code == 0, result.stderr
