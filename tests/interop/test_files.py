# SPDX-License-Identifier: Apache-2.0
"""Files go both ways: MindSpore 2.10 loads ours to the same bits, and we load its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CorruptCheckpoint, UnsealedCheckpoint, load_checkpoint, save_checkpoint
from tests.interop.states import (
    ENCRYPTED,
    ENCRYPTED_WITH_CRC,
    PLAIN,
    Combination,
    facts_of,
    large_state,
    load_in_mindspore,
    random_array,
    random_state,
    save_in_mindspore,
    to_mindspore,
)

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:getName:DeprecationWarning"),  # MindSpore's own
]

_SEEDS = (0, 1, 2)


def _name(combination: Combination) -> str:
    return f"net.{combination.format}"


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("combination", [*PLAIN, *ENCRYPTED, *ENCRYPTED_WITH_CRC], ids=str)
def test_our_file_loads_in_mindspore_to_the_same_bits(
    tmp_path: Path, combination: Combination, seed: int
) -> None:
    state = random_state(seed, combination)
    save_checkpoint(state, tmp_path / _name(combination), **combination.save_options)
    loaded = load_in_mindspore(tmp_path / _name(combination), combination)
    assert facts_of(loaded) == facts_of(state)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("combination", [*PLAIN, *ENCRYPTED], ids=str)
def test_mindspore_file_loads_to_the_same_bits(
    tmp_path: Path, combination: Combination, seed: int
) -> None:
    state = random_state(seed, combination)
    save_in_mindspore(state, tmp_path / _name(combination), combination)
    loaded = load_checkpoint(
        tmp_path / _name(combination), **combination.load_options, allow_unsealed=True
    )
    assert facts_of(loaded) == facts_of(state)


_LARGE = (
    *(one for one in PLAIN if not (one.format == "safetensors" and one.has_crc)),
    *(one for one in ENCRYPTED if one.key_bytes in (16, 32)),
    *(one for one in ENCRYPTED_WITH_CRC if one.key_bytes == 16),
)


@pytest.mark.parametrize("combination", _LARGE, ids=str)
def test_our_file_of_several_blocks_loads_in_mindspore(
    tmp_path: Path, combination: Combination
) -> None:
    state = large_state(3)
    save_checkpoint(state, tmp_path / _name(combination), **combination.save_options)
    assert facts_of(load_in_mindspore(tmp_path / _name(combination), combination)) == facts_of(
        state
    )


@pytest.mark.parametrize("combination", ENCRYPTED, ids=str)
def test_mindspore_file_of_two_cipher_blocks_loads(
    tmp_path: Path, combination: Combination
) -> None:
    state = {"w": np.arange(17 << 20, dtype=np.float32), "b": np.ones(3, np.float16)}
    save_in_mindspore(state, tmp_path / "net.ckpt", combination)
    loaded = load_checkpoint(tmp_path / "net.ckpt", **combination.load_options, allow_unsealed=True)
    assert facts_of(loaded) == facts_of(state)


@pytest.mark.parametrize("combination", [PLAIN[0], PLAIN[2]], ids=str)
def test_int4_parameter_goes_both_ways(tmp_path: Path, combination: Combination) -> None:
    stored = np.array([[1, -2], [127, -128]], np.int8)
    tensor = mindspore.Tensor(stored, dtype=mindspore.qint4x2)
    parameters = {"quantised": mindspore.Parameter(tensor, name="quantised")}
    theirs, ours = tmp_path / f"a.{combination.format}", tmp_path / f"b.{combination.format}"
    mindspore.save_checkpoint(parameters, str(theirs), format=combination.format)
    save_checkpoint(parameters, ours, format=combination.format)
    assert np.array_equal(load_checkpoint(theirs)["quantised"], stored)
    loaded = load_in_mindspore(ours, combination)["quantised"]
    assert (str(loaded.dtype), loaded.asnumpy().tobytes()) == (str(tensor.dtype), stored.tobytes())


@pytest.mark.parametrize("value", [0, 1, 3, 250, True, 1.5])
def test_scalar_in_safetensors_crc_is_what_mindspore_computes(tmp_path: Path, value: float) -> None:
    combination = Combination(format="safetensors", has_crc=True)
    state = {"scalar": np.array(value), "w": np.ones(2, np.float32)}
    save_checkpoint(state, tmp_path / "ours.safetensors", **combination.save_options)
    save_in_mindspore(state, tmp_path / "theirs.safetensors", combination)
    assert facts_of(load_in_mindspore(tmp_path / "ours.safetensors", combination)) == facts_of(
        state
    )
    loaded = load_checkpoint(tmp_path / "theirs.safetensors", **combination.load_options)
    assert facts_of(loaded) == facts_of(state)


@pytest.mark.parametrize("has_crc", [False, True])
def test_aligned_file_with_odd_tensors_loads_in_mindspore(tmp_path: Path, has_crc: bool) -> None:
    state = {
        "a.bias": np.arange(3, dtype=np.float32),
        "b.weight": np.arange(400_000, dtype=np.float32).reshape(-1, 100),
        "c.codes": np.arange(5, dtype=np.uint8),
    }
    combination = Combination(format="safetensors", has_crc=has_crc)
    path = tmp_path / "net.safetensors"
    save_checkpoint(state, path, **combination.save_options)
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0
    assert facts_of(load_in_mindspore(path, combination)) == facts_of(state)


def test_bfloat16_in_safetensors_with_crc_loads_in_mindspore_unchecked(tmp_path: Path) -> None:
    state = {"w": random_array(np.random.default_rng(0), "bfloat16", (4, 5))}
    save_checkpoint(state, tmp_path / "net.safetensors", format="safetensors", crc_check=True)
    loaded = load_in_mindspore(tmp_path / "net.safetensors", Combination(format="safetensors"))
    assert facts_of(loaded) == facts_of(state)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_our_tensor_without_elements_loads_in_mindspore(tmp_path: Path, format: str) -> None:
    state = {"none": np.zeros((0, 3), np.float32), "w": np.ones(2, np.float32)}
    save_checkpoint(state, tmp_path / f"net.{format}", format=format)
    loaded = load_in_mindspore(tmp_path / f"net.{format}", Combination(format=format))
    assert facts_of(loaded) == facts_of(state)


@pytest.mark.parametrize("async_save", ["thread", "process"])
def test_file_of_an_asynchronous_mindspore_save_loads(tmp_path: Path, async_save: str) -> None:
    state = random_state(5, Combination())
    parameters, texts = to_mindspore(state)
    path = tmp_path / "net.ckpt"
    mindspore.save_checkpoint(parameters, str(path), append_dict=texts, async_save=async_save)
    _wait_for_mindspore(async_save)
    assert facts_of(load_checkpoint(path)) == facts_of(state)


def _wait_for_mindspore(async_save: str) -> None:
    from mindspore.train import serialization

    wait: Any = getattr(serialization, f"_wait_async_{async_save}_save_ckpt")
    wait()


@pytest.mark.parametrize("combination", ENCRYPTED_WITH_CRC, ids=str)
def test_mindspore_file_with_key_and_crc_is_rescued(
    tmp_path: Path, combination: Combination
) -> None:
    # MindSpore appends a CRC trailer behind the last cipher block and can never load the file again.
    state = {"w": np.arange(9, dtype=np.float32)}
    path = tmp_path / "net.ckpt"
    save_in_mindspore(state, path, combination)
    with pytest.raises(ValueError, match=r"tempered|permission"):
        load_in_mindspore(path, combination)
    options = {**combination.load_options, "crc_check": False}
    assert facts_of(load_checkpoint(path, **options, allow_unsealed=True)) == facts_of(state)


@pytest.mark.parametrize("combination", ENCRYPTED, ids=str)
def test_mindspore_file_is_refused_with_a_key_unless_unsealed_ones_are_allowed(
    tmp_path: Path, combination: Combination
) -> None:
    save_in_mindspore({"w": np.ones(3, np.float32)}, tmp_path / "net.ckpt", combination)
    with pytest.raises(UnsealedCheckpoint, match="no seal"):
        load_checkpoint(tmp_path / "net.ckpt", **combination.load_options)


def test_file_cut_between_two_parameters_is_refused_where_mindspore_loads_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "net.ckpt"
    save_checkpoint({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, path)
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert list(load_in_mindspore(path, Combination())) == ["a"]
    with pytest.raises(CorruptCheckpoint):
        load_checkpoint(path)


def test_dictionary_order_is_kept_both_ways(tmp_path: Path) -> None:
    state = {name: np.ones(1, np.float32) for name in ("z", "a", "m")}
    save_checkpoint(state, tmp_path / "ours.ckpt")
    save_in_mindspore(state, tmp_path / "theirs.ckpt", Combination())
    assert list(load_in_mindspore(tmp_path / "ours.ckpt", Combination())) == ["z", "a", "m"]
    assert list(load_checkpoint(tmp_path / "theirs.ckpt")) == ["z", "a", "m"]


def test_plain_files_of_both_are_the_same_bytes(tmp_path: Path) -> None:
    state = random_state(7, Combination())
    parameters, texts = to_mindspore(state)
    for crc in (False, True):
        ours, theirs = tmp_path / f"ours{crc}.ckpt", tmp_path / f"theirs{crc}.ckpt"
        save_checkpoint(parameters, ours, append_dict=texts, crc_check=crc)
        mindspore.save_checkpoint(parameters, str(theirs), append_dict=texts, crc_check=crc)
        assert ours.read_bytes() == theirs.read_bytes()


def test_append_dict_is_stored_as_mindspore_stores_it(tmp_path: Path) -> None:
    append = {
        **{"int": 7, "negative": -7, "big": 2**63, "float": 0.1, "bool": True, "text": "héé"},
        **{"empty": "", "array": mindspore.Tensor(np.ones((2, 2), np.float16))},
        "generator": mindspore.Generator(),
    }
    parameters, _ = to_mindspore({"w": np.ones(3, np.float32)})
    save_checkpoint(parameters, tmp_path / "ours.ckpt", append_dict=append)
    mindspore.save_checkpoint(parameters, str(tmp_path / "theirs.ckpt"), append_dict=append)
    assert (tmp_path / "ours.ckpt").read_bytes() == (tmp_path / "theirs.ckpt").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"filter_prefix": "a"},
        {"filter_prefix": ["a.", "b"]},
        {"specify_prefix": ("a.x", "b")},
        {"specify_prefix": "a", "filter_prefix": "a.x"},
        {"choice_func": lambda name: name.endswith("x")},
    ],
)
def test_chosen_names_are_those_mindspore_chooses(tmp_path: Path, options: dict[str, Any]) -> None:
    state = {name: np.ones(1, np.float32) for name in ("a.x", "a.y", "b.x", "ab", "c.x")}
    path = tmp_path / "net.ckpt"
    save_checkpoint(state, path)
    assert list(load_checkpoint(path, **options)) == list(
        mindspore.load_checkpoint(str(path), **options)
    )
