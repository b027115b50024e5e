# SPDX-License-Identifier: Apache-2.0
"""`save_state` and `load_state`: one nested state in one file."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    ChecksumMismatch,
    CorruptCheckpoint,
    KeyProblem,
    StateMismatch,
    UnprovenCheckpoint,
    UnsealedCheckpoint,
    UnsupportedCheckpoint,
    UnsupportedState,
    load_state,
    save_checkpoint,
    save_state,
)
from tests.support import api
from tests.support.saved import overwrite

KEY, OTHER_KEY = bytes(range(16)), bytes(range(16, 32))
NAMES = ("s.ckpt", "s.safetensors")


class Model:
    """An object with a state_dict."""

    def __init__(self, value: float) -> None:
        self.weights = np.full(3, value)

    def state_dict(self) -> dict[str, Any]:
        """Return its weights."""
        return {"w": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take weights."""
        self.weights = state["w"]


def state(value: float = 1.0) -> dict[str, Any]:
    """Return a nested state that has numbers drawn."""
    rng = np.random.default_rng(int(value))
    return {
        "layers": [{"w": np.full((2, 3), value)}, {"w": np.arange(4)}],
        "history": [value, (1, "two", None)],
        "rng": rng,
        "model": Model(value),
    }


def without_manifest(path: Path) -> Path:
    """Remove the manifest of a file; return the file."""
    api.manifest_of(path).unlink()
    return path


