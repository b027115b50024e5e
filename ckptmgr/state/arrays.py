# SPDX-License-Identifier: Apache-2.0
"""Host views of the arrays of every framework, and the flat list of named tensors in a file.

No framework is imported here: a value can only be a torch tensor when the program has imported
torch. A content is copied only when it is used, and only where the bytes are not already C-ordered,
little-endian and on the host.

>>> import numpy as np
>>> [item.spec.name for item in named_tensors({"weight": np.zeros((2, 3)), "step": 7})]
['weight', 'step']
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.formats.dtypes import BY_NAME, DType, packed_dtype
from ckptmgr.formats.errors import UnsupportedError
from ckptmgr.formats.tensor import (
    Item,
    MapTensors,
    PackedArray,
    Tensor,
    TensorSpec,
    Text,
    flat_memory,
    tensor_from_array,
    tensor_from_packed,
)
from ckptmgr.state.torch_memory import torch_bytes

if TYPE_CHECKING:
    import torch

Framework = Literal["numpy", "torch", "mindspore", "jax"]

_SAVE_OBJ = "For 'save_checkpoint', the parameter 'save_obj' must be nn.Cell, list or dict, but got"
_MAX_NESTING = 100
_NUMPY = (np.ndarray, np.generic)  # each call would make the union again
_TORCH_F4 = "float4_e2m1fn_x2"


def framework_of(value: object) -> Framework | None:
    """Return the framework of an array, or None when `value` is no array."""
    if isinstance(value, _NUMPY):
        return "numpy"
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(value, torch_module.Tensor):
        return "torch"
    if is_instance_by_name(value, "mindspore.common.tensor", "Tensor"):
        return "mindspore"
    jax_module = sys.modules.get("jax")
    if jax_module is not None and isinstance(value, jax_module.Array):
        return "jax"
    return None


def described(value: Any) -> str:
    """Return the type and shape of an array, and the type of anything else, for messages."""
    if framework_of(value) is None:
        return f"a {type(value).__name__}"
    return f"{value.dtype}{list(value.shape)}"


def is_instance_by_name(value: object, module: str, name: str) -> bool:
    """Return whether `value` is an instance of `module.name`, without importing the module."""
    return any(base.__module__ == module and base.__name__ == name for base in type(value).__mro__)


def to_tensor(name: str, value: object) -> Tensor:
    """Return a tensor over the memory of an array of any layout and device, or a NumPy scalar.

    Raises:
        UnsupportedState: No array, or of a type or layout that no file format can hold as itself.
    """
    framework = framework_of(value)
    if framework is None:
        raise UnsupportedState(
            f"{name!r} is a {type(value).__qualname__}, not an array",
            hint="give a NumPy, torch, MindSpore or JAX array",
        )
    return _TO_TENSOR[framework](name, value)


def _numpy_tensor(name: str, value: Any) -> Tensor:
    array = np.asarray(value)
    return tensor_from_array(
        name, array, dtype=_row(name, numpy_dtype_name(array.dtype), array.dtype)
    )


@lru_cache(maxsize=256)
def numpy_dtype_name(dtype: np.dtype) -> str:
    """Return the name of an element type; NumPy computes it on each access."""
    return dtype.name


def _torch_tensor(name: str, value: torch.Tensor) -> Tensor:
    import torch

    if value.layout is not torch.strided:
        raise UnsupportedState(
            f"{name!r} is sparse ({value.layout})", hint="store it as .to_dense()"
        )
    if value.is_meta or is_wrapper(value):
        raise UnsupportedState(
            f"{name!r} is a {type(value).__qualname__} on {value.device}, whose memory is not here",
            hint="materialise it first, e.g. with full_tensor() or to_empty()",
        )
    shape = tuple(value.shape)
    spelling = str(value.dtype).removeprefix("torch.")
    if spelling == _TORCH_F4 and shape:  # two elements in each byte of the last dimension
        row, shape = packed_dtype("F4", (*shape[:-1], 2 * shape[-1]))
    else:
        row = _row(name, spelling, value.dtype)
    spec = TensorSpec(name=name, dtype=row, shape=shape)
    return Tensor(spec=spec, content=partial(torch_bytes, value))


def _packed_tensor(name: str, value: PackedArray) -> Tensor:
    try:
        return tensor_from_packed(name, value)
    except UnsupportedError as error:
        raise UnsupportedState(str(error)) from error


def is_wrapper(value: torch.Tensor) -> bool:
    """Return whether a torch tensor keeps its data elsewhere, like DTensor and FakeTensor."""
    import torch

    plain = getattr(torch.Tensor, "__torch_dispatch__", None)
    return getattr(type(value), "__torch_dispatch__", None) is not plain


def torch_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a torch tensor over the memory of a C-ordered array; bfloat16 and float8 included."""
    import torch

    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    dtype: torch.dtype = getattr(torch, array.dtype.name)
    return flat.view(dtype).reshape(array.shape)


