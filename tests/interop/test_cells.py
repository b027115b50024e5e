# SPDX-License-Identifier: Apache-2.0
"""MindSpore Cells are saved and filled as MindSpore's own functions do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import load_checkpoint, load_param_into_net, open_checkpoint, save_checkpoint
from tests.interop.states import Combination, facts_of, load_in_mindspore, random_array

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
training = pytest.importorskip("tests.interop.training")
pytestmark = pytest.mark.interop


def _same(one: Any, other: Any) -> bool:
    ours, theirs = training.numbers_of(one), training.numbers_of(other)
    return list(ours) == list(theirs) and all(np.array_equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_cell_saved_by_us_fills_a_cell_in_mindspore(tmp_path: Path, format: str) -> None:
    network, other = training.new_network(1), training.new_network(2)
    path = tmp_path / f"net.{format}"
    save_checkpoint(network, path, format=format)
    mindspore.load_checkpoint(str(path), net=other, format=format)
    assert _same(other, network)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_cell_saved_by_mindspore_is_filled_by_us(tmp_path: Path, format: str) -> None:
    network, other = training.new_network(1), training.new_network(2)
    path = tmp_path / f"net.{format}"
    mindspore.save_checkpoint(network, str(path), format=format)
    load_checkpoint(path, net=other)
    assert _same(other, network)


def test_loaded_arrays_fill_a_cell_and_its_optimizer_in_a_second_step(tmp_path: Path) -> None:
    network, other = training.new_network(1), training.new_network(2)
    path = tmp_path / "net.ckpt"
    save_checkpoint(network, path, append_dict={"epoch_num": 3, "note": "hi"})
    answer = load_param_into_net(other, load_checkpoint(path))
    assert answer == ([], ["epoch_num", "note"])
    assert answer == mindspore.load_param_into_net(other, mindspore.load_checkpoint(str(path)))
    assert _same(other, network)


def test_cell_is_not_half_filled_when_one_value_does_not_fit() -> None:
    network, other = training.new_network(1), training.new_network(2)
    before = {name: value.asnumpy().copy() for name, value in other.parameters_dict().items()}
    values = {name: value.asnumpy() for name, value in network.parameters_dict().items()}
    values[list(values)[-1]] = np.zeros((2, 3, 4, 5), np.float32)
    with pytest.raises(RuntimeError, match="should have the same shape"):
        load_param_into_net(other, values)
    after = other.parameters_dict()
    assert all(np.array_equal(after[name].asnumpy(), before[name]) for name in before)


def test_cell_of_another_float_type_takes_the_values() -> None:
    network, other = training.new_network(1), training.new_network(2)
    values = {
        name: value.asnumpy().astype(np.float64)
        for name, value in network.parameters_dict().items()
    }
    assert load_param_into_net(other, values) == ([], [])
    assert _same(other, network)


def test_cell_takes_no_value_that_is_neither_array_nor_parameter() -> None:
    network = training.new_network(1)
    name = next(iter(network.parameters_dict()))
    with pytest.raises(TypeError, match="parameter_dict"):
        load_param_into_net(network, {name: 3})


def test_cell_files_of_both_are_the_same_bytes(tmp_path: Path) -> None:
    cell = training.train([], epochs=1)
    save_checkpoint(cell, tmp_path / "ours.ckpt")
    mindspore.save_checkpoint(cell, str(tmp_path / "theirs.ckpt"))
    assert (tmp_path / "ours.ckpt").read_bytes() == (tmp_path / "theirs.ckpt").read_bytes()


def test_cell_with_key_and_appended_values_goes_round(tmp_path: Path) -> None:
    network, other = training.new_network(1), training.new_network(2)
    path = tmp_path / "net.ckpt"
    append = {"epoch_num": 3, "note": "héé"}
    save_checkpoint(network, path, append_dict=append, enc_key=bytes(32), crc_check=True)
    values = load_checkpoint(path, net=other, dec_key=bytes(32), crc_check=True)
    assert _same(other, network)
    assert (np.asarray(values["epoch_num"]).item(), values["note"]) == (3, "héé")


def test_list_of_parameters_is_saved_as_mindspore_saves_it(tmp_path: Path) -> None:
    network = training.new_network(1)
    entries = [{"name": p.name, "data": p} for p in network.get_parameters()]
    save_checkpoint(entries, tmp_path / "ours.ckpt")
    mindspore.save_checkpoint(entries, str(tmp_path / "theirs.ckpt"))
    assert (tmp_path / "ours.ckpt").read_bytes() == (tmp_path / "theirs.ckpt").read_bytes()


def test_tensor_beside_a_parameter_is_saved_where_mindspore_drops_it(tmp_path: Path) -> None:
    values = np.arange(3, dtype=np.float32)
    mixed = {
        "parameter": mindspore.Parameter(mindspore.Tensor(values), name="parameter"),
        "tensor": mindspore.Tensor(values),
    }
    save_checkpoint(mixed, tmp_path / "net.ckpt")
    loaded = load_in_mindspore(tmp_path / "net.ckpt", Combination())
    assert facts_of(loaded) == facts_of({"parameter": values, "tensor": values})


def test_parameter_that_is_not_initialised_yet_is_saved(tmp_path: Path) -> None:
    from mindspore.common.initializer import One, initializer

    lazy = initializer(One(), [2, 3], mindspore.float16)
    save_checkpoint({"lazy": lazy}, tmp_path / "net.ckpt")
    assert facts_of(load_checkpoint(tmp_path / "net.ckpt")) == facts_of(
        {"lazy": np.ones((2, 3), np.float16)}
    )


def test_bfloat16_parameter_is_filled_bit_for_bit(tmp_path: Path) -> None:
    bits = random_array(np.random.default_rng(0), "bfloat16", (300,))
    save_checkpoint({"w": bits}, tmp_path / "net.ckpt")
    cell = mindspore.nn.Cell()
    cell.w = mindspore.Parameter(mindspore.ops.zeros(300, mindspore.bfloat16), name="w")
    load_checkpoint(tmp_path / "net.ckpt", net=cell)
    assert cell.w.asnumpy().tobytes() == bits.tobytes()


def test_other_shape_is_refused_with_mindspore_error(tmp_path: Path) -> None:
    save_checkpoint({"w": np.ones(3, np.float32)}, tmp_path / "net.ckpt")
    cell = mindspore.nn.Cell()
    cell.w = mindspore.Parameter(mindspore.ops.zeros(4), name="w")
    errors = []
    for load in (load_checkpoint, mindspore.load_checkpoint):
        with pytest.raises(RuntimeError) as caught:
            load(str(tmp_path / "net.ckpt"), net=cell)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("strict", [False, True])
def test_other_type_is_converted_or_refused_as_in_mindspore(tmp_path: Path, strict: bool) -> None:
    save_checkpoint({"w": np.ones(3, np.float16)}, tmp_path / "net.ckpt")
    outcomes = []
    for load in (load_checkpoint, mindspore.load_checkpoint):
        cell = mindspore.nn.Cell()
        cell.w = mindspore.Parameter(mindspore.ops.zeros(3), name="w")
        try:
            load(str(tmp_path / "net.ckpt"), net=cell, strict_load=strict)
            outcomes.append(f"{cell.w.dtype} {cell.w.asnumpy().tolist()}")
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("surface", ["cell", "list of dicts", "list of parameters"])
def test_safetensors_file_of_mindspores_objects_has_the_header_that_mindspore_writes(
    tmp_path: Path, surface: str
) -> None:
    cell = training.new_network(1)
    saved = {
        "cell": cell,
        "list of dicts": [{"name": one.name, "data": one} for one in cell.get_parameters()],
        "list of parameters": list(cell.get_parameters()),
    }[surface]
    for name, save in (("ours", save_checkpoint), ("theirs", mindspore.save_checkpoint)):
        save(saved, str(tmp_path / name), format="safetensors")
    strings = []
    for name in ("ours", "theirs"):
        with open_checkpoint(tmp_path / f"{name}.safetensors") as reader:
            strings.append(reader.metadata)
    assert strings[0] == strings[1] == {"format": "ms"}
