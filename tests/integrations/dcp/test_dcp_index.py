# SPDX-License-Identifier: Apache-2.0
"""The index of checkpoints of DCP: a written one comes back, whatever else is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.integrations.dcp import index as dcp_index


def index() -> Any:
    """Return what two ranks hold: halves of a tensor, a scalar, and an object."""
    halves = tuple(
        dcp_index.RankPiece(rank=rank, offsets=(2 * rank, 0), sizes=(2, 3)) for rank in range(2)
    )
    scalar = dcp_index.RankPiece(rank=1)
    return dcp_index.DcpIndex(
        world=2,
        tensors={
            "model.w": dcp_index.CutTensor(dtype="bfloat16", shape=(4, 3), pieces=halves),
            "step": dcp_index.CutTensor(dtype="int64", shape=(), pieces=(scalar,)),
        },
        objects={"epoch": 1},
        paths={"model.w": ("model", "w"), "step": ("step",), "epoch": ("list", 0)},
    )


def test_index_comes_back_equal() -> None:
    assert dcp_index.parse_index(index().to_json()) == index()


def damaged(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(index().to_json())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("paths"), "'paths'"),
        (lambda d: d.update(world=-1), "-1 is no count"),
        (lambda d: d.update(world=True), "True is no count"),
        (lambda d: d.update(world=1), "'epoch' is in the file of rank 1 of 1"),
        (lambda d: d.update(tensors=[]), "no object"),
        (lambda d: d.update(objects={"a": "b"}), "no count"),
        (lambda d: d.update(objects={}, world=1), "has a piece in the file of rank 1 of 1"),
        (lambda d: d["tensors"].update(x=3), "no list"),
        (lambda d: d["tensors"].update(x=[1, [], []]), "1 is no element type"),
        (lambda d: d["tensors"].update(x=["int8", [2]]), "not enough values"),
        (lambda d: d["tensors"].update(x=["int8", [2], [[0, [1], [2]]]]), r"has a piece \[2\]"),
        (lambda d: d["tensors"].update(x=["int8", [2], [[0, [], []]]]), r"has a piece \[\]"),
        (lambda d: d["tensors"].update(x=["int8", [2], [[0, [0], [1]]]]), "its pieces have 1"),
        (lambda d: d["tensors"].update(x=["int8", [2**63], []]), "is no count"),
        (lambda d: d["paths"].update(x=[10**7]), "is no position in a list"),
        (lambda d: d["paths"].update(x=[None]), "None is no count"),
    ],
)
def test_index_that_contradicts_itself_is_refused(
    change: Callable[[dict[str, Any]], object], message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        dcp_index.parse_index(damaged(change))


def test_index_of_another_version_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="version 2; upgrade ckptmgr"):
        dcp_index.parse_index(damaged(lambda d: d.update(version=2)))


@given(position=st.integers(0, len(index().to_json()) - 1), byte=st.integers(0, 255))
def test_flipped_byte_raises_nothing_but_a_format_error(position: int, byte: int) -> None:
    data = bytearray(index().to_json())
    data[position] = byte
    try:
        found = dcp_index.parse_index(bytes(data))
    except FormatError:
        return
    assert found.problem() is None


@given(
    names=st.lists(st.text("a~@0,.", max_size=4), min_size=2, max_size=2),
    offsets=st.lists(st.none() | st.lists(st.integers(0, 12), max_size=2), min_size=2, max_size=2),
)
def test_different_pieces_have_different_names(names: list[str], offsets: list[Any]) -> None:
    one, other = (
        (name, tuple(at) if at and any(at) else ()) for name, at in zip(names, offsets, strict=True)
    )
    stored = [dcp_index.dcp_piece_name(*piece) for piece in (one, other)]
    assert (stored[0] == stored[1]) == (one == other)
