# SPDX-License-Identifier: Apache-2.0
"""Torch values of a state: tensors of every layout, sizes, types, devices.

Imported only when a state or a skeleton has torch values in it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any
from weakref import ref

import numpy as np
import torch

from ckptmgr.formats.tensor import Tensor, TensorSpec
from ckptmgr.state.leaves import (
    IN_ALL_FORMATS,
    NO_SPAN,
    Finder,
    Leaf,
    LeafForm,
    LeafMemory,
    Span,
    extent,
    leaf_form,
)
from ckptmgr.state.paths import Node, Path, Place, TreeError, unsupported
from ckptmgr.state.scalars import decode_float, decode_shape
from ckptmgr.state.torch_memory import memory_of_tensor, torch_bytes

_PLAIN_HINT = "save its state_dict(), or a plain tensor: tensor.detach().as_subclass(torch.Tensor)"
_PARTS_HINT = (
    "its parts are plain tensors: put the object that holds it into one whose state_dict() returns the parts that"
    " __tensor_flatten__() names; docs/training.md has such a class, WithParts"
)
_QUANTIZED = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}
_FULL_TENSOR_HINT = "save its full_tensor(), or use the distributed integration"
_STRIDED = torch.strided
_NUMPY_TYPES = frozenset(
    (
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
    )
)


_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
"""Bytes of an element to the type of NumPy and torch that holds elements which NumPy lacks."""


def encode_torch_atom(value: Any) -> tuple[Node] | None:
    """Return the node of a torch value without parts, in a tuple; None for other values."""
    if isinstance(value, torch.Size):
        return ({"torch.Size": list(value)},)
    if isinstance(value, torch.dtype):
        return ({"torch.dtype": dtype_name(value)},)
    if isinstance(value, torch.device):
        return ({"torch.device": str(value)},)
    return None


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of an element type without `torch.`."""
    return str(dtype).removeprefix("torch.")


def decode_torch_dtype(node: object) -> torch.dtype:
    """Return the element type of a name; raise TreeError if there is none."""
    dtype = getattr(torch, node, None) if isinstance(node, str) and node.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise TreeError(f"torch has no element type {node!r}")
    return dtype


@lru_cache(maxsize=256)
def stored_dtype(spelling: str) -> np.dtype | None:
    """Return the type of stored arrays with these elements; None if they are stored as bytes."""
    row = IN_ALL_FORMATS.get(spelling)
    is_torch = isinstance(getattr(torch, spelling, None), torch.dtype)
    return row.to_numpy() if row is not None and is_torch else None


def decode_torch_device(node: object) -> torch.device:
    """Return the device of a name, present or not; raise TreeError if the name is invalid."""
    if isinstance(node, str) and re.fullmatch(r"[a-z]{1,20}(:[0-9]{1,3})?", node):
        try:
            return torch.device(node)
        except RuntimeError:
            pass
    raise TreeError(f"torch has no device {node!r}")


def decode_torch_size(node: object) -> torch.Size:
    """Return the size of a list of integers; raise TreeError for any other node."""
    return torch.Size(decode_shape(node))


def is_plain(value: torch.Tensor) -> bool:
    """Return whether a tensor consists of its elements, which are in memory."""
    return value.layout is _STRIDED and not (value.is_nested or value.is_meta or value.is_quantized)


