# SPDX-License-Identifier: Apache-2.0
"""Saving with many ranks without redundancy: what is the same on several ranks is written once.

1. Every rank says which tensors it has, and which part each is of which whole.
2. Of what several ranks have, they compare the digests. Only equal digests make equal tensors, whatever a layout declares:
   what differs (random number generators, positions in the data) is kept for every rank that has another value.
3. `balance_by_bytes` decides who writes which rows; every rank finds the same plan by itself.
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
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec
from ckptmgr.parallel.balance import Replicated, Share, balance_by_bytes
from ckptmgr.parallel.coordinator import Coordinator, Json
from ckptmgr.parallel.dedup_tensors import (
    Note,
    Shared,
    agreed,
    alike,
    digest_of_tensor,
    digests_by_part,
    held,
    notes_of,
    packed,
    told_by,
)
from ckptmgr.parallel.redundancy import remove_param_redundancy
from ckptmgr.parallel.rounds import Rounds
from ckptmgr.state.items import Part

Balance = Literal["bytes", "round_robin"]


class Sharing:
    """How the ranks share the writing.

    Args:
        keep_redundancy: Copies to keep of what several ranks have.
        balance: `bytes` spreads bytes evenly and cuts large tensors; `round_robin` deals out whole ones by name, as MindSpore.

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
        rounds: Rounds,
        coordinator: Coordinator,
        items: Sequence[Item],
        metadata: Mapping[str, str],
        *,
        stop: float,
    ) -> tuple[list[Item], dict[str, str]]:
        """Return what this rank writes, and the metadata of its file with the index of it.

        Args:
            rounds: Of this save.
            coordinator: The ranks.
            items: What this rank has.
            metadata: Of its file; its index, if any, says what the items are parts of.
            stop: Until when to wait for the others.

        Raises:
            RankFailed: A rank could not say what it has.
            RanksMissing: Some ranks did not come in time.
            LayoutError: The parts of a tensor do not make up the whole, or the ranks contradict each other.
        """
        tensors: list[Tensor] = []

        def tell() -> Json:
            tensors.extend(_tensors(items))
            return packed(notes_of(tensors, metadata))

        answers = rounds.together("tensors", tell, stop=stop)
        holders_of = held(told_by(answers))
        own = {tensor.spec.name: tensor for tensor in tensors}
        doubtful = [(key, holders) for key, holders in holders_of.items() if len(holders) > 1]

        def digests() -> Json:
            mine = [own[key.name] for key, holders in doubtful if coordinator.rank in holders]
            return "".join(map(digest_of_tensor, mine))

        said: list[Json] = []
        if doubtful:
            said = rounds.together("digests", digests, stop=stop)
        same = alike(holders_of, digests_by_part(doubtful, said))
        parts = sorted(
            agreed(same, world=coordinator.world),
            key=lambda one: (one.note.name, one.note.start, one.holders),
        )
        total = len({(part.note.name, part.ranks) for part in parts})
        shares = self._shares(parts, coordinator.rank)
        wrote, pieces = _pieces(shares, own)
        index = Index(pieces=pieces, is_compared=True, total=total)
        return wrote, {**metadata, PIECES: index.to_text()}

    def _shares(self, parts: Sequence[Shared], rank: int) -> list[tuple[Shared, Share]]:
        """Return what a rank writes: which rows of which parts."""
        fixed = [part for part in parts if len(part.holders) <= self._keep]
        open_parts = [part for part in parts if len(part.holders) > self._keep]
        own = [(part, _all_rows(part.note)) for part in fixed if rank in part.holders]
        return own + self._dealt(open_parts, fixed, rank)

    def _dealt(
        self, parts: Sequence[Shared], fixed: Sequence[Shared], rank: int
    ) -> list[tuple[Shared, Share]]:
        """Return what a rank writes of what more ranks have than there are to be copies."""
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


def _replicated(key: str, part: Shared) -> Replicated:
    note = part.note
    return Replicated(
        name=key,
        shape=note.lengths,
        item_bytes=BY_NAME[note.dtype].item_bytes,
        groups=(part.holders,),
    )


def _loads(fixed: Sequence[Shared]) -> Iterator[Replicated]:
    """Yield what each rank writes in any case, in one."""
    loads: Counter[int] = Counter()
    for part in fixed:
        for rank in part.holders:
            loads[rank] += _all_rows(part.note).size_bytes
    for rank, size_bytes in sorted(loads.items()):
        yield Replicated(name=f"rank {rank}", shape=(size_bytes,), item_bytes=1, groups=((rank,),))


def _all_rows(note: Note) -> Share:
    rows = note.lengths[0] if note.lengths else 1
    size_bytes = prod(note.lengths) * BY_NAME[note.dtype].item_bytes
    return Share(note.name, 0, rows, size_bytes)


def _pieces(
    shares: Sequence[tuple[Shared, Share]], own: Mapping[str, Tensor]
) -> tuple[list[Item], dict[str, Piece]]:
    """Return the tensors of the file, in the order of the state, and what they are parts of."""
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


def _region(note: Note, share: Share) -> Region:
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
        content=Part(whole=tensor, start=start, stop=stop),
    )
