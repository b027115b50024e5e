# SPDX-License-Identifier: Apache-2.0
"""Leaves that are cut out of the text of a skeleton are those that a JSON parser finds."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from ckptmgr.state.tree import TreeError, flatten, unflatten
from tests.support.trees import round_trip, same

STORED = {"a": np.arange(2.0, dtype=np.float32), "b": np.ones(2, np.float32)}
LEAF = '{"array":{"dtype":"<f4","shape":[2],"tensor":"a"}}'


def decode(nodes: str) -> Any:
    return unflatten(f'{{"version":1,"nodes":[{nodes}]}}', STORED.__getitem__)


@pytest.mark.parametrize(
    "state",
    [
        {"\xff": np.ones(2), "text": "\xff"},
        {LEAF: np.ones(2), "text": LEAF, "more": f"{{{LEAF}"},
        {'"quoted"': np.ones(2), "back\\slash": np.zeros(3), "": np.ones(1)},
        [np.ones((1,) * 32), np.zeros((0, 3)), np.ones(2), "plain"],
    ],
)
def test_state_with_names_and_texts_like_leaves_comes_back(state: Any) -> None:
    assert same(round_trip(state), state)


def test_leaf_in_another_spelling_is_the_same_leaf() -> None:
    spaced = json.dumps(json.loads(LEAF), indent=1)

    assert same(decode(f'{LEAF},{spaced},\n{LEAF},{{"list":3}}'), [STORED["a"]] * 3)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        (f'"a{LEAF}"', "not JSON"),
        (f"{{{LEAF}:1}}", "not JSON"),
        (f'{{"list":{LEAF}}}', "values are taken"),
        (f'"\xff",{LEAF},{{"text":{LEAF}}},{{"list":3}}', "node 2 of the skeleton: bytes"),
        (f'1,{LEAF.replace("[2]", "[3]")},{{"list":2}}', "node 1 of the skeleton: tensor 'a'"),
        (LEAF.replace("[2]", "[02]"), "not JSON"),
        (LEAF.replace("[2]", "[99999999999999999]"), "it has 8 bytes"),
        (LEAF.replace("<f4", "<f9"), "element type"),
        (LEAF.replace('"a"', '"c"'), "no tensor called 'c'"),
        (LEAF.replace('"tensor":"a"', '"tensor":"a","tensor":"b"'), "'tensor' twice"),
        (LEAF.replace("array", "torch").replace("<f4", "no_type"), "no element type"),
    ],
)
def test_damaged_leaf_raises_tree_error(nodes: str, message: str) -> None:
    if "torch" in nodes:
        pytest.importorskip("torch")
    with pytest.raises(TreeError, match=message):
        decode(nodes)


def test_leaf_within_a_sparse_matrix_is_no_place_for_its_text() -> None:
    pytest.importorskip("scipy.sparse")
    with pytest.raises(TreeError, match="is spelled"):
        decode(f'{{"sparse":[{LEAF}]}}')


def test_leaf_of_a_tensor_that_another_leaf_has_gets_the_same_memory() -> None:
    first, second = decode(f'{LEAF},{LEAF},{{"list":2}}')

    assert np.shares_memory(first, second)


def test_text_of_a_skeleton_does_not_depend_on_how_it_is_read() -> None:
    flat = flatten({"w": np.ones(2), "more": [np.zeros(3), 1]})

    assert '"array":{"dtype":"<f8","shape":[2],"tensor":"w"}' in flat.skeleton
