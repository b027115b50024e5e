# SPDX-License-Identifier: Apache-2.0
"""Comparison of two checkpoints: tensors by name, and the values of the state beside them.

Tensors are read, checked and decrypted in chunks of a few MiB of each side, so that two
checkpoints of any size are compared in the same memory.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.model import Checkpoint
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.maintenance.diff_elements import DifferenceTotal, ElementDifferences, Tolerance, sum_of
from ckptmgr.maintenance.diff_sides import DiffSide, open_side
from ckptmgr.maintenance.export_plan import names_of_part
from ckptmgr.state.paths import StateMismatch
from ckptmgr.state.values import StateValue
from ckptmgr.store.store import Store

_SHOWN_PARTS = 5


class Change(enum.Enum):
    """Kind of a difference."""

    ADDED = "added"
    REMOVED = "removed"
    SHAPE = "shape"
    DTYPE = "dtype"
    CHANGED = "changed"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A checkpoint to compare, how it is read, and the part of it that counts."""

    store: Store
    checkpoint: Checkpoint
    options: ReadOptions
    part: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """A tensor that one of two checkpoints has, or both; `elements` where the shapes are equal."""

    name: str
    change: Change
    a: TensorSpec | None
    b: TensorSpec | None
    elements: ElementDifferences | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """A value beside the tensors that differs, as a text; None where a checkpoint has none."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of the comparison of two checkpoints.

    Attributes:
        tensors: All tensors: those of the first in its order, then those that only the second has.
        values: Values beside the tensors that differ.
        unverified: Which of the inputs nothing vouches for.
        has_values: Whether all values were compared: those of many ranks are not.
    """

    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    unverified: tuple[Checkpoint, ...]
    has_values: bool

    @property
    def is_same(self) -> bool:
        """Whether nothing differs."""
        return not self.values and set(self.counts) <= {Change.SAME}

    @property
    def counts(self) -> Counter[Change]:
        """The number of tensors of each kind of difference."""
        return Counter(one.change for one in self.tensors)

    @property
    def total(self) -> ElementDifferences:
        """The differences of all tensors whose elements were compared, as of one; no relative norm."""
        return sum_of([one.elements for one in self.tensors if one.elements is not None])

    @property
    def largest(self) -> TensorDifference | None:
        """The tensor with the largest change of a number, if any number changed."""
        changed = [one for one in self.tensors if one.elements is not None and one.elements.max_abs]
        return max(changed, key=_max_abs, default=None)


def _max_abs(one: TensorDifference) -> float:
    return 0.0 if one.elements is None else one.elements.max_abs or 0.0


def compare(a: Input, b: Input, tolerance: Tolerance) -> Comparison:
    """Compare two checkpoints.

    Raises:
        StateMismatch: One of them has nothing in the part that was asked for.
        CkptmgrError: One is damaged or missing, or its keys do not open it.
        OSError: From the disk.
    """
    with (
        open_side(a.store, a.checkpoint, a.options) as first,
        open_side(b.store, b.checkpoint, b.options) as second,
    ):
        sides = (_Part(first, a), _Part(second, b))
        has_values = first.has_values and second.has_values
        return Comparison(
            tensors=tuple(_tensors(*sides, tolerance)),
            values=tuple(_values(*sides, tolerance)) if has_values else (),
            unverified=tuple(
                one.checkpoint for side, one in ((first, a), (second, b)) if not side.is_verified
            ),
            has_values=has_values,
        )


class _Part:
    """The part of a side that counts, under the names that it has there."""

    def __init__(self, side: DiffSide, given: Input) -> None:
        self._side = side
        self._path = str(given.checkpoint.path)
        self._stored = _stored_names(side.specs, given)
        self.specs = {name: side.specs[stored] for name, stored in self._stored.items()}
        chosen = names_of_part(side.values, given.part)
        self.values = {name: side.values[stored] for stored, name in chosen.items()}
        self.window_bytes = side.window_bytes

    def chunks(self, name: str, chunk_bytes: int) -> Iterator[memoryview]:
        with translated_errors(self._path):
            yield from self._side.chunks(self._stored[name], chunk_bytes)


def _stored_names(specs: Mapping[str, TensorSpec], given: Input) -> dict[str, str]:
    found = names_of_part(specs, given.part)
    if not found and given.part is not None:
        parts = dict.fromkeys(name.partition("/")[0] for name in specs if "/" in name)
        known = ", ".join(map(repr, [*parts][:_SHOWN_PARTS]))
        raise StateMismatch(
            f"{given.checkpoint.path} has no tensors of a part {given.part!r}"
            + (f"; its parts are {known}" if known else ""),
            hint="a part is the beginning of names, up to a slash or a dot; ckptmgr inspect shows them",
        )
    return {name: stored for stored, name in found.items()}


def _tensors(a: _Part, b: _Part, tolerance: Tolerance) -> Iterator[TensorDifference]:
    for name, spec in a.specs.items():
        other = b.specs.get(name)
        if other is None:
            yield TensorDifference(name=name, change=Change.REMOVED, a=spec, b=None)
        elif spec.stated_shape != other.stated_shape or spec.shape != other.shape:
            yield TensorDifference(name=name, change=Change.SHAPE, a=spec, b=other)
        else:
            elements = _elements(name, a, b, tolerance)
            change = Change.CHANGED if elements.differing else Change.SAME
            if spec.dtype.name != other.dtype.name:
                change = Change.DTYPE
            yield TensorDifference(name=name, change=change, a=spec, b=other, elements=elements)
    for name, spec in b.specs.items():
        if name not in a.specs:
            yield TensorDifference(name=name, change=Change.ADDED, a=None, b=spec)


def _elements(name: str, a: _Part, b: _Part, tolerance: Tolerance) -> ElementDifferences:
    types = (a.specs[name].dtype, b.specs[name].dtype)
    total = DifferenceTotal(*types, tolerance)
    window = max(a.window_bytes, b.window_bytes) // max(one.item_bytes for one in types)
    chunks = (
        side.chunks(name, window * dtype.item_bytes)
        for side, dtype in zip((a, b), types, strict=True)
    )
    for one, other in zip(*chunks, strict=True):
        total.add(one, other)
    return total.result()


def _values(a: _Part, b: _Part, tolerance: Tolerance) -> Iterator[ValueDifference]:
    for name in {**a.values, **b.values}:
        ours, theirs = (_shown(one.values, name) for one in (a, b))
        if ours != theirs and not _are_close(a.values.get(name), b.values.get(name), tolerance):
            yield ValueDifference(name=name, a=ours, b=theirs)


def _shown(values: Mapping[str, StateValue], name: str) -> str | None:
    return repr(values[name]) if name in values else None


def _are_close(one: StateValue, other: StateValue, tolerance: Tolerance) -> bool:
    if not (isinstance(one, float) and isinstance(other, float)):
        return False
    return not tolerance.is_exact and tolerance.takes(one, other)
