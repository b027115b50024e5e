# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr sign`: its first refusals. With the real package: tests/crypto/keys/test_model_signing.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ckptmgr.integrations import openssf
from ckptmgr.integrations.openssf import bundle_path
from tests.cli.running import run, run_json
from tests.support.saved import flip, save_run

SOURCE = "env:BUNDLE_KEY"


def test_bundle_lies_beside_a_file_and_in_a_directory(tmp_path: Path) -> None:
    assert bundle_path(tmp_path) == tmp_path / "model.sig"
    assert bundle_path(tmp_path / "net.ckpt") == tmp_path / "net.ckpt.sig"


def test_missing_package_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    (path,) = save_run(tmp_path, [10])
    result = run("sign", path, "--private-key", SOURCE)
    assert result.exit_code == 2
    assert "pip install 'ckptmgr[sign]'" in result.stderr


def test_damaged_checkpoint_is_not_signed(tmp_path: Path) -> None:
    first, second = save_run(tmp_path, [10, 20])
    flip(second, 70)
    for what in (tmp_path, second):
        result = run("sign", what, "--private-key", SOURCE)
        assert (result.exit_code, "nothing was signed" in result.stderr) == (1, True)
    assert not list(tmp_path.glob("*.sig"))
    assert first.exists()


def test_bundle_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    (tmp_path / "model.sig").write_text("mine")
    (tmp_path / (path.name + ".sig")).write_text("mine")
    for what in (tmp_path, path):
        assert run("sign", what, "--private-key", SOURCE).exit_code == 13


def test_key_itself_is_refused_and_not_repeated(tmp_path: Path) -> None:
    result = run("sign", tmp_path, "--private-key", "ab" * 32)
    assert (result.exit_code, "abab" in result.output) == (2, False)


def test_several_checkpoints_are_signed_as_a_directory_only(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    result = run("sign", "10..20", "--dir", tmp_path, "--private-key", SOURCE)
    assert (result.exit_code, "sign the directory" in result.stderr) == (2, True)


def test_verify_mentions_bundles_that_are_there(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    assert run_json("verify", tmp_path)["summary"]["bundles"] == []
    bundles = [tmp_path / "model.sig", tmp_path / (path.name + ".sig")]
    for bundle in bundles:
        bundle.touch()
    assert run_json("verify", tmp_path)["summary"]["bundles"] == [str(b) for b in bundles]
    assert f"{bundles[1]}: an OpenSSF bundle, not checked here" in run("verify", path).stdout


@pytest.mark.parametrize(
    ("option", "printed"), [((), "signs net-1_10.ckpt"), (("-q",), ""), (("--json",), "bundle")]
)
def test_bundle_is_as_readable_as_what_it_signs_or_replaces(
    option: tuple[str, ...], printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The package is in another lane; the use of its answer is the subject here.
    monkeypatch.setattr(openssf, "sign_bundle", lambda path, source: b"bundle")
    (path,) = save_run(tmp_path, [10])
    path.chmod(0o440)
    bundle = bundle_path(path)
    result = run("sign", path, "--private-key", SOURCE, *option)
    assert (result.exit_code, printed in result.stdout) == (0, True)
    assert str(bundle) in result.stdout
    assert (bundle.read_bytes(), bundle.stat().st_mode & 0o777) == (b"bundle", 0o640)
    bundle.chmod(0o644)
    assert run("sign", path, "--private-key", SOURCE, "--force").exit_code == 0
    assert bundle.stat().st_mode & 0o777 == 0o644
