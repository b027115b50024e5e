# SPDX-License-Identifier: Apache-2.0
"""Strategy files: MindSpore's own are read, ours are the same bytes, forged ones are refused."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import TruncatedError
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.mindspore.wire import encode_bytes_field, encode_varint_field
from ckptmgr.formats.strategy import (
    MAX_DEVICES,
    OperatorStrategy,
    Strategy,
    StrategyKind,
    StrategyLayout,
    encode_strategy,
    merge_stages,
    parse_strategy,
    read_restore_ranks,
    split_stages,
)
from ckptmgr.formats.strategy import protobuf as strategy_protobuf
from ckptmgr.formats.strategy import values as strategy_values
from tests.support.stored import format_error

GOLDEN = Path(__file__).parent.parent / "golden"
FILES = GOLDEN / "transform" / "strategies"

W = StrategyLayout(name="w", device_matrix=(2, 4), tensor_maps=((0, -1),))
OPERATOR = OperatorStrategy(name="MatMul-op0", stage=0, strategy=((1, 1), (1, 4)))
PLAIN = Strategy(layouts=(W,), operators=(OPERATOR,))


def recorded_strategies() -> dict[str, bytes]:
    cases = json.loads((GOLDEN / "redundancy.json").read_text())["cases"]
    found = {
        name: base64.b64decode(case["strategy_file_b64"])
        for name, case in cases.items()
        if "strategy_file_b64" in case
    }
    return found | {file.name: file.read_bytes() for file in FILES.glob("**/*.ckpt")}


@st.composite
def layouts(draw: st.DrawFn, name: str) -> StrategyLayout:
    matrix = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    axes = draw(st.permutations(range(len(matrix))))
    used = axes[: draw(st.integers(0, len(axes)))]
    maps: tuple[tuple[int, ...], ...] = (tuple(used) + (-1,) * draw(st.integers(0, 2)),)
    if len(used) > 1 and draw(st.booleans()):
        maps = (tuple(used[:2]), *((axis,) for axis in used[2:]), (-1,))
    return StrategyLayout(
        name=name,
        device_matrix=matrix,
        tensor_maps=maps,
        param_split_shape=tuple(draw(st.lists(st.integers(0, 2**40), max_size=3))),
        indices_offset=tuple(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3))),
        field=draw(st.integers(0, 100)),
        opt_weight_shard_step=draw(st.integers(0, 8)),
        opt_weight_shard_size=draw(st.integers(-1, 8)),
    )


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    names = draw(st.lists(st.sampled_from(["w", "layer-1.w", "名前", "0-w", ""]), unique=True))
    pieces = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), max_size=2).map(tuple)
    operators = draw(st.lists(st.sampled_from(["op0", "op1"]), unique=True))
    return Strategy(
        layouts=tuple(draw(layouts(name)) for name in names),
        operators=tuple(
            OperatorStrategy(name=name, stage=draw(st.integers(0, 9)), strategy=draw(pieces))
            for name in operators
        ),
        current_stage=draw(st.integers(0, 3)),
    )


@pytest.mark.parametrize(("name", "data"), recorded_strategies().items())
def test_recorded_file_is_written_back_byte_for_byte(name: str, data: bytes) -> None:
    del name
    assert encode_strategy(parse_strategy(data)) == data


def test_json_spelling_says_the_same_as_protobuf() -> None:
    from_json = parse_strategy((FILES / "dp2_mp2.json").read_bytes())
    assert from_json.layouts == parse_strategy((FILES / "dp2_mp2.ckpt").read_bytes()).layouts


JSON_TOP = {"current_stage": 0, "parallel_strategy_item": {}, "parallel_layout_item": {}}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (encode_varint_field(1, (1 << 64) - 1), "current_stage is -1"),
        (json.dumps({**JSON_TOP, "current_stage": -1}).encode(), "current_stage is -1"),
        (
            json.dumps({**JSON_TOP, "parallel_strategy_item": {"op": {"stage": 1 << 32}}}).encode(),
            "stage is 4294967296.*'op'",
        ),
        (
            json.dumps(
                {
                    **JSON_TOP,
                    "parallel_strategy_item": {"op": {"stage": 0, "parallel_strategy": [[-1]]}},
                }
            ).encode(),
            "a number of pieces is -1.*'op'",
        ),
    ],
)
def test_number_that_could_not_be_written_again_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        parse_strategy(data)


def test_strategy_of_a_negative_stage_is_not_written() -> None:
    with pytest.raises(FormatError, match="current_stage is -1"):
        encode_strategy(Strategy(layouts=(), current_stage=-1))


def test_nested_tensor_map_keeps_the_axes_of_each_dimension() -> None:
    (layout, *_) = parse_strategy((FILES / "nested_2x2x2.ckpt").read_bytes()).layouts
    assert (layout.device_count, layout.axes_by_dimension) == (8, ((1, 0), ()))


@given(strategies(), st.sampled_from(["protobuf", "json"]))
def test_any_strategy_survives_writing_and_reading(strategy: Strategy, kind: StrategyKind) -> None:
    assert parse_strategy(encode_strategy(strategy, kind=kind)) == strategy


@given(st.data())
def test_damaged_file_is_read_or_refused_but_never_crashes(data: st.DataObject) -> None:
    encoded = bytearray((FILES / "dp2_mp2_opt2.ckpt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(encoded)))
    error = format_error(lambda: parse_strategy(bytes(encoded[:end])))
    assert error is None or error.message


def item(value: bytes, name: bytes = b"w") -> bytes:
    return encode_bytes_field(3, encode_bytes_field(1, name) + encode_bytes_field(2, value))


STAGE = encode_varint_field(1, 0)
NUMBERS = b"".join(encode_varint_field(number, 0) for number in (5, 6, 7))
MATRIX = encode_bytes_field(1, encode_varint_field(1, 2))
MAP = encode_bytes_field(2, encode_varint_field(1, 0))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "empty"),
        (item(MATRIX + MAP + NUMBERS), "current_stage comes 0 times"),
        (STAGE + STAGE, "current_stage comes 2 times"),
        (encode_bytes_field(1, b""), "current_stage has wire type 2"),
        (encode_varint_field(1, 1 << 40), "current_stage is"),
        (STAGE + encode_varint_field(3, 1), "a layout item has wire type 0"),
        (STAGE + item(MATRIX + MAP), "field is missing"),
        (STAGE + item(MATRIX + MAP + NUMBERS + NUMBERS), "field comes twice"),
        (STAGE + item(MATRIX + MATRIX + NUMBERS), "the device matrix comes 2 times"),
        (STAGE + item(MATRIX + MAP * 65 + NUMBERS), "more than 64 tensor maps"),
        (STAGE + item(MATRIX + MAP + NUMBERS, b"\xff"), "not UTF-8"),
        (STAGE + item(MATRIX + MAP + NUMBERS) * 2, "'w' comes twice"),
        (STAGE + item(encode_bytes_field(1, encode_varint_field(1, 0)) + NUMBERS), "0 devices"),
        (
            STAGE + item(MATRIX + encode_bytes_field(2, encode_varint_field(1, 1)) + NUMBERS),
            "axis 1",
        ),
        (STAGE + item(MATRIX + encode_varint_field(2, 1) + NUMBERS), "wire type 0"),
        (
            STAGE + item(MATRIX + encode_bytes_field(2, b"\x09" + bytes(8)) + NUMBERS),
            "has wire type 1 in field 1",
        ),
    ],
)
def test_protobuf_that_makes_no_sense_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(FormatError, match=problem):
        parse_strategy(data)


def test_operator_with_a_negative_number_of_pieces_is_refused() -> None:
    pieces = encode_bytes_field(2, encode_varint_field(1, (1 << 64) - 1))
    value = encode_varint_field(1, 0) + pieces
    operator = encode_bytes_field(2, encode_bytes_field(1, b"op") + encode_bytes_field(2, value))
    with pytest.raises(FormatError, match="pieces of -1"):
        parse_strategy(STAGE + operator)


def test_packed_numbers_are_read_as_unpacked_ones() -> None:
    packed = encode_bytes_field(1, encode_bytes_field(1, b"\x02\x04"))
    (layout,) = parse_strategy(STAGE + item(packed + MAP + NUMBERS)).layouts
    assert layout.device_matrix == (2, 4)


def test_unknown_fields_are_skipped() -> None:
    data = (
        STAGE
        + encode_varint_field(9, 1)
        + item(MATRIX + MAP + NUMBERS + encode_varint_field(77, 1))
    )
    assert len(parse_strategy(data).layouts) == 1


def test_more_numbers_than_devices_can_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_protobuf, "MAX_DEVICES", 8)
    many = encode_bytes_field(1, encode_bytes_field(1, b"\x01" * 9))
    with pytest.raises(FormatError, match="more than 8 numbers"):
        parse_strategy(STAGE + item(many + MAP + NUMBERS))


def test_more_fields_than_a_message_can_need_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy_protobuf, "_MAX_FIELDS", 8)
    with pytest.raises(FormatError, match="more than 8 fields"):
        parse_strategy(STAGE + item(encode_varint_field(77, 0) * 9))


def test_file_of_absurd_size_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(FormatError, match="bytes; 67108864 fit"):
        parse_strategy(bytes(strategy_values.MAX_STRATEGY_BYTES + 1))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"dev_matrix": "x"}, "dev_matrix is str"),
        ({"dev_matrix": None}, "dev_matrix is NoneType"),
        ({"dev_matrix": [2, True]}, "holds bool"),
        ({"tensor_map": 5}, "tensor_map is int"),
        ({"tensor_map": [[0], "x"]}, "holds str"),
        ({"tensor_map": [0, 0]}, "uses an axis twice"),
        ({"field": None}, "field is NoneType"),
        ({"field": True}, "field is bool"),
        ({"field": -1}, "field is -1"),
        ({"opt_weight_shard_size": -2}, "outside -1"),
        ({"param_split_shape": [-1]}, "param_split_shape is -1"),
    ],
)
def test_json_layout_that_makes_no_sense_is_refused(
    changed: dict[str, object], problem: str
) -> None:
    top = json.loads(encode_strategy(PLAIN, kind="json"))
    top["parallel_layout_item"]["w"].update(changed)
    with pytest.raises(FormatError, match=problem):
        parse_strategy(json.dumps(top).encode())


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"parallel_layout_item": []}, "'parallel_layout_item' in the strategy file"),
        ({"parallel_layout_item": {"w": 5}}, "'w' in the strategy file is not an object"),
        ({"parallel_strategy_item": {"op": {"stage": "0"}}}, "stage is str"),
        (
            {"parallel_strategy_item": {"op": {"stage": 0, "parallel_strategy": 1}}},
            "parallel_strategy is not a list",
        ),
        ({"current_stage": None}, "current_stage is NoneType"),
    ],
)
def test_json_file_that_makes_no_sense_is_refused(changed: dict[str, object], problem: str) -> None:
    top = {**json.loads(encode_strategy(PLAIN, kind="json")), **changed}
    with pytest.raises(FormatError, match=problem):
        parse_strategy(json.dumps(top).encode())


def test_json_dimension_without_a_list_may_stand_among_lists() -> None:
    top = json.loads(encode_strategy(PLAIN, kind="json"))
    top["parallel_layout_item"]["w"]["tensor_map"] = [[1, 0], -1]
    (layout,) = parse_strategy(json.dumps(top).encode()).layouts
    assert layout.axes_by_dimension == ((1, 0), ())


@pytest.mark.parametrize(
    ("layout", "problem"),
    [
        (replace(W, device_matrix=(1,) * 65), "65 axes"),
        (replace(W, device_matrix=(MAX_DEVICES, 2)), "more than"),
        (replace(W, tensor_maps=((-1,) * 65,)), "more than 64 dimensions"),
        (replace(W, name="\ud800"), "lone surrogate"),
    ],
)
def test_layout_that_could_not_be_read_back_is_not_written(
    layout: StrategyLayout, problem: str
) -> None:
    with pytest.raises(FormatError, match=problem):
        encode_strategy(Strategy(layouts=(layout,)))


@pytest.mark.parametrize("kind", ["protobuf", "json"])
def test_parameter_given_twice_is_not_written(kind: StrategyKind) -> None:
    with pytest.raises(FormatError, match="parameter 'w' comes twice"):
        encode_strategy(Strategy(layouts=(W, W)), kind=kind)


def test_json_refuses_operators_of_one_name_because_one_would_be_lost() -> None:
    twice = Strategy(layouts=(W,), operators=(OPERATOR, OPERATOR))
    assert len(parse_strategy(encode_strategy(twice)).operators) == 2
    with pytest.raises(FormatError, match="operator"):
        encode_strategy(twice, kind="json")


@pytest.mark.parametrize(
    "name", ["pp2_dp2_mp2", "pp2_mp2", "pp2_dp2_mp2_opt2", "pp2_shared_dp2_mp2"]
)
def test_merged_stages_are_mindspores_file(name: str) -> None:
    stages = sorted((FILES / f"{name}_stages").glob("*.ckpt"))
    merged = merge_stages(parse_strategy(stage.read_bytes()) for stage in stages)
    recorded = parse_strategy((FILES / f"{name}.ckpt").read_bytes())
    assert set(merged.layouts) == set(recorded.layouts)
    assert {one.stage for one in merged.operators} == {one.stage for one in recorded.operators}
    assert merged.current_stage == recorded.current_stage


def test_merging_and_splitting_gives_back_every_stage() -> None:
    other = replace(PLAIN, operators=(replace(OPERATOR, stage=1),), current_stage=1)
    merged = merge_stages([PLAIN, other, PLAIN])
    assert split_stages(merged) == {0: (W,), 1: (W,)}
    assert [one.name for one in merged.operators] == ["MatMul-op0", "1-MatMul-op0"]


def test_two_files_of_one_stage_that_differ_are_refused() -> None:
    other = replace(PLAIN, layouts=(replace(W, tensor_maps=((-1, 0),)),))
    with pytest.raises(FormatError, match="stage 0"):
        merge_stages([PLAIN, other])


def test_file_without_operators_is_not_merged() -> None:
    with pytest.raises(FormatError, match="nothing to merge"):
        merge_stages([Strategy(layouts=(W,))])


def test_dash_in_a_name_is_no_stage_unless_every_name_has_one() -> None:
    layouts = (replace(W, name="layer-1.w"), replace(W, name="0-w"))
    assert split_stages(Strategy(layouts=layouts)) == {0: layouts}


def test_strategy_without_parameters_is_one_stage() -> None:
    assert split_stages(Strategy(layouts=())) == {0: ()}


def test_merged_file_that_lacks_a_stage_is_refused() -> None:
    layouts = (replace(W, name="0-w"), replace(W, name="2-w"))
    with pytest.raises(FormatError, match=r"\[0, 2\] only"):
        split_stages(Strategy(layouts=layouts))


def test_stage_of_a_file_is_the_one_of_its_operators() -> None:
    assert replace(PLAIN, operators=(replace(OPERATOR, stage=3),)).stage == 3
    assert Strategy(layouts=(), current_stage=2).stage == 2


def test_restore_ranks_are_read_from_a_group_file() -> None:
    ranks = b"".join(encode_varint_field(1, rank) for rank in (0, 2, 4))
    assert read_restore_ranks(encode_bytes_field(2, ranks)) == (0, 2, 4)


@pytest.mark.parametrize("data", [b"", b"\x08", encode_varint_field(2, 1)])
def test_group_file_without_restore_ranks_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read_restore_ranks(data)


def test_cut_file_is_reported_as_truncated() -> None:
    data = (FILES / "dp2_mp2.ckpt").read_bytes()
    with pytest.raises(TruncatedError):
        parse_strategy(data[:-1])
