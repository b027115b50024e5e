# SPDX-License-Identifier: Apache-2.0
"""Grammar of a skeleton: the kinds of its nodes, and how many values before it each one takes.

A skeleton may be untrusted: every reader of its program uses this table and its bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from ckptmgr.state.paths import SHARED, Node, TreeError, shown

LEAVES = ("array", "torch")
"""Kinds of the nodes that are tensors."""
MAPPINGS = ("dict", "ordered", "counter", "defaultdict")
SEQUENCES = ("list", "tuple")
COUNTED = frozenset((*MAPPINGS, *SEQUENCES, "set", "frozenset"))
"""Kinds of the containers whose nodes count their entries."""

_Result = TypeVar("_Result")


def _entries(kind: str, body: Node) -> Node:
    return body


def _pairs(kind: str, body: Node) -> int:
    if type(body) is not int:
        raise TreeError(f"a {kind} has {shown(body)} entries")
    return 2 * body


def _fields(kind: str, body: Node) -> int:
    if not isinstance(body, list) or len(body) != 2 or not isinstance(body[1], list):
        raise TreeError("a namedtuple has no name and fields")
    return len(body[1])


def _tensor_parts(kind: str, body: Node) -> int:
    if not isinstance(body, dict):
        raise TreeError(f"a {kind} tensor is spelled {shown(body)}")
    return 3 if "axis" in body else 2 if kind == "sparse" else 1


_COUNTS: Mapping[str, int | Callable[[str, Node], Node]] = {
    **dict.fromkeys(COUNTED, _entries),
    **dict.fromkeys(MAPPINGS, _pairs),
    **dict.fromkeys(("deque", "to_bytes", "to_bytearray", "bytesio", "rng", SHARED), 1),
    **dict.fromkeys(("sparse", "quantized"), _tensor_parts),
    "namedtuple": _fields,
    "with_metadata": 2,
}


def kind_of(node: Node) -> tuple[str, Node]:
    """Return the kind and the body of a node; no kind for a plain value."""
    if isinstance(node, dict) and len(node) == 1:
        [(kind, body)] = node.items()
        return kind, body
    return "", node


def values_taken(kind: str, body: Node, held: int) -> int:
    """Return how many of the `held` values before it a node takes; raise TreeError for more."""
    found = _COUNTS.get(kind, 0)
    count = found(kind, body) if callable(found) else found
    if type(count) is not int or not 0 <= count <= held:
        raise TreeError(f"{shown(count)} values are taken, {held} are there")
    return count


def fold(nodes: Sequence[Node], make: Callable[[int, str, list[_Result]], _Result]) -> _Result:
    """Return the one value of a program; `make` makes each from its index, kind and parts.

    Raises:
        TreeError: It is no program, or leaves none or several values.
    """
    values: list[_Result] = []
    for index, node in enumerate(nodes):
        kind, body = kind_of(node)
        if kind not in _COUNTS:
            values.append(make(index, kind, []))
            continue
        try:
            first = len(values) - values_taken(kind, body, len(values))
        except TreeError as error:
            raise TreeError(f"node {index} of the skeleton: {error.message}") from error
        values[first:] = [make(index, kind, values[first:])]
    if len(values) != 1:
        raise not_one_value(len(values))
    return values[0]


def not_one_value(count: int) -> TreeError:
    """Return the error of a program that leaves none or several values."""
    return TreeError(f"the skeleton leaves {count} values instead of one state")
