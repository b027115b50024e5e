# SPDX-License-Identifier: Apache-2.0
"""Skeleton merging for a rank of which nothing was saved.

It takes the values that all ranks agree on and keeps its own value of every other.
A skeleton is a postfix program, so every value in it is a run of nodes. Values are compared by
path; where they differ, the run of one skeleton replaces that of another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptmgr.state.grammar import MAPPINGS, SEQUENCES, fold
from ckptmgr.state.paths import SHARED, Node, Path, dump_skeleton, load_skeleton
from ckptmgr.state.skeleton import leaves_of

KEPT = "\0kept/"
"""Prefix of the names of tensors that the rank keeps."""

_WRAPPED = ("with_metadata", "deque")  # of the first value before them


@dataclass(frozen=True, slots=True)
class _Value:
    """A value: its nodes, and its parts by key or index if it is a container."""

    start: int
    stop: int
    parts: Mapping[str, _Value] = field(default_factory=dict)
    is_mapping: bool = False

    @property
    def position(self) -> tuple[int, int]:
        """Its nodes, which identify it: a container starts at its first part but ends later."""
        return self.start, self.stop

    def tail(self, nodes: list[Node]) -> list[Node]:
        """Return the nodes after the last part, which build the container."""
        return nodes[
            max((part.stop for part in self.parts.values()), default=self.start) : self.stop
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedSkeleton:
    """A skeleton with `KEPT` before the names of kept tensors, and the paths of kept values."""

    skeleton: str
    kept: tuple[str, ...]


def merge_skeletons(
    first: str, others: Sequence[str], own: str | None, *, has: Callable[[str], bool]
) -> MergedSkeleton:
    """Return the skeleton for a rank of which nothing was saved.

    `first` is the skeleton of rank 0, `others` those of the other ranks that saved, `own` that of
    the state to restore into: without it, values that differ become None. `has` returns whether all
    ranks have the same tensor of a name.
    """
    merger = _Merger(first, own, has)
    for other in dict.fromkeys(others):
        merger.compare(other)
    return merger.result()


def first_differing_path(first: str, other: str) -> str:
    """Return the path of a value in which two skeletons differ."""
    merger = _Merger(first, None, lambda _: True)
    merger.compare(other)
    return next(iter(merger.differing.values()), "state")


class _Merger:
    def __init__(self, first: str, own: str | None, has: Callable[[str], bool]) -> None:
        # Ranks are compared by value, not by object identity.
        self._first = first
        self._nodes = _without_ties(first)
        self._root = _parsed(self._nodes)
        self._own_nodes = [] if own is None else _without_ties(own)
        self._own = None if own is None else _parsed(self._own_nodes)
        self._has = has
        self.differing: dict[tuple[int, int], str] = {}

    def compare(self, other: str) -> None:
        """Record the values in which another skeleton differs."""
        nodes = _without_ties(other)
        stack = [(self._root, _parsed(nodes), Path())]
        while stack:
            one, two, path = stack.pop()
            if self._nodes[one.start : one.stop] == nodes[two.start : two.stop]:
                continue
            is_alike = bool(one.parts) and list(one.parts) == list(two.parts)
            if is_alike and one.tail(self._nodes) == two.tail(nodes):
                stack += [
                    (part, two.parts[key], _step(one, key, path)) for key, part in one.parts.items()
                ]
            else:
                self.differing[one.position] = str(path)

    def result(self) -> MergedSkeleton:
        """Return the first skeleton, with every differing value replaced by the rank's own."""
        out: list[Node] = []
        kept: list[str] = []
        stack: list[_Todo] = [_Todo(self._root, self._own, Path())]
        while stack:
            item = stack.pop()
            if isinstance(item.value, slice):
                out.extend(self._nodes[item.value])
            elif self._is_kept(item.value) or self._is_cut_short(item.value, item.own):
                kept.append(str(item.path))
                out.extend(self._replacement(item.own))
            else:
                stack.extend(reversed(_descended(item.value, item.own, item.path)))
        # Values that are one object on rank 0 are not where a part of them is kept here.
        return MergedSkeleton(
            skeleton=dump_skeleton(out) if kept else self._first, kept=tuple(kept)
        )

    def _is_kept(self, value: _Value) -> bool:
        is_differing = value.position in self.differing
        return is_differing or (not value.parts and self._lacks_tensor(value))

    def _lacks_tensor(self, value: _Value) -> bool:
        leaves = leaves_of(self._nodes[value.start : value.stop])
        return not all(self._has(str(leaf.get("tensor"))) for leaf in leaves)

    def _is_cut_short(self, value: _Value, own: _Value | None) -> bool:
        """Return whether the rank's own list is too short for an element that it should keep."""
        if own is None or value.is_mapping or value.parts.keys() <= own.parts.keys():
            return False
        differs = any(value.start <= start and stop <= value.stop for start, stop in self.differing)
        return differs or self._lacks_tensor(value)

    def _replacement(self, own: _Value | None) -> list[Node]:
        if own is None:
            return [None]
        nodes: list[Node] = json.loads(json.dumps(self._own_nodes[own.start : own.stop]))
        for leaf in leaves_of(nodes):
            leaf["tensor"] = f"{KEPT}{leaf.get('tensor')}"
            leaf.pop("shared", None)
        return nodes


def _without_ties(skeleton: str) -> list[Node]:
    """Return the nodes of a skeleton except the `SHARED` ones."""
    nodes = load_skeleton(skeleton)
    return [node for node in nodes if not (isinstance(node, dict) and SHARED in node)]


@dataclass(frozen=True, slots=True)
class _Todo:
    """A value still to be written, or nodes of the first skeleton as they are."""

    value: _Value | slice
    own: _Value | None = None
    path: Path = field(default_factory=Path)


def _descended(value: _Value, own: _Value | None, path: Path) -> list[_Todo]:
    todo: list[_Todo] = []
    at = value.start
    for key, part in value.parts.items():
        todo.append(_Todo(slice(at, part.start)))
        todo.append(
            _Todo(part, None if own is None else own.parts.get(key), _step(value, key, path))
        )
        at = part.stop
    return [*todo, _Todo(slice(at, value.stop))]


def _step(value: _Value, key: str, path: Path) -> Path:
    step = json.loads(key)
    if value.is_mapping:
        return path.key(step[0] if len(step) == 1 and not isinstance(step[0], dict) else key)
    return path.index(step)


def _parsed(nodes: list[Node]) -> _Value:
    """Return the one value of a skeleton; only the parts of some containers are merged."""

    def made(index: int, kind: str, values: list[_Value]) -> _Value:
        start = values[0].start if values else index
        if kind in _WRAPPED:
            return replace(values[0], stop=index + 1)
        if kind in MAPPINGS:
            texts = (json.dumps(nodes[key.start : key.stop]) for key in values[::2])
            parts = dict(zip(texts, values[1::2], strict=True))
            return _Value(start, index + 1, parts, is_mapping=True)
        if kind in (*SEQUENCES, "namedtuple"):
            return _Value(start, index + 1, {str(n): value for n, value in enumerate(values)})
        return _Value(start, index + 1)

    return fold(nodes, made)
