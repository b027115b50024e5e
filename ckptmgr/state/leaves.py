# SPDX-License-Identifier: Apache-2.0
"""Leaves of a state, and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np

from ckptmgr.formats.dtypes import BY_NAME, DType
from ckptmgr.formats.tensor import Tensor, TensorSpec
from ckptmgr.state.paths import Node, Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory behind a leaf; addresses and strides in bytes."""

    device: str
    start: int  # address of the first byte that the leaf reaches
    stop: int  # one past the last
    origin: int  # address of element 0, after `start` only when a stride is negative
    strides: tuple[int, ...]
    alignment: int  # the leaf's offset in the stored tensor is a multiple of it
    bounds: tuple[int, int]  # addresses of the storage: first, one past the last
    content: Callable[[int, int], memoryview]  # bytes between two addresses in the storage


Span = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finder:
    """Functions that find the memory behind the arrays of a framework.

    Attributes:
        owner: Returns the object that owns the memory, if every other array over that memory is a
            view of that object; None when that is not certain.
        span: Returns the `device`, `start` and `stop` of an array's memory; None if it is not
            shared.
        memory: Returns the `Memory`.
    """

    owner: Callable[[Any], object | None]
    span: Callable[[Any], Span | None]
    memory: Callable[[Any], Memory]


class Leaf(NamedTuple):
    """An array in the state."""

    path: Path
    kind: Literal["array", "torch"]
    dtype: Node  # element type, in the skeleton
    shape: tuple[int, ...]  # of the array; `tensor` has one more dimension if it holds bytes
    node: dict[str, Node]  # rest of the body of its skeleton node; planning completes it
    value: object  # the array, held so that its memory and identity stay its own
    tensor: Tensor  # the stored tensor, if the leaf shares no memory
    item_bytes: int
    finder: Finder | None  # None when its memory cannot be shared

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements, side by side."""
        return prod(self.shape) * self.item_bytes


def contiguous_strides(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    """Return the strides in bytes of an array in C order."""
    strides = []
    for size in reversed(shape):
        strides.append(item_bytes)
        item_bytes *= size
    return tuple(reversed(strides))


def extent(
    origin: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int
) -> tuple[int, int]:
    """Return the first and one-past-last address that a non-empty strided array reaches."""
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    low = origin + sum(step for step in reach if step < 0)
    return low, origin + sum(step for step in reach if step > 0) + item_bytes


def storage_spec(
    name: str, spelling: str, shape: tuple[int, ...], item_bytes: int
) -> tuple[TensorSpec, bool]:
    """Return the stored specification, and whether it is bytes as some format lacks the type.

    Bytes are uint8 with one more dimension, unless an element is one byte.
    """
    row = _IN_ALL_FORMATS.get(spelling)
    if row is not None:
        return TensorSpec(name, row, shape), False
    stored_shape = shape if item_bytes == 1 else (*shape, item_bytes)
    return TensorSpec(name=name, dtype=_UINT8, shape=stored_shape), True


_UINT8: DType = BY_NAME["uint8"]
_IN_ALL_FORMATS = {
    name: row
    for name, row in BY_NAME.items()
    if row.mindspore is not None and row.safetensors is not None
}


def are_disjoint(owners: Iterable[object | None], count: int) -> bool:
    """Return whether `count` arrays certainly share no memory, given the owners of theirs."""
    different = set(map(id, owners))
    return len(different) == count and id(None) not in different


def overlapping_groups(spans: list[tuple[str, int, int, int]]) -> Iterator[tuple[list[int], int]]:
    """Group overlapping spans (device, start, stop, number); yield numbers and hull size."""
    spans.sort()
    group: list[int] = []
    group_device, group_start, group_stop = "", 0, 0
    for device, start, stop, number in spans:
        if group and (device != group_device or start >= group_stop):
            yield group, group_stop - group_start
            group = []
        if not group:
            group_device, group_start, group_stop = device, start, stop
        group.append(number)
        group_stop = max(group_stop, stop)
    if group:
        yield group, group_stop - group_start


def array_span(array: np.ndarray) -> Span | None:
    """Return the memory span of a NumPy array; None when it is empty."""
    if array.nbytes == 0:
        return None
    origin = array.__array_interface__["data"][0]
    if array.flags.forc:
        return "cpu", origin, origin + array.nbytes
    return "cpu", *extent(origin, array.shape, array.strides, array.itemsize)


def owner_of(array: np.ndarray) -> np.ndarray | None:
    """Return the array that owns the memory; None if another object does, or elements overlap."""
    base: object = array.base
    owner = array if base is None else base
    if isinstance(owner, np.ndarray) and owner.flags.owndata and array.flags.forc:
        return owner
    return None


def array_memory(array: np.ndarray) -> Memory:
    """Return the memory of a NumPy array that has elements."""
    origin = array.__array_interface__["data"][0]
    start, stop = extent(origin, array.shape, array.strides, array.itemsize)
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low = root.__array_interface__["data"][0]
    flat = root.T if root.flags.f_contiguous and not root.flags.c_contiguous else root
    # If the memory behind the array is itself a strided view, only the array's own reach is
    # certain.
    bounds = (low, low + root.nbytes) if flat.flags.c_contiguous else (start, start)

    def content(first: int, last: int) -> memoryview:
        return flat.reshape(-1).view(np.uint8)[first - low : last - low].data

    return Memory(
        device="cpu",
        start=start,
        stop=stop,
        origin=origin,
        strides=array.strides,
        alignment=1,
        bounds=bounds,
        content=content,
    )


ARRAYS = Finder(owner=owner_of, span=array_span, memory=array_memory)
