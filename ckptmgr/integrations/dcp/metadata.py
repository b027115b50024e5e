# SPDX-License-Identifier: Apache-2.0
"""Conversion between the plans and metadata of PyTorch DCP and our index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ckptmgr.core.errors import SaveFailed, UnsupportedState
from ckptmgr.files.load import shard_pieces as pieces
from ckptmgr.formats.tensor import Tensor
from ckptmgr.integrations.dcp.index import (
    CutTensor,
    DcpIndex,
    ObjectPath,
    RankPiece,
    dcp_piece_name,
)
from ckptmgr.state.torch_values import decode_torch_dtype, dtype_name


def dcp_index_of(plans: Sequence[SavePlan]) -> DcpIndex:
    """Return the index of the checkpoint that all ranks together are about to save.

    Raises:
        SaveFailed: They would save only a part of a tensor.
        UnsupportedState: The data of a planner are not paths.
    """
    wholes: dict[str, TensorWriteData] = {}
    boxes: dict[str, list[RankPiece]] = {}
    objects: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                objects[item.index.fqn] = rank
                continue
            data = tensor_data(item)
            wholes.setdefault(item.index.fqn, data)
            offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
            piece = RankPiece(rank=rank, offsets=offsets, sizes=sizes)
            boxes.setdefault(item.index.fqn, []).append(piece)
    tensors = {
        fqn: CutTensor(
            dtype=dtype_name(one.properties.dtype),
            shape=tuple(one.size),
            pieces=tuple(boxes[fqn]),
        )
        for fqn, one in wholes.items()
    }
    index = DcpIndex(world=len(plans), tensors=tensors, objects=objects, paths=_paths(plans))
    problem = index.problem()
    if problem is not None:
        raise SaveFailed(
            problem,
            hint="save with all ranks that hold pieces of it: one process group, no no_dist",
        )
    return index


def tensor_data(item: WriteItem) -> TensorWriteData:
    """Return the tensor data of an item, without which DCP itself cannot handle it."""
    if item.tensor_data is None:
        raise UnsupportedState(f"the planner says nothing about the tensor {item.index.fqn!r}")
    return item.tensor_data


def pieces_of(plan: SavePlan, items: Sequence[Tensor], *, is_compared: bool) -> pieces.Index:
    """Return the index of the file of one rank, as in every file of a set.

    `items` are the stored tensors of the plan, and further ones that belong to no item of it.
    `is_compared` as in `ComparedPlan`.
    """
    found = {item.spec.name: pieces.Piece(tensor=item.spec.name) for item in items}
    for planned, stored in zip(plan.items, items, strict=False):
        if planned.type == WriteItemType.BYTE_IO:
            continue
        data = tensor_data(planned)
        # Elements that no format knows are stored as bytes, which adds a dimension.
        more = stored.spec.shape[len(data.chunk.sizes) :]
        found[stored.spec.name] = pieces.Piece(
            tensor=dcp_piece_name(planned.index.fqn, None),
            shape=(*data.size, *more),
            start=(*data.chunk.offsets, *(0 for _ in more)),
        )
    return pieces.Index(pieces=found, is_compared=is_compared)


def metadata_from(index: DcpIndex) -> Metadata:
    """Return the metadata for load planners; `storage_data` has the piece of each `MetadataIndex`.

    Raises:
        TreeError: torch has no such element type.
    """
    found: dict[str, STORAGE_TYPES] = {}
    where: dict[MetadataIndex, RankPiece] = {}
    for fqn, tensor in index.tensors.items():
        found[fqn] = TensorStorageMetadata(
            properties=TensorProperties(dtype=decode_torch_dtype(tensor.dtype)),
            size=torch.Size(tensor.shape),
            chunks=[
                ChunkStorageMetadata(
                    offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes)
                )
                for piece in tensor.pieces
            ],
        )
        where.update((MetadataIndex(fqn, piece.offsets), piece) for piece in tensor.pieces)
    for fqn, rank in index.objects.items():
        found[fqn] = BytesStorageMetadata()
        where[MetadataIndex(fqn)] = RankPiece(rank=rank)
    paths = None if index.paths is None else dict(index.paths)
    return Metadata(state_dict_metadata=found, planner_data=paths, storage_data=where)


def _paths(plans: Sequence[SavePlan]) -> Mapping[str, ObjectPath] | None:
    """Return the paths of values in the nested state, from the planners; None without any."""
    found: dict[str, ObjectPath] = {}
    for plan in plans:
        if plan.planner_data is None:
            continue
        if not isinstance(plan.planner_data, Mapping) or not all(
            isinstance(path, tuple) and all(isinstance(key, (str, int)) for key in path)
            for path in plan.planner_data.values()
        ):
            raise UnsupportedState(
                f"the data of the planner are a {type(plan.planner_data).__name__}, not paths",
                hint="derive the planner from ckptmgr.integrations.dcp.SavePlanner, and leave its planner_data alone",
            )
        for fqn, path in plan.planner_data.items():
            found.setdefault(fqn, path)
    return found or None
