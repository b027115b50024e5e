# SPDX-License-Identifier: Apache-2.0
"""Loading into arrays that exist: compared as a whole first, then filled where they are."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import (
    ChecksumMismatch,
    CorruptCheckpoint,
    StateMismatch,
    UnsealedCheckpoint,
    load_checkpoint,
    save_checkpoint,
)
from ckptmgr.store.manifest.codec import manifest_name
from tests.support.saved import flip
from tests.support.surface import KEY

MIB = 1 << 20
SAVED = {
    "big": np.random.default_rng(0).random(3 * MIB // 2, np.float32).reshape(2, -1),
    "half": np.arange(5).astype(ml_dtypes.bfloat16),
    "flag": np.array([True, False]),
    "scalar": np.array(7, np.int64),
    "empty": np.empty((0, 3), np.float32),
}
WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ckpt": ("x.ckpt", {}, {}),
    "crc": ("x.ckpt", {"crc_check": True}, {"crc_check": True}),
    "safetensors": ("x.safetensors", {"format": "safetensors"}, {}),
    "safetensors-crc": (
        "x.safetensors",
        {"format": "safetensors", "crc_check": True},
        {"crc_check": True},
    ),
    "gcm": ("x.ckpt", {"enc_key": KEY}, {"dec_key": KEY}),
    "sm4": (
        "x.ckpt",
        {"enc_key": KEY, "enc_mode": "SM4-CBC"},
        {"dec_key": KEY, "dec_mode": "SM4-CBC"},
    ),
}


def saved(directory: Path, state: dict[str, Any] = SAVED, **options: Any) -> Path:
    name = f"x.{options.get('format', 'ckpt')}"
    save_checkpoint(state, directory / name, **options)
    return directory / name


def emptied(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: np.zeros_like(array) for name, array in state.items()}


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


@pytest.mark.parametrize("way", WAYS)
def test_arrays_are_filled_where_they_are(tmp_path: Path, way: str) -> None:
    name, saving, loading = WAYS[way]
    save_checkpoint(SAVED, tmp_path / name, **saving)
    into = emptied(SAVED)
    loaded = load_checkpoint(tmp_path / name, into=into, **loading)
    assert same(into, SAVED)
    assert all(loaded[key] is into[key] for key in into)


def test_only_what_is_named_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path)
    into = {"scalar": np.zeros((), np.int64)}
    assert load_checkpoint(path, into=into).keys() == {"scalar"}
    assert into["scalar"] == 7


@pytest.mark.parametrize(
    "layout",
    [
        lambda array: np.asfortranarray(array),
        lambda array: np.repeat(array, 2, axis=0)[::2],
        lambda array: array.astype(array.dtype.newbyteorder(">")),
    ],
    ids=["fortran", "strided", "big-endian"],
)
def test_other_layouts_go_through_a_buffer(tmp_path: Path, layout: Any) -> None:
    want = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = saved(tmp_path, {"w": want})
    target = layout(np.zeros_like(want))
    load_checkpoint(path, into={"w": target})
    assert np.array_equal(target, want)


def test_torch_tensors_of_any_layout_are_filled(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {
        "half": torch.arange(6, dtype=torch.bfloat16),
        "weight": torch.nn.Parameter(torch.rand(2, 3)),
        "turned": torch.rand(3, 2),
        "scalar": torch.tensor(5),
        "complex": torch.tensor([1 + 2j]),
    }
    path = saved(tmp_path, state, format="safetensors")
    into = {
        "half": torch.zeros(6, dtype=torch.bfloat16),
        "weight": torch.nn.Parameter(torch.zeros(2, 3)),
        "turned": torch.zeros(2, 3).T,
        "scalar": torch.tensor(0),
        "complex": torch.zeros(1, dtype=torch.complex64).conj(),
    }
    load_checkpoint(path, into=into)
    assert all(torch.equal(into[name], state[name]) for name in state)


def test_every_difference_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    path = saved(tmp_path, {**SAVED, "text": "words"})
    read_only = np.zeros(2, bool)
    read_only.flags.writeable = False
    into = {
        "big": np.zeros((3, 4), np.float32),
        "half": np.zeros(5, np.float16),
        "flag": read_only,
        "scalar": np.zeros((), np.int64),
        "text": np.zeros(1),
        "absent": np.zeros(1),
        "empty": [0.0],
    }
    with pytest.raises(StateMismatch) as caught:
        load_checkpoint(path, into=into)
    for problem in (
        "'big' is float32[3, 4], stored is float32[2, 786432]",
        "'half' is float16[5], stored is bfloat16[5]",
        "'flag' cannot be written to",
        "'text' is stored as a text",
        "'absent' is not in the checkpoint",
        "'empty' is a builtins.list, not a NumPy array or torch tensor",
    ):
        assert problem in str(caught.value)
    assert "scalar" not in str(caught.value)
    assert into["scalar"] == 0


def test_many_differences_are_counted(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(StateMismatch, match=r"\.\.\. and 20 more"):
        load_checkpoint(path, into={f"w{n}": np.zeros(1) for n in range(120)})


@pytest.mark.parametrize("make", ["meta", "sparse", "expanded", "wrapper"])
def test_torch_tensor_without_memory_of_its_own_is_refused(tmp_path: Path, make: str) -> None:
    torch = pytest.importorskip("torch")

    def dispatch(*_: object) -> object:
        raise NotImplementedError

    elsewhere = type("Elsewhere", (torch.Tensor,), {"__torch_dispatch__": classmethod(dispatch)})
    tensors = {
        "meta": lambda: torch.zeros(2, device="meta"),
        "sparse": lambda: torch.zeros(2).to_sparse(),
        "expanded": lambda: torch.zeros(1).expand(2),
        "wrapper": lambda: torch.Tensor._make_subclass(elsewhere, torch.zeros(2)),
    }
    path = saved(tmp_path, {"w": np.zeros(2, np.float32)})
    with pytest.raises(StateMismatch, match="'w' cannot be written to"):
        load_checkpoint(path, into={"w": tensors[make]()})


STARTS = st.lists(st.integers(0, 300), min_size=3, max_size=3)


@given(starts=STARTS, is_alike=st.booleans())
@settings(max_examples=20)
def test_arrays_that_share_memory_take_what_is_equal_there_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, starts: list[int], is_alike: bool
) -> None:
    whole = np.arange(400, dtype=np.uint16).astype(np.uint8)
    values = cut(whole, starts) if is_alike else [np.full(100, n, np.uint8) for n in (1, 2, 3)]
    path = saved(tmp_path_factory.mktemp("shared"), {f"w{n}": one for n, one in enumerate(values)})
    memory = np.zeros(400, np.uint8)
    into = {f"w{n}": one for n, one in enumerate(cut(memory, starts))}
    is_apart = all(b - a >= 100 for a, b in itertools.pairwise(sorted(starts)))
    if is_alike or is_apart:
        load_checkpoint(path, into=into)
        assert all(np.array_equal(into[f"w{n}"], one) for n, one in enumerate(values))
        return
    with pytest.raises(StateMismatch, match=r"'w\d' (overlaps|is the same memory as) 'w\d'"):
        load_checkpoint(path, into=into)
    assert not memory.any()


def test_torch_tensors_and_arrays_that_overlap_are_refused_by_name(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    path = saved(tmp_path, {"a": np.ones(4, np.float32), "b": np.full(4, 2, np.float32)})
    memory = np.zeros(6, np.float32)
    with pytest.raises(StateMismatch, match="'b' overlaps 'a' in memory, stored are two different"):
        load_checkpoint(path, into={"a": memory[:4], "b": torch.from_numpy(memory)[2:]})
    assert not memory.any()


@pytest.mark.parametrize("kind", ["mapping", "tensors", "module"])
def test_network_with_tied_weights_takes_what_is_equal_and_nothing_else(
    tmp_path: Path, kind: str
) -> None:
    torch: Any = pytest.importorskip("torch")
    module = torch.nn.Module()
    module.a = module.b = torch.nn.Parameter(torch.zeros(3))
    array = np.zeros(3, np.float32)
    nets = {"mapping": {"a": array, "b": array}, "tensors": dict(module.state_dict())}
    net = nets.get(kind, module)
    values = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    load_checkpoint(saved(tmp_path, values), net=net)
    assert float(array.sum() + module.a.detach().sum()) == 3.0
    path = saved(tmp_path, {**values, "b": np.full(3, 2, np.float32)})
    with pytest.raises(StateMismatch, match=r"fit the network[^$]*'b' is the same memory as 'a'"):
        load_checkpoint(path, net=net)
    assert float(array.sum() + module.a.detach().sum()) == 3.0


def cut(memory: np.ndarray, starts: list[int]) -> list[np.ndarray]:
    return [memory[start : start + 100] for start in starts]


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_damage_is_an_error_that_says_what_became_of_the_arrays(
    tmp_path: Path, key: bytes | None
) -> None:
    path = saved(tmp_path, enc_key=key)
    if key is not None:  # else the digests say so before the first byte is written
        path.with_name(manifest_name(path.name)).unlink()
    flip(path, 5 * MIB)
    with pytest.raises(CorruptCheckpoint) as caught:
        load_checkpoint(path, into=emptied(SAVED), dec_key=key)
    assert "undefined" in caught.value.__notes__[0]


def test_damage_that_looks_like_a_difference_is_damage(tmp_path: Path) -> None:
    path = saved(tmp_path, {"weight": np.zeros(2, np.float32)})
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content.replace(b"weight", b"height"))
    with pytest.raises(ChecksumMismatch):
        load_checkpoint(path, into={"weight": np.zeros(2, np.float32)})


def test_error_before_the_first_byte_says_nothing_about_the_arrays(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with pytest.raises(UnsealedCheckpoint) as caught:
        load_checkpoint(path, into=emptied(SAVED), dec_key=KEY)
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("other", [{"net": {}}, {"choice_func": str}, {"filter_prefix": "w"}])
def test_into_goes_with_no_other_choice(tmp_path: Path, other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="'into' says what is loaded"):
        load_checkpoint(saved(tmp_path), into=emptied(SAVED), **other)
