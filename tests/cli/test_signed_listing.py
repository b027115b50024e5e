# SPDX-License-Identifier: Apache-2.0
"""`ls` and `inspect` of signed checkpoints: with the public key they believe nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.cli.exits import Exit
from tests.cli.running import run, run_json
from tests.cli.test_verify import SIGNER, signed_run
from tests.support import api
from tests.support.saved import KEY

STRANGER = api.SigningKey(bytes(32))


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_signed_checkpoint_is_listed_and_shown_with_the_public_key(
    tmp_path: Path, key: object
) -> None:
    options = api.SaveOptions(key=KEY) if key is not None else api.SaveOptions()
    public = signed_run(tmp_path, SIGNER, options=options)
    listed = run_json("ls", tmp_path / "runs", "--public-key", public)
    assert {one["state"] for one in listed["items"]} == {"ok"}
    (path, *_) = [one["path"] for one in listed["items"]]
    shown = run("inspect", path, "--public-key", public)
    assert shown.exit_code == 0, shown.stderr
    assert f"signed     by {SIGNER.public_key.key_id}" in shown.stdout
    summary = run_json("inspect", path, "--public-key", public)["summary"]
    assert summary["signed_by"] == SIGNER.public_key.key_id
    assert run_json("inspect", path)["summary"]["signed_by"] is None


def test_checkpoint_that_somebody_else_signed_is_not_believed(tmp_path: Path) -> None:
    signed_run(tmp_path / "a", SIGNER)
    stranger = signed_run(tmp_path / "b", STRANGER)
    runs = tmp_path / "a" / "runs"
    states = {one["state"] for one in run_json("ls", runs, "--public-key", stranger)["items"]}
    assert states == {"other-key"}
    path = next(runs.glob("*.ckpt"))
    assert run("inspect", path, "--public-key", stranger).exit_code == Exit.KEY


def test_manifest_that_was_changed_is_named(tmp_path: Path) -> None:
    public = signed_run(tmp_path, SIGNER)
    manifest = next((tmp_path / "runs").glob("*.manifest.json"))
    manifest.chmod(0o600)
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 9', 1))
    assert run("ls", tmp_path / "runs").exit_code == 0
    listed = run_json("ls", tmp_path / "runs", "--public-key", public)["items"]
    assert "corrupt" in {one["state"] for one in listed}
    path = str(manifest).removesuffix(".manifest.json")
    assert run("inspect", path, "--public-key", public).exit_code == Exit.NO