def array_bytes(array: np.ndarray) -> memoryview:
    """Return a NumPy array in C order and its own byte order; a view when it is C-contiguous."""
    return flat_memory(np.ascontiguousarray(array))


def _mindspore_tensor(name: str, value: Any) -> Tensor:
    if getattr(value, "has_init", False):
        value = value.init_data()
    # MindSpore's Int4 (qint4x2) holds two values in each byte, as the row `int4` does.
    spelling = str(value.dtype).lower()
    row = BY_NAME["int4"] if spelling == "int4" else _row(name, spelling, value.dtype)

    def content() -> memoryview:
        flat = np.ascontiguousarray(value.asnumpy()).reshape(-1)
        return flat.view(np.uint8).data

    return Tensor(
        spec=TensorSpec(name=name, dtype=row, shape=tuple(value.shape)),
        content=content,
    )


def _jax_tensor(name: str, value: Any) -> Tensor:
    spec = TensorSpec(name=name, dtype=_row(name, str(value.dtype), value.dtype), shape=value.shape)
    # A host view prevents JAX from donating the buffer, so it is made only when the bytes are
    # needed.
    return Tensor(spec=spec, content=partial(jax_bytes, value))


def jax_bytes(value: Any) -> memoryview:
    """Return a JAX array in C order; a view when it is on one CPU device."""
    return array_bytes(np.asarray(value))


_TO_TENSOR: Mapping[Framework, Callable[[str, Any], Tensor]] = {
    "numpy": _numpy_tensor,
    "torch": _torch_tensor,
    "mindspore": _mindspore_tensor,
    "jax": _jax_tensor,
}


def _row(name: str, spelling: str, dtype: object) -> DType:
    # Only MindSpore's int4 has two values in a byte, as the `int4` of the table.
    row = None if spelling == "int4" else BY_NAME.get(spelling)
    if row is None:
        raise UnsupportedState(
            f"{name!r} has elements of type {dtype}, which no file format can hold",
            hint="convert it, or save it inside a state (CheckpointManager), which stores its bytes",
        )
    return row


def named_tensors(obj: object) -> list[Item]:
    """Return the items that `save_checkpoint(obj, ...)` stores, in order.

    Python numbers get MindSpore's types: int becomes int64 (uint64 from 2**63), float becomes
    float32, bool becomes bool, all without dimensions; a string stays a string.

    Args:
        obj: A mapping of names to arrays, strings and numbers; a list of `{"name": ..., "data":
            ...}`; a list of MindSpore parameters; a MindSpore `Cell`; or an object with
            `state_dict()`, whose nested names are joined by dots.

    Raises:
        TypeError: Another kind of object; the messages are MindSpore's.
        UnsupportedState: A value that no file format can hold (a TypeError, too).
    """
    source: Any = obj
    if isinstance(obj, Mapping):
        items = [_named_item(name, value) for name, value in _checked_entries(obj)]
    elif isinstance(obj, list):
        items = [_list_item(entry, is_dict_list=isinstance(obj[0], dict)) for entry in obj]
    elif hasattr(obj, "parameters_and_names") and not isinstance(obj, type):
        items = [_named_item(parameter.name, parameter) for parameter in _cell_parameters(source)]
    elif hasattr(obj, "state_dict") and not isinstance(obj, type):
        items = [_named_item(name, value) for name, value in _flat(source.state_dict(), "", 0)]
    else:
        raise TypeError(f"{_SAVE_OBJ} {type(obj)}.")
    _check_unique(items)
    return items


