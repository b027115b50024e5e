# SPDX-License-Identifier: Apache-2.0
"""Leaves of a state, the memory behind them, and the storage of leaves that share memory.

Leaves whose memory overlaps form a group. Its bytes are stored once: as the leaf that covers them
all if there is one (tied weights, a flat buffer and its views), otherwise as a run of uint8. A leaf
that overlaps no other is stored compactly, however large the storage behind it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from operator import itemgetter, le
from typing import Any, Literal, NamedTuple

import numpy as np

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.formats.dtypes import BY_NAME, DType
from ckptmgr.formats.tensor import Tensor, TensorSpec
from ckptmgr.io.arenas import owns_memory
from ckptmgr.state.paths import Node, Path, Place

_ALIGNMENT = 16


class LeafMemory(NamedTuple):
    """The memory behind a leaf; addresses and strides in bytes."""

    device: str
    start: int  # address of the first byte that the leaf reaches
    stop: int  # one past the last
    origin: int  # address of element 0, after `start` only when a stride is negative
    strides: tuple[int, ...]
    alignment: int  # the leaf's offset in the stored tensor is a multiple of it
    bounds: tuple[int, int]  # addresses of the storage: first, one past the last
    content: Callable[[int, int], memoryview]  # bytes between two addresses in the storage


Span = tuple[str, int, int, int]
"""The memory that an array reaches: device, start, stop; and the bytes of its elements."""

NO_SPAN: Span = ("", 0, 0, 0)
"""The span of an array that shares no memory."""


class Finder(NamedTuple):
    """Functions that find the memory behind the arrays of a framework.

    Attributes:
        owner: Returns the object that owns the memory, if every other array over that memory is a
            view of that object; None when that is not certain.
        span: Returns the span of an array's memory.
        memory: Returns the `LeafMemory`.
    """

    owner: Callable[[Any], object | None]
    span: Callable[[Any], Span]
    memory: Callable[[Any], LeafMemory]


class LeafForm(NamedTuple):
    """The kind, element type and shape of a leaf, described once for all leaves that have them."""

    kind: Literal["array", "torch"]
    dtype: Node  # element type, in the skeleton
    shape: tuple[int, ...]  # of the array
    item_bytes: int
    stored_dtype: DType
    stored_shape: tuple[int, ...]
    is_bytes: bool  # stored as bytes, because some format lacks the type
    finder: Finder | None  # None when the memory cannot be shared


class Leaf(NamedTuple):
    """An array in the state."""

    place: Place
    form: LeafForm
    node: dict[str, Node]  # rest of the body of its skeleton node; planning completes it
    value: Any  # the array, held so that its memory and identity stay its own
    tensor: Tensor  # the stored tensor, if the leaf shares no memory
    span: Span | None = None  # None when it is still to be found

    @property
    def path(self) -> Path:
        """Its path in the state."""
        return Path(*self.place)

    @property
    def stored_name(self) -> Node:
        """Name of the tensor that has its elements; known when the storage is planned."""
        return self.node.get("tensor", self.tensor.spec.name)

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements, side by side."""
        return prod(self.form.shape) * self.form.item_bytes


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


def leaf_form(
    kind: Literal["array", "torch"],
    dtype: Node,
    shape: tuple[int, ...],
    item_bytes: int,
    *,
    spelling: str,
    finder: Finder | None,
) -> LeafForm:
    """Return the form of leaves whose element type has this name in the table of types."""
    stored = stored_as(spelling, shape, item_bytes)
    return LeafForm(kind, dtype, shape, item_bytes, *stored, finder)


def stored_as(
    spelling: str, shape: tuple[int, ...], item_bytes: int
) -> tuple[DType, tuple[int, ...], bool]:
    """Return the stored type and shape, and whether they are bytes as some format lacks the type.

    Bytes are uint8 with one more dimension, unless an element is one byte.
    """
    row = IN_ALL_FORMATS.get(spelling)
    if row is not None:
        return row, shape, False
    return _UINT8, shape if item_bytes == 1 else (*shape, item_bytes), True


_UINT8: DType = BY_NAME["uint8"]
IN_ALL_FORMATS = {
    name: row
    for name, row in BY_NAME.items()
    if row.mindspore is not None and row.safetensors is not None
}


