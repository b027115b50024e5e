# SPDX-License-Identifier: Apache-2.0
"""The way down: a nested state becomes a list of tensors and a skeleton.

The walk keeps its own stack, so the depth of a state is limited by a rule and not by the interpreter.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any

import numpy as np

from ckptmgr.formats.tensor import Tensor
from ckptmgr.leaves import array_bytes, framework_of, to_tensor
from ckptmgr.tree_atoms import encode_atom, encode_dtype, encode_key
from ckptmgr.tree_memory import Leaf, array_memory, plan_storage, stored_as
from ckptmgr.tree_nodes import MAX_DEPTH, Json, Path, dump_skeleton, unsupported
from ckptmgr.tree_random import generator_state
from ckptmgr.tree_slices import Slice, Slicer, note_whole_shapes

_INLINE_BYTES = 1024
_WAY_OUT = "store plain values and arrays, or give the object state_dict() and load_state_dict()"
_CONTAINERS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    list: "list",
    tuple: "tuple",
}


@dataclass(frozen=True, slots=True)
class _Visit:
    """A value still to be encoded."""

    value: object
    path: Path
    depth: int


@dataclass(frozen=True, slots=True)
class _Emit:
    """Nodes to write once the values before them are encoded."""

    nodes: Sequence[Json]
    leaves_container: int | None = None


class Flattener:
    """Encodes one state; see `tree.flatten`.

    Attributes:
        slices: Name to leaf, of those leaves that are parts of larger tensors.
    """

    def __init__(self, slicer: Slicer | None = None) -> None:
        self._slicer = slicer
        self.slices: dict[str, Slice] = {}
        self._nodes: list[Json] = []
        self._leaves: list[Leaf] = []
        self._names: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._open: set[int] = set()
        self._held: list[object] = []

    def run(self, state: object) -> tuple[list[Tensor], str, dict[str, str]]:
        """Return the tensors, the skeleton and the aliases of a state."""
        stack: list[_Visit | _Emit] = [_Visit(state, Path(), 0)]
        while stack:
            item = stack.pop()
            if isinstance(item, _Visit):
                stack.extend(reversed(self._visit(item.value, item.path, item.depth)))
                continue
            self._nodes.extend(item.nodes)
            if item.leaves_container is not None:
                self._open.discard(item.leaves_container)
        tensors, aliases = plan_storage(self._leaves, self._unique)
        if self.slices:
            note_whole_shapes(self._leaves, self.slices)
        return tensors, dump_skeleton(self._nodes), aliases

    def _visit(self, value: Any, path: Path, depth: int) -> list[_Visit | _Emit]:
        """Encode a value without parts; for others return what is to be done instead."""
        if isinstance(value, bytes | bytearray) and len(value) > _INLINE_BYTES:
            return self._long_bytes(value, path)
        atom = encode_atom(value) or self._torch_atom(value)
        if atom is not None:
            self._nodes.extend(atom)
            return []
        if framework_of(value) is not None:
            return self._array(value, path, depth)
        parts = self._parts(value, path, depth + 1)
        if parts is None:
            raise unsupported(path, f"is a {_type_name(value)}, which cannot be stored", _WAY_OUT)
        if depth >= MAX_DEPTH:
            raise unsupported(
                path, f"is nested more than {MAX_DEPTH} deep", "store a flatter state"
            )
        if id(value) in self._open:
            raise unsupported(path, "contains itself", "break the cycle")
        self._open.add(id(value))
        # Temporary dicts must live as long as their ids are looked at.
        self._held.append(value)
        return parts

    def _parts(self, value: Any, path: Path, depth: int) -> list[_Visit | _Emit] | None:
        unknown: Any = value
        kind = _CONTAINERS.get(type(value))
        match kind:
            case "dict" | "counter":
                return self._mapping(value, path, depth, end={kind: len(value)})
            case "ordered":
                return self._ordered(value, path, depth)
            case "list" | "tuple":
                return self._sequence(value, path, depth, end={kind: len(value)})
        fields = getattr(value, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            names: list[Json] = [str(field) for field in fields]
            end: Json = {"namedtuple": [type(value).__name__, names]}
            return self._sequence(value, path, depth, end=end)
        if type(value) in (set, frozenset):
            return self._set(value, path)
        found = generator_state(value)
        if found is not None:
            node, state = found
            return [_Visit(state, path, depth), _Emit([node], id(value))]
        if _has_state_dict(value):
            inner = unknown.state_dict()
            return [_Visit(inner, path.state_dict(), depth), _Emit([], id(value))]
        return None

    def _mapping(self, value: Any, path: Path, depth: int, *, end: Json) -> list[_Visit | _Emit]:
        parts: list[_Visit | _Emit] = []
        for key, child in value.items():
            parts.append(_Emit(encode_key(key, path)))
            parts.append(_Visit(child, path.key(key), depth))
        return [*parts, _Emit([end], id(value))]

    def _ordered(self, value: Any, path: Path, depth: int) -> list[_Visit | _Emit]:
        extra = vars(value)
        if extra.keys() - {"_metadata"}:
            raise unsupported(path, f"is an OrderedDict with attributes {sorted(extra)}", _WAY_OUT)
        parts = self._mapping(value, path, depth, end={"ordered": len(value)})
        if extra:
            # torch notes the versions of its modules there; load_state_dict looks at them.
            parts.append(_Visit(extra["_metadata"], path.key("_metadata"), depth))
            parts.append(_Emit([{"with_metadata": 2}]))
        return parts

    def _sequence(self, value: Any, path: Path, depth: int, *, end: Json) -> list[_Visit | _Emit]:
        visits: list[_Visit | _Emit] = [
            _Visit(child, path.index(index), depth) for index, child in enumerate(value)
        ]
        return [*visits, _Emit([end], id(value))]

    def _set(self, value: Any, path: Path) -> list[_Visit | _Emit]:
        # Sets iterate in an order that changes from run to run; skeletons must not.
        parts = sorted((encode_key(element, path) for element in value), key=dump_skeleton)
        nodes = [node for part in parts for node in part]
        return [_Emit([*nodes, {type(value).__name__: len(parts)}], id(value))]

    def _torch_atom(self, value: object) -> tuple[Json] | None:
        if "torch" not in sys.modules or not type(value).__module__.startswith("torch"):
            return None
        from ckptmgr.tree_torch import encode_torch_atom

        return encode_torch_atom(value)

    def _long_bytes(self, value: bytes | bytearray, path: Path) -> list[_Visit | _Emit]:
        array = np.frombuffer(value, dtype=np.uint8)
        self._add("array", _array_leaf(array, path, self._unique(path.tensor_name())))
        self._nodes.append({f"to_{type(value).__name__}": 1})
        return []

    def _array(self, value: Any, path: Path, depth: int) -> list[_Visit | _Emit]:
        part = None if self._slicer is None else self._slicer.slice_of(path.tensor_name(), value)
        if part is not None:
            self._slice(part, path)
            return []
        match framework_of(value):
            case "numpy":
                if type(value) not in (np.ndarray, np.memmap):
                    raise unsupported(path, f"is a {_type_name(value)}", "store a plain ndarray")
                self._add("array", _array_leaf(value, path, self._unique(path.tensor_name())))
            case "torch":
                return self._torch_tensor(value, path, depth)
            case _:
                self._add("array", _foreign_leaf(value, path, self._unique(path.tensor_name())))
        return []

    def _slice(self, part: Slice, path: Path) -> None:
        name, framework = self._unique(path.tensor_name()), framework_of(part.local)
        self.slices[name] = part
        if framework == "torch":
            from ckptmgr.tree_torch import split_tensor, torch_leaf

            if split_tensor(part.local, path) is not None:  # type: ignore[arg-type]
                raise unsupported(path, "is sparse or quantized, and cut", "save it as dense")
            self._add("torch", torch_leaf(part.local, path, name))  # type: ignore[arg-type]
        elif framework == "numpy":
            self._add("array", _array_leaf(np.asarray(part.local), path, name))
        else:
            self._add("array", _foreign_leaf(part.local, path, name))

    def _torch_tensor(self, value: Any, path: Path, depth: int) -> list[_Visit | _Emit]:
        from ckptmgr.tree_torch import split_tensor, torch_leaf

        split = split_tensor(value, path)
        if split is None:
            self._add("torch", torch_leaf(value, path, self._unique(path.tensor_name())))
            return []
        node, parts = split
        visits: list[_Visit | _Emit] = [
            _Visit(part, path.key(name), depth + 1) for name, part in parts.items()
        ]
        return [*visits, _Emit([node])]

    def _add(self, kind: str, leaf: Leaf) -> None:
        self._leaves.append(leaf)
        self._nodes.append({kind: leaf.node})

    def _unique(self, name: str) -> str:
        candidate, number = name, self._numbers.get(name, 1)
        while candidate in self._names:
            number += 1
            candidate = f"{name}~{number}"
        # Many arrays may want one name (tuples as keys); each search goes on where the last one ended.
        self._numbers[name] = number
        self._names.add(candidate)
        return candidate


@cache
def _spelling(dtype: np.dtype) -> str:
    # NumPy puts the name together anew each time it is asked for.
    return dtype.name if dtype.isnative and dtype.fields is None else ""


def _array_leaf(array: np.ndarray, path: Path, name: str) -> Leaf:
    dtype = encode_dtype(array.dtype)
    if dtype is None:
        raise unsupported(
            path, f"is an array with elements of type {array.dtype}", "store numbers, or a list"
        )
    spelling = _spelling(array.dtype)
    spec, is_bytes = stored_as(name, spelling, array.shape, array.dtype.itemsize)
    node: dict[str, Json] = {"dtype": dtype, "shape": list(array.shape)}
    if is_bytes:
        node["stored"] = "uint8"

    return Leaf(
        path=path,
        node=node,
        value=array,
        tensor=Tensor(spec=spec, content=partial(array_bytes, array) if array.nbytes else _nothing),
        item_bytes=array.dtype.itemsize,
        shape=array.shape,
        memory=array_memory(array),
    )


def _nothing() -> memoryview:
    return memoryview(b"")


def _foreign_leaf(value: object, path: Path, name: str) -> Leaf:
    # JAX and MindSpore arrays come back as NumPy arrays; see tree.py.
    own = to_tensor(name, value)
    dtype = own.spec.dtype
    spec, is_bytes = stored_as(name, dtype.name, own.spec.shape, dtype.item_bytes)
    node: dict[str, Json] = {"dtype": encode_dtype(dtype.to_numpy()), "shape": list(own.spec.shape)}
    if is_bytes:
        node["stored"] = "uint8"
    return Leaf(
        path=path,
        node=node,
        value=value,
        tensor=Tensor(spec=spec, content=own.content),
        item_bytes=dtype.item_bytes,
        shape=own.spec.shape,
        memory=None,
    )


def _has_state_dict(value: object) -> bool:
    is_instance = not isinstance(value, type | ModuleType)
    return is_instance and callable(getattr(value, "state_dict", None))


def _type_name(value: object) -> str:
    kind = type(value)
    is_builtin = kind.__module__ == "builtins"
    return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