def is_mindspore(obj: object) -> bool:
    """Return whether what `named_tensors` takes is MindSpore's: a Cell, a list, or a dict of its."""
    if isinstance(obj, Mapping):
        return any(
            base.__module__.startswith("mindspore.")
            for value in obj.values()
            for base in type(value).__mro__
        )
    return isinstance(obj, list) or hasattr(obj, "parameters_and_names")


def _checked_entries(obj: Mapping[Any, object]) -> Iterator[tuple[str, object]]:
    for key, value in obj.items():
        if not isinstance(key, str):
            # The missing spaces are MindSpore's; programs match on its text.
            raise TypeError(
                "For save_checkpoint, when save_obj is made up by dict, the key should be str and"
                f"value should be Parameter, but got the type of key is {type(key)} and"
                f"the type of value is {type(value)}"
            )
        yield key, value


def _list_item(entry: Any, *, is_dict_list: bool) -> Item:
    start = "For save_checkpoint, "
    if not is_dict_list:
        if not is_instance_by_name(entry, "mindspore.common.parameter", "Parameter"):
            raise TypeError(
                f"{start}when save_obj is made up by list of Parameter,"
                f"the param should be parameter, but got {type(entry)}"
            )
        return _named_item(entry.name, entry)
    if not isinstance(entry, dict) or "name" not in entry or "data" not in entry:
        raise TypeError(
            f"{start}save_obj should be a list of dict items, and the dict should "
            f"have key values 'name' and 'value', but got {type(entry)} and {entry}."
        )
    name, value = entry["name"], entry["data"]
    start += "when save_obj is a list of dict items, "
    if not isinstance(name, str):
        raise TypeError(f"{start}the name in dict should be string, but got {type(name)}.")
    if framework_of(value) is None:
        raise TypeError(f"{start}the data in dict should be parameter, but got {type(value)}.")
    return _named_item(name, value)


def _named_item(name: str, value: Any) -> Item:
    match value:
        case str():
            return Text(name=name, text=str(value))
        case np.ndarray() | np.generic():
            return _numpy_tensor(name, value)
        case PackedArray():
            return _packed_tensor(name, value)
        case bool():
            return tensor_from_array(name, np.array(value))
        case int():
            return tensor_from_array(name, _integer(name, value))
        case float():
            with np.errstate(over="ignore"):
                return tensor_from_array(name, np.array(value, dtype=np.float32))
    if is_instance_by_name(value, "mindspore.experimental.map_parameter", "MapParameter"):
        return _map_tensors(name, value)
    if is_instance_by_name(value, "mindspore.common.generator", "Generator"):
        return to_tensor(name, value.get_state())
    return to_tensor(name, value)


def _integer(name: str, value: int) -> np.ndarray:
    if -(2**63) <= value < 2**63:
        return np.array(value, dtype=np.int64)
    if 0 <= value < 2**64:
        return np.array(value, dtype=np.uint64)
    raise UnsupportedState(
        f"{name!r} is an integer of {value.bit_length()} bits; 64 is the most",
        hint="store it as a string",
    )


def _map_tensors(name: str, value: Any) -> MapTensors:
    parts = zip(("key", "value", "status"), value.export_data(False), strict=True)
    tensors = {part: tensor_from_array(part, np.asarray(array)) for part, array in parts}
    return MapTensors(name=name, **tensors)


def _cell_parameters(cell: Any) -> Iterator[Any]:
    for _, parameter in cell.parameters_and_names():
        if not parameter.param_info.is_pipeline_shared_param:
            yield parameter


def _flat(value: object, prefix: str, depth: int) -> Iterator[tuple[str, object]]:
    if depth > _MAX_NESTING:
        raise UnsupportedState(f"{prefix[:80]!r}... is nested more than {_MAX_NESTING} deep")
    entries: Iterable[tuple[object, object]]
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple) and not isinstance(value, PackedArray):
        entries = enumerate(value)
    else:
        yield prefix, value
        return
    for key, child in entries:
        yield from _flat(child, f"{prefix}.{key}" if prefix else str(key), depth + 1)


def _check_unique(items: list[Item]) -> None:
    seen: set[str] = set()
    for item in items:
        name = item.spec.name if isinstance(item, Tensor) else item.name
        if name in seen:
            raise UnsupportedState(f"two values are called {name!r}", hint="rename one of them")
        seen.add(name)
