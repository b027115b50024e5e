# SPDX-License-Identifier: Apache-2.0
"""A command signs or authenticates only content that was proven before: no file of a stranger becomes trusted by it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.crypto.keys.pem import generate_pair
from tests.cli.running import run
from tests.cli.test_rekey import source, text
from tests.support import api
from tests.support.rekeying import NEW, OLD, save_run
from tests.support.saved import overwrite

SIGNER = api.SigningKey(bytes(range(32)))
TAMPERED, REFUSED = 1, 13


@pytest.fixture
def signing(tmp_path: Path) -> tuple[str, ...]:
    return ("--signing-key", text(tmp_path, "sign.pem", SIGNER.to_pem()))


def save(directory: Path, **settings: object) -> Path:
    """Save one checkpoint and return its manifest."""
    config = CheckpointConfig(format="safetensors", **settings)  # type: ignore[arg-type]
    with CheckpointManager(directory, config, prefix="net") as manager:
        manager.save(1, {"w": np.full(3, 666, np.float32)})
    (path,) = directory.glob("*.manifest.json")
    return path


def forged(directory: Path) -> Path:
    """Save one with the signature of another."""
    true = json.loads(save(directory / "true", signing_key=SIGNER).read_text())
    path = save(directory / "runs")
    overwrite(
        path,
        json.dumps({**json.loads(path.read_text()), "signatures": true["signatures"]}).encode(),
    )
    return path


@pytest.mark.parametrize("command", ["pin", "unpin"])
@pytest.mark.parametrize("is_signed", [True, False])
def test_pins_of_what_the_signing_key_did_not_sign_are_not_signed(
    tmp_path: Path, signing: tuple[str, ...], command: str, is_signed: bool
) -> None:
    path = forged(tmp_path) if is_signed else save(tmp_path / "runs")
    before = path.read_bytes()
    result = run(command, "1", "--dir", path.parent, *signing)
    assert result.exit_code == (TAMPERED if is_signed else REFUSED)
    assert "hint" in result.stderr or is_signed
    assert path.read_bytes() == before


def test_pin_of_an_unsigned_checkpoint_is_signed_where_that_is_allowed(
    tmp_path: Path, signing: tuple[str, ...]
) -> None:
    path = save(tmp_path / "runs")
    refused = run("pin", "1", "--dir", path.parent, *signing)
    assert "--allow-unencrypted" in refused.stderr
    assert run("pin", "1", "--dir", path.parent, *signing, "--allow-unencrypted").exit_code == 0
    store = api.place(path.parent, trusted_keys=(SIGNER.public_key,))
    assert [len(one.pins) for one in store.scan()] == [1]


@pytest.mark.hpke
def test_reencrypt_does_not_sign_what_anybody_with_the_public_key_made(
    tmp_path: Path, signing: tuple[str, ...]
) -> None:
    private, public = generate_pair("x25519")
    alice = text(tmp_path, "alice.pem", private)
    path = save(tmp_path / "runs", enc_recipients=[text(tmp_path, "alice.pub", public, mode=0o644)])
    before = path.read_bytes()
    change = ("--key", alice, "--to", source(tmp_path, NEW), "--yes")
    refused = run("reencrypt", path.parent, *change, *signing)
    assert (refused.exit_code, "not signed" in refused.stderr) == (REFUSED, True)
    assert path.read_bytes() == before
    assert run("reencrypt", path.parent, *change, *signing, "--allow-unsealed").exit_code == 0
    assert "signatures" in json.loads(path.read_text())


def renamed(directory: Path) -> Path:
    """Return a sealed file of step 1 under the name of step 9, without manifest."""
    save_run(directory=directory, steps=1)
    (path,) = directory.glob("*.ckpe")
    (directory / api.manifest_name(path.name)).unlink()
    return path.rename(directory / "net-9_9.safetensors.ckpe")


@pytest.mark.parametrize("command", ["reencrypt", "convert"])
def test_step_that_only_a_name_claims_is_not_authenticated(tmp_path: Path, command: str) -> None:
    path = renamed(tmp_path / "runs")
    key = ("--key", source(tmp_path, OLD))
    rest = ("--compression", "zstd")
    if command == "reencrypt":
        rest = ("--to", source(tmp_path, NEW), "--yes")  # type: ignore[assignment]
    before = path.read_bytes()
    refused = run(command, path.parent, *key, *rest)
    assert (refused.exit_code, "--allow-unsealed" in refused.stderr) == (REFUSED, True)
    assert [one.name for one in path.parent.glob("net-*")] == [path.name]
    assert path.read_bytes() == before
    assert run(command, path.parent, *key, *rest, "--allow-unsealed").exit_code == 0
    assert (path.parent / api.manifest_name(path.name)).exists()


def test_manifest_without_authentication_does_not_get_one_by_a_change_of_keys(
    tmp_path: Path,
) -> None:
    save_run(directory=tmp_path / "runs", steps=1)
    (path,) = (tmp_path / "runs").glob("*.manifest.json")
    document = json.loads(path.read_text())
    del document["auth"]
    overwrite(path, json.dumps(document).encode())
    before = path.read_bytes()
    change = ("--key", source(tmp_path, OLD), "--add", source(tmp_path, NEW), "--yes")
    for extra in ((), ("--allow-unsealed",)):
        refused = run("rekey", path.parent, *change, *extra)
        assert (refused.exit_code, "not authenticated" in refused.stderr) == (REFUSED, True)
    assert path.read_bytes() == before
