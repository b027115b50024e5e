# SPDX-License-Identifier: Apache-2.0
"""Deduplication of DCP's save plans: each byte is written once, and ranks write about equally much.

Large tensors are cut by rows. DCP itself gives whole tensors to the rank with the smallest load, so
one large table makes one rank write all of it.

Plain tensors of one name on several ranks count as the same only if their digests are equal:
buffers, statistics and random number generators may differ between ranks. Rows of different ranks
must never become one tensor, so where they differ the whole tensor of the lowest rank is kept.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod

import torch
from torch import distributed
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptmgr.integrations.dcp.items import stored
from ckptmgr.integrations.dcp.metadata import tensor_data
from ckptmgr.parallel.balance import MAX_CHUNK_BYTES, Replicated, balance_by_bytes
from ckptmgr.parallel.dedup_tensors import digest_of_tensor

_LOG = logging.getLogger(__name__)
_SHOWN_NAMES = 8
# Smaller pieces cost more in reading than they save in writing.
LEAST_CHUNK_BYTES = 1 << 20
# This many chunks per rank bring the largest load within 2 % of the mean.
_CHUNKS_PER_RANK = 50


def balanced(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks with every item in one of them, or its rows in several.

    Of values that are no tensors the one of the lowest rank is kept.
    """
    holders: dict[MetadataIndex, list[int]] = {}
    items: dict[MetadataIndex, WriteItem] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            items.setdefault(item.index, item)
    shared = {
        index: item
        for index, item in items.items()
        if len(holders[index]) > 1 and _size_bytes([item])
    }
    kept: list[list[WriteItem]] = [[] for _ in plans]
    for index, item in items.items():
        if index not in shared:
            kept[holders[index][0]].append(item)
    for rank, item in _dealt_out(shared, holders, own_bytes=list(map(_size_bytes, kept))):
        kept[rank].append(item)
    return [replace(plan, items=one) for plan, one in zip(plans, kept, strict=True)]


def rows_of(whole: torch.Tensor, item: WriteItem, part: WriteItem) -> torch.Tensor:
    """Return the rows of the tensor of an item that a part of it covers."""
    chunk = tensor_data(part).chunk
    start = chunk.offsets[0] - tensor_data(item).chunk.offsets[0]
    return whole.narrow(0, start, chunk.sizes[0])


def is_part(part: WriteItem, item: WriteItem) -> bool:
    """Return whether an item is some rows of another one of the same tensor, and not all of it."""
    if item.type == WriteItemType.BYTE_IO:
        return False
    outer, inner = tensor_data(item).chunk, tensor_data(part).chunk
    return (
        outer.sizes != inner.sizes
        and outer.offsets[1:] == inner.offsets[1:]
        and outer.sizes[1:] == inner.sizes[1:]
        and outer.offsets[0] <= inner.offsets[0]
        and inner.offsets[0] + inner.sizes[0] <= outer.offsets[0] + outer.sizes[0]
    )


def _dealt_out(
    shared: Mapping[MetadataIndex, WriteItem],
    holders: Mapping[MetadataIndex, Sequence[int]],
    *,
    own_bytes: Sequence[int],
) -> Iterator[tuple[int, WriteItem]]:
    """Yield the rank that writes, and the rows, of the items that several ranks have."""
    if not shared:
        return
    names = {f"{number:09}": index for number, index in enumerate(shared)}
    tensors = [
        Replicated(
            name=name,
            shape=tuple(tensor_data(shared[index]).chunk.sizes),
            item_bytes=tensor_data(shared[index]).properties.dtype.itemsize,
            groups=(tuple(holders[index]),),
        )
        for name, index in names.items()
    ]
    for rank, size_bytes in enumerate(own_bytes):
        own = Replicated(name=f"own {rank}", shape=(1, size_bytes), item_bytes=1, groups=((rank,),))
        tensors.append(own)
    total = sum(one.size_bytes for one in tensors)
    even = total // (_CHUNKS_PER_RANK * len(own_bytes))
    chunk_bytes = max(LEAST_CHUNK_BYTES, min(MAX_CHUNK_BYTES, even))
    chunks = balance_by_bytes(tensors, chunk_bytes=chunk_bytes).chunks
    for (name, saver), run in groupby(chunks, lambda one: (one.name, int(one.savers[0, 0]))):
        index = names.get(name)
        if index is not None:
            rows = [*run]
            yield saver, _rows(shared[index], rows[0].start_row, rows[-1].stop_row)


