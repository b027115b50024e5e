# SPDX-License-Identifier: Apache-2.0
"""Parts of a stored state: the entries of the dict that it is, each with all that it holds.

A skeleton is a list of nodes in which the parts of a container come before it, so an entry is a run
of nodes. What several entries share is described in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.state.paths import SHARED, Node, Path, StateMismatch, dump_skeleton, load_skeleton
from ckptmgr.state.skeleton import leaves_of

_MAPPINGS = ("dict", "ordered", "defaultdict")
PARTS_OF_KIND = {
    "list": 1,
    "tuple": 1,
    "set": 1,
    "frozenset": 1,
    "dict": 2,
    "ordered": 2,
    "counter": 2,
    "defaultdict": 2,
}
"""Kind of a container whose node counts its entries: values for each entry."""
_ONE = frozenset(["deque", "to_bytes", "to_bytearray", "bytesio", "rng", SHARED])
_SHOWN = 20


def checked_parts(only: object) -> tuple[str, ...] | None:
    """Return the names of the parts that a load was asked for, or None for everything.

    Raises:
        TypeError, ValueError: It is neither a string nor a non-empty list of strings.
    """
    if only is None:
        return None
    names = (only,) if isinstance(only, str) else only
    if not isinstance(names, list | tuple) or not all(isinstance(one, str) for one in names):
        raise TypeError(f"only must be the name of a part, or a list of names, but got {only!r}")
    if not names or not all(names):
        raise ValueError("only names no part of the state; leave it out to load everything")
    return tuple(dict.fromkeys(names))


def name_prefix(part: str) -> str:
    """Return the start of the names of the tensors of a part, such as `net/`."""
    return Path().key(part).key("").tensor_name()


def part_of(skeleton: str, names: Sequence[str]) -> str:
    """Return the skeleton of a state that has only these entries of the dict that it is.

    Raises:
        StateMismatch: It is no dict, or lacks one of them; names those that it has.
        TreeError: The skeleton is damaged.
    """
    nodes = load_skeleton(skeleton)
    root = nodes[-1] if nodes else None
    kind = next(iter(root)) if isinstance(root, dict) and len(root) == 1 else None
    if kind not in _MAPPINGS:
        raise StateMismatch(
            "only names a part of a state, but this state is no dict",
            hint="load it without only",
        )
    starts = _starts_of_parts(nodes)
    keys = {
        key: (starts[2 * i], (*starts, len(nodes) - 1)[2 * i + 2])
        for i in range(len(starts) // 2)
        if isinstance(key := nodes[starts[2 * i]], str)
    }
    missing = [name for name in names if name not in keys]
    if missing:
        known = ", ".join(map(repr, list(keys)[:_SHOWN])) or "none"
        raise StateMismatch(
            f"the checkpoint has no part {', '.join(map(repr, missing))}; its parts are {known}",
            hint="only takes the names at the top of the state that was saved",
        )
    chosen = [node for name in names for node in nodes[slice(*keys[name])]]
    return dump_skeleton([*_renumbered(chosen), {kind: len(names)}])


def tensors_of(skeleton: str) -> frozenset[str]:
    """Return the names of the tensors that a skeleton needs."""
    return frozenset(str(leaf.get("tensor")) for leaf in leaves_of(load_skeleton(skeleton)))


def _starts_of_parts(nodes: Sequence[Node]) -> list[int]:
    """Return the index of the first node of each key and value of the last node, a dict."""
    starts: list[int] = []
    for index, node in enumerate(nodes):
        takes = min(parts_taken(node), len(starts))
        first = starts[len(starts) - takes] if takes else index
        if index == len(nodes) - 1:
            return starts[len(starts) - takes :] if takes else []
        del starts[len(starts) - takes :]
        starts.append(first)
    return []


def parts_taken(node: Node) -> int:
    """Return how many values before it a node takes; a damaged node is found by `unflatten`."""
    if not isinstance(node, dict) or len(node) != 1:
        return 0
    [(kind, body)] = node.items()
    if kind in PARTS_OF_KIND:
        return PARTS_OF_KIND[kind] * body if type(body) is int and body > 0 else 0
    if kind == "namedtuple":
        is_whole = isinstance(body, list) and len(body) == 2 and isinstance(body[1], list)
        return len(body[1]) if is_whole else 0  # type: ignore[arg-type, index]
    if kind in ("sparse", "quantized"):
        return 3 if isinstance(body, dict) and "axis" in body else 2 if kind == "sparse" else 1
    return 2 if kind == "with_metadata" else int(kind in _ONE)


def _renumbered(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with the numbers of shared objects from 0: none may exceed the nodes."""
    numbers: dict[str, int] = {}
    return [
        {SHARED: numbers.setdefault(repr(node[SHARED]), len(numbers))}
        if isinstance(node, dict) and SHARED in node
        else node
        for node in nodes
    ]
