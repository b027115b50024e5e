# SPDX-License-Identifier: Apache-2.0
"""Execution of DCP's load plans: reads items from the file of one rank into the planner's tensors.

Contents go straight into tensors on the CPU that are contiguous and of the stored type; all others,
and memory that two tensors share, are filled through buffers of at most 256 MiB together.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from ckptmgr.core.regions import region_at, whole_region
from ckptmgr.integrations.dcp.files import PieceRead, ShardFile, ShardSet
from ckptmgr.integrations.dcp.index import RankPiece, dcp_piece_name
from ckptmgr.state.destinations import disjoint, has_memory, memory_of
from ckptmgr.state.overlaps import conflicts, overlapping_targets
from ckptmgr.state.paths import StateMismatch

_BUFFERED_BYTES = 256 << 20
_SHOWN_DIFFERENCES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """An item to read."""

    item: ReadItem
    target: torch.Tensor  # of the planner
    dtype: torch.dtype  # the stored element type
    memory: np.ndarray | None  # that of the target, where it can be filled without conversion

    @property
    def buffered_bytes(self) -> int:
        """Memory that it takes besides its target."""
        return prod(self.item.lengths) * self.dtype.itemsize if self.memory is None else 0


class Loading:
    """Reads from the file of one rank; `metadata` is that of `metadata_from`."""

    def __init__(self, file: ShardFile, metadata: Metadata, planner: LoadPlanner) -> None:
        self._file = file
        self._pieces: Mapping[MetadataIndex, RankPiece] = metadata.storage_data
        self._kinds = metadata.state_dict_metadata
        self._planner = planner

    def run(self, items: Sequence[ReadItem]) -> None:
        """Read the items; raises as `StorageReader.read_data`."""
        self._read_objects([item for item in items if item.type == LoadItemType.BYTE_IO])
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        tensors.sort(key=lambda item: (self._file.offset(_name(item)), item.storage_offsets))
        for jobs in _batches(self._jobs(tensors)):
            self._read(jobs)

    def values(self, items: Sequence[ReadItem]) -> list[torch.Tensor]:
        """Return the new values of targets, in the types of the targets; raises as `run`."""
        jobs = [replace(self._job(item), memory=None) for item in items]
        buffers = self._filled(jobs)
        return [buffers[id(job)].to(job.target.dtype) for job in jobs]

    def _read_objects(self, items: Sequence[ReadItem]) -> None:
        reads = []
        for item in items:
            size_bytes = self._file.size_bytes(_name(item))
            whole = whole_region([size_bytes])
            target = memoryview(bytearray(size_bytes))
            reads.append(
                PieceRead(name=_name(item), stored=whole, wanted=whole, item_bytes=1, target=target)
            )
        self._file.read(reads)
        for item, want in zip(items, reads, strict=True):
            self._planner.load_bytes(item, io.BytesIO(want.target))

    def _jobs(self, items: Sequence[ReadItem]) -> list[_Job]:
        jobs = [self._job(item) for item in items]
        direct = disjoint({str(number): job.memory for number, job in enumerate(jobs)})
        return [replace(job, memory=direct.get(str(number))) for number, job in enumerate(jobs)]

    def _job(self, item: ReadItem) -> _Job:
        target = self._planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise StateMismatch(
                f"{item.dest_index.fqn!r} takes {list(target.size())} where {list(item.lengths)} are stored"
            )
        kind = self._kinds[item.storage_index.fqn]
        assert isinstance(kind, TensorStorageMetadata)  # noqa: S101 - the planner went by it
        dtype = kind.properties.dtype
        memory = memory_of(target) if target.dtype == dtype else None
        return _Job(item=item, target=target, dtype=dtype, memory=memory)

    def _read(self, jobs: Sequence[_Job]) -> None:
        buffers = self._filled(jobs)
        for job in jobs:
            if id(job) in buffers:
                job.target.copy_(buffers[id(job)])
            self._planner.commit_tensor(job.item, job.target)

    def _filled(self, jobs: Sequence[_Job]) -> dict[int, torch.Tensor]:
        """Read some jobs, and return the buffers of those without memory, by `id` of the job."""
        buffers = {
            id(job): torch.empty(job.item.lengths, dtype=job.dtype)
            for job in jobs
            if job.memory is None
        }
        reads = []
        for job in jobs:
            memory = memory_of(buffers[id(job)]) if job.memory is None else job.memory
            reads.append(self._piece_read(job, memory))
        self._file.read(reads)
        return buffers

    def _piece_read(self, job: _Job, memory: np.ndarray | None) -> PieceRead:
        assert memory is not None  # noqa: S101 - a new tensor on the CPU has memory
        item = job.item
        return PieceRead(
            name=_name(item),
            stored=whole_region(self._pieces[item.storage_index].sizes),
            wanted=region_at(item.storage_offsets, item.lengths),
            item_bytes=job.dtype.itemsize,
            target=memory.reshape(-1).view(np.uint8).data,
        )


def check_shared(
    shards: ShardSet,
    items: Mapping[int, Sequence[ReadItem]],
    metadata: Metadata,
    planner: LoadPlanner,
) -> None:
    """Check that tensors which share memory get the same values there; changes nothing.

    `items` are by the rank whose file has them; `metadata` is that of `metadata_from`.

    Raises:
        StateMismatch: Two tensors get different values; or a target has another size than its item.
        CorruptCheckpoint, OSError: As `StorageReader.read_data`.
    """
    # Another planner may allocate memory for each target.
    if not isinstance(planner, DefaultLoadPlanner):
        return
    wanted = [
        (rank, item)
        for rank, own in items.items()
        for item in own
        if item.type != LoadItemType.BYTE_IO
    ]
    found = {n: planner.resolve_tensor(item).detach() for n, (_, item) in enumerate(wanted)}
    targets = {number: target for number, target in found.items() if has_memory(target)}
    numbers = [
        n for group in overlapping_targets(targets) if _is_of_several(group, wanted) for n in group
    ]
    values: dict[int, torch.Tensor] = {}
    for rank in sorted({wanted[number][0] for number in numbers}):
        own_numbers = [number for number in numbers if wanted[number][0] == rank]
        with shards.file(rank) as file:
            read = Loading(file, metadata, planner).values([wanted[n][1] for n in own_numbers])
        values |= zip(own_numbers, read, strict=True)

    def name(number: int) -> str:
        return repr(wanted[number][1].dest_index.fqn)

    problems = [
        f"{name(one.later)} {one.naming(name)}"
        for one in conflicts({n: targets[n] for n in sorted(values)}, values)
    ]
    if problems:
        raise StateMismatch(
            "the checkpoint does not fit this state; nothing was changed:\n  "
            + "\n  ".join(sorted(set(problems))[:_SHOWN_DIFFERENCES]),
            hint="give tensors that do not share memory, or tie those that were tied when they were saved",
        )


def _is_of_several(group: Sequence[int], wanted: Sequence[tuple[int, ReadItem]]) -> bool:
    """Return whether targets belong to several tensors; the parts of one tensor are disjoint."""
    return len(group) == 1 or len({wanted[number][1].dest_index.fqn for number in group}) > 1


def _batches(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    batch: list[_Job] = []
    buffered = 0
    for job in jobs:
        if batch and buffered + job.buffered_bytes > _BUFFERED_BYTES:
            yield batch
            batch, buffered = [], 0
        batch.append(job)
        buffered += job.buffered_bytes
    if batch:
        yield batch


def _name(item: ReadItem) -> str:
    return dcp_piece_name(item.storage_index.fqn, item.storage_index.offset)