def _rows(item: WriteItem, start: int, stop: int) -> WriteItem:
    """Return an item for some rows of another one."""
    data = tensor_data(item)
    if not data.chunk.sizes or stop - start == data.chunk.sizes[0]:
        return item
    offsets = torch.Size((data.chunk.offsets[0] + start, *data.chunk.offsets[1:]))
    sizes = torch.Size((stop - start, *data.chunk.sizes[1:]))
    return WriteItem(
        index=MetadataIndex(item.index.fqn, offsets),
        type=WriteItemType.SHARD,
        tensor_data=replace(data, chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes)),
    )


def _size_bytes(items: Sequence[WriteItem]) -> int:
    return sum(
        prod(tensor_data(item).chunk.sizes) * tensor_data(item).properties.dtype.itemsize
        for item in items
        if item.type != WriteItemType.BYTE_IO
    )


@dataclass(frozen=True)
class ComparedPlan(SavePlan):
    """The plan of a rank with the means to compare its plain tensors with those of other ranks.

    Attributes:
        digests: Name of a plain tensor to the digest of its content; None before they are computed.
        is_compared: Whether tensors of several ranks are known to be the same on all of them.
    """

    digests: Mapping[str, str] | None = None
    is_compared: bool = False


def with_digests(plan: SavePlan, planner: SavePlanner) -> ComparedPlan:
    """Return a plan with the digests of its plain tensors; raises as `stored`."""
    digests = {
        item.index.fqn: digest_of_tensor(stored(item, planner))
        for item in plan.items
        if item.type == WriteItemType.TENSOR
    }
    return replace(without_digests(plan), digests=digests)


def without_digests(plan: SavePlan) -> ComparedPlan:
    """Return a plan whose digests are not computed yet."""
    return ComparedPlan(plan.items, plan.storage_data, plan.planner_data, plan.usable)


def has_peers() -> bool:
    """Return whether torch knows of other ranks."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def without_conflicts(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks without items that differ from those of a lower rank."""
    values: dict[str, dict[int, Hashable]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.type == WriteItemType.SHARD:
                continue
            values.setdefault(item.index.fqn, {})[rank] = _value(plan, item, rank)
    owners = {fqn: min(one) for fqn, one in values.items() if len(set(one.values())) > 1}
    if owners:
        _LOG.warning(
            "the ranks have different tensors under %s: of each, that of the lowest rank is saved",
            _shown(sorted(owners)),
        )
    copies = Counter(
        item.index for plan in plans for item in plan.items if item.type == WriteItemType.SHARD
    )
    is_compared = not owners and all(count == 1 for count in copies.values())
    return [
        _kept(plan, [item for item in plan.items if _is_kept(item, rank, owners)], is_compared)
        for rank, plan in enumerate(plans)
    ]


def is_compared(plans: Sequence[SavePlan]) -> bool:
    """Return whether tensors of several ranks are known to be the same on all of them."""
    return all(isinstance(plan, ComparedPlan) and plan.is_compared for plan in plans)


def _value(plan: SavePlan, item: WriteItem, rank: int) -> Hashable:
    """Return a key that is equal for equal tensors of two ranks; without a digest none is."""
    if item.type == WriteItemType.BYTE_IO:
        return None  # any value: that of the lowest rank is kept
    data = tensor_data(item)
    digests = plan.digests if isinstance(plan, ComparedPlan) else None
    return data.properties.dtype, data.size, (digests or {}).get(item.index.fqn, rank)


def _is_kept(item: WriteItem, rank: int, owners: Mapping[str, int]) -> bool:
    return item.type == WriteItemType.SHARD or owners.get(item.index.fqn, rank) == rank


def _kept(plan: SavePlan, items: list[WriteItem], is_compared: bool) -> SavePlan:
    if isinstance(plan, ComparedPlan):
        return replace(plan, items=items, digests={}, is_compared=is_compared)
    return replace(plan, items=items)


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(map(repr, names[:_SHOWN_NAMES])) + more
