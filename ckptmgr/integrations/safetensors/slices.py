# SPDX-License-Identifier: Apache-2.0
"""`get_slice`: a tensor that is read when it is indexed, and only as far as the index needs.

torch tensors are indexed as torch does, as in the library. Arrays are indexed by numbers and ranges
with the errors of the library; where it ignores a step or refuses an ellipsis or the negative end
of a range, they have NumPy's meaning.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from safetensors import SafetensorError

from ckptmgr.files.load.tensors import CheckpointReader
from ckptmgr.integrations.safetensors.values import Conversion

_Bounds = list[tuple[int, int]]


class LazySlice:
    """A tensor of an open file; `reader` returns it, or raises where it is closed."""

    def __init__(
        self, reader: Callable[[], CheckpointReader], name: str, conversion: Conversion
    ) -> None:
        self._reader = reader
        self._name = name
        self._conversion = conversion

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._reader().spec(self._name).stated_shape)

    def get_dtype(self) -> str:
        """Return its element type as safetensors spells it, such as `F32`."""
        dtype = self._reader().spec(self._name).dtype
        return dtype.safetensors or dtype.name

    def __getitem__(self, index: Any) -> Any:
        """Return a part of the tensor, checked.

        Raises:
            SafetensorError: The index is outside the tensor, or of another kind (not for torch).
            IndexError, TypeError: torch refuses the index.
            CorruptCheckpoint: The data read is damaged.
        """
        reader = self._reader()
        spec = reader.spec(self._name)
        is_torch = self._conversion.framework == "pytorch"
        if spec.dtype.packed_shape is not None:
            whole = self._conversion.of_value(reader.read(self._name), self._name)
            if not is_torch:
                raise SafetensorError(f"{spec.dtype.name} cannot be sliced; read the whole tensor")
            return whole[index]
        found = _torch_bounds(index, spec.shape) if is_torch else _bounds(index, spec.shape)
        if found is None:
            return self._conversion.of_value(reader.read(self._name), self._name)[index]
        bounds, rest = found
        block = reader.read_block(self._name, bounds)
        # With the ellipsis, one element of a NumPy array is an array, too, as in the library.
        return self._conversion.of_value(block, self._name)[(*rest, ...)]


def _expanded(index: Any, dimensions: int) -> list[Any]:
    """Return an index for each of the first dimensions, without an ellipsis."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        place = next(number for number, part in enumerate(parts) if part is Ellipsis)
        missing = max(0, dimensions - len(parts) + 1)
        parts[place : place + 1] = [slice(None)] * missing
    return parts


def _torch_bounds(index: Any, shape: tuple[int, ...]) -> tuple[_Bounds, tuple[Any, ...]] | None:
    """Return the block to read and the index of its elements; None for the whole tensor."""
    import torch

    parts = _expanded(index, len(shape))
    if not all(isinstance(part, int | slice) and not isinstance(part, bool) for part in parts):
        return None
    torch.empty(shape, device="meta")[index]  # torch's own errors, before anything is read
    bounds, rest = [], []
    for part, length in zip(parts, shape, strict=False):
        bound, inner = _range_of(part, length)
        bounds.append(bound)
        rest.append(inner)
    return bounds, tuple(rest)


def _range_of(part: int | slice, length: int) -> tuple[tuple[int, int], int | slice]:
    """Return first index and end of a part of a dimension, and the index within them."""
    if isinstance(part, slice):
        start, stop, step = part.indices(length)
        return (start, max(start, stop)), slice(None, None, step)
    start = part + length if part < 0 else part
    return (start, start + 1), 0


def _bounds(index: Any, shape: tuple[int, ...]) -> tuple[_Bounds, tuple[Any, ...]]:
    """Return the block to read and the index of its elements; raises as the library."""
    if isinstance(index, list):
        if index:
            raise SafetensorError("Non empty lists are not implemented")
        index = slice(0, 0)
    parts = [_with_ints(part) for part in _expanded(index, len(shape))]
    where = f"Error during slicing {_shown(parts)} with shape {list(shape)}"
    if len(parts) > len(shape):
        raise SafetensorError(f"{where}: more slicing indexes than dimensions in tensor")
    bounds, rest = [], []
    for dimension, (part, length) in enumerate(zip(parts, shape, strict=False)):
        _check_part(part, dimension, length, where)
        bound, inner = _range_of(part, length)
        bounds.append(bound)
        rest.append(inner)
    return bounds, tuple(rest)


def _with_ints(part: Any) -> Any:
    """Return an index with ints for other integers, such as NumPy's; raises as the library."""
    if isinstance(part, slice):
        fields = (part.start, part.stop, part.step)
        return slice(*(None if one is None else operator.index(one) for one in fields))
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        return part
    try:
        return operator.index(part)
    except TypeError:  # an array of many elements
        return part


def _check_part(part: Any, dimension: int, length: int, where: str) -> None:
    """Raise the library's error for an index that is outside the dimension."""
    if isinstance(part, slice):
        if part.step is not None and part.step < 1:
            raise SafetensorError(f"{where}: steps below 1 are not implemented")
        outside = [one for one in (part.start,) if one is not None and one >= length]
        outside += [one - 1 for one in (part.stop,) if one is not None and one > length]
    elif isinstance(part, int) and not isinstance(part, bool):
        if part < -length:
            raise SafetensorError(
                f"Invalid index {part} for dimension {dimension} of size {length}"
            )
        outside = [part] if part >= length else []
    else:
        raise SafetensorError(f"{where}: {type(part).__name__} is neither a number nor a range")
    if outside:
        raise SafetensorError(
            f"{where}: index {outside[0]} out of bounds for tensor dimension #{dimension} of size"
            f" {length}"
        )


def _shown(parts: list[Any]) -> str:
    return "[" + ", ".join(map(_shown_part, parts)) + "]"


def _shown_part(part: Any) -> str:
    if not isinstance(part, slice):
        return str(part)
    start, stop = ("" if one is None else one for one in (part.start, part.stop))
    return f"{start}:{stop}"
