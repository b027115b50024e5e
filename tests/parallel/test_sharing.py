# SPDX-License-Identifier: Apache-2.0
"""Agreements of ranks before they write, and data that they do not take from each other."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ckptmgr import RankFailed, RanksMissing, RanksOutOfStep
from ckptmgr.files.load.shard_pieces import PIECES, Index, Piece, read_index
from ckptmgr.formats.strict_json import Json
from ckptmgr.formats.tensor import Item, Text, tensor_from_array
from ckptmgr.parallel import Coordinator, LayoutError
from ckptmgr.parallel.dedup import Sharing
from ckptmgr.parallel.rounds import CollectiveRounds
from tests.parallel.ranks import Meeting, Outcome, Seat, run_ranks


def tensor(name: str, array: np.ndarray) -> Item:
    return tensor_from_array(name, array)


def divided(
    coordinator: Coordinator, items: list[Item], pieces: dict[str, Piece] | None = None
) -> tuple[list[Item], dict[str, str]]:
    metadata = {} if pieces is None else {PIECES: Index(pieces=pieces).to_text()}
    rounds = CollectiveRounds(coordinator, "save 1", what="step 1 was not saved")
    return Sharing().divided(rounds, coordinator, items, metadata, stop=1e18)


def all_ranks(
    make: Callable[[int], tuple[list[Item], dict[str, Piece]]], world: int = 2
) -> list[Outcome[tuple[list[Item], dict[str, str]]]]:
    meeting = Meeting(world)
    return run_ranks(meeting, lambda rank: divided(Seat(meeting, rank), *make(rank)))


def failure(make: Callable[[int], tuple[list[Item], dict[str, Piece]]]) -> list[BaseException]:
    raised = [outcome.raised for outcome in all_ranks(make)]
    return [error for error in raised if error is not None]


def test_scalars_and_empty_tensors_are_written_once() -> None:
    items = [tensor("s", np.array(2.5)), tensor("e", np.zeros((0, 3), np.float32))]
    found = [outcome.must() for outcome in all_ranks(lambda rank: (items, {}))]
    names = [item.spec.name for wrote, _ in found for item in wrote]  # type: ignore[union-attr]
    assert sorted(names) == ["e", "s"]
    for _, metadata in found:
        assert all(
            piece.ranks is None for piece in read_index(metadata[PIECES], path="").pieces.values()
        )


def test_what_is_no_tensor_is_named_on_all_ranks() -> None:
    texts: list[Item] = [Text(name="t", text="x")]
    errors = failure(lambda rank: (texts if rank == 1 else [], {}))
    assert [type(error) for error in errors] == [RankFailed] * 2
    assert all("rank 1: UnsupportedCheckpoint: 't' is no tensor" in str(one) for one in errors)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({}, "has a layout on some ranks and none on others"),
        ({"w": Piece(tensor="w", shape=(6,), start=(2,))}, "different shapes or types"),
        ({"w": Piece(tensor="w", shape=(4,), start=(1,))}, "do not make up its shape"),
        ({"w": Piece(tensor="w", shape=(4,), start=(0,))}, "do not make up its shape"),
    ],
)
def test_layouts_that_contradict_each_other_are_an_error_on_all_ranks(
    other: dict[str, Piece], text: str
) -> None:
    own = {"w": Piece(tensor="w", shape=(4,), start=(0,))}
    errors = failure(lambda rank: ([tensor("w", np.full(2, rank))], other if rank else own))
    assert [type(error) for error in errors] == [LayoutError] * 2
    assert all(text in str(error) for error in errors)


def test_boxes_that_are_no_grid_are_an_error() -> None:
    places = [(0, 0), (2, 2)]
    errors = failure(
        lambda rank: (
            [tensor("w", np.zeros((2, 2)))],
            {"w": Piece(tensor="w", shape=(4, 4), start=places[rank])},
        )
    )
    assert len(errors) == 2
    assert all("do not make up its shape [4, 4]" in str(error) for error in errors)


def test_shapes_without_elements_that_contradict_each_other_are_an_error() -> None:
    errors = failure(
        lambda rank: (
            [tensor("w", np.zeros((4, 0)))],
            {"w": Piece(tensor="w", shape=(8 + 8 * rank, 0), start=(4 * rank, 0))},
        )
    )
    assert len(errors) == 2
    assert all("different shapes or types of 'w'" in str(error) for error in errors)


def test_index_counts_the_tensors_of_all_ranks() -> None:
    found = all_ranks(
        lambda rank: ([tensor("w", np.ones(2)), tensor("r", np.full(2, rank))], {}), world=3
    )
    totals = [read_index(outcome.must()[1][PIECES], path="").total for outcome in found]
    assert totals == [4, 4, 4]


def test_tensor_that_only_some_ranks_have_is_theirs() -> None:
    found = all_ranks(lambda rank: ([tensor("w", np.ones(2))] if rank else [], {}), world=3)
    indices = [read_index(outcome.must()[1][PIECES], path="").pieces for outcome in found]
    assert all(piece.ranks == (1, 2) for index in indices for piece in index.values())
    assert not indices[0]


@dataclass
class Rogue:
    """A coordinator whose other rank says something of its own."""

    says: dict[str, Json]
    rank: int = 0
    world: int = 2

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        name = tag.rpartition("/")[2]
        if name not in self.says:
            raise RanksMissing(tag, ranks=[1], found={0: value}, timeout_s=timeout_s)
        said = self.says[name]
        return [value, {"ok": packed(said) if name == "tensors" else said}]


def packed(said: Json) -> Json:
    """Return notes as they travel; any other value stays as it is."""
    if not isinstance(said, list):
        return said
    return b64encode(zlib.compress(json.dumps(said).encode())).decode()


OWN: list[Any] = ["w", "float64", [2]]


@pytest.mark.parametrize(
    "says",
    [
        {"tensors": "w"},
        {"tensors": b64encode(b"w").decode()},
        {"tensors": b64encode(zlib.compress(b"w")).decode()},
        {"tensors": b64encode(zlib.compress(b'"w"')).decode()},
        {"tensors": {"w": 1}},
        {"tensors": 3},
        {"tensors": ["w"]},
        {"tensors": [3]},
        {"tensors": [[]]},
        {"tensors": [[3, "float64", [2]]]},
        {"tensors": [["w", "float63", [2]]]},
        {"tensors": [["w", "float64", [-2]]]},
        {"tensors": [["w", "float64", "2"]]},
        {"tensors": [[*OWN, [4]]]},
        {"tensors": [[*OWN, [4], [0, 0]]]},
        {"tensors": [OWN], "digests": None},
        {"tensors": [OWN], "digests": "00"},
    ],
    ids=str,
)
def test_rank_that_says_something_else_is_out_of_step(says: dict[str, Json]) -> None:
    with pytest.raises(RanksOutOfStep):
        divided(Rogue(says), [tensor("w", np.zeros(2))])


@pytest.mark.parametrize("says", [{}, {"tensors": [OWN]}], ids=str)
def test_rank_that_does_not_come_is_missing(says: dict[str, Json]) -> None:
    with pytest.raises(RanksMissing):
        divided(Rogue(says), [tensor("w", np.zeros(2))])
