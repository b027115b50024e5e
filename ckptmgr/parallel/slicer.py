# SPDX-License-Identifier: Apache-2.0
"""Slices in the state of a rank: leaves with a layout, DTensors, JAX arrays of many processes."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ckptmgr.core.errors import UnsupportedState
from ckptmgr.core.regions import Region, region_shape
from ckptmgr.files.load.shard_pieces import PIECES
from ckptmgr.files.load.state import index_of
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.foreign_layouts import from_dtensor
from ckptmgr.parallel.layout import Layouts, ParallelLayout, for_shape
from ckptmgr.parallel.mindspore.slices import full_shape, region_of
from ckptmgr.state.jax_shards import addressable_part, addressable_region, is_multi_process
from ckptmgr.state.slices import Slice

_SHOWN = 5


class LayoutSlicer:
    """Finds the regions of tensors that a rank holds; a `Slicer`.

    `layouts` are by the name of a tensor, such as `model/weight`.
    """

    def __init__(self, rank: int, layouts: Layouts | None = None) -> None:
        self._rank = rank
        self._layouts = layouts or {}

    def slice_of(self, name: str, value: Any, /) -> Slice | None:
        """Return the slice that a leaf is, or None; raise UnsupportedState for another shape."""
        layout = self._layouts.get(name)
        try:
            if is_dtensor(value):
                return self._dtensor(value)
            if is_multi_process(value):
                return _spread(value)
            if layout is None:
                return None
            lengths = tuple(map(int, value.shape))
            fitted = replace(for_shape(layout, lengths), shape=layout.shape)
            shape = full_shape(fitted, lengths)
            return self._slice(value, for_shape(layout, shape), shape, lengths)
        except LayoutError as error:
            raise UnsupportedState(f"{name!r}: {error.message}", hint=error.hint) from error

    def metadata_of(self, items: Sequence[Item]) -> dict[str, str]:
        """Return the metadata with the index of the named tensors that are slices.

        Raises as `tensor_specs`, `check_used` and `slice_of`.
        """
        specs = tensor_specs(items)
        self.check_used(specs)
        found = {name: self.slice_of(name, spec) for name, spec in specs.items()}
        slices = {name: one for name, one in found.items() if one is not None}
        return {PIECES: index_of(slices, specs).to_text()} if slices else {}

    def check_used(self, names: Collection[str]) -> None:
        """Raise UnsupportedState unless every layout of this rank names a tensor."""
        for name, layout in self._layouts.items():
            if name not in names and self._rank in _ranks(layout):
                some = ", ".join(sorted(names)[:_SHOWN])
                raise UnsupportedState(
                    f"there is a layout of {name!r}, but no such tensor in the state",
                    hint=f"tensors are called by their place in the state, such as {some}",
                )

    def region(self, name: str, shape: tuple[int, ...], /) -> Region | None:
        """Return the region of a tensor for the rank, or None without a layout."""
        layout = self._layouts.get(name)
        if layout is None:
            return None
        if layout.shape is not None and layout.shape != shape:
            raise LayoutError(
                f"{name!r} has the shape {list(shape)}, but its layout says {list(layout.shape)}"
            )
        return self._region(for_shape(layout, shape), shape)

    def _dtensor(self, value: Any) -> Slice:
        import torch

        layout, shape = from_dtensor(value), tuple(map(int, value.shape))
        with torch.no_grad():
            local = value.to_local()
        return self._slice(local, layout, shape, tuple(map(int, local.shape)))

    def _slice(
        self,
        local: object,
        layout: ParallelLayout,
        shape: tuple[int, ...],
        lengths: tuple[int, ...],
    ) -> Slice:
        region = self._region(layout, shape)
        if 0 in lengths and 0 in region_shape(region):
            return Slice(local=local, shape=shape, start=(0,) * len(shape), lengths=lengths)
        if region_shape(region) != lengths:
            raise LayoutError(
                f"rank {self._rank} holds {list(lengths)}, but by its layout {list(region_shape(region))} of {list(shape)}"
            )
        start = tuple(one.start for one in region)
        return Slice(local=local, shape=shape, start=start, lengths=lengths)

    def _region(self, layout: ParallelLayout, shape: tuple[int, ...]) -> Region:
        ranks = _ranks(layout)
        if self._rank not in ranks:
            return tuple(one._replace(stop=one.start) for one in region_of(layout, 0, shape))
        return region_of(layout, ranks.index(self._rank), shape)


def tensor_specs(items: Sequence[Item]) -> dict[str, TensorSpec]:
    """Return the spec of each item by name; raise UnsupportedState for other items than tensors."""
    specs = {}
    for item in items:
        if not isinstance(item, Tensor):
            raise UnsupportedState(
                f"{item.name!r} is no tensor; files of many ranks hold tensors only",
                hint="leave it out, or save it as numbers",
            )
        specs[item.spec.name] = item.spec
    return specs


def _spread(value: Any) -> Slice:
    box = addressable_region(value)
    if box is None:
        raise LayoutError(
            "the devices of this process hold parts of it that are no box together",
            hint="order the mesh so that the devices of a process are neighbours",
        )
    return Slice(
        local=addressable_part(value, box),
        shape=tuple(map(int, value.shape)),
        start=tuple(one.start for one in box),
        lengths=region_shape(box),
    )


def _ranks(layout: ParallelLayout) -> tuple[int, ...]:
    return tuple(map(layout.rank_of, range(layout.device_count)))


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, without importing torch."""
    module = sys.modules.get("torch.distributed.tensor")
    kind = getattr(module, "DTensor", None)
    return kind is not None and isinstance(value, kind)
