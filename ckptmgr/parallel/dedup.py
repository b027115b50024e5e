# SPDX-License-Identifier: Apache-2.0
"""Deduplicated saves of many ranks: tensors that several ranks hold are written once.

1. Every rank sends the names and regions of its tensors.
2. The ranks compare digests of the tensors that several of them hold. Only equal digests make equal
   tensors, whatever a layout declares: tensors that differ (random number generators, positions in
   the data) are kept for every rank with another value.
3. `balance_by_bytes` decides which rank writes which rows; every rank computes the same plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.regions import Region, region_at
from ckptmgr.files.load.shard_pieces import PIECES, Index, Piece, piece_name
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.strict_json import Json
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec
from ckptmgr.parallel.balance import Replicated, Share, balance_by_bytes
from ckptmgr.parallel.coordinator import Coordinator
from ckptmgr.parallel.dedup_tensors import (
    SharedTensor,
    TensorNote,
    digest_of_tensor,
    digests_by_part,
    equal_parts,
    holders_by_note,
    pack_notes,
    shared_tensors,
    tensor_notes_of,
    unpack_notes,
)
from ckptmgr.parallel.redundancy import remove_param_redundancy
from ckptmgr.parallel.rounds import CollectiveRounds
from ckptmgr.state.items import TensorPart

Balance = Literal["bytes", "round_robin"]


class Sharing:
    """Division of the writing among the ranks.

    `keep_redundancy` copies of each tensor stay. The balance `bytes` spreads bytes evenly and cuts
    large tensors; `round_robin` deals out whole ones by name, as MindSpore.

    Raises:
        ValueError: No copy is to be kept, or there is no such balance.
    """

    def __init__(self, *, keep_redundancy: int = 1, balance: Balance = "bytes") -> None:
        if type(keep_redundancy) is not int or keep_redundancy < 1:
            raise ValueError(
                f"keep_redundancy is {keep_redundancy!r}; at least one copy must be kept"
            )
        if balance not in ("bytes", "round_robin"):
            raise ValueError(f"balance must be 'bytes' or 'round_robin', but is {balance!r}")
        self._keep = keep_redundancy
        self._balance = balance

    def divided(
        self,
        rounds: CollectiveRounds,
        coordinator: Coordinator,
        items: Sequence[Item],
        metadata: Mapping[str, str],
        *,
        stop: float,
    ) -> tuple[list[Item], dict[str, str]]:
        """Return the items that this rank writes, and the metadata of its file with their index.

        An index in `metadata` gives the regions of the items. `stop` is the deadline of the other
        ranks.

        Raises:
            RankFailed: A rank could not describe its tensors.
            RanksMissing: Some ranks did not come in time.
            LayoutError: The parts of a tensor do not make up the whole, or the ranks contradict
                each other.
        """
        tensors: list[Tensor] = []

        def described() -> Json:
            tensors.extend(_tensors(items))
            return pack_notes(tensor_notes_of(tensors, metadata))

        answers = rounds.together("tensors", described, stop=stop)
        holders_of = holders_by_note(unpack_notes(answers))
        own = {tensor.spec.name: tensor for tensor in tensors}
        candidates = [(key, holders) for key, holders in holders_of.items() if len(holders) > 1]

        def digests() -> Json:
            held = [own[key.name] for key, holders in candidates if coordinator.rank in holders]
            return "".join(map(digest_of_tensor, held))

        digests_by_rank: list[Json] = []
        if candidates:
            digests_by_rank = rounds.together("digests", digests, stop=stop)
        same = equal_parts(holders_of, digests_by_part(candidates, digests_by_rank))
        parts = sorted(
            shared_tensors(same, world=coordinator.world),
            key=lambda one: (one.note.name, one.note.start, one.holders),
        )
        total = len({(part.note.name, part.ranks) for part in parts})
        shares = self._shares(parts, coordinator.rank)
        wrote, pieces = _pieces(shares, own)
        index = Index(pieces=pieces, is_compared=True, total=total)
        return wrote, {**metadata, PIECES: index.to_text()}

    def _shares(self, parts: Sequence[SharedTensor], rank: int) -> list[tuple[SharedTensor, Share]]:
        """Return the parts that a rank writes, with their rows."""
        fixed = [part for part in parts if len(part.holders) <= self._keep]
        open_parts = [part for part in parts if len(part.holders) > self._keep]
        own = [(part, _all_rows(part.note)) for part in fixed if rank in part.holders]
        return own + self._dealt(open_parts, fixed, rank)

    def _dealt(
        self, parts: Sequence[SharedTensor], fixed: Sequence[SharedTensor], rank: int
    ) -> list[tuple[SharedTensor, Share]]:
        """Return the shares of a rank in the parts with more holders than copies to keep."""
        by_key = {f"{number:012}": part for number, part in enumerate(parts)}
        if self._balance == "round_robin":
            dealt = remove_param_redundancy(
                {key: (part.holders,) for key, part in by_key.items()}, self._keep
            )
            chosen = sorted(dealt.get(rank, ()))
            return [(by_key[key], _all_rows(by_key[key].note)) for key in chosen]
        replicated = [_replicated(key, part) for key, part in by_key.items()]
        plan = balance_by_bytes([*replicated, *_loads(fixed)], keep_redundancy=self._keep)
        return [(by_key[share.name], share) for share in plan.shares(rank) if share.name in by_key]


def _tensors(items: Sequence[Item]) -> Iterator[Tensor]:
    for item in items:
        if not isinstance(item, Tensor):
            raise UnsupportedCheckpoint(
                f"{item.name!r} is no tensor, so ranks cannot share the writing of it",
                hint="save without remove_redundancy",
            )
        yield item


def _replicated(key: str, part: SharedTensor) -> Replicated:
    note = part.note
    return Replicated(
        name=key,
        shape=note.lengths,
        item_bytes=BY_NAME[note.dtype].item_bytes,
        groups=(part.holders,),
    )


def _loads(fixed: Sequence[SharedTensor]) -> Iterator[Replicated]:
    """Yield one entry per rank for the bytes that it writes in any case."""
    loads: Counter[int] = Counter()
    for part in fixed:
        for rank in part.holders:
            loads[rank] += _all_rows(part.note).size_bytes
    for rank, size_bytes in sorted(loads.items()):
        yield Replicated(name=f"rank {rank}", shape=(size_bytes,), item_bytes=1, groups=((rank,),))


def _all_rows(note: TensorNote) -> Share:
    rows = note.lengths[0] if note.lengths else 1
    size_bytes = prod(note.lengths) * BY_NAME[note.dtype].item_bytes
    return Share(note.name, 0, rows, size_bytes)


def _pieces(
    shares: Sequence[tuple[SharedTensor, Share]], own: Mapping[str, Tensor]
) -> tuple[list[Item], dict[str, Piece]]:
    """Return the tensors of the file, in the order of the state, and their index."""
    order = {name: number for number, name in enumerate(own)}
    tensors: dict[str, Tensor] = {}
    pieces: dict[str, Piece] = {}
    # A name that is cut must not be taken by the piece of another tensor.
    taken = dict.fromkeys(own, True)
    for part, share in sorted(shares, key=lambda one: (order[one[0].note.name], one[1].start_row)):
        name, tensor, region = part.note.name, own[part.note.name], _region(part.note, share)
        if region != part.note.region:
            name = piece_name(name, region, taken=taken)
            taken[name] = True
            tensor = _rows(name, tensor, share)
        is_part = region != region_at((0,) * len(region), part.note.shape)
        tensors[name] = tensor
        pieces[name] = Piece(
            tensor=part.note.name,
            shape=part.note.shape if is_part else None,
            start=tuple(one.start for one in region) if is_part else None,
            ranks=part.ranks,
        )
    return [*tensors.values()], pieces


def _region(note: TensorNote, share: Share) -> Region:
    if not note.lengths:
        return ()
    start = (note.start[0] + share.start_row, *note.start[1:])
    return region_at(start, (share.stop_row - share.start_row, *note.lengths[1:]))


def _rows(name: str, tensor: Tensor, share: Share) -> Tensor:
    """Return some rows of a tensor."""
    spec = tensor.spec
    shape = (share.stop_row - share.start_row, *spec.shape[1:])
    row_bytes = prod(spec.shape[1:]) * spec.dtype.item_bytes
    start, stop = share.start_row * row_bytes, share.stop_row * row_bytes
    return Tensor(
        spec=TensorSpec(name=name, dtype=spec.dtype, shape=shape),
        content=TensorPart(whole=tensor, start=start, stop=stop),
    )
