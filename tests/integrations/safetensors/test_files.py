# SPDX-License-Identifier: Apache-2.0
"""`save_file` and `load_file`: the library's bytes without a key, a container with one."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy

import ckptmgr
from ckptmgr import KeyProblem, UnsupportedCheckpoint, UnsupportedState
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.integrations.safetensors import numpy
from ckptmgr.io.temp_names import temp_name

KEY = bytes(range(32))
TENSORS: dict[str, Any] = {
    "b": np.arange(6, dtype=np.int64).reshape(2, 3),
    "a": np.ones(3, np.float16),
}
OF_LIBRARY = [row for row in BY_NAME.values() if row.safetensors]


def all_types() -> dict[str, np.ndarray]:
    """Return two arrays of each type that the library knows, in an order that is not the file's."""
    arrays = {row.name: np.ones((2, 3), row.to_numpy()) for row in reversed(OF_LIBRARY)}
    return {**arrays, **{f"{name}.b": array[:0] for name, array in arrays.items()}}


@pytest.mark.parametrize("metadata", [None, {}, {"format": "ms"}, {"b": "also a tensor"}])
def test_file_has_the_bytes_that_the_library_writes(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    # Without tensors and with empty metadata the library writes what no program reads.
    for tensors in (all_types(), TENSORS, *([] if metadata == {} else [{}])):
        ckptmgr.save_file(tensors, tmp_path / "ours", metadata)
        safetensors.numpy.save_file(tensors, tmp_path / "theirs", metadata)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_file_of_torch_tensors_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = importlib.import_module("safetensors.torch")
    tensors = {
        "w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "f4": torch.zeros(2, 2, dtype=torch.float4_e2m1fn_x2),
        "f8": torch.ones(5).to(torch.float8_e4m3fn),
    }
    ckptmgr.save_file(tensors, tmp_path / "ours")
    library.save_file(tensors, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_array_of_another_layout_is_saved_in_order(tmp_path: Path) -> None:
    array = np.arange(6).reshape(2, 3).T
    ckptmgr.save_file({"w": array}, tmp_path / "x")
    assert np.array_equal(numpy.load_file(tmp_path / "x")["w"], array)


def test_file_is_durable_for_its_owner_and_has_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for key in (None, KEY):
        ckptmgr.save_file(TENSORS, path, key=key)
        assert path.stat().st_mode & 0o777 == 0o600
        names = sorted(one.name for one in tmp_path.iterdir())
        assert names == ["model.safetensors", "model.safetensors.manifest.json"]
        with ckptmgr.open_checkpoint(path, dec_key=key) as reader:
            assert reader.is_verified


@pytest.mark.parametrize("key", [None, KEY, "env:RUN_KEY"], ids=["plain", "bytes", "source"])
def test_loaded_tensors_are_those_that_were_saved(
    tmp_path: Path, key: bytes | str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_KEY", KEY.hex())
    ckptmgr.save_file(TENSORS, tmp_path / "x", {"a": "b"}, key=key)
    loaded = ckptmgr.load_file(tmp_path / "x", framework="np", key=key)
    assert {name: (one.dtype, one.tolist()) for name, one in loaded.items()} == {
        name: (one.dtype, one.tolist()) for name, one in TENSORS.items()
    }


def test_encrypted_file_needs_its_key(tmp_path: Path) -> None:
    ckptmgr.save_file(TENSORS, tmp_path / "x", key=KEY)
    for key in (None, bytes(32)):
        with pytest.raises(KeyProblem):
            ckptmgr.load_file(tmp_path / "x", framework="np", key=key)
    assert b"data_offsets" not in (tmp_path / "x").read_bytes()


def test_trust_of_a_load_is_that_of_an_opening(tmp_path: Path) -> None:
    ckptmgr.save_file(TENSORS, tmp_path / "x")
    with pytest.raises(KeyProblem, match="allow_unencrypted"):
        ckptmgr.load_file(tmp_path / "x", framework="np", key=KEY)
    loaded = ckptmgr.load_file(tmp_path / "x", framework="np", key=KEY, allow_unencrypted=True)
    assert set(loaded) == set(TENSORS)


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ("w", ValueError, r"Expected a dict of \[str, torch.Tensor\]"),
        ({"w": [1]}, ValueError, "Key `w` is invalid, expected torch.Tensor but received"),
        ({1: np.ones(1)}, TypeError, "key should be str"),
        ({"w": np.ones(1, complex)}, UnsupportedCheckpoint, "complex128"),
        ({"w": np.ones(1, object)}, UnsupportedState, "'w' has elements of type object"),
        ({"__metadata__": np.ones(1)}, UnsupportedCheckpoint, "is also a metadata key"),
    ],
)
def test_what_is_no_tensor_is_refused(
    tmp_path: Path, tensors: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ckptmgr.save_file(tensors, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_unusable_arguments_are_refused(tmp_path: Path) -> None:
    metadata: Any = {"a": 1}
    with pytest.raises(TypeError, match="'metadata' must map strings to strings"):
        ckptmgr.save_file(TENSORS, tmp_path / "x", metadata)
    with pytest.raises(ValueError, match="a key for AES-GCM must be 16 or 24 or 32 bytes"):
        ckptmgr.save_file(TENSORS, tmp_path / "x", key=b"short")
    with pytest.raises(FileNotFoundError):
        ckptmgr.save_file(TENSORS, tmp_path / "none" / "x")


def test_torch_tensors_that_cannot_be_saved_are_refused_as_by_the_library(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    library = importlib.import_module("safetensors.torch")
    whole = torch.zeros(4, 4)
    for tensors in (
        {"a": whole, "b": whole},
        {"a": whole[:2], "b": whole[1:]},
        {"a": whole.t()[:2]},
        {"a": torch.zeros(2, 2).to_sparse()},
        {"a": torch.zeros(2, device="meta")},
    ):
        with pytest.raises((ValueError, RuntimeError)) as theirs:
            library.save_file(tensors, tmp_path / "theirs")
        with pytest.raises(theirs.type):
            ckptmgr.save_file(tensors, tmp_path / "ours")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_model_with_shared_tensors_comes_back(tmp_path: Path, key: bytes | None) -> None:
    torch = pytest.importorskip("torch")
    ours: Any = importlib.import_module("ckptmgr.integrations.safetensors.torch")

    def model() -> Any:
        linear = torch.nn.Linear(3, 3)
        return torch.nn.ModuleDict({"a": linear, "b": linear})

    saved, path = model(), tmp_path / "model.safetensors"
    ours.save_model(saved, path, {"b.bias": "mine"}, key=key)
    with ckptmgr.safe_open(path, "np", key=key) as file:
        assert file.metadata() == {"b.weight": "a.weight", "b.bias": "mine"}
    loaded = model()
    assert ours.load_model(loaded, path, key=key) == (set(), [])
    assert torch.equal(loaded["b"].weight, saved["a"].weight)


def test_model_of_another_layout_is_packed_unless_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ours: Any = importlib.import_module("ckptmgr.integrations.safetensors.torch")
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.rand(3, 2).t())
    with pytest.raises(ValueError, match="Or use save_model"):
        ours.save_model(model, tmp_path / "x", force_contiguous=False)
    ours.save_model(model, tmp_path / "x")
    assert torch.equal(ours.load_file(tmp_path / "x")["weight"], model.weight)


def test_model_that_differs_from_the_file_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ours: Any = importlib.import_module("ckptmgr.integrations.safetensors.torch")
    ours.save_model(torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1)}), tmp_path / "x", key=KEY)
    other = torch.nn.ModuleDict({"b": torch.nn.Linear(1, 1)})
    larger = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)})
    with pytest.raises(RuntimeError, match=r'Missing key.*"b.bias", "b.weight"$'):
        ours.load_model(larger, tmp_path / "x", key=KEY)
    with pytest.raises(RuntimeError, match=r'Missing key.*"b.bias", "b.weight"\n.*Unexpected key'):
        ours.load_model(other, tmp_path / "x", key=KEY)
    missing, unexpected = ours.load_model(other, tmp_path / "x", strict=False, key=KEY)
    assert (missing, sorted(unexpected)) == ({"b.bias", "b.weight"}, ["a.bias", "a.weight"])
    shared = torch.nn.Linear(1, 1)
    twice = torch.nn.ModuleDict({"a": shared, "b": shared})
    ours.save_file(
        {
            f"{n}.{p}": torch.ones((1, 1) if p == "weight" else 1)
            for n in "ab"
            for p in ("weight", "bias")
        },
        tmp_path / "y",
    )
    assert sorted(ours.load_model(twice, tmp_path / "y", strict=False)[1]) == ["b.bias", "b.weight"]


