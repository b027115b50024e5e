# SPDX-License-Identifier: Apache-2.0
"""The items of a checkpoint file: named tensors, texts and MindSpore map parameters.

A tensor's bytes are C order, little endian. A function returns them as a flat view, so that a
tensor that must first be made contiguous (or copied from a device) costs memory only while it is
written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .dtypes import PACKED_BITS, DType, dtype_of, packed_dtype
from .errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np

MAX_TENSORS = 1 << 19
"""Of one file: five times as many as the largest models have. Each takes a KiB and some µs."""

_NUMBERS = "biufc"
_MAX_ARRAY_BYTES = (1 << 63) - 1


class TensorSpec(NamedTuple):
    """Name, element type and shape of one tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the content."""
        return prod(self.shape) * self.dtype.item_bytes

    @property
    def stated_shape(self) -> tuple[int, ...]:
        """The shape in the file: that of the array, or of elements that are packed into its bytes."""
        return self.dtype.packed_shape or self.shape


class Tensor(NamedTuple):
    """A tensor to be written; `content` returns a flat, C-contiguous, little-endian view."""

    spec: TensorSpec
    content: Callable[[], memoryview]


_Join = Callable[[Sequence[Tensor]], "list[memoryview] | None"]
JOINERS: dict[object, _Join] = {}
"""Functions that join the contents of small tensors, by the function that a partial content calls.

A content of each takes three times as long. The result is None if they cannot be joined, if one has
another function, or if a tensor is no longer as its specification says.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPieces:
    """Content of a tensor that is made in pieces, so that no more than some of them are in memory.

    `read(start, stop)` returns these bytes as a flat view; `cuts` has the end of each piece, the
    last one that of the content.
    """

    read: Callable[[int, int], memoryview]
    cuts: tuple[int, ...]

    def __call__(self) -> memoryview:
        """Return the whole content."""
        return self.read(0, self.cuts[-1] if self.cuts else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A named string; only `.ckpt` can hold it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MapTensors:
    """A MindSpore MapParameter: three tensors called key, value and status.

    Source: `MapTensorProto` of `checkpoint.proto`.
    """

    name: str
    key: Tensor
    value: Tensor
    status: Tensor


Item = Tensor | Text | MapTensors


class PackedArray(NamedTuple):
    """A tensor of a type that neither NumPy nor ml_dtypes can pack: its bytes, and their meaning.

    Attributes:
        dtype: `F4`, `F6_E2M3` or `F6_E3M2`, as safetensors spells them.
        shape: Shape in elements.
        data: uint8[n], the elements without gaps, as in the file.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Return the bytes, for NumPy's functions."""
        array = self.data if dtype is None else self.data.astype(dtype, copy=False)
        return array.copy() if copy else array


def tensor_from_packed(name: str, packed: PackedArray) -> Tensor:
    """Return the tensor of packed elements.

    Raises:
        UnsupportedError: The type is no packed one, or the bytes are not those of the shape.
    """
    spelling, shape, data = packed
    if spelling not in PACKED_BITS:
        known = ", ".join(PACKED_BITS)
        raise UnsupportedError(f"{spelling!r} is no packed type; there are {known}", tensor=name)
    try:
        row, stored = packed_dtype(spelling, tuple(shape))
    except ValueError as error:
        raise UnsupportedError(str(error), tensor=name) from None
    if data.dtype.name != "uint8" or data.size != stored[0]:
        raise UnsupportedError(
            f"{spelling}{list(shape)} needs {stored[0]} bytes as uint8, but the data is"
            f" {data.dtype.name}{list(data.shape)}",
            tensor=name,
        )
    return tensor_from_array(name, data.reshape(-1), dtype=row)


def check_shape(spec: TensorSpec, *, offset: int | None = None) -> None:
    """Raise unless an array can have this shape.

    A tensor without elements may have other dimensions of any length: no content bounds them.

    Raises:
        UnsupportedError: NumPy has no such array; names offset and tensor.
    """
    most = most_dimensions()
    if len(spec.shape) > most:
        raise UnsupportedError(f"more than {most} dimensions", offset=offset, tensor=spec.name)
    if prod(filter(None, spec.shape)) * spec.dtype.item_bytes > _MAX_ARRAY_BYTES:
        raise UnsupportedError(
            f"no array has the shape {list(spec.shape)}: its dimensions are too long",
            offset=offset,
            tensor=spec.name,
        )


@cache
def most_dimensions() -> int:
    """Return how many dimensions an array may have: 64 since NumPy 2, 32 before."""
    import numpy as np

    return 64 if int(np.__version__.partition(".")[0]) >= 2 else 32


def check_count(count: int) -> None:
    """Raise UnsupportedError unless a file may have `count` tensors."""
    if count > MAX_TENSORS:
        raise UnsupportedError(f"more than {MAX_TENSORS} tensors in one file")


def content_of(tensor: Tensor) -> memoryview:
    """Return a tensor's content: `size_bytes` bytes, one dimension, format B, bools 0 or 1.

    Raises FormatError if it is shorter or longer than shape and type demand.
    """
    view, spec = tensor.content(), tensor.spec
    if view.nbytes != spec.size_bytes:
        raise FormatError(
            f"the content has {view.nbytes} bytes, but {spec.dtype.name}{list(spec.shape)}"
            f" needs {spec.size_bytes}",
            tensor=spec.name,
        )
    view = view if view.ndim == 1 and view.itemsize == 1 else view.cast("B")
    return _as_bools(view) if spec.dtype.name == "bool" else view


def _as_bools(view: memoryview) -> memoryview:
    """Return truth values as 0 and 1: uninitialised memory holds others, which readers refuse."""
    import numpy as np

    stored = np.frombuffer(view, np.uint8)
    if stored.max(initial=0) <= 1:
        return view
    filled: np.ndarray = (stored != 0).view(np.uint8)
    return filled.data


def tensor_from_array(name: str, array: np.ndarray, *, dtype: DType | None = None) -> Tensor:
    """Wrap a NumPy array; it is copied, on use, only unless C-contiguous and little-endian.

    `dtype` is the type to store if the array's own dtype differs (int4 is held as int8).

    Raises:
        UnsupportedError: The table has no such element type.
    """
    row = dtype if dtype is not None else dtype_of(array.dtype.name)
    spec = TensorSpec(name=name, dtype=row, shape=array.shape)
    return Tensor(spec=spec, content=partial(_array_content, array))


def _array_content(array: np.ndarray) -> memoryview:
    import numpy as np

    flat = np.ascontiguousarray(array)
    if flat.dtype.byteorder == ">" or (
        flat.dtype.byteorder == "=" and sys.byteorder == "big"
    ):  # pragma: no cover - the second half needs a big-endian machine
        flat = flat.astype(flat.dtype.newbyteorder("<"))
    return flat_memory(flat)


def flat_memory(array: np.ndarray) -> memoryview:
    """Return the memory of a C-contiguous array: one dimension, format B."""
    dtype = array.dtype
    if dtype.isbuiltin == 1 and dtype.kind in _NUMBERS and array.size:
        return array.data.cast("B")  # a third of the time; Python has no name for the other types
    import numpy as np

    flat: np.ndarray = array.reshape(-1).view(np.uint8)
    return flat.data
