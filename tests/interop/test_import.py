# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr.integrations.mindspore` in the place of `mindspore`: its names, and its objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckptmgr
from ckptmgr import parallel
from tests.interop.states import Combination, random_state, save_in_mindspore

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
training = pytest.importorskip("tests.interop.training")
ours = pytest.importorskip("ckptmgr.integrations.mindspore")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:getName:DeprecationWarning"),  # MindSpore's own
]


def _facts(values: dict[str, Any]) -> dict[str, object]:
    return {
        name: one
        if isinstance(one, str)
        else (type(one), str(one.dtype), one.shape, one.requires_grad, one.asnumpy().tobytes())
        for name, one in values.items()
    }


def _slices(count: int) -> list[Any]:
    rows = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    return [mindspore.Parameter(mindspore.Tensor(one), name="w") for one in rows]


def test_names_of_checkpoints_are_ours_and_all_others_are_mindspores() -> None:
    assert ours.train.ModelCheckpoint is ours.ModelCheckpoint is ckptmgr.ModelCheckpoint
    assert ours.train.CheckpointConfig is ckptmgr.CheckpointConfig
    assert ours.train.Model is mindspore.train.Model
    assert ours.parallel.transform_checkpoints is parallel.transform_checkpoints
    assert ours.parallel.set_algo_parameters is mindspore.parallel.set_algo_parameters
    assert ours.Tensor is mindspore.Tensor
    with pytest.raises(AttributeError, match="lode_checkpoint"):
        _ = ours.lode_checkpoint


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_loaded_values_are_the_parameters_that_mindspore_loads(tmp_path: Path, format: str) -> None:
    combination = Combination(format=format)
    path = tmp_path / f"net.{format}"
    save_in_mindspore(random_state(1, combination), path, combination)
    theirs = mindspore.load_checkpoint(str(path), format=format)
    assert _facts(ours.load_checkpoint(path)) == _facts(theirs)


def test_loaded_int4_is_a_parameter_of_mindspores_type(tmp_path: Path) -> None:
    stored = mindspore.Tensor(np.array([[1, -2]], np.int8), dtype=mindspore.qint4x2)
    ours.save_checkpoint({"q": mindspore.Parameter(stored, name="q")}, tmp_path / "net.ckpt")
    loaded = ours.load_checkpoint(tmp_path / "net.ckpt")["q"]
    assert (str(loaded.dtype), loaded.asnumpy().tolist()) == ("Int4", [[1, -2]])


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_file_is_loaded_into_a_cell_and_into_its_state_dict(tmp_path: Path, format: str) -> None:
    network, second, third = (training.new_network(seed) for seed in (1, 2, 3))
    path = tmp_path / f"net.{format}"
    ours.save_checkpoint(network.state_dict(), path, format=format)
    loaded = ours.load_checkpoint(path, net=second)
    third.load_state_dict(loaded)
    wanted = training.numbers_of(network)
    for cell in (second, third):
        found = training.numbers_of(cell)
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("library", [ours, mindspore], ids=["ours", "theirs"])
def test_exception_of_choice_func_is_the_cause_of_a_value_error(
    tmp_path: Path, library: Any
) -> None:
    path = ours.save_checkpoint({"w": np.ones(2)}, tmp_path / "net.ckpt").path
    with pytest.raises(ValueError, match="failed to load the checkpoint file") as caught:
        library.load_checkpoint(str(path), choice_func=lambda name: name.startswith(3))
    assert isinstance(caught.value.__cause__, TypeError)


def test_merged_slices_are_the_parameter_that_mindspore_merges() -> None:
    slices = _slices(2)
    merged, theirs = ours.merge_sliced_parameter(slices), mindspore.merge_sliced_parameter(slices)
    assert (merged.name, _facts({"w": merged})) == (theirs.name, _facts({"w": theirs}))


def test_segments_are_loaded_as_parameters(tmp_path: Path) -> None:
    for index, one in enumerate(_slices(2)):
        one.name = f"w{index}"
        ours.save_checkpoint([one], tmp_path / f"part{index}.ckpt")
    found = ours.load_segmented_checkpoints(str(tmp_path))
    assert {name: type(one).__name__ for name, one in found.items()} == {
        "w0": "Parameter",
        "w1": "Parameter",
    }


def test_redundancy_of_optimizer_shards_is_what_mindspore_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from mindspore.train import _utils

    monkeypatch.setattr(_utils, "get_group_size", lambda group: 4)  # no group exists in one process
    layouts = {"w": ([4, 4], [0, -1], [16, 16], 0, True, "group", [16, 64])}
    theirs = _utils.get_parameter_redundancy(layouts, initial_rank=0)
    assert ours.get_parameter_redundancy(layouts, initial_rank=0) == theirs
