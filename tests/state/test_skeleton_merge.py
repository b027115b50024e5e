# SPDX-License-Identifier: Apache-2.0
"""Skeletons for ranks that have none of their own."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.state import tree
from ckptmgr.state.paths import TreeError, dump_skeleton
from ckptmgr.state.skeleton import leaf_shapes, with_shapes
from ckptmgr.state.skeleton_merge import KEPT, first_differing_path, merge_skeletons

Point = namedtuple("Point", "x y")

values: Any = st.recursive(
    st.none() | st.integers(0, 5) | st.text(max_size=2) | st.floats(0, 1) | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.frozensets(st.integers(0, 9), max_size=3)
    ),
    max_leaves=12,
)


def skeleton(state: object) -> str:
    return tree.flatten(state).skeleton


def merged_state(first: object, others: list[object], own: object) -> tuple[Any, tuple[str, ...]]:
    """Merge, with only one number for all tensors: 0 of the stored ones, 1 of those that are kept."""
    found = merge_skeletons(
        skeleton(first),
        [skeleton(one) for one in others],
        None if own is None else skeleton(own),
        has=lambda name: not name.endswith("random"),
    )
    state = tree.unflatten(
        found.skeleton,
        lambda name: np.full(leaf_shapes(found.skeleton)[name], float(name.startswith(KEPT))),
    )
    return state, found.kept


@given(values)
def test_what_all_agree_on_is_taken(state: Any) -> None:
    found = merge_skeletons(
        skeleton(state), [skeleton(state)] * 2, skeleton({"other": 1}), has=lambda _: True
    )
    assert (found.skeleton, found.kept) == (skeleton(state), ())


@settings(max_examples=60)
@given(values, values, values)
def test_what_differs_is_what_the_rank_has(one: Any, two: Any, own: Any) -> None:
    state, kept = merged_state({"a": one, "b": [1, one]}, [{"a": two, "b": [1, one]}], {"a": own})
    assert skeleton(state["b"]) == skeleton([1, one])
    if skeleton(one) == skeleton(two):
        assert (skeleton(state["a"]), kept) == (skeleton(one), ())
    else:
        assert kept
        assert all(path.startswith("state['a']") for path in kept)


def test_parts_are_compared_one_by_one() -> None:
    one = {"l": [1, {"x": 2, 3: (4, 5)}], "p": Point(1, 2), "c": Counter("ab")}
    two = {"l": [1, {"x": 9, 3: (4, 6)}], "p": Point(1, 7), "c": Counter("ab")}
    own = {"l": [0, {"x": 50, 3: (60, 70)}], "p": Point(80, 90), "c": Counter()}
    state, kept = merged_state(one, [one, two], own)
    assert state["l"] == [1, {"x": 50, 3: (4, 70)}]
    assert state["p"] == (1, 90)
    assert state["c"] == Counter("ab")
    assert kept == ("state['l'][1]['x']", "state['l'][1][3][1]", "state['p'][1]")


def test_another_structure_is_kept_as_a_whole() -> None:
    state, kept = merged_state({"h": [1, 2]}, [{"h": [1]}], {"h": [7]})
    assert (state, kept) == ({"h": [7]}, ("state['h']",))
    state, kept = merged_state({"h": [1, 2]}, [{"h": (1, 2)}], {})
    assert (state, kept) == ({"h": None}, ("state['h']",))


def test_list_that_is_too_short_for_what_is_kept_is_kept_whole() -> None:
    state, kept = merged_state({"h": [1, {"x": 2}]}, [{"h": [1, {"x": 3}]}], {"h": []})
    assert (state, kept) == ({"h": []}, ("state['h']",))
    state, kept = merged_state({"h": [1, 2], "n": 1}, [{"h": [1, 2], "n": 2}], {"h": [], "n": 5})
    assert (state, kept) == ({"h": [1, 2], "n": 5}, ("state['n']",))
    state, kept = merged_state([np.zeros(1), {"random": np.zeros(1)}], [], [])
    assert (state, kept) == ([], ("state",))


def test_generator_of_which_a_part_differs_is_kept_whole() -> None:
    one, two, own = (np.random.default_rng(seed) for seed in range(3))
    state, kept = merged_state({"g": one}, [{"g": two}], {"g": own})
    assert kept == ("state['g']",)
    assert state["g"].bit_generator.state == own.bit_generator.state


def test_generator_of_which_a_tensor_is_missing_is_kept_whole() -> None:
    one, own = skeleton({"g": np.random.RandomState(1)}), skeleton({"g": np.random.default_rng(3)})
    found = merge_skeletons(one, [one], own, has=lambda _: False)
    assert (found.skeleton, found.kept) == (own, ("state['g']",))


def test_tensor_that_a_rank_lacks_is_its_own() -> None:
    state = {"w": np.zeros(2), "random": np.zeros(3)}
    found, kept = merged_state(state, [state], {"w": np.zeros(2), "random": np.zeros(4)})
    assert (found["w"].tolist(), found["random"].tolist()) == ([0, 0], [1, 1, 1, 1])
    assert kept == ("state['random']",)


def test_module_state_keeps_its_metadata_and_its_differing_parts() -> None:
    first: Any = OrderedDict(a=1, b=2)
    first._metadata = {"version": 2}
    other: Any = OrderedDict(a=1, b=3)
    other._metadata = {"version": 2}
    own: Any = OrderedDict(a=0, b=9)
    own._metadata = {"version": 1}
    state, kept = merged_state(first, [other], own)
    assert (dict(state), state._metadata, kept) == (
        {"a": 1, "b": 9},
        {"version": 2},
        ("state['b']",),
    )
    other._metadata = {"version": 3}
    assert merged_state(first, [other], own)[1] == ("state",)


def test_first_difference_is_named() -> None:
    assert first_differing_path(skeleton({"a": [1, 2]}), skeleton({"a": [1, 3]})) == "state['a'][1]"
    assert first_differing_path(skeleton({"a": 1}), skeleton({"a": 1})) == "state"


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [1, 2],
        [{"list": 3}],
        [{"list": -1}],
        [{"dict": "1"}],
        [{"namedtuple": 3}],
        [{"rng": "x"}],
        [{"quantized": {"axis": 1}}],
        [{"sparse": {}}],
    ],
)
def test_what_is_no_skeleton_is_refused(nodes: Any) -> None:
    with pytest.raises(TreeError):
        merge_skeletons(dump_skeleton(nodes), [], None, has=lambda _: True)


def test_shapes_are_replaced_where_they_are_asked_for() -> None:
    stored = skeleton({"a": np.zeros((4, 2)), "b": np.zeros(3)})
    changed = with_shapes(stored, {"a": (1, 2), "z": (9,)})
    assert leaf_shapes(changed) == {"a": (1, 2), "b": (3,)}
    assert with_shapes(stored, {}) is stored
