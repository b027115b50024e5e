# SPDX-License-Identifier: Apache-2.0
"""Tensors of one layout made from the files of another: planned at once, read one by one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.regions import Region, byte_runs
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.entries import TextEntry
from ckptmgr.formats.tensor import Tensor, TensorSpec, Text
from ckptmgr.parallel.errors import LayoutError, SliceMissing
from ckptmgr.parallel.layout import Layouts, ParallelLayout, devices_per_stage, for_shape, whole
from ckptmgr.parallel.mindspore.rank_files import OpenRankFiles
from ckptmgr.parallel.mindspore.reshard import SourcePart, plan_region
from ckptmgr.parallel.mindspore.slices import full_shape, region_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharder:
    """Makes tensors of `target` layouts from files of `source` layouts; None for whole ones."""

    files: OpenRankFiles
    source: Layouts | None
    target: Layouts | None

    def items(self, rank: int) -> list[Tensor | Text]:
        """Return the items that a rank of the target holds; each content is read when it is called.

        Raises:
            SliceMissing: No file holds a part of an item.
            LayoutError: A file does not fit the strategy.
        """
        devices = devices_per_stage(self.target)
        stage, device = divmod(rank, devices)
        found: list[Tensor | Text] = []
        for name in self.files.names():
            layout = (self.target or {}).get(name)
            if layout is not None and stage not in layout.stages:
                continue
            if self.source is not None and name not in self.source and layout is None:
                found.extend(self._unlisted(name, device))
            else:
                where = 0 if layout is None else device
                found.append(self.tensor(name, layout or whole(), device=where))
        return found

    def tensor(self, name: str, target: ParallelLayout, *, device: int = 0) -> Tensor:
        """Return the slice of a tensor on a device of the target layout; raises as `items`."""
        source = self._layout(name)
        _refuse_fields(name, source, target)
        spec, shape = self._whole(name, source)
        source, target = for_shape(source, shape), for_shape(target, shape)
        region = region_of(target, device, shape)
        choices = [
            (part, self._holder(name, part, spec)) for part in plan_region(source, shape, region)
        ]
        lengths = tuple(one.length for one in region)
        return Tensor(
            spec=TensorSpec(name=name, dtype=spec.dtype, shape=lengths),
            content=_Shared(partial(self._read, name, region, choices, spec.dtype.item_bytes)),
        )

    def unlisted(self) -> list[Tensor | Text]:
        """Return the values that the source strategy does not list, each from one rank."""
        listed = self.source
        names = [] if listed is None else [n for n in self.files.names() if n not in listed]
        return [item for name in names for item in self._unlisted(name, 0)]

    def _layout(self, name: str) -> ParallelLayout:
        return whole() if self.source is None else self.source.get(name, whole())

    def _whole(self, name: str, source: ParallelLayout) -> tuple[TensorSpec, tuple[int, ...]]:
        """Return the spec of a stored slice of a tensor, and the shape of the whole."""
        for rank in self.files.paths:
            spec = self.files.tensor(rank, name)
            if spec is not None:
                fitted = replace(for_shape(source, spec.shape), shape=source.shape)
                return spec, full_shape(fitted, spec.shape)
        raise UnsupportedCheckpoint(f"{name!r} is no tensor, so it cannot be cut or joined")

    def _holder(self, name: str, part: SourcePart, spec: TensorSpec) -> int:
        """Return a rank whose file has the slice, with the shape and type of the layout."""
        wanted = tuple(one.length for one in part.stored)
        holders = part.holders if self._is_cut(name) else tuple(self.files.paths)
        for rank in holders:
            stored = self.files.tensor(rank, name)
            if stored is None:
                continue
            if (stored.shape, stored.dtype) != (wanted, spec.dtype):
                raise LayoutError(
                    f"{name!r} is {stored.dtype.name}{list(stored.shape)}, but by the strategy it is"
                    f" {spec.dtype.name}{list(wanted)}",
                    path=self.files.paths[rank],
                    hint="the strategy file is that of another run, or rank directories are mixed up",
                )
            return rank
        raise SliceMissing(
            f"a slice of {name!r} is in no file: the checkpoint file of rank{holders[0]} is needed, but it is missing.",
            parameter=name,
            ranks=holders,
        )

    def _is_cut(self, name: str) -> bool:
        return self.source is not None and name in self.source

    def _unlisted(self, name: str, device: int) -> Iterator[Tensor | Text]:
        """Yield a value that no strategy lists, from the file of the matching source rank."""
        ranks = [rank for rank in self.files.paths if name in self.files.file(rank).entries]
        own = device % devices_per_stage(self.source)
        rank = own if own in ranks else ranks[0]
        entry = self.files.file(rank).entries[name]
        if isinstance(entry, TextEntry):
            yield Text(name=name, text=entry.text)
        elif isinstance(entry, TensorEntry):
            yield Tensor(spec=entry.spec, content=_Shared(partial(self._read_whole, rank, name)))
        else:
            raise UnsupportedCheckpoint(
                f"the map parameter {name!r} cannot be carried over", path=self.files.paths[rank]
            )

    def _read_whole(self, rank: int, name: str) -> np.ndarray:
        flat: np.ndarray = self.files.read_array(rank, name).reshape(-1).view(np.uint8)
        return flat

    def _read(
        self,
        name: str,
        region: Region,
        choices: Iterable[tuple[SourcePart, int]],
        item_bytes: int,
    ) -> np.ndarray:
        buffer = np.empty(int(np.prod([one.length for one in region])) * item_bytes, np.uint8)
        for part, rank in choices:
            runs = byte_runs(part.stored, part.wanted, region, item_bytes=item_bytes)
            self.files.read_runs(rank, name, runs, buffer.data)
        return buffer


def _refuse_fields(name: str, *layouts: ParallelLayout) -> None:
    for layout in layouts:
        if layout.field_size and layout.device_count > 1:
            raise LayoutError(
                f"{name!r} is an embedding table of {layout.field_size} fields, whose rows are not cut one after the other",
                hint="join its slices with merge_sliced_parameter",
            )


class _Shared:
    """A content that is read once for all threads that hold it at the same time."""

    def __init__(self, read: Callable[[], np.ndarray]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._last: weakref.ref[np.ndarray] | None = None

    def __call__(self) -> memoryview:
        with self._lock:
            array = None if self._last is None else self._last()
            if array is None:
                array = self._read()
                self._last = weakref.ref(array)
            return array.data
