# SPDX-License-Identifier: Apache-2.0
"""Arrays that share memory, all or a part of it: two stored values that differ there cannot both go into them.

Values go together when they are the same where their targets overlap: tied weights, a buffer and the views of it. What is
refused is a state in which the value that is written last would change one that was written before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckptmgr.state.arrays import memory_of_tensor
from ckptmgr.state.leaves import (
    Finder,
    Memory,
    Span,
    are_disjoint,
    array_memory,
    array_span,
    owner_of,
)

_Content = Callable[[Any], np.ndarray]
"""Returns what goes into a target: see `bytes_for`."""


class Conflict(NamedTuple):
    """Two targets whose values differ where they overlap.

    Attributes:
        later: The one that comes later; the same as `earlier` when the elements of one target overlap.
        earlier: The other one.
        is_same: Whether both are the same elements, and not only a part of them.
    """

    later: Any
    earlier: Any
    is_same: bool

    def __str__(self) -> str:
        return self.naming(str)

    def naming(self, name: Callable[[Any], str]) -> str:
        """Return what is wrong with `later`, given how messages name a target."""
        if self.is_same:
            return f"is the same memory as {name(self.earlier)}, stored are two different values"
        other = "itself" if self.later is self.earlier else name(self.earlier)
        return f"overlaps {other} in memory, stored are two different values"


class _Member(NamedTuple):
    key: Any
    memory: Memory
    shape: tuple[int, ...]
    item_bytes: int

    @property
    def layout(self) -> tuple[object, ...]:
        return (self.memory.origin, self.memory.strides, self.shape, self.item_bytes)


def overlapping_targets(targets: Mapping[Any, Any]) -> list[list[Any]]:
    """Return the groups of targets whose memory may overlap; one alone where its own elements do.

    Args:
        targets: Each a NumPy array or a torch tensor, in the order in which they are filled.
    """
    return [[one.key for one in group] for group in _groups(targets)]


def conflicts(
    targets: Mapping[Any, Any],
    stored: Mapping[Any, Any],
    read_contents: Callable[[Any], None] = lambda _: None,
) -> Iterator[Conflict]:
    """Yield the targets for which there are two values.

    Args:
        targets: Each a NumPy array or a torch tensor, in the order in which they are filled.
        stored: What goes into each: the same framework, shape and type.
        read_contents: Called with what is stored for some, before its content is looked at.
    """
    for group in _groups(targets):
        if not _is_alike(group, stored):
            for one in group:
                read_contents(stored[one.key])
            yield from _clashes(group, lambda key: bytes_for(targets[key], stored[key]))


def bytes_for(target: Any, stored: Any) -> np.ndarray:
    """Return the bytes in the memory of a target when `stored` was copied into it: one dimension more for each element."""
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
    keys = list(targets)
    spans: list[tuple[str, int, int, int]] = []
    for number, value in enumerate(targets.values()):
        span = _span_of(value)
        if span is not None:
            spans.append((*span, number))
    spans.sort()
    group: list[int] = []
    device, end = "", 0
    for at, start, stop, number in spans:
        if group and (at != device or start >= end):
            yield from _sharing(targets, keys, group)
            group = []
        device, end = at, stop if not group else max(end, stop)
        group.append(number)
    yield from _sharing(targets, keys, group)


def _sharing(
    targets: Mapping[Any, Any], keys: Sequence[Any], group: list[int]
) -> Iterator[list[_Member]]:
    members = [_member(keys[number], targets[keys[number]]) for number in sorted(group)]
    if len(members) > 1 or any(map(_overlaps_itself, members)):
        yield members


def _owner_of(value: Any) -> object | None:
    return owner_of(value) if isinstance(value, np.ndarray) else None


def _span_of(value: Any) -> Span | None:
    if isinstance(value, np.ndarray):
        return array_span(value)
    if not value.numel():
        return None
    # A tensor has no span where its values are not those in its memory; here its memory counts.
    span = _tensors().span(value)
    if span is not None:
        return span
    memory = _tensors().memory(value)
    return memory.device, memory.start, memory.stop


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
    """Return whether what is stored for a group shares memory in the same way, so that no two values can differ."""
    offsets = set()
    for one in group:
        memory = _member(one.key, stored[one.key]).memory
        if (memory.device, memory.strides) != (one.memory.device, one.memory.strides):
            return False
        offsets.add(memory.origin - one.memory.origin)
    return len(offsets) == 1


def _clashes(group: Sequence[_Member], content: _Content) -> Iterator[Conflict]:
    first: dict[tuple[object, ...], _Member] = {}
    for one in group:
        other = first.setdefault(one.layout, one)
        if other is not one and not np.array_equal(content(one.key), content(other.key)):
            yield Conflict(one.key, other.key, is_same=True)
    different = list(first.values())
    if len(different) > 1 or _overlaps_itself(different[0]):
        yield from _partial_clashes(different, content)


def _partial_clashes(group: Sequence[_Member], content: _Content) -> Iterator[Conflict]:
    """Write all values where no harm is done, and yield those that do not find what they would write."""
    start = min(one.memory.start for one in group)
    room = max(one.memory.stop for one in group) - start
    memory, is_written = np.zeros(room, np.uint8), np.zeros(room, np.bool_)
    for number, one in enumerate(group):
        value = content(one.key)
        there, written = (_view(one, whole, start) for whole in (memory, is_written))
        if _differs(there, written, value):
            earlier = next(
                other for other in group[:number] if _is_clash(other, one, content, start)
            )
            yield Conflict(one.key, earlier.key, is_same=False)
        there[...] = value
        written[...] = True
        if not np.array_equal(there, value):
            yield Conflict(one.key, one.key, is_same=False)


def _is_clash(one: _Member, other: _Member, content: _Content, start: int) -> bool:
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
