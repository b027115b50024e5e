# SPDX-License-Identifier: Apache-2.0
"""The index in the files of many ranks: its content, and that nothing else passes for one."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CkptmgrError, CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.regions import Interval
from ckptmgr.files.load.shard_pieces import Index, Piece, check_fits, piece_name, read_index
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import TensorSpec

PATH = "net.ckpt"
numbers = st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple)


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    shape = draw(st.none() | numbers)
    ranks = draw(st.none() | st.lists(st.integers(0, 1000), min_size=1, max_size=3).map(tuple))
    return Piece(
        tensor=draw(st.text(max_size=5)),
        shape=shape,
        start=None if shape is None else draw(numbers),
        ranks=ranks,
    )


@given(
    st.dictionaries(st.text(max_size=5), pieces(), max_size=4),
    st.booleans(),
    st.none() | st.integers(0, 2**40),
)
def test_index_comes_back_as_it_was(
    found: dict[str, Piece], is_compared: bool, total: int | None
) -> None:
    index = Index(pieces=found, is_compared=is_compared, total=total)
    assert read_index(index.to_text(), path=PATH) == index


def test_file_without_index_lists_nothing() -> None:
    assert read_index(None, path=PATH) == Index(pieces={}, is_compared=False)


@pytest.mark.parametrize(
    "body",
    [
        [],
        {},
        {"version": 1, "pieces": {}},
        {"version": 1, "compared": 1, "pieces": {}},
        {"version": 0, "compared": True, "pieces": {}},
        {"version": "1", "compared": True, "pieces": {}},
        {"version": 1, "compared": True, "pieces": []},
        {"version": 1, "compared": True, "total": "2", "pieces": {}},
        {"version": 1, "compared": True, "total": True, "pieces": {}},
        {"version": 1, "compared": True, "pieces": {"w": []}},
        {"version": 1, "compared": True, "pieces": {"w": {"tensor": 3}}},
        {"version": 1, "compared": True, "pieces": {"w": {"more": 3}}},
        {"version": 1, "compared": True, "pieces": {"w": {"shape": [1]}}},
        {"version": 1, "compared": True, "pieces": {"w": {"start": [1]}}},
        {"version": 1, "compared": True, "pieces": {"w": {"shape": [-1], "start": [0]}}},
        {"version": 1, "compared": True, "pieces": {"w": {"shape": [True], "start": [0]}}},
        {"version": 1, "compared": True, "pieces": {"w": {"shape": 3, "start": [0]}}},
        {"version": 1, "compared": True, "pieces": {"w": {"ranks": []}}},
        {"version": 1, "compared": True, "pieces": {"w": {"ranks": [1 << 40]}}},
    ],
)
def test_what_is_no_index_is_damage(body: Any) -> None:
    with pytest.raises(CorruptCheckpoint, match="the index of its pieces is none"):
        read_index(json.dumps(body), path=PATH)


@settings(max_examples=50)
@given(st.text(max_size=30) | st.just("[" * 100_000))
def test_no_text_raises_anything_else(text: str) -> None:
    with contextlib.suppress(CkptmgrError):
        read_index(text, path=PATH)


def test_newer_version_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="version 2, this ckptmgr reads 1"):
        read_index('{"version": 2}', path=PATH)


@pytest.mark.parametrize(
    ("shape", "start"), [((4,), (3,)), ((1,), (0,)), ((4, 1), (0, 0)), ((4,), (0, 0))]
)
def test_piece_that_does_not_lie_in_the_whole_is_damage(
    shape: tuple[int, ...], start: tuple[int, ...]
) -> None:
    spec = TensorSpec(name="w", dtype=BY_NAME["float32"], shape=(2,))
    with pytest.raises(CorruptCheckpoint, match="which is not inside"):
        check_fits(Piece(tensor="w", shape=shape, start=start), spec, path=PATH)


def test_name_of_a_piece_is_one_that_nobody_has() -> None:
    region = (Interval(0, 2),)
    assert piece_name("w", region, taken={"w[0:2]": 1, "w[0:2]~2": 1}) == "w[0:2]~3"
