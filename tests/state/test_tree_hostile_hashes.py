# SPDX-License-Identifier: Apache-2.0
"""Skeletons that would load for ever: keys of one hash, and shared values that contain each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ckptmgr import UnsupportedState
from ckptmgr.state.tree import TreeError, flatten, unflatten
from tests.support.trees import round_trip

MODULUS = 2**61 - 1
"""Integers have their value modulo this as their hash."""


def decode(*nodes: object) -> object:
    def read(name: str) -> Any:
        raise AssertionError(f"{name} is read")

    return unflatten(json.dumps({"version": 3, "nodes": nodes}), read)


def integer(number: int) -> list[object]:
    return [{"int": hex(number * MODULUS)}]


def in_tuple(number: int) -> list[object]:
    return [*integer(number), {"tuple": 1}]


KEYS: dict[str, Callable[[int], list[object]]] = {"integer": integer, "tuple": in_tuple}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
def test_mapping_whose_keys_share_a_hash_is_refused(key: Callable[[int], list[object]]) -> None:
    nodes = [node for number in range(1, 2000) for node in (*key(number), None)]
    with pytest.raises(TreeError, match="more than 256 keys of a dict share one hash"):
        decode(*nodes, {"dict": 1999})


@pytest.mark.parametrize("kind", ["set", "frozenset"])
def test_set_whose_elements_share_a_hash_is_refused(kind: str) -> None:
    nodes = [node for number in range(1, 2000) for node in integer(number)]
    with pytest.raises(TreeError, match=f"more than 256 keys of a {kind} share one hash"):
        decode(*nodes, {kind: 1999})


@pytest.mark.parametrize("kind", [dict.fromkeys, set])
def test_keys_that_a_load_would_refuse_are_refused_by_the_save(
    kind: Callable[[list[int]], object],
) -> None:
    with pytest.raises(UnsupportedState, match="more than 256 keys share one hash"):
        flatten({"seen": kind([number * MODULUS for number in range(300)])})


def test_many_keys_of_all_kinds_come_back() -> None:
    powers = [2.0**exponent for exponent in range(-1074, 1024)]
    state = dict.fromkeys([*range(5000), *powers[:1074], *(f"{n}" for n in range(5000))], 0)
    assert round_trip(state) == state


@pytest.mark.parametrize("container", ["list", "tuple"])
def test_shared_values_that_double_again_and_again_are_refused(container: str) -> None:
    nodes: list[object] = [{container: 0}, {"shared": 0}]
    for number in range(60):
        nodes += [{container: 0}, {"shared": number}, {container: 2}, {"shared": number + 1}]
    with pytest.raises(TreeError, match="many times more parts than the skeleton has nodes"):
        decode(*nodes)


def test_shared_values_that_nest_each_other_too_deep_are_refused() -> None:
    nodes: list[object] = [{"list": 0}, {"shared": 0}]
    for number in range(1200):
        nodes += [{"list": 0}, {"shared": number}, {"list": 1}, {"shared": number + 1}]
    with pytest.raises(TreeError, match="nested too deep"):
        decode(*nodes, {"list": 1201})


@pytest.mark.parametrize("number", [-1, 1, MODULUS, "a", [0]])
def test_number_of_a_shared_leaf_beyond_the_nodes_is_refused(number: object) -> None:
    leaf = {"tensor": "w", "dtype": "<f4", "shape": [1], "shared": number}
    with pytest.raises(TreeError, match="a leaf is shared as"):
        decode({"array": leaf})


@pytest.mark.parametrize("number", [-1, 2, MODULUS, 2**53])
def test_number_of_a_shared_value_beyond_the_nodes_is_refused(number: int) -> None:
    with pytest.raises(TreeError, match="is shared as"):
        decode(1, {"shared": number})
