# SPDX-License-Identifier: Apache-2.0
"""The files of a checkpoint that many ranks saved together, read as one, by any number of ranks.

A tensor is put together from the pieces that the files hold, the own file first; of each file no more is read than the
digest ranges, or cipher blocks, in which wanted bytes or its own description lie. No byte is used that was not checked. Where
a file is damaged and others hold the same rows, those are taken, with a warning.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from types import TracebackType
from typing import Self

import numpy as np

from ckptmgr.boxes import Region, byte_runs, common, lengths_of, whole_region, without
from ckptmgr.errors import ChecksumMismatch, CorruptCheckpoint
from ckptmgr.formats.index import TensorEntry, check_content
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.formats.zstd_source import FramesSource
from ckptmgr.frame_reader import read_frames
from ckptmgr.loader import OpenCheckpoint, ReadOptions, bytes_of, confirm_index, open_source
from ckptmgr.lower_errors import translated_errors
from ckptmgr.manifest import Manifest
from ckptmgr.scatter import Placement, read_scattered
from ckptmgr.store import Store
from ckptmgr.stored_pieces import KnownFile, StoredPiece, known_file, placed

_LOG = logging.getLogger(__name__)
_OPEN_FILES = 64

Wanted = Mapping[str, Region | None]
"""Tensor to the part of it that is wanted; None for all of it."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Bytes of a file that go into an array."""

    stored: StoredPiece
    wanted: Region
    name: str
    target: Region


