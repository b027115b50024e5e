# SPDX-License-Identifier: Apache-2.0
"""Layouts from strategy files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CorruptCheckpoint
from ckptmgr.formats.strategy import Strategy, StrategyLayout, encode_strategy
from ckptmgr.parallel import LayoutError, ParallelLayout, read_layouts
from ckptmgr.parallel.layout import devices_per_stage, layouts_of, stage_count

GOLDEN = Path(__file__).parents[2] / "golden" / "transform"
READABLE: dict[str, list[dict[str, dict[str, Any]]]] = json.loads(
    (GOLDEN / "strategies.json").read_text()
)


def expected(stages: list[dict[str, dict[str, Any]]]) -> dict[str, ParallelLayout]:
    found: dict[str, ParallelLayout] = {}
    for stage, parameters in enumerate(stages):
        for name, one in parameters.items():
            axes = [axis if isinstance(axis, list) else [axis] for axis in one["map"]]
            known = found[name].stages if name in found else ()
            found[name] = ParallelLayout(
                device_matrix=tuple(one["dev"]),
                tensor_map=tuple(tuple(a for a in dim if a != -1) for dim in axes),
                stages=(*known, stage),
                opt_shard_size=one["size"],
                opt_shard_step=one["step"],
            )
    return found


@pytest.mark.parametrize("name", sorted(name for name, stages in READABLE.items() if stages))
def test_layouts_of_a_recorded_file_are_what_was_written(name: str) -> None:
    (file,) = (GOLDEN / "strategies").glob(
        name.replace("_json", ".json") if "json" in name else f"{name}.ckpt"
    )
    found = read_layouts(file)
    assert found == expected(READABLE[name])
    assert stage_count(found) == len(READABLE[name])


def test_merged_file_without_its_first_stage_is_refused_by_name(tmp_path: Path) -> None:
    layout = StrategyLayout(name="1-w", device_matrix=(2,), tensor_maps=((0,),))
    file = tmp_path / "merged.ckpt"
    file.write_bytes(encode_strategy(Strategy(layouts=(layout,))))
    with pytest.raises(CorruptCheckpoint, match=r"merged\.ckpt.*\[1\] only"):
        read_layouts(file)


def test_parameters_over_different_numbers_of_devices_are_refused() -> None:
    layouts = layouts_of(
        Strategy(
            layouts=(
                StrategyLayout(name="w", device_matrix=(2,), tensor_maps=((0,),)),
                StrategyLayout(name="v", device_matrix=(4,), tensor_maps=((0,),)),
            )
        )
    )
    with pytest.raises(LayoutError, match="'w' is laid out over 2 devices, 'v' over 4"):
        devices_per_stage(layouts)


def test_no_layouts_mean_one_device() -> None:
    assert devices_per_stage({}) == 1


def test_rank_counts_the_devices_stage_after_stage() -> None:
    layout = ParallelLayout(device_matrix=(2, 2), tensor_map=((0,),), stages=(1, 2))
    assert (layout.rank_of(3), layout.rank_of(3, stage=2)) == (7, 11)
    named = ParallelLayout(device_matrix=(2,), tensor_map=((0,),), ranks=(9, 4))
    assert named.rank_of(1) == 4
