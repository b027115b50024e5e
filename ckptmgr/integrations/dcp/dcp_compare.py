# SPDX-License-Identifier: Apache-2.0
"""Whether plain tensors that several ranks have under one name are the same: only equal digests make equal tensors.

Buffers, statistics and random number generators may differ between ranks. Rows of different ranks must never become one
tensor, so of what differs the lowest rank's is kept, as a whole.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import distributed
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckptmgr.integrations.dcp.items import stored
from ckptmgr.integrations.dcp.metadata import tensor_data
from ckptmgr.parallel.dedup_tensors import digest_of_tensor

_LOG = logging.getLogger(__name__)
_SHOWN_NAMES = 8


@dataclass(frozen=True)
class ComparedPlan(SavePlan):
    """The plan of a rank that can tell what it has from what others have under the same name.

    Attributes:
        digests: Name of a plain tensor to the digest of its content; None where they are not taken yet.
        is_compared: Whether what several ranks have is known to be the same on all of them.
    """

    digests: Mapping[str, str] | None = None
    is_compared: bool = False


def told(plan: SavePlan, planner: SavePlanner) -> ComparedPlan:
    """Return a plan with the digests of its plain tensors.

    Raises:
        UnsupportedState: A tensor cannot be stored.
    """
    digests = {
        item.index.fqn: digest_of_tensor(stored(item, planner))
        for item in plan.items
        if item.type == WriteItemType.TENSOR
    }
    return replace(untold(plan), digests=digests)


def untold(plan: SavePlan) -> ComparedPlan:
    """Return a plan without digests yet."""
    return ComparedPlan(plan.items, plan.storage_data, plan.planner_data, plan.usable)


def has_peers() -> bool:
    """Return whether torch knows of other ranks."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


def one_for_all(plans: Sequence[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks without what they have under the name of something else on a lower rank."""
    values: dict[str, dict[int, Hashable]] = {}
    for rank, plan in enumerate(plans):
        for item in _plain(plan):
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
    """Return whether what several ranks have is known to be the same on all of them."""
    return all(isinstance(plan, ComparedPlan) and plan.is_compared for plan in plans)


def _plain(plan: SavePlan) -> Iterator[WriteItem]:
    return (item for item in plan.items if item.type != WriteItemType.SHARD)


def _value(plan: SavePlan, item: WriteItem, rank: int) -> Hashable:
    """Return what is equal where two ranks have the same; without a digest nothing is."""
    if item.type == WriteItemType.BYTE_IO:
        return None  # whatever it is: that of the lowest rank is kept
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
