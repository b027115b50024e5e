# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr export`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptmgr import CheckpointConfig, CheckpointManager, save_state
from tests.cli.running import key_file, run, run_json
from tests.support.saved import KEY, save_run

NET = {"weight": np.arange(12, dtype=np.float32).reshape(3, 4), "bias": np.ones(4, np.float16)}
STATE = {"net": NET, "optimizer": {"m": np.zeros(50)}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory with the checkpoints of two steps, the second with other weights."""
    config = CheckpointConfig(format="safetensors")
    with CheckpointManager(tmp_path / "runs", config, prefix="net") as manager:
        manager.save(1, STATE)
        manager.save(2, {**STATE, "net": {**NET, "bias": np.zeros(4, np.float16)}})
    return tmp_path / "runs"


def test_latest_checkpoint_is_exported_with_one_line(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("export", "latest", "--dir", runs, "-o", out, "--hf", "--only", "net")
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    (line,) = result.stdout.splitlines()
    assert line.startswith(f"{runs}/net-2.safetensors → {out}  2 tensors, 1 file, ")
    found = load_file(out / "model.safetensors")
    assert found.keys() == NET.keys()
    assert not found["bias"].any()
    plain = run("export", runs / "net-1.safetensors", "-o", tmp_path / "b", "--hf", charset="ascii")
    assert " -> " in plain.stdout


def test_series_and_force_choose_what_is_exported_and_replaced(runs: Path, tmp_path: Path) -> None:
    save_run(runs, [2], series="other")
    out = tmp_path / "out"
    command = ("export", "2", "--dir", runs, "-o", out, "--hf")
    assert run(*command).exit_code == 2
    assert run(*command, "--series", "net", "--only", "net").exit_code == 0
    refused = run(*command, "--series", "other")
    assert refused.exit_code == 13
    assert "is not empty" in refused.stderr
    assert "--force" in refused.stderr
    assert run(*command, "--series", "other", "--force").exit_code == 0
    assert sorted(load_file(out / "model.safetensors")) == ["epoch_num", "fc.weight"]


def test_encrypted_checkpoint_is_exported_with_its_key(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "net.safetensors.ckpe", enc_key=KEY.raw).path
    command = ("export", path, "-o", tmp_path / "out", "--hf", "--only", "net")
    assert run(*command).exit_code == 12
    assert not (tmp_path / "out").exists()
    assert run(*command, "--key", key_file(tmp_path)).exit_code == 0
    np.testing.assert_array_equal(
        load_file(tmp_path / "out/model.safetensors")["weight"], NET["weight"]
    )


def test_plain_checkpoint_is_refused_with_a_key_unless_allowed(runs: Path, tmp_path: Path) -> None:
    key = key_file(tmp_path)
    command = ("export", runs / "net-1.safetensors", "-o", tmp_path / "out", "--hf", "--key", key)
    assert run(*command).exit_code == 13
    assert run(*command, "--allow-unencrypted").exit_code == 0


def test_step_that_only_a_name_states_is_refused_with_a_key(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "net-1_5.ckpt", enc_key=KEY.raw, manifest=False).path
    key = key_file(tmp_path)
    command = ("-o", tmp_path / "out", "--hf", "--key", key)
    refused = run("export", "5", "--dir", tmp_path, *command)
    assert refused.exit_code == 13
    assert "no manifest proves which checkpoint this file is" in refused.stderr
    assert run("export", path, *command).exit_code == 0


def test_json_has_files_ties_and_the_checkpoint(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    document = run_json(
        "export", "1", "--dir", runs, "-o", out, "--hf", "--max-shard-size", "48B", "--only", "net"
    )
    assert document["schema"] == "ckptmgr.export/1"
    assert [Path(item["path"]).name for item in document["items"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    assert all(Path(one["path"]).stat().st_size == one["size_bytes"] for one in document["items"])
    summary = document["summary"]
    assert (summary["step"], summary["tensors"], summary["tensor_bytes"]) == (1, 2, 56)
    assert (summary["ties"], summary["left_out"], summary["is_verified"]) == ({}, [], True)
    assert summary["directory"] == str(out)
    json.loads((out / "model.safetensors.index.json").read_text())


@pytest.mark.parametrize(("option", "end"), [("-q", b"\n"), ("-0", b"\0")])
def test_quiet_prints_the_paths_of_the_files(
    runs: Path, tmp_path: Path, option: str, end: bytes
) -> None:
    out = tmp_path / "out"
    result = run("export", "1", "--dir", runs, "-o", out, "--hf", "--only", "net", option)
    assert result.stdout_bytes == bytes(out / "model.safetensors") + end


def test_notes_say_what_is_probably_not_meant(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "net.ckpt", manifest=False, crc_check=False).path
    result = run("export", path, "-o", tmp_path / "a", "--hf")
    assert "names keep the parts of the state (net, optimizer)" in result.stderr
    assert "not verified" in result.stderr
    (path,) = save_run(tmp_path / "run", [1])
    assert "left out: 1 text" in run("export", path, "-o", tmp_path / "b", "--hf").stderr
    state = {f"part{number}": {"w": np.ones(1)} for number in range(7)}
    path = save_state(state, tmp_path / "many.ckpt").path
    assert "part4, ...)" in run("export", path, "-o", tmp_path / "c", "--hf").stderr


def test_tied_weights_are_counted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(2)
    path = save_state({"net": {"a": weight, "b": weight}}, tmp_path / "net.ckpt").path
    result = run("export", path, "-o", tmp_path / "out", "--hf", "--only", "net")
    assert "1 tensor (1 tied), 1 file" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--hf"),
        (("--hf", "--max-shard-size", "much"), "--max-shard-size: 'much' is not a size"),
        (("--hf", "--max-shard-size", "0B"), "--max-shard-size is less than one byte"),
        (("--hf", "--only", ""), "--only is empty"),
        (("--hf", "--only", "model"), "its parts are 'net', 'optimizer'"),
    ],
)
def test_unusable_option_is_refused_by_name(
    runs: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    result = run("export", "latest", "--dir", runs, "-o", tmp_path / "out", *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
