# SPDX-License-Identifier: Apache-2.0
"""Parts of a stored state: the entries of the dict that it is, each with all that it holds.

A skeleton is a list of nodes in which the parts of a container come before it, so an entry is a run
of nodes. What several entries share is described in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.state.grammar import MAPPINGS, fold, kind_of
from ckptmgr.state.paths import SHARED, Node, Path, StateMismatch, dump_skeleton, load_skeleton
from ckptmgr.state.skeleton import leaves_of

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
    if _kind(nodes) == "with_metadata":  # of a module: the dict, and what torch attaches to it
        nodes = nodes[: _starts_of_parts(nodes)[1]]
    kind = _kind(nodes)
    if kind not in MAPPINGS:
        raise StateMismatch(
            "only names a part of a state, but this state is no dict",
            hint="load it without only",
        )
    starts = [*_starts_of_parts(nodes), len(nodes) - 1]
    keys = {
        name: slice(start, stop)
        for start, stop in zip(starts[:-1:2], starts[2::2], strict=True)
        if isinstance(name := nodes[start], str)
    }
    missing = [name for name in names if name not in keys]
    if missing:
        known = ", ".join(map(repr, list(keys)[:_SHOWN])) or "none"
        raise StateMismatch(
            f"the checkpoint has no part {', '.join(map(repr, missing))}; its parts are {known}",
            hint="only takes the names at the top of the state that was saved",
        )
    chosen = [node for name in names for node in nodes[keys[name]]]
    return dump_skeleton([*_renumbered(chosen), {kind: len(names)}])


def tensors_of(skeleton: str) -> frozenset[str]:
    """Return the names of the tensors that a skeleton needs."""
    return frozenset(str(leaf.get("tensor")) for leaf in leaves_of(load_skeleton(skeleton)))


def _kind(nodes: Sequence[Node]) -> str:
    return kind_of(nodes[-1])[0] if nodes else ""


def _starts_of_parts(nodes: Sequence[Node]) -> list[int]:
    """Return the index of the first node of each value that the last node takes."""
    starts: list[int] = []

    def start_of(index: int, kind: str, parts: list[int]) -> int:
        if index == len(nodes) - 1:
            starts.extend(parts)
        return parts[0] if parts else index

    fold(nodes, start_of)
    return starts


def _renumbered(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with the numbers of shared objects from 0: none may exceed the nodes."""
    numbers: dict[str, int] = {}
    return [
        {SHARED: numbers.setdefault(repr(node[SHARED]), len(numbers))}
        if isinstance(node, dict) and SHARED in node
        else node
        for node in nodes
    ]
