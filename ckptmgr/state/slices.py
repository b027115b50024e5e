# SPDX-License-Identifier: Apache-2.0
"""Slices: leaves of a state that are the local parts of sharded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptmgr.core.regions import Region, region_at
from ckptmgr.state.leaves import Leaf
from ckptmgr.state.paths import unsupported


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The local part of a sharded tensor."""

    local: object
    shape: tuple[int, ...]  # of the whole tensor
    start: tuple[int, ...]  # of `local` in the whole
    lengths: tuple[int, ...]  # shape of `local`

    @property
    def region(self) -> Region:
        """The region of `local` in the whole."""
        return region_at(self.start, self.lengths)


class Slicer(Protocol):
    """Decides which leaves are slices."""

    def slice_of(self, name: str, value: object, /) -> Slice | None:
        """Return the slice of an array, `name` being its path (`model/weight`); None if whole."""
        ...

    def region(self, name: str, shape: tuple[int, ...], /) -> Region | None:
        """Return the region of a stored tensor that this process needs; None for all of it."""
        ...


def set_whole_shapes(leaves: Sequence[Leaf], slices: Mapping[str, Slice]) -> None:
    """Give the planned nodes of slices the shape of the whole tensor.

    Raises:
        UnsupportedState: A slice shares its memory with a leaf that is not the same slice.
    """
    for leaf in leaves:
        own, stored = slices.get(leaf.tensor.spec.name), slices.get(str(leaf.stored_name))
        if own is None and stored is None:
            continue
        if own is None or stored is None or not _is_same(own, stored) or _is_view(leaf):
            raise unsupported(
                leaf.path,
                "shares memory with a slice of a tensor that other ranks hold the rest of",
                "store a copy of one of them",
            )
        leaf.node["shape"] = list(own.shape)


def _is_same(one: Slice, other: Slice) -> bool:
    return (one.shape, one.start, one.lengths) == (other.shape, other.start, other.lengths)


def _is_view(leaf: Leaf) -> bool:
    return "strides" in leaf.node or leaf.node.get("offset", 0) != 0