def are_disjoint(owners: Iterable[object | None], count: int) -> bool:
    """Return whether `count` arrays certainly share no memory, given the owners of theirs."""
    different: set[int] = set()
    for owner in owners:
        if owner is None:  # as of each torch tensor: the others need not be looked at
            return False
        different.add(id(owner))
    return len(different) == count


_START, _STOP = itemgetter(1), itemgetter(2)


def stand_alone(spans: Sequence[Span]) -> bool:
    """Return whether no array certainly shares elements with itself or another one.

    Spans on several devices are compared as if there was one.
    """
    starts, stops = sorted(map(_START, spans)), sorted(map(_STOP, spans))
    return all(map(le, stops, islice(starts, 1, None))) and all(
        [stop - start >= size_bytes for _, start, stop, size_bytes in spans]
    )


def overlapping_groups(spans: Sequence[Span]) -> Iterator[tuple[list[int], int]]:
    """Group arrays whose spans overlap; yield their numbers and the size of the hull."""
    group: list[int] = []
    group_device, group_start, group_stop = "", 0, 0
    found = sorted((*span[:3], number) for number, span in enumerate(spans) if span[0])
    for device, start, stop, number in found:
        if group and (device != group_device or start >= group_stop):
            yield group, group_stop - group_start
            group = []
        if not group:
            group_device, group_start, group_stop = device, start, stop
        group.append(number)
        group_stop = max(group_stop, stop)
    if group:
        yield group, group_stop - group_start


def array_span(array: np.ndarray) -> Span:
    """Return the span of a NumPy array."""
    size_bytes = array.nbytes
    if size_bytes == 0:
        return NO_SPAN
    origin = array.__array_interface__["data"][0]
    if array.flags.forc:
        return "cpu", origin, origin + size_bytes, size_bytes
    start, stop = extent(origin, array.shape, array.strides, array.itemsize)
    return "cpu", start, stop, size_bytes


def owner_of(array: np.ndarray) -> np.ndarray | None:
    """Return the array that alone owns the memory; None without one, or if elements overlap."""
    base: object = array.base
    owner = array if base is None else base
    if isinstance(owner, np.ndarray) and owns_memory(owner) and array.flags.forc:
        return owner
    return None


