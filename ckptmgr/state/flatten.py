# SPDX-License-Identifier: Apache-2.0
"""Flattening: a nested state becomes a list of tensors and a skeleton.

The walk keeps its own stack, so `MAX_DEPTH` limits the depth of a state, not the interpreter.
"""

from __future__ import annotations

import io
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ckptmgr.core.notes import add_note
from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.array_leaves import array_leaf, foreign_leaf, is_storable
from ckptmgr.state.arrays import Framework, framework_of
from ckptmgr.state.configs import config_content, is_config
from ckptmgr.state.frames import (
    WAY_OUT,
    ContainerFrame,
    Part,
    mapping_parts,
    module_frame,
    ordered_frame,
    record_frame,
    sequence_frame,
    set_nodes,
    stream_frame,
    type_name,
)
from ckptmgr.state.leaves import Leaf, plan_storage
from ckptmgr.state.paths import MAX_DEPTH, SHARED, Node, Path, Place, unsupported
from ckptmgr.state.random import generator_key, generator_state
from ckptmgr.state.records import JAX_KEY, is_jax_key, record_of, way_out
from ckptmgr.state.scalars import (
    ENCODERS,
    encode_atom,
)
from ckptmgr.state.skeleton import skeleton_of
from ckptmgr.state.text_forms import text_problem

if TYPE_CHECKING:  # one process has no slices
    from ckptmgr.state.slices import Slice, Slicer

_INLINE_BYTES = 1024
_BYTES = (bytes, bytearray)
_ATOMS = {kind: encode for kind, encode in ENCODERS.items() if kind not in _BYTES}
_CONTAINERS: dict[type, str] = {
    dict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
    defaultdict: "defaultdict",
    deque: "deque",
    list: "list",
    tuple: "tuple",
}


