# SPDX-License-Identifier: Apache-2.0
"""Strategy files merged over stages and looked into, with MindSpore's messages."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr import CheckpointNotFound, CorruptCheckpoint
from ckptmgr.formats.mindspore.wire import encode_bytes_field, encode_varint_field
from ckptmgr.formats.strategy import (
    OperatorStrategy,
    Strategy,
    StrategyLayout,
    encode_strategy,
    parse_strategy,
)
from ckptmgr.parallel import (
    build_searched_strategy,
    merge_pipeline_strategys,
    read_layouts,
    restore_group_info_list,
)

STRATEGIES = Path(__file__).parents[2] / "golden" / "transform" / "strategies"
LAYOUT = StrategyLayout(name="w", device_matrix=(2,), tensor_maps=((0,),))
STAGE = Strategy(layouts=(LAYOUT,), operators=(OperatorStrategy(name="op0", stage=0),))


def test_merged_file_says_what_mindspores_says(tmp_path: Path) -> None:
    merged = tmp_path / "sub" / "merged.ckpt"
    merge_pipeline_strategys(STRATEGIES / "pp2_dp2_mp2_stages", merged)
    assert read_layouts(merged) == read_layouts(STRATEGIES / "pp2_dp2_mp2.ckpt")


def test_json_files_merge_to_json(tmp_path: Path) -> None:
    for stage in (0, 1):
        operators = (OperatorStrategy(name="op0", stage=stage),)
        data = encode_strategy(replace(STAGE, operators=operators), kind="json")
        (tmp_path / f"stage{stage}.json").write_bytes(data)
    merge_pipeline_strategys(tmp_path, tmp_path / "out" / "merged.json")
    merged = (tmp_path / "out" / "merged.json").read_bytes()
    assert merged.startswith(b"{")
    assert [one.name for one in parse_strategy(merged).layouts] == ["0-w", "1-w"]


def test_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="is not a directory"):
        merge_pipeline_strategys(tmp_path / "nope", tmp_path / "out.ckpt")


def test_directory_without_strategies_is_refused_where_mindspore_writes_an_empty_file(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="no strategy files"):
        merge_pipeline_strategys(tmp_path, tmp_path / "out.ckpt")


def test_files_of_both_kinds_are_refused(tmp_path: Path) -> None:
    shutil.copy(STRATEGIES / "dp2_mp2.ckpt", tmp_path)
    shutil.copy(STRATEGIES / "dp2_mp2.json", tmp_path)
    with pytest.raises(ValueError, match=r"should be all '\.ckpt' or all '\.json'"):
        merge_pipeline_strategys(tmp_path, tmp_path / "out.ckpt")


def test_file_without_operators_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(encode_strategy(Strategy(layouts=(LAYOUT,))))
    with pytest.raises(ValueError, match=r"a\.ckpt is empty"):
        merge_pipeline_strategys(tmp_path, tmp_path / "out.ckpt")


def test_files_of_one_stage_that_differ_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(encode_strategy(STAGE))
    other = replace(STAGE, layouts=(replace(LAYOUT, tensor_maps=((-1,),)),))
    (tmp_path / "b.ckpt").write_bytes(encode_strategy(other))
    with pytest.raises(CorruptCheckpoint, match="two different strategies"):
        merge_pipeline_strategys(tmp_path, tmp_path / "out.ckpt")


def test_searched_strategy_keeps_the_names_of_the_file() -> None:
    found = build_searched_strategy(STRATEGIES / "pp2_mp2.ckpt")
    assert found is not None
    assert set(found) == {"0-emb", "0-w1", "0-moments.w1", "1-w2", "1-norm", "1-bias"}
    assert build_searched_strategy(None) is None


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, CheckpointNotFound, "no such strategy file: "),
        (b"", CorruptCheckpoint, "should not be empty"),
        (b"\xff", CorruptCheckpoint, "strategy"),
    ],
)
def test_unusable_strategy_file_is_refused(
    content: bytes | None, error: type[Exception], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "strategy.ckpt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=message):
        build_searched_strategy(file)


def test_other_things_than_a_file_name_are_refused_with_mindspores_message() -> None:
    with pytest.raises(
        TypeError, match="'strategy_filename' should be string, but got <class 'int'>"
    ):
        build_searched_strategy(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'group_info_file_name' should be str"):
        restore_group_info_list(5)  # type: ignore[arg-type]


def test_group_file_gives_its_ranks(tmp_path: Path) -> None:
    ranks = b"".join(encode_varint_field(1, rank) for rank in (0, 2, 4))
    (tmp_path / "g").write_bytes(encode_bytes_field(2, ranks))
    assert restore_group_info_list(tmp_path / "g") == [0, 2, 4]


def test_group_file_that_is_missing_empty_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such group information file"):
        restore_group_info_list(tmp_path / "q")
    (tmp_path / "q").write_bytes(b"")
    with pytest.raises(ValueError, match="should not be empty"):
        restore_group_info_list(tmp_path / "q")
    (tmp_path / "q").write_bytes(b"\xff")
    with pytest.raises(CorruptCheckpoint):
        restore_group_info_list(tmp_path / "q")
