# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr sign` with the real `model_signing`, whose own command judges the bundles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import run, run_json
from tests.support.saved import KEY, flip, save_run

pytest.importorskip("model_signing", reason="needs model-signing: make providers")
pytestmark = pytest.mark.providers


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, Path]:
    """Return the source of a private key and the file of its public half."""
    path = tmp_path / "bundle.pem"
    run_json("keygen", "--type", "p256", "--out", path)
    return f"file:{path}", tmp_path / "bundle.pem.pub"


def is_accepted(path: Path, bundle: Path, public: Path) -> bool:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(path)]
    command += ["--signature", str(bundle), "--public_key", str(public)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def test_bundle_of_a_file_is_accepted_until_the_file_changes(
    tmp_path: Path, keys: tuple[str, Path]
) -> None:
    source, public = keys
    (path,) = save_run(tmp_path / "runs", [10])
    document = run_json("sign", path, "--private-key", source)
    bundle = path.with_name(path.name + ".sig")
    assert document["items"] == [{"path": str(path), "bundle": str(bundle)}]
    assert is_accepted(path, bundle, public)
    flip(path, 70)
    assert not is_accepted(path, bundle, public)


def test_bundle_of_a_directory_covers_all_but_hidden_files(
    tmp_path: Path, keys: tuple[str, Path]
) -> None:
    source, public = keys
    first, _ = save_run(tmp_path / "runs", [10, 20])
    assert run("sign", first.parent, "--private-key", source).exit_code == 0
    bundle = first.parent / "model.sig"
    assert is_accepted(first.parent, bundle, public)
    assert run("verify", first.parent).exit_code == 0
    assert (
        run("sign", first.parent, "--private-key", source, "--force", "-q").stdout == f"{bundle}\n"
    )
    assert is_accepted(first.parent, bundle, public)
    (first.parent / "planted.ckpt").touch()
    assert not is_accepted(first.parent, bundle, public)


def test_key_that_is_none_for_bundles_is_refused_and_not_shown(
    tmp_path: Path, keys: tuple[str, Path]
) -> None:
    (path,) = save_run(tmp_path / "runs", [10])
    run_json("keygen", "--type", "ed25519", "--out", tmp_path / "sign.pem")
    for source, env in (
        (f"file:{tmp_path / 'sign.pem'}", {}),
        ("env:BUNDLE_KEY", {"BUNDLE_KEY": KEY.raw.hex()}),
        ("file:absent", {}),
    ):
        result = run("sign", path, "--private-key", source, env=env)
        assert result.exit_code == 12, result.stderr
        assert KEY.raw.hex() not in result.output
    assert not list(path.parent.glob("*.sig"))
    assert keys[1].exists()


def test_file_that_the_package_does_not_sign_is_refused(
    tmp_path: Path, keys: tuple[str, Path]
) -> None:
    (path,) = save_run(tmp_path / "runs", [10])
    (path.parent / "link").symlink_to(path)
    result = run("sign", path.parent, "--private-key", keys[0])
    assert (result.exit_code, "cannot be signed" in result.stderr) == (2, True)


def test_missing_package_is_named_with_the_way_out(
    tmp_path: Path, keys: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = save_run(tmp_path / "runs", [10])
    monkeypatch.setitem(sys.modules, "model_signing", None)
    result = run("sign", path, "--private-key", keys[0])
    assert (result.exit_code, "pip install 'ckptmgr[sign]'" in result.stderr) == (2, True)