@pytest.mark.parametrize("name", ["", ".numpy", ".torch", ".flax"])
def test_module_has_every_name_of_the_librarys(name: str) -> None:
    pytest.importorskip({".torch": "torch", ".flax": "jax"}.get(name, "numpy"))
    library = importlib.import_module(f"safetensors{name}")
    ours = importlib.import_module(f"ckptmgr.integrations.safetensors{name}")
    missing = [one for one in vars(library) if not one.startswith("__") and not hasattr(ours, one)]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numpy", "flax"])
def test_module_is_ours_however_it_is_imported(name: str) -> None:
    pytest.importorskip({"flax": "jax"}.get(name, name))
    # In a new process, where no other test has imported it as a module.
    code = (
        f"from ckptmgr.integrations.safetensors import {name} as one\n"
        "assert one.__name__.startswith('ckptmgr'), one\n"
        f"import ckptmgr.integrations.safetensors as two\n"
        f"assert two.{name} is one\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_jax_arrays_are_saved_and_loaded(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    from ckptmgr.integrations.safetensors import flax

    array = jnp.arange(3, dtype=jnp.bfloat16)
    for key in (None, KEY):
        flax.save_file({"w": array}, tmp_path / "x", key=key)
        loaded = flax.load_file(tmp_path / "x", key=key)["w"]
        assert (loaded.dtype, loaded.tolist()) == (array.dtype, array.tolist())


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    "name",
    [
        "e.safetensors.manifest.json",
        "run-1.shards",
        ".run.lease",
        ".run.starts",
        temp_name("e.ckpt", token="host-1-2", series="e"),
        ".ckptmgr-trash",
    ],
    ids=["manifest", "set", "lease", "starts", "temporary", "trash"],
)
def test_name_of_another_file_of_ckptmgr_is_refused(
    tmp_path: Path, name: str, key: bytes | None
) -> None:
    (tmp_path / name).write_bytes(b"kept")
    (tmp_path / "link").symlink_to(name)
    for path in (tmp_path / name, tmp_path / "link"):
        with pytest.raises(ValueError, match="that of another file of ckptmgr"):
            ckptmgr.save_file(TENSORS, path, key=key)
    assert (tmp_path / name).read_bytes() == b"kept"
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted([name, "link"])
