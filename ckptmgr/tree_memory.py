# SPDX-License-Identifier: Apache-2.0
"""Which leaves share memory, and what is stored for each.

Leaves whose memory overlaps form a group. Its bytes are stored once: as the leaf that covers them all where there is
one (tied weights, a flat buffer and its views), otherwise as a run of uint8. A leaf that overlaps nobody is stored
compactly, however large the storage behind it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptmgr.errors import UnsupportedState
from ckptmgr.formats.dtypes import BY_NAME, DType
from ckptmgr.formats.tensor import Tensor, TensorSpec
from ckptmgr.tree_nodes import Json, Path

_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory that a leaf looks at.

    Attributes:
        device: Name of the address space.
        start: Address of the first byte that the leaf can reach.
        stop: One past the last.
        origin: Address of element 0 (after `start` only when a stride is negative).
        strides: Bytes from one element to the next, per dimension.
        alignment: The offset of the leaf in what is stored must be a multiple of it.
        bounds: First and one-past-last address of the storage behind it.
        content: Returns the bytes between two addresses in that storage.
    """

    device: str
    start: int
    stop: int
    origin: int
    strides: tuple[int, ...]
    alignment: int
    bounds: tuple[int, int]
    content: Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An array in the state.

    Attributes:
        path: Where it is, for messages.
        node: The body of its skeleton node; planning completes it.
        value: The array; held so that its memory and identity stay its own.
        tensor: How it is stored when it shares nothing.
        item_bytes: Bytes of an element.
        shape: Its own shape (that of `tensor` has one more dimension where the bytes are stored as uint8).
        memory: What it looks at, or None when nobody can share it.
    """

    path: Path
    node: dict[str, Json]
    value: object
    tensor: Tensor
    item_bytes: int
    shape: tuple[int, ...]
    memory: Memory | None

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements, side by side."""
        return prod(self.shape) * self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie side by side in C order."""
        strides = contiguous_strides(self.shape, self.item_bytes)
        return self.memory is not None and all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, self.memory.strides, strides, strict=True)
        )


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


def stored_as(
    name: str, spelling: str, shape: tuple[int, ...], item_bytes: int
) -> tuple[TensorSpec, bool]:
    """Return how elements are stored: as themselves where every format knows them, else as their bytes.

    Returns:
        The specification, and whether it is the bytes (uint8, with one more dimension unless an element is one byte).
    """
    row = BY_NAME.get(spelling)
    if row is not None and row.mindspore is not None and row.safetensors is not None:
        return TensorSpec(name=name, dtype=row, shape=shape), False
    stored_shape = shape if item_bytes == 1 else (*shape, item_bytes)
    return TensorSpec(name=name, dtype=_UINT8, shape=stored_shape), True


_UINT8: DType = BY_NAME["uint8"]


def plan_storage(
    leaves: Sequence[Leaf], unique_name: Callable[[str], str]
) -> tuple[list[Tensor], dict[str, str]]:
    """Decide what is stored and complete the nodes of all leaves.

    Args:
        leaves: In the order of the tree.
        unique_name: Reserves a free tensor name like the one given.

    Returns:
        The tensors in that order, and `alias -> name` for leaves that are another one under a second name.

    Raises:
        UnsupportedState: Overlapping leaves with no common storage behind them.
    """
    tensors = {id(leaf): leaf.tensor for leaf in leaves}
    aliases: dict[str, str] = {}
    for group in _overlapping(leaves):
        owner = _owner(group)
        if owner is None:
            _store_hull(group, tensors, unique_name)
            continue
        for leaf in group:
            if leaf is not owner:
                del tensors[id(leaf)]
                if _point_at(leaf, owner):
                    aliases[leaf.tensor.spec.name] = owner.tensor.spec.name
    _number_shared(leaves)
    for leaf in leaves:
        leaf.node.setdefault("tensor", leaf.tensor.spec.name)
    return list(tensors.values()), aliases


def _overlapping(leaves: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """Yield the groups that need more than storing each leaf on its own; members in the order of the tree."""
    order = {id(leaf): index for index, leaf in enumerate(leaves)}
    located = [(leaf.memory, leaf) for leaf in leaves if leaf.memory is not None]
    located.sort(key=lambda pair: (pair[0].device, pair[0].start))
    group: list[Leaf] = []
    device, stop = "", 0
    for memory, leaf in located:
        if group and (memory.device != device or memory.start >= stop):
            yield from _needing_care(group, order)
            group, stop = [], 0
        group.append(leaf)
        device, stop = memory.device, max(stop, memory.stop)
    yield from _needing_care(group, order)


def _needing_care(group: list[Leaf], order: dict[int, int]) -> Iterable[list[Leaf]]:
    if len(group) > 1 or any(_overlaps_itself(leaf) for leaf in group):
        yield sorted(group, key=lambda leaf: order[id(leaf)])


def _overlaps_itself(leaf: Leaf) -> bool:
    memory = leaf.memory
    return memory is not None and memory.stop - memory.start < leaf.size_bytes


def _layout(leaf: Leaf) -> tuple[object, ...]:
    memory = leaf.memory
    assert memory is not None  # noqa: S101 - groups hold only leaves with memory
    return (memory.origin, memory.strides, leaf.shape, leaf.item_bytes)


def _owner(group: list[Leaf]) -> Leaf | None:
    first = group[0]
    if len({_layout(leaf) for leaf in group}) == 1 and not _overlaps_itself(first):
        return first
    start, stop = _hull(group)
    if any((_origin(leaf) - start) % _alignment(leaf) for leaf in group):
        return None
    for leaf in group:
        if _hull([leaf]) == (start, stop) and leaf.is_contiguous:
            return leaf
    return None


def _hull(group: list[Leaf]) -> tuple[int, int]:
    memories = [leaf.memory for leaf in group if leaf.memory is not None]
    return min(memory.start for memory in memories), max(memory.stop for memory in memories)


def _origin(leaf: Leaf) -> int:
    return leaf.memory.origin if leaf.memory is not None else 0


def _alignment(leaf: Leaf) -> int:
    return leaf.memory.alignment if leaf.memory is not None else 1


def _point_at(leaf: Leaf, owner: Leaf) -> bool:
    """Make `leaf` a view of what is stored for `owner`; return whether both are the same elements."""
    leaf.node["tensor"] = owner.tensor.spec.name
    leaf.node.pop("stored", None)
    if _layout(leaf) == _layout(owner):
        leaf.node["offset"] = 0
        return leaf.tensor.spec == _renamed(owner.tensor.spec, leaf.tensor.spec.name)
    _place(leaf, _hull([owner])[0])
    return False


def _renamed(spec: TensorSpec, name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=spec.dtype, shape=spec.shape)


def _place(leaf: Leaf, start: int) -> None:
    leaf.node["offset"] = _origin(leaf) - start
    if not leaf.is_contiguous and leaf.memory is not None:
        leaf.node["strides"] = list(leaf.memory.strides)


def _store_hull(
    group: list[Leaf], tensors: dict[int, Tensor], unique_name: Callable[[str], str]
) -> None:
    start, stop = _hull(group)
    memory = next(
        (
            m
            for leaf in group
            if (m := leaf.memory) and m.bounds[0] <= start and stop <= m.bounds[1]
        ),
        None,
    )
    if memory is None:
        raise UnsupportedState(
            f"{group[0].path} and {group[-1].path} overlap in memory, but no storage holds both",
            hint="store a copy of one of them",
        )
    start = max(memory.bounds[0], start - start % _ALIGNMENT)
    for leaf in group:
        if (_origin(leaf) - start) % _alignment(leaf):
            raise UnsupportedState(
                f"{leaf.path} lies unaligned in memory that it shares", hint="store a copy of it"
            )
        leaf.node.pop("stored", None)
        _place(leaf, start)
    name = unique_name(f"{group[0].tensor.spec.name}~storage")
    spec = TensorSpec(name=name, dtype=_UINT8, shape=(stop - start,))
    content = memory.content
    for leaf in group:
        leaf.node["tensor"] = name
        # The first place in the order of the tree is kept, with the storage in it.
        if leaf is group[0]:
            tensors[id(leaf)] = Tensor(spec=spec, content=lambda: content(start, stop))
        else:
            del tensors[id(leaf)]


def _number_shared(leaves: Sequence[Leaf]) -> None:
    """Note which leaves are the very same object, so that it comes back as one object."""
    counts = Counter(id(leaf.value) for leaf in leaves)
    numbers: dict[int, int] = {}
    for leaf in leaves:
        identity = id(leaf.value)
        if counts[identity] > 1:
            leaf.node["shared"] = numbers.setdefault(identity, len(numbers))


def array_memory(array: np.ndarray) -> Memory | None:
    """Return the memory of a NumPy array; None when it is empty."""
    if array.nbytes == 0:
        return None
    origin = array.__array_interface__["data"][0]
    start, stop = extent(origin, array.shape, array.strides, array.itemsize)
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    low = root.__array_interface__["data"][0]
    flat = root.T if root.flags.f_contiguous and not root.flags.c_contiguous else root
    # Where the memory behind the array is itself a strided view, only what the array reaches is known to be there.
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
