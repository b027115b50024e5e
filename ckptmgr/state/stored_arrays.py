# SPDX-License-Identifier: Apache-2.0
"""Leaves of a skeleton: NumPy arrays and torch tensors over the tensors of a file.

A leaf is a whole tensor or a view of its bytes. A skeleton may be untrusted, so each is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ckptmgr.state.arrays import numpy_dtype_name
from ckptmgr.state.leaves import contiguous_strides, extent
from ckptmgr.state.paths import Node, TreeError, shown
from ckptmgr.state.scalars import decode_dtype, decode_shape, decode_strides
from ckptmgr.state.skeleton_reader import PlainLeaf, body_of

if TYPE_CHECKING:
    import torch

ReadTensor = Callable[[str], np.ndarray]

_ALIGNMENT = 16
_NEEDED_FIELDS = frozenset(("tensor", "dtype", "shape"))
_FLAGS = frozenset(("parameter", "requires_grad"))
_PLAIN_TORCH_FIELDS = _NEEDED_FIELDS | _FLAGS
_LEAF_FIELDS = _NEEDED_FIELDS | {"stored", "offset", "strides", "shared"}
_TORCH_FIELDS = _LEAF_FIELDS | _FLAGS


class _View(NamedTuple):
    """The view that a leaf is of the bytes of its tensor; `offset` and `strides` in bytes."""

    memory: np.ndarray
    name: str
    shape: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class _Form(NamedTuple):
    """Element type and shape of leaves, as they are stored; `dtype` is None if they are bytes."""

    dtype: np.dtype | None
    shape: tuple[int, ...]
    adopt: Callable[[np.ndarray], object] | None  # makes a torch tensor


def _form_of(kind: str, body: dict[str, Node]) -> _Form:
    spelling, shape = str(body["dtype"]), decode_shape(body["shape"])
    if kind == "array":
        return _Form(decode_dtype(spelling), shape, None)
    adapter = torch_values()
    dtype = adapter.stored_dtype(spelling)
    return _Form(dtype, shape, None if dtype is None else adapter.adopter(spelling))


class StoredArrays:
    """Makes the leaves of one skeleton.

    Args:
        read: Returns the array of a tensor.
        fill: Reads the content of a tensor; called with its name before the content is used.

    Attributes:
        leaves: `id` of an array or torch tensor in the state to the name of its tensor; only with
            `fill`.
        whole: Tensor name to whether the tensor is exactly one leaf; only with `fill`.
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
        self._shared: dict[object, object] = {}

    def plain_leaves(self, leaves: Iterable[PlainLeaf], *, numbers: int) -> Iterator[object]:
        """Yield the array of each leaf, if possible as it is stored; see `leaf` for `numbers`."""
        forms: dict[str, _Form] = {}
        for leaf in leaves:
            head, name = leaf
            form = forms.get(head)
            if form is None:
                form = forms[head] = _form_of(*body_of(leaf))
            dtype, shape, adopt = form
            if name not in self._stored:
                stored = self._stored[name] = self._read_stored(name)
                fits = dtype is not None and stored.dtype == dtype
                if fits and stored.shape == shape and stored.flags.carray:
                    self._handed_out.add(name)
                    value: object = stored if adopt is None else adopt(stored)
                    if self._fill is not None:
                        self._note(value, name, is_whole=True)
                    yield value
                    continue
            yield self.leaf(*body_of(leaf), numbers=numbers)

    def leaf(self, kind: str, body: Node, *, numbers: int) -> object:
        """Return the array of a node; the numbers of shared ones are below `numbers`."""
        allowed = _LEAF_FIELDS if kind == "array" else _TORCH_FIELDS
        if not isinstance(body, dict) or not _NEEDED_FIELDS <= body.keys() <= allowed:
            raise TreeError(f"an {kind} leaf is not described by a tensor, a dtype and a shape")
        shared = body.get("shared")
        if shared is not None and not (type(shared) is int and 0 <= shared < numbers):
            raise TreeError(f"a leaf is shared as {shown(shared)}")
        if shared in self._shared:
            return self._shared[shared]
        build = self._array if kind == "array" else self._tensor
        name = self._load(body["tensor"])
        value: object = guarded(f"tensor {name!r}", lambda: build(body))
        self._note(value, name, is_whole="offset" not in body and "shared" not in body)
        if shared is not None:
            self._shared[shared] = value
        return value

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

    def _note(self, value: object, name: str, *, is_whole: bool) -> None:
        if self._fill is not None:
            self.leaves[id(value)] = name
            self.whole[name] = is_whole and name not in self.whole

    def _array(self, body: dict[str, Node]) -> np.ndarray:
        dtype = decode_dtype(body["dtype"])
        view = self._view(body, dtype.itemsize, numpy_dtype_name(dtype))
        if prod(view.shape) * dtype.itemsize == 0:
            return np.ndarray(view.shape, dtype)
        return np.ndarray(view.shape, dtype, view.memory.data, view.offset, view.strides)

    def _tensor(self, body: dict[str, Node]) -> torch.Tensor:
        adapter = torch_values()
        dtype = adapter.decode_torch_dtype(body["dtype"])
        stored = self._stored[str(body["tensor"])]
        spelling = adapter.dtype_name(dtype)
        is_plain = body.keys() <= _PLAIN_TORCH_FIELDS and body["shape"] == list(stored.shape)
        is_plain = is_plain and stored.flags.carray
        if (
            is_plain
            and numpy_dtype_name(stored.dtype) == spelling
            and adapter.stored_dtype(spelling)
        ):
            known: torch.Tensor = adapter.with_flags(adapter.adopter(spelling)(stored), body)
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


def guarded(what: str, build: Callable[[], Any]) -> Any:
    """Return `build()`; errors of NumPy and torch become a TreeError."""
    try:
        return build()
    except TreeError as error:
        raise TreeError(f"{what}: {error.message}", hint=error.hint) from error
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RuntimeError) as error:
        raise TreeError(f"{what} cannot be restored: {error}") from error


@cache
def torch_values() -> Any:
    """Return the module for torch; raise TreeError if there is no torch."""
    try:
        from ckptmgr.state import torch_values
    except ImportError as error:
        raise TreeError(
            "the state has torch values, but torch is not installed",
            hint="pip install 'ckptmgr[torch]'",
        ) from error
    return torch_values