class Flattener:
    """Encodes one state; see `tree.flatten`.

    Args:
        slicer: Finds the leaves that are parts of larger tensors.
        is_dry: Only look for values that cannot be stored: no `state_dict()` is called, and no
            tensor of a framework is looked into, which may be a target without elements. An object
            that can only be filled passes.

    Attributes:
        objects: The objects with a `state_dict()`, each with its name.
        weak: Names of the weakly typed arrays of JAX; None where there are no arrays of JAX.
    """

    def __init__(self, slicer: Slicer | None = None, *, is_dry: bool = False) -> None:
        self._slicer = slicer
        self._is_dry = is_dry
        self.slices: dict[str, Slice] = {}
        self.objects: list[tuple[str, Any]] = []
        self.weak: list[str] | None = None
        self._nodes: list[Node | Leaf] = []
        self._leaves: list[Leaf] = []
        self._names: set[str] = set()
        self._numbers: dict[str, int] = {}
        self._usual_types = () if slicer is not None else _usual_types()
        self._frames: list[ContainerFrame] = []
        self._open: set[int] = set()
        self._held: list[object] = []
        self._ends: list[tuple[object, int]] = []

    def run(self, state: object) -> tuple[list[Tensor], str, dict[str, str]]:
        """Return the tensors, the skeleton and the aliases of a state."""
        self.walk(state)
        tensors, aliases = plan_storage(self._leaves, self._unique)
        if self.slices:
            from ckptmgr.state.slices import set_whole_shapes

            set_whole_shapes(self._leaves, self.slices)
        return tensors, skeleton_of(self._with_ties()), aliases

    def walk(self, state: object) -> None:
        """Visit all values of a state; raise UnsupportedState for one that cannot be stored."""
        self._visit(state, Path(), 0)
        frames, nodes = self._frames, self._nodes
        usual_types, is_dry = self._usual_types, self._is_dry
        while frames:
            frame = frames[-1]
            parts, path, step, depth, end, container, tie = frame
            for before, value, key in parts:
                nodes.extend(before)
                kind = type(value)
                encoder = _ATOMS.get(kind)
                if encoder is not None:
                    nodes.append(encoder(value))
                    continue
                if kind in usual_types and step is not None:
                    if is_dry and _is_storable(value):
                        continue
                    if self._usual_array(value, (path, step, key), path.part_name(step, key)):
                        continue
                self._visit(value, path if step is None else Path(path, step, key), depth)
                if frames[-1] is not frame:  # the value has parts of its own
                    break
            else:
                frames.pop()
                nodes.extend(end)
                if container is not None:
                    self._open.discard(container)
                if tie is not None:
                    self._note_end(tie)

    def _with_ties(self) -> list[Node | Leaf]:
        """Return the nodes, with a `SHARED` node after each occurrence of a repeated object."""
        counts = Counter(tie for tie, _ in self._ends)
        if len(counts) == len(self._ends):
            return self._nodes
        nodes: list[Node | Leaf] = []
        numbers: dict[object, int] = {}
        start = 0
        for tie, end in self._ends:
            if counts[tie] > 1:
                number = numbers.setdefault(tie, len(numbers))
                nodes += [*self._nodes[start:end], {SHARED: number}]
                start = end
        return [*nodes, *self._nodes[start:]]

    def _usual_array(self, value: Any, place: Place, name: str) -> bool:
        """Encode an array of the types that most are; return whether it is a plain one."""
        if type(value) is np.ndarray:
            leaf = array_leaf(value, place, self._unique(name))
        else:
            adapter = _torch_values()
            if not adapter.is_plain(value):
                return False
            leaf = adapter.torch_leaf(value, place, self._unique(name))
        self._leaves.append(leaf)
        self._nodes.append(leaf)
        return True

    def _note_end(self, tie: object) -> None:
        """Record where the nodes of a mutable object end; the caller holds the object."""
        self._ends.append((tie, len(self._nodes)))

    def _visit(self, value: Any, path: Path, depth: int) -> None:
        """Encode a value without parts, or push a frame for its parts."""
        if type(value) not in _CONTAINERS and self._visit_leaf(value, path, depth):
            return
        frame = self._frame(value, path, depth + 1)
        if frame is None:
            problem = text_problem(value)
            what = f"is a {type_name(value)}, which {problem or 'cannot be stored'}"
            raise unsupported(path, what, "store it as a string" if problem else WAY_OUT)
        if depth >= MAX_DEPTH:
            raise unsupported(
                path, f"is nested more than {MAX_DEPTH} deep", "store a flatter state"
            )
        if id(value) in self._open:
            raise unsupported(path, "contains itself", "break the cycle")
        self._open.add(id(value))
        # Temporary dicts must live as long as their ids are compared.
        self._held.append(value)
        self._frames.append(frame)

    def _visit_leaf(self, value: Any, path: Path, depth: int) -> bool:
        """Encode an array or a value without parts; return whether it is one."""
        if isinstance(value, _BYTES) and len(value) > _INLINE_BYTES:
            self._long_bytes(value, path)
            return True
        if type(value) is bytearray:
            self._nodes.extend(encode_atom(value) or ())
            self._hold(value)
            return True
        atom = encode_atom(value)
        framework = framework_of(value) if atom is None else None
        if framework is not None:
            self._array(value, framework, path, depth)
            return True
        atom = atom or self._torch_atom(value)
        if atom is not None:
            self._nodes.extend(atom)
            return True
        hint = way_out(value)
        if hint is not None:
            raise unsupported(path, f"is a {type_name(value)}", hint)
        return False

    def _frame(self, value: Any, path: Path, depth: int) -> ContainerFrame | None:
        unknown: Any = value
        kind = _CONTAINERS.get(type(value))
        match kind:
            case "dict" | "counter" | "defaultdict":
                parts = mapping_parts(value, path)
                return ContainerFrame(
                    parts, path, "key", depth, [{kind: len(value)}], id(value), id(value)
                )
            case "ordered":
                return ordered_frame(value, path, depth)
            case "list" | "tuple":
                return sequence_frame(value, path, depth, end=[{kind: len(value)}])
            case "deque":
                ends: list[Node] = [{"list": len(value)}, {kind: value.maxlen}]
                return sequence_frame(value, path, depth, end=ends)
        if is_config(value):
            parts = iter([((), config_content(value), None)])
            return ContainerFrame(parts, path, None, depth, (), id(value), id(value))
        fields = getattr(value, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            names: list[Node] = [str(field) for field in fields]
            end: Node = {"namedtuple": [type(value).__name__, names]}
            return sequence_frame(value, path, depth, end=[end])
        if type(value) in (set, frozenset):
            tie = id(value) if type(value) is set else None
            return ContainerFrame(
                iter(()), path, None, depth, set_nodes(value, path), id(value), tie
            )
        if type(value) is io.BytesIO:
            return stream_frame(value, path, depth)
        if type(value) is ModuleType:
            return module_frame(value, path, depth)
        found = generator_state(value)
        if found is not None:
            node, state = found
            key = generator_key(value)
            return ContainerFrame(
                iter([((), state, None)]), path, None, depth, [node], id(value), key
            )
        if _has(value, "state_dict"):
            self.objects.append((path.tensor_name(), value))
        if self._is_dry and (_has(value, "state_dict") or _has(value, "load_state_dict")):
            return ContainerFrame(iter(()), path, None, depth, (), id(value))
        if _has(value, "state_dict"):
            try:
                inner = unknown.state_dict()
            except Exception as error:
                add_note(error, f"while saving {path}")
                raise
            parts = iter([((), inner, None)])
            return ContainerFrame(parts, path, "object", depth, (), id(value), id(value))
        record = record_of(value)
        return None if record is None else record_frame(record, value, path, depth)

    def _torch_atom(self, value: object) -> tuple[Node] | None:
        if "torch" not in sys.modules or not type(value).__module__.startswith("torch"):
            return None
        from ckptmgr.state.torch_values import encode_torch_atom

        return encode_torch_atom(value)

    def _long_bytes(self, value: bytes | bytearray, path: Path) -> None:
        array = np.frombuffer(value, dtype=np.uint8)
        self._add(array_leaf(array, path.place, self._unique(path.tensor_name())))
        self._nodes.append({f"to_{type(value).__name__}": 1})
        if isinstance(value, bytearray):
            self._hold(value)

    def _hold(self, value: object) -> None:
        """Hold a mutable object without parts whose nodes are complete."""
        self._held.append(value)
        self._note_end(id(value))

    def _array(self, value: Any, framework: Framework, path: Path, depth: int) -> None:
        part = None if self._slicer is None else self._slicer.slice_of(path.tensor_name(), value)
        if part is not None:
            self._slice(part, path)
            return
        match framework:
            case "torch" | "jax" | "mindspore" if self._is_dry:
                pass
            case "numpy":
                if type(value) not in (np.ndarray, np.memmap):
                    raise unsupported(path, f"is a {type_name(value)}", "store a plain ndarray")
                self._add(array_leaf(value, path.place, self._unique(path.tensor_name())))
            case "torch":
                self._torch_tensor(value, path, depth)
            case "jax" if is_jax_key(value):
                self._held.append(value)
                self._frames.append(record_frame(JAX_KEY, value, path, depth + 1))
            case _:
                if framework == "jax":
                    self._note_weak(value, path)
                self._add(foreign_leaf(value, path.place, self._unique(path.tensor_name())))

    def _slice(self, part: Slice, path: Path) -> None:
        name, framework = self._unique(path.tensor_name()), framework_of(part.local)
        self.slices[name] = part
        if framework == "torch":
            adapter = _torch_values()
            if adapter.split_tensor(part.local, path) is not None:
                raise unsupported(path, "is sparse or quantized, and cut", "save it as dense")
            self._add(adapter.torch_leaf(part.local, path.place, name))
        elif framework == "numpy":
            self._add(array_leaf(np.asarray(part.local), path.place, name))
        else:
            self._add(foreign_leaf(part.local, path.place, name))

    def _torch_tensor(self, value: Any, path: Path, depth: int) -> None:
        adapter = _torch_values()
        split = adapter.split_tensor(value, path)
        if split is None:
            self._add(adapter.torch_leaf(value, path.place, self._unique(path.tensor_name())))
            return
        node, parts = split
        values: list[Part] = [((), part, name) for name, part in parts.items()]
        self._held.append(value)
        self._frames.append(
            ContainerFrame(iter(values), path, "key", depth + 1, [node], None, id(value))
        )

    def _note_weak(self, value: Any, path: Path) -> None:
        self.weak = self.weak or []
        if value.weak_type:
            self.weak.append(path.tensor_name())

    def _add(self, leaf: Leaf) -> None:
        self._leaves.append(leaf)
        self._nodes.append(leaf)

    def _unique(self, name: str) -> str:
        if name not in self._names:
            self._names.add(name)
            return name
        candidate, number = name, self._numbers.get(name, 1)
        while candidate in self._names:
            number += 1
            candidate = f"{name}~{number}"
        # Many arrays may have one name (tuples as keys); each search continues after the last one.
        self._numbers[name] = number
        self._names.add(candidate)
        return candidate


def _usual_types() -> tuple[type, ...]:
    """Return the types of which most arrays are."""
    torch = sys.modules.get("torch")
    return (np.ndarray,) if torch is None else (np.ndarray, torch.Tensor, torch.nn.Parameter)


@cache
def _torch_values() -> ModuleType:
    from ckptmgr.state import torch_values

    return torch_values


def _is_storable(value: Any) -> bool:
    """Return whether a value of the usual types has elements of a type that can be stored."""
    return type(value) is not np.ndarray or is_storable(value.dtype)


def _has(value: object, method: str) -> bool:
    is_instance = not isinstance(value, type | ModuleType)
    return is_instance and callable(getattr(value, method, None))
