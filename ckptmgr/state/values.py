# SPDX-License-Identifier: Apache-2.0
"""The values of a stored state that are no tensors, by path: numbers, texts, kinds of containers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ckptmgr.state.grammar import COUNTED, LEAVES, MAPPINGS, fold, kind_of
from ckptmgr.state.paths import SHARED, Node, load_skeleton
from ckptmgr.state.scalars import decode_float

StateValue = bool | int | float | str | None

_PLAIN = ("dict", "list", "tuple")


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A node of a skeleton, and the values that it takes."""

    node: Node
    children: tuple[_Subtree, ...]


def values_of(skeleton: str) -> dict[str, StateValue]:
    """Return the values beside the tensors by path, such as `optimizer/lr`, in the order of the state.

    A container is no value of its own, unless it is empty or neither dict, list nor tuple. A
    value without a type in JSON is a text: its kind, and its stored form.

    Raises:
        TreeError: The skeleton is damaged.
    """
    nodes = load_skeleton(skeleton)
    return dict(_walk(fold(nodes, lambda index, _, parts: _Subtree(nodes[index], tuple(parts)))))


def _walk(root: _Subtree) -> Iterator[tuple[str, StateValue]]:
    waiting = [(root, "")]  # no recursion: a state may be deep
    while waiting:
        tree, path = waiting.pop()
        kind, body = kind_of(tree.node)
        if kind in LEAVES:
            continue
        if kind != SHARED and not (kind in _PLAIN and tree.children):
            yield path or "state", _value(tree.node, kind, body)
        waiting += reversed([*_children(tree, path, kind)])


def _children(tree: _Subtree, path: str, kind: str) -> Iterator[tuple[_Subtree, str]]:
    below = f"{path}/" if path else ""
    if kind in MAPPINGS:
        for key, value in zip(tree.children[::2], tree.children[1::2], strict=True):
            name = key.node if isinstance(key.node, str) else json.dumps(key.node)
            yield value, below + name
        return
    for index, value in enumerate(tree.children):
        yield value, f"{below}{index}" if kind in COUNTED or index else path


def _value(node: Node, kind: str, body: Node) -> StateValue:
    if not kind:
        return node if node is None or isinstance(node, bool | int | str) else json.dumps(node)
    if kind == "float":
        return decode_float(body)
    if kind in COUNTED:
        return kind
    return f"{kind} {body if isinstance(body, str) else json.dumps(body)}"
