# SPDX-License-Identifier: Apache-2.0
"""Every reader of a skeleton reads its untrusted program by one table."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from ckptmgr.state.part import part_of
from ckptmgr.state.paths import TreeError
from ckptmgr.state.skeleton_merge import merge_skeletons
from ckptmgr.state.tree import unflatten
from ckptmgr.state.values import values_of

READERS: dict[str, Callable[[str], object]] = {
    "unflatten": lambda skeleton: unflatten(skeleton, lambda _: np.zeros(1)),
    "values": values_of,
    "part": lambda skeleton: part_of(skeleton, ["a"]),
    "merge": lambda skeleton: merge_skeletons(skeleton, [], None, has=lambda _: True),
}
# The last node is that of a dict, where it is reached.
REFUSED: list[tuple[list[object], str]] = [
    (["a", {"dict": 9}], "node 1 of the skeleton: 18 values are taken, 1 are there"),
    (["a", {"dict": -1}], "node 1 of the skeleton: -2 values are taken"),
    (["a", {"dict": "x"}], "node 1 of the skeleton: a dict has 'x' entries"),
    ([{"list": True}, {"dict": 1}], "node 0 of the skeleton: True values are taken"),
    ([{"set": 10**18}, {"dict": 1}], "node 0 of the skeleton: 10{18} values are taken"),
    ([1, {"namedtuple": ["P"]}, {"dict": 1}], "a namedtuple has no name and fields"),
    ([{"counter": None}, {"dict": 1}], "a counter has None entries"),
    ([{"deque": None}, {"dict": 1}], "node 0 of the skeleton: 1 values are taken"),
    ([1, {"with_metadata": 2}, {"dict": 1}], "node 1 of the skeleton: 2 values are taken"),
    ([1, 2, {"sparse": {"axis": 0}}, {"dict": 1}], "node 2 of the skeleton: 3 values are taken"),
    ([1, {"quantized": 5}, {"dict": 1}], "a quantized tensor is spelled 5"),
    (["a", 1, "b", 2, {"dict": 1}], "leaves 3 values instead of one state"),
]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("nodes", "message"), REFUSED, ids=range(len(REFUSED)))
def test_program_that_is_none_is_refused_alike_by_every_reader(
    nodes: list[object], message: str, reader: str
) -> None:
    skeleton = json.dumps({"version": 3, "nodes": nodes})
    with pytest.raises(TreeError, match=message):
        READERS[reader](skeleton)
