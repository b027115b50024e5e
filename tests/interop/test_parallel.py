# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints and strategy files go both ways between us and MindSpore 2.10."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import load_checkpoint, save_checkpoint
from ckptmgr.formats.strategy import (
    OperatorStrategy,
    Strategy,
    StrategyLayout,
    encode_strategy,
)
from ckptmgr.parallel import (
    get_parameter_redundancy,
    rank_list_for_transform,
    read_layouts,
    remove_param_redundancy,
    transform_checkpoints,
    unified_safetensors,
)
from ckptmgr.parallel.mindspore.slices import region_of
from tests.parallel.mindspore.layouts import shape_for

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: make interop")
pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore:getName:DeprecationWarning"),  # MindSpore's own
    pytest.mark.filterwarnings("ignore::DeprecationWarning:google"),
]

_MATRICES = ((2, 2), (8,), (2, 2, 2), (4, 2), (2, 4))
_PAIRS = [(one, other) for one in range(5) for other in range(5) if one != other]


def random_strategy(seed: int, matrix: tuple[int, ...]) -> Strategy:
    """Six parameters of two dimensions, cut at random; every second one by an optimizer shard where there are copies."""
    random = np.random.default_rng(seed)
    layouts = []
    for number in range(6):
        axes = random.permutation(len(matrix))[: random.integers(0, 3)].tolist()
        tensor_map = random.permutation([*axes, *[-1] * (2 - len(axes))]).tolist()
        layout = StrategyLayout(
            name=f"p{number}.w", device_matrix=matrix, tensor_maps=(tuple(tensor_map),)
        )
        layouts.append(layout)
    operators = (OperatorStrategy(name="op0", stage=0, strategy=((1, 1),)),)
    return Strategy(layouts=tuple(layouts), operators=operators)


def written(directory: Path, seed: int) -> Path:
    file = directory / f"strategy{seed}.ckpt"
    file.write_bytes(encode_strategy(random_strategy(seed, _MATRICES[seed % len(_MATRICES)])))
    return file


def sharded(directory: Path, strategy: Path, *, format: str) -> dict[str, np.ndarray]:
    """Save whole parameters as the files of all ranks; return the whole ones."""
    layouts = read_layouts(strategy)
    shape = (16, 16)
    whole = {
        name: np.random.default_rng(number).standard_normal(shape, np.float32)
        for number, name in enumerate(layouts)
    }
    assert all(16 % length == 0 for one in layouts.values() for length in shape_for(one))
    devices = next(iter(layouts.values())).device_count
    for rank in range(devices):
        folder = directory / f"rank_{rank}"
        folder.mkdir(parents=True)
        values = {
            name: whole[name][tuple(slice(*one) for one in region_of(layout, rank, shape))].copy()
            for name, layout in layouts.items()
        }
        save_checkpoint(values, folder / f"net.{format}", format=format)
    return whole


def plain(file: Path) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in load_checkpoint(file).items()}


@pytest.mark.parametrize("seed", range(10))
def test_redundancy_of_our_strategy_file_is_mindspores(seed: int, tmp_path: Path) -> None:
    from mindspore.train import _utils as utils

    strategy = str(written(tmp_path, seed))
    theirs = utils.get_parameter_redundancy(strategy, initial_rank=0)
    ours = get_parameter_redundancy(strategy, initial_rank=0)
    assert ours == theirs
    for keep in (1, 2):
        assert remove_param_redundancy(ours, keep) == utils.remove_param_redundancy(theirs, keep)


@pytest.mark.parametrize(("one", "other"), _PAIRS)
def test_ranks_needed_are_those_mindspore_lists(one: int, other: int, tmp_path: Path) -> None:
    source, target = written(tmp_path, one), written(tmp_path, other)
    devices = next(iter(read_layouts(target).values())).device_count
    for rank in range(devices):
        theirs = mindspore.rank_list_for_transform(rank, str(source), str(target))
        ours = rank_list_for_transform(rank, source, target)
        assert set(theirs) <= set(ours)
        assert ours == theirs


@pytest.mark.parametrize(("one", "other"), [(0, 1), (1, 2), (2, 3), (3, 0), (4, 2)])
def test_transformed_files_are_mindspores(one: int, other: int, tmp_path: Path) -> None:
    source, target = written(tmp_path, one), written(tmp_path, other)
    sharded(tmp_path / "in", source, format="ckpt")
    mindspore.transform_checkpoints(
        str(tmp_path / "in"), str(tmp_path / "theirs"), "t", str(source), str(target)
    )
    for file in transform_checkpoints(tmp_path / "in", tmp_path / "ours", "t", source, target):
        ours = plain(file)
        theirs = plain(tmp_path / "theirs" / file.relative_to(tmp_path / "ours"))
        assert ours.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_array_equal(ours[name], array)


def test_mindspore_loads_what_we_unified(tmp_path: Path) -> None:
    strategy = written(tmp_path, 2)
    whole = sharded(tmp_path / "in", strategy, format="safetensors")
    unified_safetensors(tmp_path / "in", strategy, tmp_path / "unified")
    mindspore.load_distributed_checkpoint(
        None,
        predict_strategy=None,
        format="safetensors",
        unified_safetensors_dir=str(tmp_path / "unified"),
        dst_safetensors_dir=str(tmp_path / "out"),
        rank_id=0,
        output_format="ckpt",
    )
    found = plain(tmp_path / "out" / "rank_0" / "net.ckpt")
    assert found.keys() == whole.keys()
    for name, array in whole.items():
        np.testing.assert_array_equal(found[name], array)
