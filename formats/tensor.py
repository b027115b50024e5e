# SPDX-License-Identifier: Apache-2.0
"""What a format stores: named tensors, texts and MindSpore map parameters.

A tensor's bytes are C order, little endian. They are given by a function that returns a flat view, so that a tensor
that must first be made contiguous (or fetched from a device) costs memory only while it is being written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from .dtypes import DType, dtype_of
from .errors import FormatError

if TYPE_CHECKING:
    import numpy as np

_NUMBERS = "biufc"


class TensorSpec(NamedTuple):
    """Name, element type and shape of one tensor."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the content."""
        return prod(self.shape) * self.dtype.item_bytes


class Tensor(NamedTuple):
    """A tensor to be written.

    Attributes:
        spec: Name, type, shape.
        content: Returns the bytes as a flat, C-contiguous, little-endian view of `spec.size_bytes` bytes.
    """

    spec: TensorSpec
    content: Callable[[], memoryview]


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


def content_of(tensor: Tensor) -> memoryview:
    """Return a tensor's content with its promise checked: `size_bytes` bytes, one dimension, format B.

    Raises:
        FormatError: It is shorter or longer than shape and type say; names the tensor.
    """
    view, spec = tensor.content(), tensor.spec
    if view.nbytes != spec.size_bytes:
        raise FormatError(
            f"the content has {view.nbytes} bytes, but {spec.dtype.name}{list(spec.shape)}"
            f" needs {spec.size_bytes}",
            tensor=spec.name,
        )
    return view if view.ndim == 1 and view.itemsize == 1 else view.cast("B")


def checked_content(tensor: Tensor) -> Callable[[], memoryview]:
    """Return a function that does what `content_of` does for this tensor."""
    return partial(content_of, tensor)


def tensor_from_array(name: str, array: np.ndarray, *, dtype: DType | None = None) -> Tensor:
    """Wrap a NumPy array without copying it; non-contiguous and big-endian arrays are copied when their turn comes.

    Args:
        name: The tensor's name.
        array: Any array whose dtype is in the table.
        dtype: The row to store it as, when the array's own dtype does not say (int4 is held as int8).

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
