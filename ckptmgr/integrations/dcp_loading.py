# SPDX-License-Identifier: Apache-2.0
"""What a load plan wants from the file of one rank, read into the tensors of its planner.

Contents go straight into tensors on the CPU that are contiguous and of the stored type; all others, and memory that two
tensors share, are filled through buffers of at most 256 MiB together.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from ckptmgr.boxes import region_at, whole_region
from ckptmgr.destinations import apart, memory_of
from ckptmgr.integrations.dcp_files import ShardFile, Want
from ckptmgr.integrations.dcp_index import Piece, piece_name
from ckptmgr.tree_nodes import StateMismatch

_BUFFERED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """An item to read.

    Attributes:
        item: The item.
        target: Where the planner wants it.
        dtype: The stored element type.
        memory: The memory of the target, when it can be filled as the file has it; else None.
    """

    item: ReadItem
    target: torch.Tensor
    dtype: torch.dtype
    memory: np.ndarray | None

    @property
    def buffered_bytes(self) -> int:
        """How much memory it takes besides its target."""
        return prod(self.item.lengths) * self.dtype.itemsize if self.memory is None else 0


class Loading:
    """Reads from the file of one rank.

    Args:
        file: The file.
        metadata: Of the checkpoint, from `metadata_from`.
        planner: Says where things go.
    """

    def __init__(self, file: ShardFile, metadata: Metadata, planner: LoadPlanner) -> None:
        self._file = file
        self._pieces: Mapping[MetadataIndex, Piece] = metadata.storage_data
        self._kinds = metadata.state_dict_metadata
        self._planner = planner

    def run(self, items: Sequence[ReadItem]) -> None:
        """Read the items; raises as `StorageReader.read_data`."""
        self._read_objects([item for item in items if item.type == LoadItemType.BYTE_IO])
        tensors = [item for item in items if item.type != LoadItemType.BYTE_IO]
        tensors.sort(key=lambda item: (self._file.offset(_name(item)), item.storage_offsets))
        for jobs in _batches(self._jobs(tensors)):
            self._read(jobs)

    def _read_objects(self, items: Sequence[ReadItem]) -> None:
        wants = []
        for item in items:
            size_bytes = self._file.size_bytes(_name(item))
            whole = whole_region([size_bytes])
            target = memoryview(bytearray(size_bytes))
            wants.append(
                Want(name=_name(item), stored=whole, wanted=whole, item_bytes=1, target=target)
            )
        self._file.read(wants)
        for item, want in zip(items, wants, strict=True):
            self._planner.load_bytes(item, io.BytesIO(want.target))

    def _jobs(self, items: Sequence[ReadItem]) -> list[_Job]:
        jobs = [self._job(item) for item in items]
        direct = apart({str(number): job.memory for number, job in enumerate(jobs)})
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
        buffers = {
            id(job): torch.empty(job.item.lengths, dtype=job.dtype)
            for job in jobs
            if job.memory is None
        }
        wants = []
        for job in jobs:
            memory = memory_of(buffers[id(job)]) if job.memory is None else job.memory
            wants.append(self._want(job, memory))
        self._file.read(wants)
        for job in jobs:
            if id(job) in buffers:
                job.target.copy_(buffers[id(job)])
            self._planner.commit_tensor(job.item, job.target)

    def _want(self, job: _Job, memory: np.ndarray | None) -> Want:
        assert memory is not None  # noqa: S101 - a new tensor on the CPU has memory
        item = job.item
        return Want(
            name=_name(item),
            stored=whole_region(self._pieces[item.storage_index].sizes),
            wanted=region_at(item.storage_offsets, item.lengths),
            item_bytes=job.dtype.itemsize,
            target=memory.reshape(-1).view(np.uint8).data,
        )


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
    return piece_name(item.storage_index.fqn, item.storage_index.offset)
