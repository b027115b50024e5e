# SPDX-License-Identifier: Apache-2.0
"""No key in anything that any command prints, logs, raises or writes, whatever opens, signs or is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import click
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from ckptmgr import CheckpointConfig, CheckpointManager, save_checkpoint
from ckptmgr.cli import cli
from ckptmgr.crypto.keys.signing import load_signing_key
from ckptmgr.crypto.providers.registry import open_provider
from ckptmgr.crypto.providers.wrapped_file import load_wrapped_key
from tests.cli.running import run
from tests.cli.test_ranks import STRATEGIES
from tests.cli.test_secrets import Transcript, make_key, transcript
from tests.maintenance import test_repair
from tests.maintenance.test_repair import damage
from tests.maintenance.test_repair import saved as save_ranks
from tests.support import api

__all__ = ["transcript"]  # the fixture

Line = tuple[str | Path, ...]
PEM_FILES = {"x25519": "alice", "mlkem768-x25519": "bob", "ed25519": "signer", "p256": "bundle"}


@dataclass(frozen=True, slots=True)
class Secrets:
    """Files with secrets, and their content."""

    folder: Path
    keys: dict[str, api.Key]

    def source(self, name: str) -> str:
        scheme = {"phrase": "passphrase:file", "wrapped": "wrapped"}.get(name, "file")
        return f"{scheme}:{self.folder / name}"

    @property
    def files(self) -> list[Path]:
        """Where secrets may lie."""
        return [self.folder / name for name in (*self.keys, *PEM_FILES.values(), "odd")]

    @property
    def env(self) -> dict[str, str]:
        return {"CKPTMGR_KEY_SERVICE": f"local:{self.source('kek')}"}


@pytest.fixture
def secrets(tmp_path: Path, transcript: Transcript) -> Secrets:
    """One secret of every kind, made by `keygen` where it makes such."""
    folder = tmp_path / "secrets"
    folder.mkdir()
    names = ("right", "new", "wrong", "kek")
    keys = {name: make_key(folder / name, transcript, size=32) for name in names}
    for kind, name in PEM_FILES.items():
        made = transcript.add_result(run("keygen", "--type", kind, "--out", folder / name))
        assert made.exit_code == 0, made.stderr
    private = load_pem_private_key((folder / "alice").read_bytes(), None)
    assert isinstance(private, X25519PrivateKey)
    keys["alice"] = api.Key(private.private_bytes_raw())
    keys["signer"] = api.Key(load_signing_key(f"file:{folder / 'signer'}").raw)
    phrase = folder / "phrase"
    phrase.touch(mode=0o600)
    phrase.write_bytes(b"correct horse #7\n")
    keys["phrase"] = api.Key(b"correct horse #7")
    found = Secrets(folder, keys)
    line = ("keygen", "--service", f"local:{found.source('kek')}", "-o", folder / "wrapped")
    assert transcript.add_result(run(*line)).exit_code == 0
    service = open_provider(f"local:{found.source('kek')}")
    keys["wrapped"] = load_wrapped_key(str(folder / "wrapped"), service=service)
    return found


def saved(directory: Path, secrets: Secrets) -> Path:
    """Save three signed checkpoints that a key, a passphrase and a private key open."""
    config = CheckpointConfig(
        enc_key=secrets.source("right"),
        enc_recipients=[f"{secrets.source('alice')}.pub", secrets.source("phrase")],
        signing_key=secrets.source("signer"),
        format="safetensors",
        keep="last(3)",
    )
    with CheckpointManager(directory, config, prefix="net") as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weights": np.arange(1000, dtype=np.float32)})
    return directory


def lines(
    work: Path, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, Line]]:
    """Yield command lines and the exit codes they must end with."""
    runs, right = saved(work / "runs", secrets), secrets.source("right")
    key, sign = ("--key", right), ("--signing-key", secrets.source("signer"))
    everybody = (*key, "--key", f"{secrets.source('alice')}.pub", "--key", secrets.source("phrase"))
    file = runs / "net-3.safetensors.ckpe"
    for name in ("right", "alice", "phrase"):
        yield 0, ("ls", runs, "--key", secrets.source(name))
        yield 0, ("inspect", file, "--key", secrets.source(name))
        yield 0, ("verify", file, "--key", secrets.source(name))
    yield 0, ("tag", file, "release", *key, *sign)
    yield 0, ("untag", file, "release", *key, *sign)
    yield 0, ("pin", file, *key, *sign)
    yield 0, ("unpin", file, *key, *sign)
    yield 0, ("convert", file, "--compression", "zstd", *everybody, *sign)
    yield 0, ("convert", file, "--compression", "none", *everybody, *sign)
    yield 0, ("rekey", runs, *key, "--add", secrets.source("new"), "--yes", *sign)
    yield 0, ("rekey", runs, *key, "--remove", secrets.source("phrase"), "--yes", *sign)
    yield 0, ("reencrypt", runs, *key, "--to", right, "--to", secrets.source("wrapped"), "--yes", *sign)  # fmt: skip
    yield 0, ("verify", runs, "--key", secrets.source("wrapped"))
    yield 0, ("watch", runs, "--once", "--json", *key)
    yield 0, ("diff", file, file, *key, "--other-key", secrets.source("wrapped"))
    yield 0, ("stats", runs, *key)
    yield 0, ("simulate", "last(1)", runs, *key)
    yield 0, ("report", runs, "-o", work / "report.html", *key)
    yield 0, ("config", "show", runs, "--origin")
    yield 0, ("doctor", runs, "--deep", *key)
    yield 0, ("export", file, "--hf", "-o", work / "hub", *key)
    yield 0, ("export", file, "--to", "ckpt", "-o", work / "net.ckpt", *key)
    there = "memory://secrets/run"  # without the library of object stores the commands end with its name
    yield 0 if find_spec("obstore") else 2, ("copy", runs, there, *key)
    yield 0 if find_spec("obstore") else 2, ("storage", "probe", there)
    yield 0, ("prune", runs, "--keep", "last(1)", "--yes", *key)
    yield 0, ("prune", runs, "--undo", "--yes", *key)
    yield 0, ("rm", "1", "--dir", runs, "--yes", *key)
    text = work / "tokenizer.json"
    text.write_text("{}")
    (work / "out").mkdir()
    for number, name in enumerate(("right", "wrapped", "phrase")):
        sealed = work / f"{number}.json.ckpe"
        yield 0, ("encrypt", text, "-o", sealed, "--key", secrets.source(name))
        yield 0, ("decrypt", sealed, "-o", work / "out", "--key", secrets.source(name))
    (work / "in" / "rank_0").mkdir(parents=True)
    values = {"w": np.arange(4)}
    save_checkpoint(values, work / "in" / "rank_0" / "net.ckpt", enc_key=secrets.keys["right"].raw)
    yield 0, ("transform", work / "in", "-o", work / "ranks", *key)
    yield 0, ("unify", work / "in", "-o", work / "whole", "--plain", *key)
    yield 0, ("merge", STRATEGIES / "pp2_mp2_stages", "-o", work / "strategy.ckpt")
    monkeypatch.setattr(test_repair, "WEIGHTS", np.ones((3000, 1000), np.float32))
    repaired = save_ranks(work / "set", enc_key=secrets.keys["right"].raw, format="safetensors")
    damage(work / "set" / repaired.shards[0], 0.9)
    yield 0, ("repair", work / "set" / repaired.name, *key)
    yield 0, ("sign", runs, "--private-key", secrets.source("bundle"), *key)


def failing(command: str, option: str, secrets: Secrets, target: Path) -> Iterator[Line]:
    """Yield command lines that give a secret itself, a wrong one, or a damaged one, to an option of a command."""
    secret = secrets.keys["wrong"].raw.hex()
    odd = secrets.folder / "odd"
    odd.touch(mode=0o600)
    odd.write_bytes(secrets.keys["wrong"].raw + b"x")
    shorter = (str(target),) if command not in ("keygen",) else ()
    for source in (secret, f"hex:{secret}", f"file:{secret}", f"env:{secret}", f"file:{odd}"):
        yield (command, *shorter, option, source)
        yield (command, option, source, *shorter, "--json")
    yield (command, *shorter, f"{option}{secret}")


SECRET_OPTIONS = (
    "--key",
    "--add",
    "--remove",
    "--to",
    "--signing-key",
    "--private-key",
    "--other-key",
)


def secret_options(command: click.Command) -> list[str]:
    return [name for param in command.params for name in param.opts if name in SECRET_OPTIONS]


@pytest.mark.slow
@pytest.mark.hpke
def test_every_command_is_run_and_none_shows_a_secret(
    tmp_path: Path, transcript: Transcript, secrets: Secrets, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    tried = {"keygen", "help", "completion", "prove"}  # prove takes no key, and starts programs
    for code, line in lines(work, secrets, monkeypatch):
        result = transcript.add_result(run("--debug", *line, env=secrets.env))
        assert result.exit_code in (code, 2 if line[0] == "sign" else code), (line, result.output)
        tried.add(str(line[0]))
    assert tried == set(cli.list_commands(click.Context(cli)))
    transcript.add_files(tmp_path, but=secrets.files)
    assert transcript.leaks(list(secrets.keys.values())) == []
    assert b"PRIVATE KEY" not in b"".join(transcript.shown)


@pytest.mark.slow
@pytest.mark.hpke
def test_secret_in_the_wrong_place_is_not_repeated_by_any_command(
    tmp_path: Path, transcript: Transcript, secrets: Secrets
) -> None:
    runs, count = saved(tmp_path / "runs", secrets), 0
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        for option in secret_options(command):
            for line in failing(name, option, secrets, runs):
                result = transcript.add_result(run("--debug", *line, env=secrets.env))
                assert result.exit_code != 0, line
                count += 1
    assert count > 150
    transcript.add_files(tmp_path, but=secrets.files)
    assert transcript.leaks(list(secrets.keys.values())) == []