class ShardedCheckpoint:
    """The files of many ranks, for reading. Use as a context manager.

    Args:
        store: The directory.
        manifest: Of all files.
        options: Keys, and what to accept.

    Attributes:
        manifest: As given.
        path: Of the checkpoint.
        used: The ranks whose files tensors were read from.
    """

    def __init__(self, store: Store, manifest: Manifest, *, options: ReadOptions) -> None:
        self._store = store
        self._options = options
        self.manifest = manifest
        self.path = store.directory / manifest.name
        self._known: dict[int, KnownFile] = {}
        self._open: OrderedDict[int, tuple[OpenCheckpoint, contextlib.ExitStack]] = OrderedDict()
        self._confirmed: set[int] = set()
        self._damaged: dict[int, Exception] = {}
        self.used: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._open:
            self._open.popitem()[1][1].close()

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return len(self.manifest.shards)

    @property
    def is_compared(self) -> bool:
        """Whether the ranks have compared what they saved; see `Index`."""
        return all(self.file(rank).is_compared for rank in range(self.world))

    def leave_out(self, rank: int) -> None:
        """Take nothing from the file of a rank."""
        name = self.manifest.shards[rank].name
        self._damaged[rank] = CorruptCheckpoint("is left out", path=self._store.directory / name)

    def metadata(self, rank: int) -> Mapping[str, str]:
        """Return the metadata strings in the file of a rank, checked.

        Raises:
            CorruptCheckpoint: They are damaged.
        """
        known = self.file(rank)
        opened = self._opened(rank)
        if rank not in self._confirmed:
            with translated_errors(opened.path):
                confirm_index(opened)
            self._confirmed.add(rank)
        return known.metadata

    def file(self, rank: int) -> KnownFile:
        """Return what the file of a rank holds, not checked yet; raises as `open_source`."""
        if rank not in self._known:
            self._opened(rank)
        return self._known[rank]

    def names(self, rank: int) -> list[str]:
        """Return the tensors that a rank has, in the order of the files."""
        found = (
            (name, stored)
            for number in range(self.world)
            for name, pieces in self.file(number).pieces.items()
            for stored in pieces
        )
        return list(dict.fromkeys(name for name, one in found if one.piece.is_for(rank)))

    def tensors(self) -> list[tuple[TensorSpec, tuple[int, ...] | None]]:
        """Return all tensors, whole, in the order of the files, with the ranks whose they are where ranks differ."""
        found: dict[tuple[TensorSpec, tuple[int, ...] | None], None] = {}
        for number in range(self.world):
            self.metadata(number)
            for name, pieces in self.file(number).pieces.items():
                for one in pieces:
                    spec = TensorSpec(name=name, dtype=one.spec.dtype, shape=one.whole)
                    found.setdefault((spec, one.piece.ranks))
        return list(found)

    @property
    def piece_bytes(self) -> int:
        """Bytes of all pieces in all files."""
        files = (self.file(number) for number in range(self.world))
        return sum(
            one.spec.size_bytes
            for file in files
            for pieces in file.pieces.values()
            for one in pieces
        )

    def pieces(self, name: str, *, rank: int | None) -> Iterator[StoredPiece]:
        """Yield the pieces of a tensor that a rank has, those in its own file first; None for those of all ranks."""
        own = [] if rank is None or rank >= self.world else [rank]
        for number in (*own, *(n for n in range(self.world) if n not in own)):
            if number in self._damaged:
                continue
            try:
                found = self.file(number).pieces.get(name, ())
            except (CorruptCheckpoint, FileNotFoundError) as error:
                self._note_damage(number, error)
                continue
            yield from (one for one in found if rank is None or one.piece.is_for(rank))

    def read(self, wanted: Wanted, *, rank: int | None) -> dict[str, np.ndarray]:
        """Return tensors, or parts of them, as a rank has them.

        Args:
            wanted: Which, and which part.
            rank: The rank; None where all have the same, see `pieces`.

        Raises:
            CorruptCheckpoint: Damage was found, or a part is in no file.
        """
        while True:
            arrays: dict[str, np.ndarray] = {}
            tasks: dict[int, list[_Task]] = {}
            specs: dict[str, TensorSpec] = {}
            for name, region in wanted.items():
                spec, region, found = self._cover(name, region, rank)
                arrays[name] = np.empty(lengths_of(region), spec.dtype.to_numpy())
                for task in found:
                    tasks.setdefault(task.stored.file_rank, []).append(task)
                specs[name] = spec
            if all(self._is_filled(number, tasks[number], arrays) for number in sorted(tasks)):
                with translated_errors(str(self.path)):
                    for name, array in arrays.items():
                        entry = TensorEntry(spec=specs[name], pieces=())
                        check_content(entry, bytes_of(array), offset=0)
                return arrays

    def _is_filled(self, number: int, tasks: list[_Task], arrays: Mapping[str, np.ndarray]) -> bool:
        """Read what is wanted of a file; return False when it is damaged and others may have the same."""
        try:
            self._fill(number, tasks, arrays)
        except (CorruptCheckpoint, FileNotFoundError) as error:
            self._note_damage(number, error)
            return False
        return True

    def _note_damage(self, number: int, error: Exception) -> None:
        self._damaged[number] = error
        _LOG.warning("%s: %s is left out: %s", self.path, self.manifest.shards[number].name, error)

    def _cover(
        self, name: str, region: Region | None, rank: int | None
    ) -> tuple[TensorSpec, Region, list[_Task]]:
        """Return how a tensor is stored, what is wanted of it, and pieces that make it up."""
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
                both = common(stored.region, box)
                if both is None:
                    left.append(box)
                    continue
                chosen.append((stored, both))
                left += without(box, both)
            missing = left
            if not missing:
                break
        if first is None or region is None or any(prod(lengths_of(one)) for one in missing):
            raise self._missing(name, missing)
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

    def _missing(self, name: str, missing: list[Region]) -> Exception:
        for error in self._damaged.values():
            return error
        where = f" at {[one.start for one in missing[0]]}" if missing else ""
        return CorruptCheckpoint(
            f"a part of the tensor{where} is in none of the files", path=self.path, tensor=name
        )

    def _fill(self, number: int, tasks: list[_Task], arrays: Mapping[str, np.ndarray]) -> None:
        opened = self._opened(number)
        entries = {one.name: one for one in opened.index.entries if isinstance(one, TensorEntry)}
        placements: list[Placement] = []
        for task in tasks:
            entry, target = entries.get(task.stored.spec.name), bytes_of(arrays[task.name])
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
            _read(opened, placements, is_confirmed=number in self._confirmed)
        self._confirmed.add(number)
        self.used.add(number)

    def _opened(self, rank: int) -> OpenCheckpoint:
        if rank in self._open:
            self._open.move_to_end(rank)
            return self._open[rank][0]
        manifest = self.manifest.of_shard(rank)
        path = self._store.directory / manifest.name
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(contextlib.closing(self._store.fs.open(path)))
            opened = open_source(
                raw, path=str(path), options=self._options, manifest=manifest, is_for_loading=True
            )
            self._confirmed.discard(rank)
            self._known[rank] = known_file(opened, rank)
            self._open[rank] = opened, stack.pop_all()
        while len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1][1].close()
        return self._open[rank][0]


def _read(opened: OpenCheckpoint, placements: list[Placement], *, is_confirmed: bool) -> None:
    if isinstance(opened.source, FramesSource):
        read_frames(opened.source, placements)
        return
    if not opened.unit_bytes:
        for one in placements:
            opened.source.read_into(one.offset, one.target)
        return
    glimpses = None if is_confirmed else opened.glimpses
    read_scattered(
        opened.source,
        placements,
        unit_bytes=opened.unit_bytes,
        glimpses=glimpses,
        also_units=() if glimpses is None else glimpses.units(opened.unit_bytes),
    )


def first_difference(files: ShardedCheckpoint, name: str, region: Region | None) -> int | None:
    """Return the first rank whose own tensor is not the same as that of rank 0, or None.

    Raises:
        CkptmgrError: About the files.
    """
    own = files.read({name: region}, rank=0)[name]
    for rank in range(1, files.world):
        try:
            other = files.read({name: region}, rank=rank)[name]
        except CorruptCheckpoint:
            if any(files.pieces(name, rank=rank)):
                raise
            return rank
        if (own.dtype, own.shape) != (other.dtype, other.shape):
            return rank
        if bytes_of(own) != bytes_of(other):
            return rank
    return None
