# SPDX-License-Identifier: Apache-2.0
"""`export_weights`: the weights in a checkpoint in the layout of the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from ckptmgr import (
    CheckpointNotFound,
    CorruptCheckpoint,
    KeyProblem,
    StateMismatch,
    UnsafeWrite,
    UnsupportedCheckpoint,
    export_weights,
    save_checkpoint,
    save_state,
)
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import MapTensors, Tensor, TensorSpec, tensor_from_array
from tests.support import api
from tests.support.saved import flip, items, save_run

KEY = bytes(range(32))
RANDOM = np.random.default_rng(0)
NET: dict[str, np.ndarray] = {
    "0.weight": RANDOM.standard_normal((300, 200)).astype(np.float32),
    "0.bias": RANDOM.standard_normal(300).astype(np.float32),
    "1.count": np.array(7, np.int64),
    "1.mask": np.array([True, False, True]),
    "2.empty": np.zeros((0, 3), np.float16),
}
STATE = {"net": NET, "optimizer": {"m": np.zeros(5000)}, "step": 7}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file with a network and an optimizer."""
    return save_state(STATE, tmp_path / "net.safetensors").path


def loaded(directory: Path) -> dict[str, np.ndarray]:
    """Return all tensors of an export, as the library reads its files."""
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def assert_same(found: Mapping[str, np.ndarray], wanted: Mapping[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "np") as file:
        found: dict[str, str] = file.metadata()
    return found


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("net.safetensors", {}),
        ("net.ckpt", {}),
        ("net.safetensors.ckpz", {"compression": "zstd"}),
        ("net.safetensors.ckpe", {"enc_key": KEY}),
        ("net.ckpt", {"enc_key": KEY}),
        ("net.safetensors", {"manifest": False}),
        ("net.safetensors", {"manifest": False, "crc_check": False}),
    ],
    ids=["safetensors", "ckpt", "compressed", "container", "sealed", "with CRC", "bare"],
)
def test_part_of_a_state_is_exported_under_its_own_names(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = save_state(STATE, tmp_path / name, **options).path
    done = export_weights(path, tmp_path / "out", only="net", dec_key=options.get("enc_key"))
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    assert_same(loaded(tmp_path / "out"), NET)
    assert metadata_of(tmp_path / "out/model.safetensors") == {"format": "pt"}
    assert (done.tensor_count, done.tensor_bytes) == (5, sum(one.nbytes for one in NET.values()))
    assert done.is_verified == ("crc_check" not in options)


def test_weights_larger_than_a_shard_are_split_with_an_index(saved: Path, tmp_path: Path) -> None:
    done = export_weights(saved, tmp_path / "out", only="net", max_shard_size="240.5KB")
    names = names_in(tmp_path / "out")
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        INDEX,
    ]
    assert [path.name for path in done.files] == names
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"] == {"total_size": done.tensor_bytes}
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert_same(loaded(tmp_path / "out"), NET)


def test_large_tensors_are_read_in_pieces_and_whole(tmp_path: Path) -> None:
    large = {"a": np.arange(2_300_001, dtype=np.float64), "b": np.arange(9_000, dtype=np.int16)}
    for name, key in (("net.ckpt", None), ("net.safetensors.ckpe", KEY)):
        path = save_state({"net": large}, tmp_path / name, enc_key=key).path
        export_weights(path, tmp_path / f"{name}.out", only="net", dec_key=key)
        assert_same(loaded(tmp_path / f"{name}.out"), large)


def test_tied_weights_are_written_once_and_noted(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.ModuleDict({"emb": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8)})
    model["head"].weight = model["emb"].weight
    path = save_state({"model": model}, tmp_path / "net.safetensors").path
    done = export_weights(path, tmp_path / "out", only="model", max_shard_size=40)
    assert done.ties == {"head.weight": "emb.weight"}
    assert sorted(loaded(tmp_path / "out")) == ["emb.weight", "head.bias"]
    for file in (tmp_path / "out").glob("*.safetensors"):
        assert metadata_of(file) == {"format": "pt", "head.weight": "emb.weight"}
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["head.weight"] == "emb.weight"
    assert sorted(index["weight_map"]) == ["emb.weight", "head.bias"]