def array_memory(array: np.ndarray) -> LeafMemory:
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

    return LeafMemory(
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


class _Located(NamedTuple):
    """A leaf, its number in the order of the tree, and its memory."""

    number: int
    leaf: Leaf
    memory: LeafMemory

    @property
    def name(self) -> str:
        return self.leaf.tensor.spec.name

    @property
    def overlaps_itself(self) -> bool:
        return self.memory.stop - self.memory.start < self.leaf.size_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are contiguous in C order."""
        shape = self.leaf.form.shape
        strides = contiguous_strides(shape, self.leaf.form.item_bytes)
        return all(
            size == 1 or have == want
            for size, have, want in zip(shape, self.memory.strides, strides, strict=True)
        )


def plan_storage(
    leaves: Sequence[Leaf], unique_name: Callable[[str], str]
) -> tuple[list[Tensor], dict[str, str]]:
    """Return the tensors to store, and alias to name; complete the nodes of all leaves.

    An alias is a leaf with the same elements as an earlier one. `unique_name` reserves a free
    tensor name like the given one.

    Raises:
        UnsupportedState: Overlapping leaves with no common storage behind them.
    """
    aliases: dict[str, str] = {}
    tensors = [leaf.tensor for leaf in leaves]
    objects = {id(leaf.value) for leaf in leaves}
    if not are_disjoint(map(_owner_of, leaves), len(leaves)):
        kept: dict[int, Tensor] = dict(enumerate(tensors))
        for group in _overlapping(leaves):
            _plan_group(group, kept, aliases, unique_name)
        tensors = list(kept.values())
    if len(objects) < len(leaves):
        _number_shared(leaves)
    return tensors, aliases


def _owner_of(leaf: Leaf) -> object | None:
    finder = leaf.form.finder
    return leaf.value if finder is None else finder.owner(leaf.value)


def _plan_group(
    group: list[_Located],
    tensors: dict[int, Tensor],
    aliases: dict[str, str],
    unique_name: Callable[[str], str],
) -> None:
    owner = _owner(group)
    if owner is None:
        _store_hull(group, tensors, unique_name)
        return
    for one in group:
        if one is not owner:
            del tensors[one.number]
            if _point_at(one, owner):
                aliases[one.name] = owner.name


def _overlapping(leaves: Sequence[Leaf]) -> Iterator[list[_Located]]:
    """Yield the groups of leaves that overlap each other or themselves, in tree order."""
    spans = [leaf.span or _span_of(leaf) for leaf in leaves]
    if stand_alone([span for span in spans if span is not NO_SPAN]):
        return
    for group, size_bytes in overlapping_groups(spans):
        if len(group) > 1 or size_bytes < leaves[group[0]].size_bytes:
            yield [_located(leaves, index) for index in sorted(group)]


def _span_of(leaf: Leaf) -> Span:
    finder = leaf.form.finder
    return NO_SPAN if finder is None else finder.span(leaf.value)


def _located(leaves: Sequence[Leaf], index: int) -> _Located:
    leaf = leaves[index]
    finder = leaf.form.finder
    assert finder is not None  # noqa: S101 - it has a span
    return _Located(index, leaf, finder.memory(leaf.value))


def _layout(one: _Located) -> tuple[object, ...]:
    return (one.memory.origin, one.memory.strides, one.leaf.form.shape, one.leaf.form.item_bytes)


def _owner(group: list[_Located]) -> _Located | None:
    first = group[0]
    if len({_layout(one) for one in group}) == 1 and not first.overlaps_itself:
        return first
    start, stop = _hull(group)
    if any((one.memory.origin - start) % one.memory.alignment for one in group):
        return None
    for one in group:
        if (one.memory.start, one.memory.stop) == (start, stop) and one.is_contiguous:
            return one
    return None


def _hull(group: list[_Located]) -> tuple[int, int]:
    return min(one.memory.start for one in group), max(one.memory.stop for one in group)


def _point_at(one: _Located, owner: _Located) -> bool:
    """Make a leaf a view of the tensor of `owner`; return whether both are the same elements."""
    node = one.leaf.node
    node["tensor"] = owner.name
    node.pop("stored", None)
    if _layout(one) == _layout(owner):
        node["offset"] = 0
        return one.leaf.tensor.spec == _renamed(owner.leaf.tensor.spec, one.name)
    _set_offset(one, owner.memory.start)
    return False


def _renamed(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)


def _set_offset(one: _Located, start: int) -> None:
    one.leaf.node["offset"] = one.memory.origin - start
    if not one.is_contiguous:
        one.leaf.node["strides"] = list(one.memory.strides)


def _store_hull(
    group: list[_Located], tensors: dict[int, Tensor], unique_name: Callable[[str], str]
) -> None:
    start, stop = _hull(group)
    memory = next(
        (
            one.memory
            for one in group
            if one.memory.bounds[0] <= start and stop <= one.memory.bounds[1]
        ),
        None,
    )
    if memory is None:
        raise UnsupportedState(
            f"{group[0].leaf.path} and {group[-1].leaf.path} overlap in memory, but no storage holds both",
            hint="store a copy of one of them",
        )
    start = max(memory.bounds[0], start - start % _ALIGNMENT)
    for one in group:
        if (one.memory.origin - start) % one.memory.alignment:
            raise UnsupportedState(
                f"{one.leaf.path} lies unaligned in memory that it shares",
                hint="store a copy of it",
            )
        one.leaf.node.pop("stored", None)
        _set_offset(one, start)
    name = unique_name(f"{group[0].name}~storage")
    spec = TensorSpec(name=name, dtype=_UINT8, shape=(stop - start,))
    content = memory.content
    for one in group:
        one.leaf.node["tensor"] = name
        # The storage takes the first leaf's place in the order of the tree.
        if one is group[0]:
            tensors[one.number] = Tensor(spec=spec, content=lambda: content(start, stop))
        else:
            del tensors[one.number]


def _number_shared(leaves: Sequence[Leaf]) -> None:
    """Number the leaves that are one object, so that they are restored as one object."""
    counts = Counter(id(leaf.value) for leaf in leaves)
    numbers: dict[int, int] = {}
    for leaf in leaves:
        identity = id(leaf.value)
        if counts[identity] > 1:
            leaf.node["shared"] = numbers.setdefault(identity, len(numbers))
