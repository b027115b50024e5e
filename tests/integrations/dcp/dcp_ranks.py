# SPDX-License-Identifier: Apache-2.0
"""Ranks that save and load through DCP in one process: the calls that `dcp.save` and `dcp.load` make on each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import api

pytest.importorskip("torch")

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckptmgr.integrations.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from tests.support.failingdisk import FailingDisk

State = dict[str, Any]


class Cut(torch.Tensor):
    """A part of a larger tensor, which tells DCP about itself as a DTensor does."""

    local: torch.Tensor
    box: ChunkStorageMetadata
    whole: torch.Size

    @staticmethod
    def of(local: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> Cut:
        """Return `local` as the part of a tensor of this shape that begins at `offsets`."""
        cut: Cut = torch.Tensor._make_subclass(Cut, local)
        cut.local, cut.whole = local, torch.Size(shape)
        cut.box = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=local.size())
        return cut

    def size(self, dim: object = None) -> torch.Size:  # type: ignore[override]
        """Return the shape of the larger one."""
        return self.whole

    def __create_write_items__(self, fqn: str, object: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.local)
        data = TensorWriteData(chunk=self.box, properties=properties, size=self.whole)
        index = MetadataIndex(fqn, self.box.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self.box]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self.local


def cut(whole: torch.Tensor, rank: int, world: int, *, dimension: int = 0) -> Cut:
    """Return the part that a rank holds of a tensor that is cut along a dimension as `torch.chunk` does."""
    chunks = whole.chunk(world, dim=dimension)
    offsets = [0] * whole.dim()
    offsets[dimension] = sum(one.size(dimension) for one in chunks[:rank])
    empty = whole.narrow(dimension, whole.size(dimension), 0)
    return Cut.of((chunks[rank] if rank < len(chunks) else empty).clone(), offsets, whole.size())


def save(
    writers: Sequence[StorageWriter],
    states: Sequence[State],
    planners: Sequence[Any] | None = None,
) -> None:
    """Save as `dcp.save` does on all ranks; rank 0 is the coordinator."""
    chosen = planners or [SavePlanner() for _ in writers]
    plans = []
    for rank, (writer, state, planner) in enumerate(zip(writers, states, chosen, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), is_coordinator=rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = chosen[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for writer, plan, planner in zip(writers, plans, chosen, strict=True)
    ]
    writers[0].finish(metadata, results)


def load(readers: Sequence[StorageReader], states: Sequence[State]) -> None:
    """Load as `dcp.load` does on all ranks."""
    planners = [LoadPlanner() for _ in readers]
    plans = []
    for rank, (reader, state, planner) in enumerate(zip(readers, states, planners, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0, rank=rank, use_collectives=True)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for reader, plan, planner in zip(readers, plans, planners, strict=True):
        reader.read_data(planner.finish_plan(plan), planner).wait()


class CountingDisk(FailingDisk):
    """The real disk, counting its reads.

    Attributes:
        read_bytes: Name to bytes read.
    """

    def __init__(self, disk: api.FileSystem | None = None) -> None:
        super().__init__(disk or api.OsFileSystem())
        self.read_bytes: Counter[str] = Counter()

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        """Open a file for reading."""
        return _Counted(super().open(path, is_uncached=is_uncached), path.name, self.read_bytes)


class _Counted:
    def __init__(self, file: api.InputFile, name: str, read_bytes: Counter[str]) -> None:
        self._file, self._name, self._read_bytes = file, name, read_bytes

    @property
    def size(self) -> int:
        return self._file.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._read_bytes[self._name] += buffer.nbytes
        self._file.read_into(offset, buffer)

    def close(self) -> None:
        self._file.close()
