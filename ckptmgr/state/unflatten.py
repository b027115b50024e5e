# SPDX-License-Identifier: Apache-2.0
"""Unflattening: a skeleton and its tensors become a state again.

A skeleton may be untrusted. Every node is checked, nothing that it names is imported or called, and
no memory is allocated beyond that of the tensors themselves.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from ckptmgr.state.arrays import numpy_dtype_name
from ckptmgr.state.leaves import contiguous_strides, extent
from ckptmgr.state.paths import MAX_DEPTH, SHARED, Node, TreeError, load_skeleton, shown
from ckptmgr.state.random import build_generator
from ckptmgr.state.scalars import (
    MOST_EQUAL_HASHES,
    decode_bytes,
    decode_complex,
    decode_dtype,
    decode_float,
    decode_int,
    decode_scalar,
    decode_shape,
    decode_strides,
    decode_text,
    has_too_many_equal_hashes,
    is_key,
)
from ckptmgr.state.text_forms import TEXT_KINDS, decode_text_form

if TYPE_CHECKING:
    import torch

ReadTensor = Callable[[str], np.ndarray]

_ALIGNMENT = 16
# An object that several parts of a state hold is written, with all its nodes, for each of them.
_MOST_REPEATED = 4
# Some values of a state take two nodes, such as an OrderedDict and what torch attaches to it.
_MAX_STEPS = 2 * MAX_DEPTH + 10
_NEEDED_FIELDS = frozenset(("tensor", "dtype", "shape"))
_FLAGS = frozenset(("parameter", "requires_grad"))
_PLAIN_TORCH_FIELDS = _NEEDED_FIELDS | _FLAGS
_LEAF_FIELDS = _NEEDED_FIELDS | {"stored", "offset", "strides", "shared"}
_TORCH_FIELDS = _LEAF_FIELDS | _FLAGS
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


_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": Counter,
    "defaultdict": defaultdict,
}


class _Built(NamedTuple):
    """A value; `size` is the number of its parts at all depths, a shared one counted every time."""

    value: Any
    depth: int
    size: int = 1


class _View(NamedTuple):
    """The view that a leaf is of the bytes of its tensor; `offset` and `strides` in bytes."""

    memory: np.ndarray
    name: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Unflattener:
    """Decodes one skeleton; see `tree.unflatten`.

    Args:
        read: Returns the array of a tensor.
        fill: Reads the content of a tensor; called with its name before the content is used.

    Attributes:
        leaves: `id` of an array or torch tensor in the state to the name of its tensor.
        whole: Tensor name to whether the tensor is exactly one leaf.
    """

    def __init__(self, read: ReadTensor, *, fill: Callable[[str], None] | None = None) -> None:
        self._read = read
        self._fill = fill
        self.leaves: dict[int, str] = {}
        self.whole: dict[str, bool] = {}
        self._memory: dict[str, np.ndarray] = {}
        self._stored: dict[str, np.ndarray] = {}
        self._handed_out: set[str] = set()
        self._torch_memory: dict[str, torch.Tensor] = {}
        self._shared: dict[int, object] = {}
        self._ties: dict[int, _Built] = {}
        self._stack: list[_Built] = []
        self._node_count = 0

    def run(self, skeleton: str) -> object:
        """Return the state; raise TreeError if the skeleton does not fit the tensors."""
        nodes = load_skeleton(skeleton)
        self._node_count = len(nodes)
        for index, node in enumerate(nodes):
            try:
                self._step(node)
            except TreeError as error:
                message = f"node {index} of the skeleton: {error.message}"
                raise TreeError(message, hint=error.hint) from error
        if len(self._stack) != 1:
            raise TreeError(f"the skeleton leaves {len(self._stack)} values instead of one state")
        return self._stack[0].value

    def _step(self, node: Node) -> None:
        if isinstance(node, list):
            raise TreeError("a list is no node")
        if not isinstance(node, dict):
            self._stack.append(_Built(node, 0))
            return
        if len(node) != 1:
            raise TreeError(f"a node has {len(node)} kinds")
        [(kind, body)] = node.items()
        if kind in _ATOMS:
            self._stack.append(_Built(_ATOMS[kind](body), 0))
        elif kind in _COMBINERS:
            _COMBINERS[kind](self, kind, body)
        elif kind == SHARED:
            self._tie(body)
        elif kind in ("array", "torch"):
            self._stack.append(_Built(self._leaf(kind, body), 0))
        elif kind in ("torch.Size", "torch.dtype", "torch.device"):
            self._stack.append(_Built(_torch().ATOM_DECODERS[kind](body), 0))
        else:
            raise TreeError(f"there is no kind of node called {kind!r}")

    def _tie(self, number: Node) -> None:
        """Replace the last value with the first one of the same number."""
        if not self._is_shared_number(number) or not self._stack:
            raise TreeError(f"a value is shared as {shown(number)}")
        last = self._stack[-1]
        first = self._ties.setdefault(number, last)
        if type(first.value) is not type(last.value):
            raise TreeError(f"the values that are shared as {number} are of several types")
        self._push(first)

    def _is_shared_number(self, number: Node) -> TypeGuard[int]:
        """Return whether a number can be that of a shared value; of larger ones the hashes may be equal."""
        return type(number) is int and 0 <= number < self._node_count

    def _push(self, built: _Built) -> None:
        """Replace the last value; refuse shared ones that contain each other again and again."""
        if built.depth > _MAX_STEPS:
            raise TreeError("the state is nested too deep")
        if built.size > _MOST_REPEATED * self._node_count:
            raise TreeError("the state has many times more parts than the skeleton has nodes")
        self._stack[-1] = built

    def _pop(self, count: object) -> list[Any]:
        """Replace the last values with a placeholder of the right depth, and return them."""
        if type(count) is not int or not 0 <= count <= len(self._stack):
            raise TreeError(f"{count!r} values are taken, {len(self._stack)} are there")
        taken = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        depth = 1 + max((built.depth for built in taken), default=0)
        size = 1 + sum(built.size for built in taken)
        self._stack.append(_Built(None, 0))
        self._push(_Built(None, depth, size))
        return [built.value for built in taken]

    def _put(self, value: object) -> None:
        self._stack[-1] = self._stack[-1]._replace(value=value)

    def _sequence(self, kind: str, body: Node) -> None:
        values = self._pop(body)
        self._put(values if kind == "list" else tuple(values))

    def _namedtuple(self, kind: str, body: Node) -> None:
        if not isinstance(body, list) or len(body) != 2 or not isinstance(body[1], list):
            raise TreeError("a namedtuple has no name and fields")
        self._put(tuple(self._pop(len(body[1]))))

    def _set(self, kind: str, body: Node) -> None:
        values = _keys(kind, self._pop(body))
        made: set[Any] | frozenset[Any] = (set if kind == "set" else frozenset)(values)
        if len(made) != len(values):
            raise TreeError("a set holds a value twice")
        self._put(made)

    def _mapping(self, kind: str, body: Node) -> None:
        if type(body) is not int:
            raise TreeError(f"a {kind} has {body!r} entries")
        values = self._pop(2 * body)
        made: dict[Any, Any] = _MAPPINGS[kind]()
        for position, key in enumerate(_keys(kind, values[::2])):
            made[key] = values[2 * position + 1]
        if len(made) != body:
            raise TreeError(f"a {kind} holds a key twice")
        self._put(made)

    def _deque(self, kind: str, body: Node) -> None:
        [values] = self._pop(1)
        limit = 2**63 - 1 if body is None else body
        if type(values) is not list or type(limit) is not int or not len(values) <= limit < 2**63:
            raise TreeError(f"a deque with maxlen {shown(body)} is not a list of as many")
        self._put(deque(values, None if body is None else limit))

    def _metadata(self, kind: str, body: Node) -> None:
        mapping, metadata = self._pop(2)
        if type(mapping) is not OrderedDict:
            raise TreeError("metadata belongs to an OrderedDict")
        mapping._metadata = metadata  # type: ignore[attr-defined]
        self._put(mapping)

    def _bytes(self, kind: str, body: Node) -> None:
        [array] = self._pop(1)
        self.read_contents(array)
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 1:
            raise TreeError("bytes are not stored as uint8")
        self._put(array.tobytes() if kind == "to_bytes" else bytearray(array.tobytes()))

    def _bytes_io(self, kind: str, body: Node) -> None:
        [content] = self._pop(1)
        if type(content) is not bytes or type(body) is not int or not 0 <= body < 2**63:
            raise TreeError("a BytesIO is not bytes and a position in them")
        made = io.BytesIO(content)
        made.seek(body)
        self._put(made)

    def _torch_parts(self, kind: str, body: Node) -> None:
        torch = _torch()
        if not isinstance(body, dict):
            raise TreeError(f"a {kind} tensor is spelled {body!r}")
        parts = self._pop(3 if "axis" in body else 2 if kind == "sparse" else 1)
        self.read_contents(parts)
        build = torch.build_sparse if kind == "sparse" else torch.build_quantized
        if not all(_is_torch_tensor(part) for part in parts):
            raise TreeError(f"a {kind} tensor has parts that are no tensors")
        self._put(_guarded(f"a {kind} tensor", lambda: build(body, parts)))

    def _rng(self, kind: str, body: Node) -> None:
        [state] = self._pop(1)
        self.read_contents(state)
        self._put(_guarded(f"a {body}", lambda: build_generator(body, state)))

    def _leaf(self, kind: str, body: Node) -> object:
        allowed = _LEAF_FIELDS if kind == "array" else _TORCH_FIELDS
        if not isinstance(body, dict) or not _NEEDED_FIELDS <= body.keys() <= allowed:
            raise TreeError(f"an {kind} leaf is not described by a tensor, a dtype and a shape")
        if len(body) == len(_NEEDED_FIELDS) and kind == "array":
            plain = self._plain_array(body)
            if plain is not None:
                return plain
        shared = body.get("shared")
        if shared is not None and not self._is_shared_number(shared):
            raise TreeError(f"a leaf is shared as {shown(shared)}")
        if shared in self._shared:
            return self._shared[shared]
        build = self._array if kind == "array" else self._tensor
        name = self._load(body["tensor"])
        value: object = _guarded(f"tensor {name!r}", lambda: build(body))
        self._note(value, name, is_whole="offset" not in body and "shared" not in body)
        if shared is not None:
            self._shared[shared] = value
        return value

    def _note(self, value: object, name: str, *, is_whole: bool) -> None:
        if self._fill is not None:
            self.leaves[id(value)] = name
            self.whole[name] = is_whole and name not in self.whole

    def _plain_array(self, body: dict[str, Node]) -> np.ndarray | None:
        """Return the stored array of a leaf; None where the leaf is only a view of it."""
        name, node = body["tensor"], body["dtype"]
        if not isinstance(name, str) or not isinstance(node, str) or name in self._stored:
            return None
        stored = self._stored[name] = self._read_stored(name)
        is_plain = stored.flags.carray and body["shape"] == list(stored.shape)
        if not is_plain or stored.dtype != decode_dtype(node):
            return None
        self._handed_out.add(name)
        self._note(stored, name, is_whole=True)
        return stored

    def _array(self, body: dict[str, Node]) -> np.ndarray:
        dtype = decode_dtype(body["dtype"])
        view = self._view(body, dtype.itemsize, numpy_dtype_name(dtype))
        if prod(view.shape) * dtype.itemsize == 0:
            return np.ndarray(view.shape, dtype)
        return np.ndarray(view.shape, dtype, view.memory.data, view.offset, view.strides)

    def _tensor(self, body: dict[str, Node]) -> torch.Tensor:
        adapter = _torch()
        dtype = adapter.decode_torch_dtype(body["dtype"])
        stored = self._stored[str(body["tensor"])]
        spelling = adapter.dtype_name(dtype)
        is_plain = body.keys() <= _PLAIN_TORCH_FIELDS and body["shape"] == list(stored.shape)
        is_plain = is_plain and stored.flags.carray
        is_plain = is_plain and numpy_dtype_name(stored.dtype) == spelling
        if is_plain and adapter.is_known_to_numpy(dtype):
            known: torch.Tensor = adapter.with_flags(adapter.adopt_array(stored), body)
            return known
        view = self._view(body, dtype.itemsize, spelling)
        if view.name not in self._torch_memory:
            self._torch_memory[view.name] = adapter.share_array(view.memory)
        memory = self._torch_memory[view.name]
        tensor = adapter.build_tensor(
            dtype, view.shape, memory=memory, offset=view.offset, strides=view.strides
        )
        flagged: torch.Tensor = adapter.with_flags(tensor, body)
        return flagged

    def _view(self, body: dict[str, Node], item_bytes: int, spelling: str) -> _View:
        name, shape = str(body["tensor"]), decode_shape(body["shape"])
        memory = self._memory[name]
        strides, start = contiguous_strides(shape, item_bytes), body.get("offset", 0)
        if "offset" not in body:
            stored = body.get("stored", spelling)
            held = numpy_dtype_name(self._stored[name].dtype)
            if held != stored:
                raise TreeError(f"it holds {held}, not {stored}")
            if memory.nbytes != prod(shape) * item_bytes:
                raise TreeError(f"it has {memory.nbytes} bytes, not {prod(shape) * item_bytes}")
        elif "strides" in body:
            strides = decode_strides(body["strides"], len(shape))
        if type(start) is not int:
            raise TreeError(f"the offset is {start!r}")
        if prod(shape):
            low, high = extent(start, shape, strides, item_bytes)
            if low < 0 or high > memory.nbytes:
                raise TreeError(f"bytes [{low}, {high}) of {memory.nbytes} are wanted")
        return _View(memory, name, shape, start, strides)

    def _load(self, name: Node) -> str:
        """Read a stored tensor into memory that the state will own; return its name."""
        if not isinstance(name, str):
            raise TreeError(f"a tensor is called {name!r}")
        if name in self._memory:
            return name
        stored = self._stored[name] if name in self._stored else self._read_stored(name)
        flat = np.ascontiguousarray(stored).reshape(-1)
        memory = flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)
        address = memory.__array_interface__["data"][0]
        is_fit = memory.flags.writeable and address % _ALIGNMENT == 0
        if not is_fit and name not in self._handed_out:
            memory = memory.copy()
            stored = memory.view(flat.dtype).reshape(stored.shape) if flat.nbytes else stored
        self._memory[name], self._stored[name] = memory, stored
        return name

    def _read_stored(self, name: str) -> np.ndarray:
        try:
            return self._read(name)
        except KeyError:
            raise TreeError(f"there is no tensor called {name!r}") from None

    def read_contents(self, values: object) -> None:
        """Read the contents of the arrays in a value."""
        if self._fill is None:
            return
        if isinstance(values, dict):
            values = list(values.values())
        if isinstance(values, list | tuple | deque):
            for value in values:
                self.read_contents(value)
        elif (name := self.leaves.get(id(values))) is not None:
            self.whole[name] = False
            self._fill(name)


def _keys(kind: str, values: list[Any]) -> list[Any]:
    """Return the values, which are the keys of a dict or a set."""
    for value in values:
        if not is_key(value):
            raise TreeError(f"a {type(value).__name__} is used as a key")
    if has_too_many_equal_hashes(values):
        raise TreeError(
            f"more than {MOST_EQUAL_HASHES} keys of a {kind} share one hash, so that it would load "
            "for ever"
        )
    return values


def _guarded(what: str, build: Callable[[], Any]) -> Any:
    """Return `build()`; errors of NumPy and torch become a TreeError."""
    try:
        return build()
    except TreeError as error:
        raise TreeError(f"{what}: {error.message}", hint=error.hint) from error
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise TreeError(f"{what} cannot be restored: {error}") from error


def _is_torch_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


@cache
def _torch() -> Any:
    try:
        from ckptmgr.state import torch_values
    except ImportError as error:
        raise TreeError(
            "the state has torch values, but torch is not installed",
            hint="pip install 'ckptmgr[torch]'",
        ) from error
    return torch_values


_COMBINERS: dict[str, Callable[[Unflattener, str, Node], None]] = {
    "list": Unflattener._sequence,
    "tuple": Unflattener._sequence,
    "namedtuple": Unflattener._namedtuple,
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
