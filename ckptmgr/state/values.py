# SPDX-License-Identifier: Apache-2.0
"""The values of a stored state that are no tensors, by path: numbers, texts, kinds of containers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from ckptmgr.state.part import PARTS_OF_KIND, parts_taken
from ckptmgr.state.paths import SHARED, Node, TreeError, load_skeleton
from ckptmgr.state.scalars import decode_float

StateValue = bool | int | float | str | None

_ARRAYS = ("array", "torch")
_PLAIN = ("dict", "list", "tuple")


@dataclass(frozen=True, slots=True)
class _Subtree:
    """A node of a skeleton, and the values that it takes."""

    node: Node
    children: tuple[_Subtree, ...]


def values_of(skeleton: str) -> dict[str, StateValue]:
    """Return the values beside the tensors by path, such as `optimizer/lr`, in the order of the state.

    A container is no value of its own, unless it is empty or neither dict, list nor tuple. What
    JSON has no type for is a text: its kind, and its stored form.

    Raises:
        TreeError: The skeleton is damaged.
    """
    stack: list[_Subtree] = []
    for node in load_skeleton(skeleton):
        count = parts_taken(node)
        if count > len(stack):
            raise TreeError("the skeleton of the state takes values that are not there")
        start = len(stack) - count
        stack[start:] = [_Subtree(node, tuple(stack[start:]))]
    if len(stack) != 1:
        raise TreeError("the skeleton of the state is not one value")
    return dict(_walk(stack[0]))


def _walk(root: _Subtree) -> Iterator[tuple[str, StateValue]]:
    waiting = [(root, "")]  # no recursion: a state may be deep
    while waiting:
        tree, path = waiting.pop()
        kind, body = _kind_of(tree.node)
        if kind in _ARRAYS:
            continue
        if kind != SHARED and not (kind in _PLAIN and tree.children):
            yield path or "state", _value(tree.node, kind, body)
        waiting += reversed([*_children(tree, path, kind)])


def _kind_of(node: Node) -> tuple[str | None, Node]:
    if isinstance(node, dict) and len(node) == 1:
        [(kind, body)] = node.items()
        return kind, body
    return None, None


def _children(tree: _Subtree, path: str, kind: str | None) -> Iterator[tuple[_Subtree, str]]:
    below = f"{path}/" if path else ""
    if kind is not None and PARTS_OF_KIND.get(kind) == 2:
        for key, value in zip(tree.children[::2], tree.children[1::2], strict=True):
            name = key.node if isinstance(key.node, str) else json.dumps(key.node)
            yield value, below + name
        return
    for index, value in enumerate(tree.children):
        yield value, f"{below}{index}" if kind in PARTS_OF_KIND or index else path


def _value(node: Node, kind: str | None, body: Node) -> StateValue:
    if kind is None:
        return node if node is None or isinstance(node, bool | int | str) else json.dumps(node)
    if kind == "float":
        return decode_float(body)
    if kind in PARTS_OF_KIND:
        return kind
    return f"{kind} {body if isinstance(body, str) else json.dumps(body)}"
