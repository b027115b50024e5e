# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that many ranks saved together, read as one by any number of ranks.

A tensor is assembled from the pieces in the files, the own file first. Of each file only the digest
ranges, or cipher blocks, with wanted bytes or with the index are read. Only checked bytes are used.
If a file is damaged and others have the same rows, those are used, with a warning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import ChecksumMismatch, CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.regions import (
    Region,
    byte_runs,
    intersection,
    region_shape,
    subtract,
    whole_region,
)
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.shard_files import OpenShards
from ckptmgr.files.load.shard_pieces import StoredPiece, placed
from ckptmgr.formats.index import TensorEntry, check_content
from ckptmgr.formats.tensor import TensorSpec, flat_memory
from ckptmgr.io.arenas import new_array
from ckptmgr.io.scatter import Placement
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

Wanted = Mapping[str, Region | None]
"""Tensor name to the wanted region; None for all of it."""


@dataclass(frozen=True, slots=True)
class _Task:
    """A region of a stored piece to be read into an array."""

    stored: StoredPiece
    wanted: Region
    name: str
    target: Region


class ShardedCheckpoint(OpenShards):
    """The tensors in the files of many ranks; arguments and the rest as for `OpenShards`."""

    def __init__(self, store: Store, manifest: Manifest, *, options: ReadOptions) -> None:
        super().__init__(store, manifest, options=options)
        self.used: set[int] = set()

    def read(self, wanted: Wanted, *, rank: int | None) -> dict[str, np.ndarray]:
        """Return tensors, or regions of them, of a rank; with None those that all ranks share.

        Raises:
            CorruptCheckpoint: Damage was found, or a part is in no file.
        """
        while True:
            arrays: dict[str, np.ndarray] = {}
            tasks: dict[int, list[_Task]] = {}
            specs: dict[str, TensorSpec] = {}
            for name, region in wanted.items():
                spec, region, found = self._cover(name, region, rank)
                arrays[name] = new_array(region_shape(region), spec.dtype.to_numpy())
                for task in found:
                    tasks.setdefault(task.stored.file_rank, []).append(task)
                specs[name] = spec
            if all(self._is_filled(number, tasks[number], arrays) for number in sorted(tasks)):
                with translated_errors(str(self.path)):
                    for name, array in arrays.items():
                        entry = TensorEntry(spec=specs[name], pieces=())
                        check_content(entry, flat_memory(array), offset=0)
                return arrays

    def _is_filled(self, number: int, tasks: list[_Task], arrays: Mapping[str, np.ndarray]) -> bool:
        """Read all tasks of a file; return False if it is damaged: others may have the data."""
        try:
            self._fill(number, tasks, arrays)
        except (CorruptCheckpoint, FileNotFoundError) as error:
            self._note_damage(number, error)
            return False
        return True

    def check_complete(self) -> None:
        """Raise unless every tensor in the files is complete for each rank that has it.

        Raises:
            CorruptCheckpoint, UnsupportedCheckpoint: A part is in no file.
        """
        held = {(one.tensor, rank) for one in self._all_pieces() for rank in one.ranks or (0,)}
        for name, rank in sorted(held):
            self._cover(name, None, rank)

    def _cover(
        self, name: str, region: Region | None, rank: int | None
    ) -> tuple[TensorSpec, Region, list[_Task]]:
        """Return the stored spec of a tensor, the wanted region, and the pieces that cover it."""
        try:
            return self._joined(name, region, rank)
        except (CorruptCheckpoint, UnsupportedCheckpoint):
            if not self._has_new_damage():
                raise
        return self._cover(name, region, rank)

    def _joined(
        self, name: str, region: Region | None, rank: int | None
    ) -> tuple[TensorSpec, Region, list[_Task]]:
        first: StoredPiece | None = None
        missing: list[Region] = []
        chosen: list[tuple[StoredPiece, Region]] = []
        for stored in self.pieces(name, rank=rank):
            if first is None:
                first = stored
                region = whole_region(stored.whole) if region is None else region
                missing = [region]
            self._check_alike(first, stored, wanted=region)
            left: list[Region] = []
            for box in missing:
                both = intersection(stored.region, box)
                if both is None:
                    left.append(box)
                    continue
                chosen.append((stored, both))
                left += subtract(box, both)
            missing = left
            if not missing:
                break
        if first is None and region is not None and not prod(region_shape(region)):
            # An empty part is in no file; any other piece gives the whole shape.
            first = next(self.pieces(name, rank=None), None)
        if first is None or region is None or any(prod(region_shape(one)) for one in missing):
            raise self._missing(name, region, rank, missing)
        return first.spec, region, [_Task(stored, both, name, region) for stored, both in chosen]

    def _check_alike(self, one: StoredPiece, other: StoredPiece, *, wanted: Region | None) -> None:
        if wanted is not None and len(wanted) != len(one.whole):
            raise CorruptCheckpoint(
                f"{len(wanted)} dimensions are wanted of a tensor of the shape {list(one.whole)}",
                path=self.path,
                tensor=one.piece.tensor,
            )
        if (one.whole, one.spec.dtype) != (other.whole, other.spec.dtype):
            raise CorruptCheckpoint(
                f"the pieces are of {one.spec.dtype.name}{list(one.whole)} and {other.spec.dtype.name}{list(other.whole)}",
                path=self.path,
                tensor=one.piece.tensor,
            )

    def _missing(
        self, name: str, region: Region | None, rank: int | None, missing: list[Region]
    ) -> Exception:
        for error in self._damaged.values():
            return error
        if rank is not None:
            with contextlib.suppress(CorruptCheckpoint):
                self._joined(name, region, None)
                return self._only_apart(name, rank)
        where = f" at {[one.start for one in missing[0]]}" if missing else ""
        return CorruptCheckpoint(
            f"a part of the tensor{where} is in none of the files", path=self.path, tensor=name
        )

    def _only_apart(self, name: str, rank: int) -> UnsupportedCheckpoint:
        return UnsupportedCheckpoint(
            f"{name!r} differs between the ranks that saved copies of it, and rank {rank} had only a part",
            path=self.path,
            hint=f"load it with {self.world} ranks and the layout it was saved with, or read the files one by one: "
            "each is an ordinary checkpoint",
        )

    def _fill(self, number: int, tasks: list[_Task], arrays: Mapping[str, np.ndarray]) -> None:
        opened = self._opened(number)
        entries = {one.name: one for one in opened.index.entries if isinstance(one, TensorEntry)}
        placements: list[Placement] = []
        for task in tasks:
            entry, target = entries.get(task.stored.spec.name), flat_memory(arrays[task.name])
            if entry is None or entry.spec != task.stored.spec:
                raise ChecksumMismatch("the file changed while it was read", path=opened.path)
            runs = byte_runs(
                task.stored.region, task.wanted, task.target, item_bytes=entry.spec.dtype.item_bytes
            )
            for run in runs:
                view = target[run.target_offset :][: run.length]
                placements += placed(entry, run.source_offset, view)
        placements.sort(key=lambda one: one.offset)
        with translated_errors(opened.path):
            opened.read(placements, confirmed=() if number in self._confirmed else None)
        self._confirmed.add(number)
        self.used.add(number)


def first_difference(files: ShardedCheckpoint, name: str, region: Region | None) -> int | None:
    """Return the first rank whose own tensor is not the same as that of rank 0, or None.

    Raises:
        CkptmgrError: About the files.
    """
    own = _content(files, name, region, 0)
    others = range(1, files.world)
    return next((rank for rank in others if _content(files, name, region, rank) != own), None)


def _content(
    files: ShardedCheckpoint, name: str, region: Region | None, rank: int
) -> tuple[np.dtype, tuple[int, ...], memoryview] | None:
    if not any(files.pieces(name, rank=rank)):
        files.metadata(rank)  # raises if the file is damaged, and may have had it
        return None
    array = files.read({name: region}, rank=rank)[name]
    return array.dtype, array.shape, flat_memory(array)