def test_tensor_shared_with_another_part_keeps_its_name_in_the_part(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.ones(3)
    state = {"first": {"w": weight}, "net": {"a": weight, "b": weight}}
    path = save_state(state, tmp_path / "net.safetensors").path
    done = export_weights(path, tmp_path / "out", only="net")
    assert sorted(loaded(tmp_path / "out")) == ["a"]
    assert done.ties == {"b": "a"}


def test_part_may_end_within_the_names_of_a_module(tmp_path: Path) -> None:
    state = {"state_dict": {"model.0.weight": np.ones(3), "loss.weight": np.ones(2)}}
    path = save_state(state, tmp_path / "net.safetensors").path
    export_weights(path, tmp_path / "out", only="state_dict/model")
    assert sorted(loaded(tmp_path / "out")) == ["0.weight"]
    export_weights(path, tmp_path / "dot", only="state_dict/model.")
    assert sorted(loaded(tmp_path / "dot")) == ["0.weight"]


def test_slash_in_a_key_of_a_state_is_a_slash_in_the_name(tmp_path: Path) -> None:
    path = save_state({"net": {"dense/kernel": np.ones(3)}}, tmp_path / "net.safetensors").path
    export_weights(path, tmp_path / "out", only="net")
    assert list(loaded(tmp_path / "out")) == ["dense/kernel"]


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    state = {"net": {"a/b": np.ones(3), "a": {"b": np.ones(2)}}}
    path = save_state(state, tmp_path / "net.safetensors").path
    with pytest.raises(UnsupportedCheckpoint, match="would both be called 'a/b'"):
        export_weights(path, tmp_path / "out", only="net")


def test_name_that_is_nothing_but_the_part_is_refused(tmp_path: Path) -> None:
    tensors = [tensor_from_array("net/", np.ones(3))]
    (path,) = save_run(tmp_path / "run", [1], content=tensors)
    with pytest.raises(UnsupportedCheckpoint, match="'net/' would have no name"):
        export_weights(path, tmp_path / "out", only="net")


def test_without_a_part_all_tensors_keep_their_names(saved: Path, tmp_path: Path) -> None:
    done = export_weights(saved, tmp_path / "out")
    assert sorted(loaded(tmp_path / "out")) == sorted(
        [*(f"net/{name}" for name in NET), "optimizer/m"]
    )
    assert sorted(done.parts) == ["net", "optimizer"]


def test_texts_are_left_out_and_named(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path / "run", [1])
    done = export_weights(path, tmp_path / "out")
    assert sorted(loaded(tmp_path / "out")) == ["epoch_num", "fc.weight"]
    assert done.left_out == ("net",)


def test_map_parameter_is_refused_by_name(tmp_path: Path) -> None:
    parts = {part: tensor_from_array(part, np.ones(2)) for part in ("key", "value", "status")}
    content = [*items(), MapTensors(name="table", **parts)]
    (path,) = save_run(tmp_path / "run", [1], content=content)
    with pytest.raises(UnsupportedCheckpoint, match="'table' is a map parameter"):
        export_weights(path, tmp_path / "out")


def test_int4_is_refused_by_name(tmp_path: Path) -> None:
    spec = TensorSpec(name="w", dtype=BY_NAME["int4"], shape=(2,))
    tensors = [Tensor(spec=spec, content=lambda: memoryview(b"ab"))]
    (path,) = save_run(tmp_path / "run", [1], content=tensors)
    with pytest.raises(UnsupportedCheckpoint, match="'w' is MindSpore's int4"):
        export_weights(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checkpoint_without_tensors_is_refused(tmp_path: Path) -> None:
    path = save_state({"step": 3}, tmp_path / "net.ckpt").path
    with pytest.raises(UnsupportedCheckpoint, match="nothing to export"):
        export_weights(path, tmp_path / "out")


def test_lone_tensor_is_exported_under_its_own_name(tmp_path: Path) -> None:
    state = {"net": {"w": np.ones(2)}, "ema": np.arange(3.0)}
    path = save_state(state, tmp_path / "net.safetensors").path
    export_weights(path, tmp_path / "out", only="ema")
    assert_same(loaded(tmp_path / "out"), {"ema": state["ema"]})
    with pytest.raises(StateMismatch, match="its parts are 'ema', 'net'"):
        export_weights(path, tmp_path / "other", only="em")


def test_missing_part_is_refused_with_those_that_are_there(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(StateMismatch, match="its parts are 'net', 'optimizer'"):
        export_weights(saved, tmp_path / "out", only="model")
    assert names_in(tmp_path) == sorted(["net.safetensors", "net.safetensors.manifest.json"])


def test_missing_part_of_flat_names_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(NET, tmp_path / "net", format="safetensors").path
    with pytest.raises(StateMismatch, match=r"no tensors of a part 'model'\n"):
        export_weights(path, tmp_path / "out", only="model")


def test_files_are_private_and_not_wider_than_the_input(saved: Path, tmp_path: Path) -> None:
    saved.chmod(0o444)
    export_weights(saved, tmp_path / "out", only="net", max_shard_size=1)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o400}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_damaged_checkpoint_leaves_no_directory(saved: Path, tmp_path: Path) -> None:
    flip(saved, saved.stat().st_size // 2)
    before = names_in(tmp_path)
    with pytest.raises(CorruptCheckpoint):
        export_weights(saved, tmp_path / "out")
    assert names_in(tmp_path) == before


def test_damaged_file_whose_crc_is_its_only_proof_is_refused(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "net.safetensors", manifest=False).path
    flip(path, path.stat().st_size - 5)
    with pytest.raises(CorruptCheckpoint, match="CRC32"):
        export_weights(path, tmp_path / "out")
    assert names_in(tmp_path) == ["net.safetensors"]


def test_encrypted_checkpoint_needs_its_key(tmp_path: Path) -> None:
    path = save_state(STATE, tmp_path / "net.safetensors", enc_key=KEY).path
    for key in (None, bytes(32)):
        with pytest.raises(KeyProblem):
            export_weights(path, tmp_path / "out", dec_key=key)
    assert not (tmp_path / "out").exists()


def test_directory_that_is_not_empty_is_refused_and_replaced_with_force(
    saved: Path, tmp_path: Path
) -> None:
    export_weights(saved, tmp_path / "out", max_shard_size=1)
    before = names_in(tmp_path / "out")
    with pytest.raises(UnsafeWrite, match="is not empty"):
        export_weights(saved, tmp_path / "out", only="net")
    assert names_in(tmp_path / "out") == before
    export_weights(saved, tmp_path / "out", only="net", force=True)
    assert names_in(tmp_path / "out") == ["model.safetensors"]
    assert not list(tmp_path.glob(".export*"))


def test_empty_directory_is_taken(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    export_weights(saved, tmp_path / "link", only="net")
    assert names_in(tmp_path / "out") == ["model.safetensors"]


@pytest.mark.parametrize("is_directory", [True, False])
def test_force_never_removes_what_no_export_wrote(
    saved: Path, tmp_path: Path, is_directory: bool
) -> None:
    export_weights(saved, tmp_path / "out", only="net")
    other = tmp_path / "out" / ("model-00001-of-00002.safetensors" if is_directory else "a.json")
    other.mkdir() if is_directory else other.touch()
    with pytest.raises(UnsafeWrite, match="which no export wrote") as caught:
        export_weights(saved, tmp_path / "out", force=True)
    assert other.name in str(caught.value)
    assert other.exists()


def test_force_never_removes_the_input(saved: Path, tmp_path: Path) -> None:
    export_weights(saved, tmp_path / "out", only="net")
    with pytest.raises(UnsafeWrite, match="holds the input"):
        export_weights(tmp_path / "out/model.safetensors", tmp_path / "out", force=True)


@pytest.mark.parametrize(
    ("target", "message"),
    [("file", "is no directory"), ("net.lease", "no such"), ("none/out", "no such directory")],
)
def test_target_that_can_be_no_new_directory_is_refused(
    saved: Path, tmp_path: Path, target: str, message: str
) -> None:
    (tmp_path / "file").touch()
    if target == "net.lease":
        target, message = ".net.lease", "is the name of a manifest"
    with pytest.raises((UnsafeWrite, CheckpointNotFound), match=message):
        export_weights(saved, tmp_path / target, force=True)


def test_failed_swap_leaves_the_earlier_export(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_weights(saved, tmp_path / "out", only="net")
    rename = os.replace
    failed: list[object] = []

    def failing(old: Any, new: Any, **options: Any) -> None:
        if Path(new).name == "out" and not failed:
            failed.append(old)
            raise OSError(5, "Input/output error")
        rename(old, new, **options)

    monkeypatch.setattr("ckptmgr.io.filesystem.os.replace", failing)
    with pytest.raises(OSError, match="Input/output error"):
        export_weights(saved, tmp_path / "out", force=True)
    assert failed
    assert_same(loaded(tmp_path / "out"), NET)
    assert not list(tmp_path.glob(".export*"))


def test_signed_checkpoint_is_exported_for_those_who_trust_the_signer(tmp_path: Path) -> None:
    signer, other = (api.SigningKey(bytes([n]) * 32) for n in (1, 2))
    path = save_state(STATE, tmp_path / "net.safetensors", signing_key=signer).path
    export_weights(path, tmp_path / "out", trusted_keys=[signer.public_key])
    with pytest.raises(KeyProblem):
        export_weights(path, tmp_path / "other", trusted_keys=[other.public_key])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ""}, "only names no part"),
        ({"only": ["net"]}, "only must be the name"),
        ({"max_shard_size": "5 apples"}, "max_shard_size must be a size"),
        ({"max_shard_size": 0}, "at least one byte"),
        ({"max_shard_size": 1.5}, "max_shard_size must be a number"),
        ({"force": 1}, "force"),
    ],
)
def test_unusable_argument_is_refused_by_name(
    saved: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        export_weights(saved, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
