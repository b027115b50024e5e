# SPDX-License-Identifier: Apache-2.0
"""Skeletons of states whose tensors are cut over many ranks: whole on disk, a part in each process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckptmgr.state.paths import Json, dump_skeleton, load_skeleton

_LEAVES = ("array", "torch")


def leaf_shapes(skeleton: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a skeleton has a leaf of; of several leaves the first one counts.

    Raises:
        TreeError: It is no skeleton.
    """
    found: dict[str, tuple[int, ...]] = {}
    for leaf in leaves_of(load_skeleton(skeleton)):
        shape = leaf.get("shape")
        if isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**63 for n in shape):
            found.setdefault(str(leaf.get("tensor")), tuple(shape))
    return found


def with_shapes(skeleton: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a skeleton in which the leaves of some tensors have other shapes.

    Raises:
        TreeError: It is no skeleton.
    """
    if not shapes:
        return skeleton
    nodes = load_skeleton(skeleton)
    for leaf in leaves_of(nodes):
        shape = shapes.get(str(leaf.get("tensor")))
        if shape is not None:
            leaf["shape"] = list(shape)
    return dump_skeleton(nodes)


def leaves_of(nodes: list[Json]) -> Iterator[dict[str, Any]]:
    """Yield the bodies of the nodes that stand for tensors; they may be changed."""
    for node in nodes:
        if isinstance(node, dict) and len(node) == 1:
            [(kind, body)] = node.items()
            if kind in _LEAVES and isinstance(body, dict):
                yield body
