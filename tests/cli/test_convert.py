# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr convert`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.formats.tensor import tensor_from_array
from tests.cli.running import key_file, run, run_json
from tests.support import api
from tests.support.saved import KEY, flip, save_run

WEIGHTS = (np.random.default_rng(0).standard_normal(20_000) * 0.02).astype(np.float32)
CONTENT = [tensor_from_array("w", WEIGHTS), tensor_from_array("m", np.zeros(9000, np.int64))]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the plain checkpoints of two steps."""
    options = api.SaveOptions(format="safetensors")
    save_run(tmp_path / "run", [10, 20], options=options, content=CONTENT)
    return tmp_path / "run"


def data_files(directory: Path) -> list[str]:
    return sorted(
        path.name
        for path in directory.iterdir()
        if not path.name.startswith(".") and path.suffix != ".json"
    )


def test_directory_is_compressed_and_expanded_again(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}
    result = run("convert", directory, "--compression", "zstd", "--level", "3")
    assert result.exit_code == 0, result.stderr
    assert data_files(directory) == ["net-1_10.safetensors.ckpz", "net-2_10.safetensors.ckpz"]
    assert "compressed  net-1_10.safetensors.ckpz" in result.stdout
    assert [line.split()[0] for line in result.stdout.splitlines()[3:]] == [
        "DTYPE",
        "float32",
        "int64",
        "header",
    ]
    assert run("verify", "--dir", directory).exit_code == 0
    assert run("convert", directory, "--compression", "none").exit_code == 0
    assert {path.name: path.read_bytes() for path in directory.glob("*.safetensors")} == before


def test_what_is_done_is_not_done_again(directory: Path) -> None:
    run("convert", directory, "--compression", "zstd")
    result = run("convert", directory, "--compression", "zstd")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "unchanged   net-1_10.safetensors.ckpz",
        "unchanged   net-2_10.safetensors.ckpz",
    ]


def test_json_tells_ratio_and_speed_of_each_element_type(directory: Path) -> None:
    document = run_json("convert", directory, "--compression", "zstd")
    assert document["schema"] == "ckptmgr.convert/1"
    assert [item["outcome"] for item in document["items"]] == ["compressed", "compressed"]
    assert document["items"][0]["path"].endswith(".ckpz")
    figures = document["summary"]["by_dtype"]["float32"]
    assert figures["raw_bytes"] == 2 * WEIGHTS.nbytes
    assert 0.5 < figures["ratio"] < 0.95
    assert figures["bytes_per_s_per_core"] > 0
    assert document["summary"]["target_bytes"] < document["summary"]["source_bytes"]


def test_encrypted_checkpoint_keeps_its_name(tmp_path: Path) -> None:
    source = key_file(tmp_path)
    options = api.SaveOptions(format="safetensors", key=KEY)
    (path,) = save_run(tmp_path / "run", [10], options=options, content=CONTENT)
    path.rename(path.with_name("net.safetensors.ckpe"))
    (path.parent / f"{path.name}.manifest.json").unlink()
    path = path.with_name("net.safetensors.ckpe")
    before = path.stat().st_size
    result = run(
        "convert", path, "--compression", "zstd", "--key", source, "-q", "--allow-unsealed"
    )
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    assert path.stat().st_size < before
    inspected = run("inspect", path, "--key", source)
    assert "zstd, to " in inspected.stdout
    decrypted = tmp_path / "plain.safetensors"
    assert run("decrypt", path, "-o", decrypted, "--key", source).exit_code == 0


def test_signed_checkpoint_is_converted_with_its_signing_key_only(tmp_path: Path) -> None:
    signer = api.SigningKey(bytes(range(32)))
    config = CheckpointConfig(format="safetensors", signing_key=signer)
    with CheckpointManager(tmp_path / "run", config, prefix="net") as manager:
        manager.save(1, {"w": WEIGHTS})
    path = tmp_path / "run/net-1.safetensors"
    refused = run("convert", path, "--compression", "zstd")
    assert (refused.exit_code, path.exists()) == (12, True)
    assert "--signing-key" in refused.stderr
    secret = tmp_path / "sign.key"
    secret.write_bytes(signer.to_pem())
    secret.chmod(0o600)
    signed = ("--signing-key", f"file:{secret}")
    assert run("convert", path, "--compression", "zstd", *signed).exit_code == 0
    (target,) = api.listed(
        tmp_path / "run", trusted_keys=(signer.public_key,), allow_unencrypted=True
    )
    manifest = api.place(
        tmp_path / "run", trusted_keys=(signer.public_key,), allow_unencrypted=True
    ).read_manifest(target.name)
    assert manifest is not None
    assert manifest.signed_by == signer.public_key.key_id


def test_unsigned_checkpoint_is_not_signed_by_converting_it(
    directory: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "sign.key"
    secret.write_bytes(api.SigningKey(bytes(range(32))).to_pem())
    secret.chmod(0o600)
    path = directory / "net-1_10.safetensors"
    result = run("convert", path, "--compression", "zstd", "--signing-key", f"file:{secret}")
    assert result.exit_code != 0
    assert path.exists()


def test_damaged_one_does_not_stop_the_others(directory: Path) -> None:
    flip(directory / "net-1_10.safetensors", 5000)
    result = run("convert", directory, "--compression", "zstd")
    assert result.exit_code == 3
    assert data_files(directory) == ["net-1_10.safetensors", "net-2_10.safetensors.ckpz"]
    assert "net-1_10.safetensors" in result.stderr


def test_nothing_but_damage_says_so(directory: Path) -> None:
    path = directory / "net-1_10.safetensors"
    flip(path, 5000)
    result = run("convert", path, "--compression", "zstd", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["summary"]["failed"] == 1
    assert json.loads(result.stderr)["error"] == "ChecksumMismatch"


def test_compressed_file_is_encrypted_under_the_name_of_a_container(
    directory: Path, tmp_path: Path
) -> None:
    run("convert", directory, "--compression", "zstd")
    source = key_file(tmp_path)
    path = directory / "net-1_10.safetensors.ckpz"
    result = run("encrypt", path, "-o", tmp_path, "--key", source)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "net-1_10.safetensors.ckpe").exists()