def flip_last_byte(path: Path) -> None:
    """Damage a file at its end."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    overwrite(path, bytes(content))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("key", [None, KEY])
def test_nested_state_comes_back_from_its_one_path(
    tmp_path: Path, name: str, has_manifest: bool, key: bytes | None
) -> None:
    path = tmp_path / name
    saved = save_state(state(1), path, enc_key=key)
    assert saved.path == path
    assert {one.name for one in tmp_path.iterdir()} == {name, api.manifest_name(name)}
    if not has_manifest:
        without_manifest(path)
    target = state(2)
    weights = target["layers"][0]["w"]
    restored: Any = load_state(path, target, dec_key=key)
    assert restored is target
    assert (restored["layers"][0]["w"] is weights, weights.tolist()) == (True, [[1] * 3] * 2)
    assert restored["history"] == [1.0, (1, "two", None)]
    assert restored["rng"].random() == np.random.default_rng(1).random()
    assert restored["model"].weights.tolist() == [1, 1, 1]


def test_state_without_a_target_is_built_anew(tmp_path: Path) -> None:
    save_state(lambda: [{"a": np.ones(2)}, 7], tmp_path / "s.ckpt")
    found: Any = load_state(tmp_path / "s.ckpt")
    assert (found[0]["a"].tolist(), found[1]) == ([1, 1], 7)


def test_facts_of_a_save_are_in_the_listing(tmp_path: Path) -> None:
    saved = save_state({"n": 1}, tmp_path / "s.ckpt", step=7, epoch=2, metrics={"loss": 0.5})
    assert (saved.step, saved.epoch, dict(saved.metrics)) == (7, 2, {"loss": 0.5})
    manifest = json.loads((tmp_path / api.manifest_name("s.ckpt")).read_text())
    assert (manifest["step"], manifest["metrics"]) == (7, {"loss": 0.5})


def test_second_save_replaces_the_first(tmp_path: Path) -> None:
    for value in (1, 2):
        save_state({"n": value}, tmp_path / "s.ckpt")
    assert load_state(tmp_path / "s.ckpt") == {"n": 2}


def test_failed_save_leaves_the_older_file(tmp_path: Path) -> None:
    save_state({"n": 1}, tmp_path / "s.ckpt")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_state({"w": np.ones(100_000)}, tmp_path / "s.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_state(tmp_path / "s.ckpt") == {"n": 1}


def test_format_is_that_of_the_name_or_the_given_one(tmp_path: Path) -> None:
    assert save_state({"n": 1}, tmp_path / "s.safetensors").format == "safetensors"
    assert save_state({"n": 1}, tmp_path / "s.ckpt").format == "ckpt"
    assert (
        save_state({"n": 1}, tmp_path / "state.bin", format="safetensors").format == "safetensors"
    )
    assert load_state(without_manifest(tmp_path / "state.bin")) == {"n": 1}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("s", {}, "neither .ckpt nor .safetensors; give format="),
        ("s.ckpt", {"format": "safetensors"}, "contradicts the name 's.ckpt'"),
        ("s.ckpt", {"format": "pt"}, "format must be 'ckpt' or 'safetensors', but got 'pt'"),
        ("s.manifest.json", {"format": "ckpt"}, "that of another file of ckptmgr"),
        ("s.shards", {"format": "ckpt"}, "that of another file of ckptmgr"),
        (".s.lease", {"format": "ckpt"}, "that of another file of ckptmgr"),
        (".s.starts", {"format": "safetensors"}, "that of another file of ckptmgr"),
        ("s.safetensors.ckpe", {}, r"ends in \.ckpe, but the file will be a safetensors file"),
        ("s.safetensors.ckpz", {}, r"ends in \.ckpz"),
        ("s.safetensors.ckpz", {"enc_key": KEY, "compression": "zstd"}, r"ends in \.ckpz"),
        ("s.ckpt", {"enc_mode": "SM4-CBC"}, "enc_mode='SM4-CBC' has no effect without enc_key"),
        ("s.ckpt", {"compression": "zstd"}, "needs format='safetensors'"),
        ("s.ckpt", {"step": -1}, "the step is an integer from 0 on"),
    ],
)
def test_argument_without_effect_or_sense_is_refused(
    tmp_path: Path, name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        save_state({"n": 1}, tmp_path / name, **given)
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_and_directory_in_place_of_the_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/s\.ckpt"):
        save_state({"n": 1}, tmp_path / "nowhere" / "s.ckpt")
    (tmp_path / "d.ckpt").mkdir()
    with pytest.raises(IsADirectoryError, match=r"d\.ckpt"):
        save_state({"n": 1}, tmp_path / "d.ckpt")


def test_value_that_cannot_be_stored_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match="bad"):
        save_state({"bad": object()}, tmp_path / "s.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_encrypted_and_compressed_file_is_a_container_under_its_name(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors.ckpe"
    saved = save_state({"w": np.zeros(99_999)}, path, enc_key=KEY, compression="zstd")
    assert (saved.cipher, saved.size_bytes < 400_000) == ("AES-GCM", True)
    found: Any = load_state(path, dec_key=KEY)
    assert not found["w"].any()


@pytest.mark.parametrize("name", NAMES)
def test_wrong_and_missing_keys_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_state({"n": 1}, path, enc_key=KEY)
    for key in (None, OTHER_KEY):
        with pytest.raises(KeyProblem):
            load_state(path, dec_key=key)


def test_plain_file_is_refused_with_a_key_unless_it_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "s.ckpt"
    save_state({"n": 1}, path)
    with pytest.raises(UnsealedCheckpoint, match=r"not authenticated|not encrypted"):
        load_state(path, dec_key=KEY)
    assert load_state(path, dec_key=KEY, allow_unencrypted=True) == {"n": 1}
    without_manifest(path)
    with pytest.raises(UnsealedCheckpoint, match="not encrypted"):
        load_state(path, dec_key=KEY)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", [None, {"w": np.zeros(9)}], ids=["new", "into"])
def test_damage_is_found_by_the_digests_and_changes_nothing(
    tmp_path: Path, name: str, target: Any
) -> None:
    path = tmp_path / name
    save_state({"w": np.ones(9)}, path)
    flip_last_byte(path)
    with pytest.raises(CorruptCheckpoint, match="digest"):
        load_state(path, target)
    assert target is None or not target["w"].any()


@pytest.mark.parametrize("name", NAMES)
def test_damage_without_a_manifest_is_found_by_the_crc(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_state({"w": np.ones(9)}, path, crc_check=True)
    without_manifest(path)
    found: Any = load_state(path)
    assert found["w"].all()
    content = path.read_bytes()
    at = content.index(np.ones(9).tobytes())
    overwrite(path, content[:at] + b"\x01" + content[at + 1 :])
    with pytest.raises(ChecksumMismatch):
        load_state(path, {"w": np.zeros(9)})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("target", [None, {"step": 0, "w": np.zeros(3)}], ids=["new", "into"])
def test_changed_number_in_the_state_tree_is_found_by_the_crc(
    tmp_path: Path, name: str, target: Any
) -> None:
    path = tmp_path / name
    save_state({"step": 5, "w": np.arange(3.0)}, path, crc_check=True)
    content = without_manifest(path).read_bytes()
    found: Any = load_state(path)
    assert found["step"] == 5
    changed = content.replace(b'"step\\",5', b'"step\\",7').replace(b'"step",5', b'"step",7')
    assert changed != content
    overwrite(path, changed)
    with pytest.raises(ChecksumMismatch, match=name):
        load_state(path, target)
    assert target is None or target["step"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_damage_without_a_manifest_is_found_by_the_seal(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save_state({"w": np.ones(100_000)}, path, enc_key=KEY)
    content = without_manifest(path).read_bytes()
    middle = len(content) // 2
    overwrite(path, content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    with pytest.raises((CorruptCheckpoint, KeyProblem)):
        load_state(path, dec_key=KEY)


def test_state_that_does_not_fit_is_named_and_unchanged(tmp_path: Path) -> None:
    save_state({"w": np.ones(2)}, tmp_path / "s.ckpt")
    target = {"w": np.zeros(3)}
    with pytest.raises(StateMismatch, match="w"):
        load_state(tmp_path / "s.ckpt", target)
    assert not target["w"].any()


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no such file") as caught:
        load_state(tmp_path / "s.ckpt")
    assert isinstance(caught.value, FileNotFoundError)


def test_file_of_named_tensors_and_set_of_ranks_are_refused_with_the_way_to_load_them(
    tmp_path: Path,
) -> None:
    save_checkpoint({"w": np.ones(2)}, tmp_path / "flat.ckpt")
    for name in ("flat.ckpt", "net-1.shards"):
        with pytest.raises(UnsupportedCheckpoint) as caught:
            load_state(tmp_path / name)
        assert "load_checkpoint" in str(caught.value.hint)


@pytest.mark.parametrize("key", [None, KEY])
def test_data_file_of_a_manager_loads_without_its_manifest(
    tmp_path: Path, key: bytes | None
) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(enc_key=key), prefix="net") as manager:
        manager.save(3, state(3))
    found: Any = load_state(without_manifest(tmp_path / "net-3.ckpt"), dec_key=key)
    assert found["layers"][0]["w"].tolist() == [[3] * 3] * 2


def test_signature_is_required_where_public_keys_are_trusted(tmp_path: Path) -> None:
    signing = pytest.importorskip("ckptmgr.crypto.keys.signing")
    pair = signing.SigningKey.generate()
    save_state({"n": 1}, tmp_path / "signed.ckpt", signing_key=pair)
    save_state({"n": 1}, tmp_path / "plain.ckpt")
    assert load_state(tmp_path / "signed.ckpt", trusted_keys=[pair.public_key]) == {"n": 1}
    with pytest.raises(KeyProblem):
        load_state(tmp_path / "plain.ckpt", trusted_keys=[pair.public_key])
    without_manifest(tmp_path / "signed.ckpt")
    with pytest.raises(UnprovenCheckpoint, match="no manifest"):
        load_state(tmp_path / "signed.ckpt", trusted_keys=[pair.public_key])


def test_torch_module_and_optimizer_are_restored_in_place(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")

    def made(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "epoch": seed}

    first, second = made(1), made(2)
    save_state(first, tmp_path / "s.safetensors")
    restored: Any = load_state(tmp_path / "s.safetensors", second)
    assert torch.equal(second["model"].weight, first["model"].weight)
    assert restored["epoch"] == 1
    moments = [one["optimizer"].state_dict()["state"][0]["exp_avg"] for one in (first, second)]
    assert torch.equal(*moments)
