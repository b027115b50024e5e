# SPDX-License-Identifier: Apache-2.0
"""Unflattening: a skeleton and its tensors become a state again.

A skeleton may be untrusted. Every node is checked, nothing that it names is imported or called, and
no memory is allocated beyond that of the tensors themselves.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import partial
from operator import length_hint
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.state.grammar import LEAVES, not_one_value, values_taken
from ckptmgr.state.paths import MAX_DEPTH, SHARED, Node, TreeError, shown
from ckptmgr.state.random import build_generator
from ckptmgr.state.scalars import (
    KEY_TYPES,
    MOST_EQUAL_HASHES,
    decode_bytes,
    decode_complex,
    decode_float,
    decode_int,
    decode_scalar,
    decode_text,
    has_too_many_equal_hashes,
    is_key,
)
from ckptmgr.state.skeleton_reader import MARK, nodes_of
from ckptmgr.state.stored_arrays import ReadTensor, StoredArrays, guarded, torch_values
from ckptmgr.state.text_forms import TEXT_KINDS, decode_text_form

# An object that several parts of a state hold is written, with all its nodes, for each of them.
_MOST_REPEATED = 4
# Some values of a state take two nodes, such as an OrderedDict and what torch attaches to it.
_MAX_STEPS = 2 * MAX_DEPTH + 10
_ATOMS: dict[str, Callable[[object], object]] = {
    "int": decode_int,
    "float": decode_float,
    "complex": decode_complex,
    "bytes": decode_bytes,
    "bytearray": lambda node: bytearray(decode_bytes(node)),
    "text": decode_text,
    "scalar": decode_scalar,
    **{kind: partial(decode_text_form, kind) for kind in TEXT_KINDS},
}


_MAPPINGS: dict[str, Callable[[dict[Any, Any]], dict[Any, Any]]] = {
    "ordered": OrderedDict,
    "counter": Counter,
    "defaultdict": partial(defaultdict, None),
}


class _Measure(NamedTuple):
    """Depth of a value, and the number of its parts at all depths, a shared one counted every time."""

    depth: int = 0
    size: int = 1


class Unflattener:
    """Decodes one skeleton; see `tree.unflatten`.

    Args:
        read: Returns the array of a tensor.
        fill: Reads the content of a tensor; called with its name before the content is used.

    Attributes:
        arrays: Makes the leaves.
    """

    def __init__(self, read: ReadTensor, *, fill: Callable[[str], None] | None = None) -> None:
        self.arrays = StoredArrays(read, fill=fill)
        self._ties: dict[int, tuple[Any, _Measure]] = {}
        self._node_count = 0
        self._values: list[Any] = []  # that no container has taken yet
        self._measures: list[tuple[int, _Measure]] = []  # of the containers there, by position

    def run(self, skeleton: str) -> object:
        """Return the state; raise TreeError if the skeleton does not fit the tensors."""
        nodes, leaves = nodes_of(skeleton)
        self._node_count = len(nodes)
        values, left = self._values, iter(nodes)
        arrays = self.arrays.plain_leaves(leaves, numbers=self._node_count)
        try:
            for node in left:
                if node == MARK and leaves:
                    values.append(next(arrays))
                elif isinstance(node, dict):
                    self._step(node)
                elif isinstance(node, list):
                    raise TreeError("a list is no node")
                else:
                    values.append(node)
        except TreeError as error:
            index = len(nodes) - 1 - length_hint(left)
            message = f"node {index} of the skeleton: {error.message}"
            raise TreeError(message, hint=error.hint) from error
        if len(self._values) != 1:
            raise not_one_value(len(self._values))
        return self._values[0]

    def _step(self, node: dict[str, Node]) -> None:
        if len(node) != 1:
            raise TreeError(f"a node has {len(node)} kinds")
        [(kind, body)] = node.items()
        if kind in LEAVES:
            self._values.append(self.arrays.leaf(kind, body, numbers=self._node_count))
        elif kind in _ATOMS:
            self._values.append(_ATOMS[kind](body))
        elif kind in _COMBINERS:
            parts = self._pop(values_taken(kind, body, len(self._values)))
            self._put(_COMBINERS[kind](self, kind, body, parts))
        elif kind == SHARED:
            self._tie(body)
        elif kind in ("torch.Size", "torch.dtype", "torch.device"):
            self._values.append(torch_values().ATOM_DECODERS[kind](body))
        else:
            raise TreeError(f"there is no kind of node called {kind!r}")

    def _tie(self, number: Node) -> None:
        """Replace the last value with the first one of the same number."""
        # Of larger numbers than there are nodes the hashes may be equal.
        if type(number) is not int or not 0 <= number < self._node_count or not self._values:
            raise TreeError(f"a value is shared as {shown(number)}")
        last = self._values[-1]
        measure = _Measure()
        if self._measures and self._measures[-1][0] == len(self._values) - 1:
            measure = self._measures.pop()[1]
        value, measure = self._ties.setdefault(number, (last, measure))
        if type(value) is not type(last):
            raise TreeError(f"the values that are shared as {number} are of several types")
        self._put(value)
        self._note_measure(measure)

    def _note_measure(self, measure: _Measure) -> None:
        """Note that of the last value; refuse shared ones that contain each other again and again."""
        if measure.depth > _MAX_STEPS:
            raise TreeError("the state is nested too deep")
        if measure.size > _MOST_REPEATED * self._node_count:
            raise TreeError("the state has many times more parts than the skeleton has nodes")
        self._measures.append((len(self._values) - 1, measure))

    def _pop(self, count: int) -> list[Any]:
        """Replace the last values with a placeholder of the right depth, and return them."""
        first = len(self._values) - count
        taken = self._values[first:]
        del self._values[first:]
        depth, size = 0, count
        while self._measures and self._measures[-1][0] >= first:
            _, part = self._measures.pop()
            depth, size = max(depth, part.depth), size + part.size - 1
        self._values.append(None)
        self._note_measure(_Measure(1 + depth, 1 + size))
        return taken

    def _put(self, value: object) -> None:
        self._values[-1] = value

    def _sequence(self, kind: str, body: Node, values: list[Any]) -> object:
        return values if kind == "list" else tuple(values)

    def _set(self, kind: str, body: Node, values: list[Any]) -> object:
        keys = _keys(kind, values)
        made: set[Any] | frozenset[Any] = (set if kind == "set" else frozenset)(keys)
        if len(made) != len(keys):
            raise TreeError("a set holds a value twice")
        return made

    def _mapping(self, kind: str, body: Node, values: list[Any]) -> object:
        made = dict(zip(_keys(kind, values[::2]), values[1::2], strict=True))
        if len(made) != body:
            raise TreeError(f"a {kind} holds a key twice")
        return made if kind == "dict" else _MAPPINGS[kind](made)

    def _deque(self, kind: str, body: Node, parts: list[Any]) -> object:
        [values] = parts
        limit = 2**63 - 1 if body is None else body
        if type(values) is not list or type(limit) is not int or not len(values) <= limit < 2**63:
            raise TreeError(f"a deque with maxlen {shown(body)} is not a list of as many")
        return deque(values, None if body is None else limit)

    def _metadata(self, kind: str, body: Node, parts: list[Any]) -> object:
        mapping, metadata = parts
        if type(mapping) is not OrderedDict:
            raise TreeError("metadata belongs to an OrderedDict")
        mapping._metadata = metadata  # type: ignore[attr-defined]
        return mapping

    def _bytes(self, kind: str, body: Node, parts: list[Any]) -> object:
        [array] = parts
        self.arrays.read_contents(array)
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
            raise TreeError("bytes are not stored as uint8")
        return array.tobytes() if kind == "to_bytes" else bytearray(array.tobytes())

    def _bytes_io(self, kind: str, body: Node, parts: list[Any]) -> object:
        [content] = parts
        if type(content) is not bytes or type(body) is not int or not 0 <= body < 2**63:
            raise TreeError("a BytesIO is not bytes and a position in them")
        made = io.BytesIO(content)
        made.seek(body)
        return made

    def _torch_parts(self, kind: str, body: Node, parts: list[Any]) -> object:
        torch = torch_values()
        self.arrays.read_contents(parts)
        build = torch.build_sparse if kind == "sparse" else torch.build_quantized
        if not all(_is_torch_tensor(part) for part in parts):
            raise TreeError(f"a {kind} tensor has parts that are no tensors")
        return guarded(f"a {kind} tensor", lambda: build(body, parts))

    def _rng(self, kind: str, body: Node, parts: list[Any]) -> object:
        [state] = parts
        self.arrays.read_contents(state)
        return guarded(f"a {body}", lambda: build_generator(body, state))


def _keys(kind: str, values: list[Any]) -> list[Any]:
    """Return the values, which are the keys of a dict or a set."""
    if not KEY_TYPES.issuperset(map(type, values)):
        for value in values:
            if not is_key(value):
                raise TreeError(f"a {type(value).__name__} is used as a key")
    if has_too_many_equal_hashes(values):
        raise TreeError(
            f"more than {MOST_EQUAL_HASHES} keys of a {kind} share one hash, so that it would load "
            "for ever"
        )
    return values


def _is_torch_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


_COMBINERS: dict[str, Callable[[Unflattener, str, Node, list[Any]], object]] = {
    "list": Unflattener._sequence,
    "tuple": Unflattener._sequence,
    "namedtuple": Unflattener._sequence,
    "set": Unflattener._set,
    "frozenset": Unflattener._set,
    "dict": Unflattener._mapping,
    "ordered": Unflattener._mapping,
    "counter": Unflattener._mapping,
    "deque": Unflattener._deque,
    "defaultdict": Unflattener._mapping,
    "with_metadata": Unflattener._metadata,
    "to_bytes": Unflattener._bytes,
    "to_bytearray": Unflattener._bytes,
    "bytesio": Unflattener._bytes_io,
    "sparse": Unflattener._torch_parts,
    "quantized": Unflattener._torch_parts,
    "rng": Unflattener._rng,
}
