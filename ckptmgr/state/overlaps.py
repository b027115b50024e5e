# SPDX-License-Identifier: Apache-2.0
"""Overlapping restore targets: conflicts between the stored values of arrays that share memory.

Values agree when they are equal wherever their targets overlap: tied weights, a buffer and its
views. A conflict is a value whose write would change one that was written before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.state.leaves import (
    NO_SPAN,
    Finder,
    LeafMemory,
    Span,
    are_disjoint,
    array_memory,
    array_span,
    overlapping_groups,
    owner_of,
    stand_alone,
)
from ckptmgr.state.torch_memory import memory_of_tensor

_Content = Callable[[Any], np.ndarray]
"""Returns what goes into a target: see `bytes_for`."""


class Conflict(NamedTuple):
    """Two targets whose values differ where they overlap."""

    later: Any
    earlier: Any  # the same as `later` when the elements of one target overlap
    is_same: bool  # whether both are exactly the same elements

    def naming(self, name: Callable[[Any], str]) -> str:
        """Return the problem of `later` as text; `name` formats a target."""
        if self.is_same:
            return f"is the same memory as {name(self.earlier)}, stored are two different values"
        other = "itself" if self.later is self.earlier else name(self.earlier)
        return f"overlaps {other} in memory, stored are two different values"


class _Member(NamedTuple):
    key: Any
    memory: LeafMemory
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def layout(self) -> tuple[object, ...]:
        return (self.memory.origin, self.memory.strides, self.shape, self.item_bytes)


def overlapping_targets(targets: Mapping[Any, Any]) -> list[list[Any]]:
    """Return the groups of arrays that overlap; a group of one where its own elements do."""
    return [[one.key for one in group] for group in _groups(targets)]


def conflicts(
    targets: Mapping[Any, Any],
    stored: Mapping[Any, Any],
    read_contents: Callable[[Any], None] = lambda _: None,
) -> Iterator[Conflict]:
    """Yield the targets that would get two values.

    Args:
        targets: NumPy arrays or torch tensors, in the order in which they are filled.
        stored: The value of each: the same framework, shape and type.
        read_contents: Called with a stored value before its content is compared.
    """
    for group in _groups(targets):
        if not _is_alike(group, stored):
            for one in group:
                read_contents(stored[one.key])
            yield from _conflicts(group, lambda key: bytes_for(targets[key], stored[key]))


def bytes_for(target: Any, stored: Any) -> np.ndarray:
    """Return the bytes of `stored` as the target's memory would hold them, by element."""
    if isinstance(stored, np.ndarray):
        flat = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    else:
        value = stored.detach().conj() if target.is_conj() else stored.detach()
        value = value.neg() if target.is_neg() else value
        flat = memory_of_tensor(value.resolve_conj().resolve_neg().cpu().contiguous())
    return flat.reshape(*target.shape, target.dtype.itemsize)


def _groups(targets: Mapping[Any, Any]) -> Iterator[list[_Member]]:
    if are_disjoint(map(_owner_of, targets.values()), len(targets)):
        return
    keys, values = list(targets), list(targets.values())
    spans = [_span_of(value) for value in values]
    if stand_alone([span for span in spans if span is not NO_SPAN]):
        return
    for group, _ in overlapping_groups(spans):
        members = [_member(keys[number], targets[keys[number]]) for number in sorted(group)]
        if len(members) > 1 or _overlaps_itself(members[0]):
            yield members


def _owner_of(value: Any) -> object | None:
    return owner_of(value) if isinstance(value, np.ndarray) else None


def _span_of(value: Any) -> Span:
    if isinstance(value, np.ndarray):
        return array_span(value)
    # Of conjugated and negated tensors, too, which have no span when they are stored.
    size_bytes = value.nbytes
    if not size_bytes:
        return NO_SPAN
    if value.is_contiguous():
        start = value.data_ptr()
        return "cpu" if value.is_cpu else str(value.device), start, start + size_bytes, size_bytes
    memory = _tensors().memory(value)
    return memory.device, memory.start, memory.stop, size_bytes


def _member(key: Any, value: Any) -> _Member:
    is_array = isinstance(value, np.ndarray)
    memory = array_memory(value) if is_array else _tensors().memory(value)
    return _Member(key, memory, tuple(value.shape), value.dtype.itemsize)


@cache
def _tensors() -> Finder:
    from ckptmgr.state.torch_values import TENSORS

    return TENSORS


def _overlaps_itself(one: _Member) -> bool:
    return one.memory.stop - one.memory.start < prod(one.shape) * one.item_bytes


def _is_alike(group: Sequence[_Member], stored: Mapping[Any, Any]) -> bool:
    """Return whether the stored values share memory as the targets do: then no two differ."""
    offsets = set()
    for one in group:
        memory = _member(one.key, stored[one.key]).memory
        if (memory.device, memory.strides) != (one.memory.device, one.memory.strides):
            return False
        offsets.add(memory.origin - one.memory.origin)
    return len(offsets) == 1


def _conflicts(group: Sequence[_Member], content: _Content) -> Iterator[Conflict]:
    first: dict[tuple[object, ...], _Member] = {}
    for one in group:
        other = first.setdefault(one.layout, one)
        if other is not one and not np.array_equal(content(one.key), content(other.key)):
            yield Conflict(one.key, other.key, is_same=True)
    different = list(first.values())
    if len(different) > 1 or _overlaps_itself(different[0]):
        yield from _partial_conflicts(different, content)


def _partial_conflicts(group: Sequence[_Member], content: _Content) -> Iterator[Conflict]:
    """Write all values into scratch memory, and yield those that meet another value there."""
    start = min(one.memory.start for one in group)
    room = max(one.memory.stop for one in group) - start
    memory, is_written = np.zeros(room, np.uint8), np.zeros(room, np.bool_)
    for number, one in enumerate(group):
        value = content(one.key)
        there, written = (_view(one, whole, start) for whole in (memory, is_written))
        if _differs(there, written, value):
            earlier = next(
                other for other in group[:number] if _is_conflict(other, one, content, start)
            )
            yield Conflict(one.key, earlier.key, is_same=False)
        there[...] = value
        written[...] = True
        if not np.array_equal(there, value):
            yield Conflict(one.key, one.key, is_same=False)


def _is_conflict(one: _Member, other: _Member, content: _Content, start: int) -> bool:
    room = max(one.memory.stop, other.memory.stop) - start
    memory, is_written = np.zeros(room, np.uint8), np.zeros(room, np.bool_)
    _view(one, memory, start)[...] = content(one.key)
    _view(one, is_written, start)[...] = True
    there, written = (_view(other, whole, start) for whole in (memory, is_written))
    return _differs(there, written, content(other.key))


def _differs(there: np.ndarray, is_written: np.ndarray, value: np.ndarray) -> bool:
    return bool(np.any(is_written & (there != value)))


def _view(one: _Member, whole: np.ndarray, start: int) -> np.ndarray:
    shape, strides = (*one.shape, one.item_bytes), (*one.memory.strides, 1)
    return np.ndarray(shape, whole.dtype, whole.data, one.memory.origin - start, strides)