def split_tensor(value: torch.Tensor, path: Path) -> tuple[Node, dict[str, object]] | None:
    """Return the node and the parts of a sparse or quantized tensor; None for a plain one."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        hint = _PLAIN_HINT
        if hasattr(value, "full_tensor"):
            hint = _FULL_TENSOR_HINT
        elif hasattr(value, "__tensor_flatten__"):
            hint = _PARTS_HINT
        raise unsupported(path, f"is a {type(value).__qualname__}", hint)
    if is_plain(value):
        return None
    if value.is_nested:
        raise unsupported(path, "is a nested tensor", "store it as a list: tensor.unbind()")
    if value.is_meta:
        raise unsupported(path, "is on the meta device, which holds no elements", "materialise it")
    if value.is_quantized:
        return _split_quantized(value, path)
    if value.layout is not torch.sparse_coo:
        raise unsupported(
            path, f"has the layout {value.layout}", "store it as to_dense() or to_sparse_coo()"
        )
    plain = value.detach()
    node: Node = {
        "sparse": {"shape": list(value.shape), "coalesced": value.is_coalesced(), **_flags(value)}
    }
    return node, {"indices": plain._indices(), "values": plain._values()}


def _split_quantized(value: torch.Tensor, path: Path) -> tuple[Node, dict[str, object]]:
    name, scheme = dtype_name(value.dtype), value.qscheme()
    node: dict[str, Node] = {"dtype": name}
    parts: dict[str, object] = {}
    if name in _QUANTIZED and scheme is torch.per_tensor_affine:
        node |= {"scale": value.q_scale().hex(), "zero_point": value.q_zero_point()}
    elif name in _QUANTIZED and scheme is torch.per_channel_affine:
        node |= {"axis": value.q_per_channel_axis()}
        parts = {"scales": value.q_per_channel_scales()}
        parts["zero_points"] = value.q_per_channel_zero_points()
    else:
        raise unsupported(path, f"is quantized as {name}, {scheme}", "store it as dequantize()")
    return {"quantized": node}, {"integers": value.int_repr(), **parts}


def _flags(value: torch.Tensor) -> dict[str, Node]:
    flags: dict[str, Node] = {}
    # The isinstance check of torch.nn.Parameter is slow, so plain tensors skip it.
    if type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter):
        flags["parameter"] = True
    if value.requires_grad:
        flags["requires_grad"] = True
    return flags


@lru_cache(maxsize=1024)
def _form_of(dtype: torch.dtype, shape: torch.Size) -> LeafForm:
    name = dtype_name(dtype)
    return leaf_form("torch", name, (*shape,), dtype.itemsize, spelling=name, finder=TENSORS)


def torch_leaf(value: torch.Tensor, place: Place, name: str) -> Leaf:
    """Return the leaf of a plain tensor."""
    form = _form_of(value.dtype, value.shape)
    node = _flags(value) if value.requires_grad or type(value) is not torch.Tensor else {}
    if form.is_bytes:
        node["stored"] = "uint8"
    spec = TensorSpec(name, form.stored_dtype, form.stored_shape)
    tensor = Tensor(spec, partial(torch_bytes, value))
    # The span is needed in any case, as no tensor owns its memory, and now the tensor is in the cache.
    return Leaf(place, form, node, value, tensor, _span(value))


def _span(value: torch.Tensor) -> Span:
    size_bytes = value.nbytes
    # Conjugated and negated views differ from their memory, so their values are stored separately.
    if not size_bytes or value.is_conj() or value.is_neg():
        return NO_SPAN
    origin = value.data_ptr()
    device = "cpu" if value.is_cpu else str(value.device)
    if value.is_contiguous():
        return device, origin, origin + size_bytes, size_bytes
    item_bytes = value.dtype.itemsize
    strides = [stride * item_bytes for stride in value.stride()]
    start, stop = extent(origin, value.shape, strides, item_bytes)
    return device, start, stop, size_bytes


def _memory(value: torch.Tensor) -> LeafMemory:
    storage, item_bytes = value.untyped_storage(), value.dtype.itemsize
    strides = tuple(stride * item_bytes for stride in value.stride())
    low, origin = storage.data_ptr(), value.data_ptr()
    start, stop = extent(origin, value.shape, strides, item_bytes)

    def content(first: int, last: int) -> memoryview:
        flat = torch.empty(0, dtype=torch.uint8, device=value.device)
        flat.set_(storage, first - low, (last - first,), (1,))
        return memory_of_tensor(flat.cpu()).data

    return LeafMemory(
        device="cpu" if value.is_cpu else str(value.device),
        start=start,
        stop=stop,
        origin=origin,
        strides=strides,
        alignment=item_bytes,
        bounds=(low, low + storage.nbytes()),
        content=content,
    )


# Any number of tensors may share one storage, so none owns it.
TENSORS = Finder(owner=lambda value: None, span=_span, memory=_memory)


def build_tensor(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    memory: torch.Tensor,
    offset: int,
    strides: Sequence[int],
) -> torch.Tensor:
    """Return a view of uint8 memory; `offset` and `strides` are in bytes and inside it."""
    item_bytes = dtype.itemsize
    if offset % item_bytes or any(stride % item_bytes for stride in strides):
        raise TreeError(f"elements of {item_bytes} bytes lie unaligned")
    if any(stride < 0 for stride in strides):
        raise TreeError("torch has no negative strides")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    usable = memory[: memory.numel() // item_bytes * item_bytes].view(dtype)
    steps = [stride // item_bytes for stride in strides]
    return usable.as_strided(shape, steps, offset // item_bytes)


def with_flags(tensor: torch.Tensor, node: dict[str, Node]) -> torch.Tensor:
    """Return the tensor as a parameter and with gradients where the node says so."""
    requires_grad = node.get("requires_grad", False)
    if node.get("parameter", False):
        return torch.nn.Parameter(tensor, requires_grad=bool(requires_grad))
    return tensor.requires_grad_() if requires_grad else tensor


def build_sparse(node: dict[str, Node], parts: list[Any]) -> torch.Tensor:
    """Return a COO tensor from its parts; torch checks that the indices are inside the shape."""
    indices, values = parts
    tensor = torch.sparse_coo_tensor(
        indices,
        values,
        decode_shape(node["shape"]),
        is_coalesced=bool(node["coalesced"]),
        check_invariants=True,
    )
    return with_flags(tensor, node)


def build_quantized(node: dict[str, Node], parts: list[Any]) -> torch.Tensor:
    """Return a quantized tensor from its integers and parameters."""
    name = node["dtype"]
    want = _QUANTIZED.get(name) if isinstance(name, str) else None
    if want is None or dtype_name(parts[0].dtype) != want:
        raise TreeError(f"a tensor quantized as {name!r} has parts of another type")
    with warnings.catch_warnings():
        # torch calls its own quantized types deprecated, but the stored state has them.
        warnings.filterwarnings("ignore", message=".*quantize", category=UserWarning)
        if len(parts) == 3:
            axis = node["axis"]
            if type(axis) is not int or not 0 <= axis < parts[0].dim():
                raise TreeError(f"a quantized tensor has the axis {axis!r}")
            integers, scales, zero_points = parts
            make = torch._make_per_channel_quantized_tensor  # pyright: ignore[reportPrivateImportUsage]
            return make(integers, scales, zero_points, axis)
        scale, zero_point = decode_float(node["scale"]), node["zero_point"]
        return torch._make_per_tensor_quantized_tensor(parts[0], scale, zero_point)  # type: ignore[arg-type]


def build_torch_generator(device: object, state: object) -> torch.Generator:
    """Return a generator with the given state; raise TreeError when the device does not take it."""
    if not isinstance(state, torch.Tensor):
        raise TreeError("the state of a torch generator is not a tensor")
    try:
        generator = torch.Generator(decode_torch_device(device))
        generator.set_state(state)
    except (RuntimeError, TypeError) as error:
        raise TreeError(
            f"no torch generator on {device!r} takes the stored state: {error}"
        ) from None
    return generator


ATOM_DECODERS: dict[str, Callable[[object], object]] = {
    "torch.Size": decode_torch_size,
    "torch.dtype": decode_torch_dtype,
    "torch.device": decode_torch_device,
}


_exclusive: dict[int, ref[np.ndarray]] = {}
"""Address to NumPy array, for arrays that only one tensor references; some are gone."""
_checked_at = 20_000
"""Number of arrays in `_exclusive` at which those that are gone leave it."""


def share_array(memory: np.ndarray) -> torch.Tensor:
    """Return a tensor over the memory of a NumPy array that may have other references."""
    tensor = torch.from_numpy(memory)
    _exclusive.pop(tensor.data_ptr(), None)
    return tensor


@cache
def adopter(spelling: str) -> Callable[[np.ndarray], torch.Tensor]:
    """Return a function that makes a tensor over the memory of an array without other references.

    The arrays are of the `stored_dtype` of the element type.
    """
    dtype: torch.dtype = getattr(torch, spelling)
    is_known = dtype in _NUMPY_TYPES

    def adopt(memory: np.ndarray) -> torch.Tensor:
        if not is_known:
            memory = memory.view(_INTEGERS[dtype.itemsize])
        tensor = torch.from_numpy(memory)
        address = tensor.data_ptr()
        if address:
            _exclusive[address] = ref(memory)
            if len(_exclusive) >= _checked_at:
                _forget_dead_arrays()
        return tensor if is_known else tensor.view(dtype)

    return adopt


def _forget_dead_arrays() -> None:
    global _checked_at
    for address, array in list(_exclusive.items()):
        if array() is None:
            del _exclusive[address]
    _checked_at = 2 * len(_exclusive) + 20_000


def is_change_counted(value: torch.Tensor) -> bool:
    """Return whether torch counts every change of a tensor: its memory is not exposed otherwise.

    `tensor.numpy()`, `from_numpy`, `frombuffer` and DLPack towards torch leave a storage that
    cannot be resized; other processes may change shared memory; tensors of the inference mode have
    no counter.
    """
    storage = value.untyped_storage()
    if value.is_inference() or storage.is_shared():
        return False
    adopted = _exclusive.get(storage.data_ptr())
    return storage.resizable() or (adopted is not None and adopted() is not None)
