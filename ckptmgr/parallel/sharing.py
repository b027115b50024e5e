# SPDX-License-Identifier: Apache-2.0
"""Saving with many ranks without redundancy: what is the same on several ranks is written once.

1. Every rank says which tensors it has, and which part each is of which whole.
2. Of what several ranks have, they compare the digests. Only equal digests make equal tensors, whatever a layout declares:
   what differs (random number generators, positions in the data) is kept for every rank that has another value.
3. `balance_by_bytes` decides who writes which rows; every rank finds the same plan by itself.
"""

from __future__ import annotations

import logging
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from blake3 import blake3

from ckptmgr.boxes import Region, region_at
from ckptmgr.errors import UnsupportedCheckpoint
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec
from ckptmgr.parallel.balance import Replicated, Share, balance_by_bytes
from ckptmgr.parallel.coordinator import Coordinator, Json, RanksOutOfStep, from_json, to_json
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.redundancy import remove_param_redundancy
from ckptmgr.parallel.rounds import Rounds
from ckptmgr.pieces import PIECES, Index, Piece, piece_name, read_index
from ckptmgr.staging_items import Part

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = 16
_SHOWN = 3
_MAX_NOTES_BYTES = 1 << 30

Balance = Literal["bytes", "round_robin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a rank says about a tensor.

    Attributes:
        name: The tensor.
        dtype: Name of its element type.
        lengths: Shape of what the rank has.
        shape: Of the whole.
        start: Where it begins in the whole.
        is_declared: Whether a layout says so; otherwise it is taken for whole.
    """

    name: str
    dtype: str
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    start: tuple[int, ...]
    is_declared: bool

    @property
    def region(self) -> Region:
        """The elements that the rank has, in the whole."""
        return region_at(self.start, self.lengths)

    def to_json(self) -> Json:
        """Return it as it travels."""
        own: list[Json] = [self.name, self.dtype, list(self.lengths)]
        return [*own, list(self.shape), list(self.start)] if self.is_declared else own

    @classmethod
    def from_json(cls, value: Json, *, rank: int) -> Note:
        """Return what another rank has said.

        Raises:
            RanksOutOfStep: It is no note.
        """
        try:
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{value!r} describes no tensor")
            name, dtype, lengths, *declared = value
            own = _numbers(lengths)
            shape, start = map(_numbers, declared) if declared else (own, (0,) * len(own))
            if not isinstance(name, str) or dtype not in BY_NAME or len(shape) != len(start):
                raise ValueError(f"{value!r} describes no tensor")
        except (TypeError, ValueError) as error:
            raise RanksOutOfStep(f"rank {rank} runs another version: {error}") from error
        return cls(
            name=name,
            dtype=str(dtype),
            lengths=own,
            shape=shape,
            start=start,
            is_declared=bool(declared),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A tensor, or a part of one, that some ranks have alike.

    Attributes:
        note: What it is.
        holders: The ranks that have it.
        is_for_all: Whether it is the one tensor of this name; otherwise it is that of its holders only.
    """

    note: Note
    holders: tuple[int, ...]
    is_for_all: bool


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
            return _packed(_notes(tensors, metadata))

        answers = rounds.together("tensors", tell, stop=stop)
        held = _held(_told(answers))
        own = {tensor.spec.name: tensor for tensor in tensors}
        doubtful = [(key, holders) for key, holders in held.items() if len(holders) > 1]

        def digests() -> Json:
            mine = [own[key.name] for key, holders in doubtful if coordinator.rank in holders]
            return "".join(map(_digest, mine))

        said: list[Json] = []
        if doubtful:
            said = rounds.together("digests", digests, stop=stop)
        alike = _alike(held, _digests_by_key(doubtful, said))
        parts = sorted(
            _agreed(alike, world=coordinator.world),
            key=lambda one: (one.note.name, one.note.start, one.holders),
        )
        return _pieces(parts, self._shares(parts, coordinator.rank), own, metadata)

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


def _notes(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Iterator[Note]:
    declared = read_index(metadata.get(PIECES), path="the state").pieces
    for tensor in tensors:
        spec, piece = tensor.spec, declared.get(tensor.spec.name)
        is_part = piece is not None and piece.shape is not None
        yield Note(
            name=spec.name,
            dtype=spec.dtype.name,
            lengths=spec.shape,
            shape=spec.shape if piece is None else piece.whole(spec),
            start=(piece.start if piece is not None else None) or (0,) * len(spec.shape),
            is_declared=is_part,
        )


def _packed(notes: Iterable[Note]) -> str:
    """Return notes as they travel; names of tensors repeat themselves, so they become ten times shorter."""
    return b64encode(zlib.compress(to_json([note.to_json() for note in notes]))).decode()


def _told(answers: Sequence[Json]) -> list[list[Note]]:
    """Return what all ranks say; what several say in the same words is read once.

    Raises:
        RanksOutOfStep: It is no list of notes.
    """
    known: dict[Json, list[Note]] = {}
    for rank, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise RanksOutOfStep(f"rank {rank} names no tensors: {answer!r}")
        if answer not in known:
            known[answer] = [Note.from_json(one, rank=rank) for one in _unpacked(answer, rank)]
    return [known[answer] for answer in answers]


def _unpacked(text: str, rank: int) -> Sequence[Json]:
    unzip = zlib.decompressobj()
    try:
        data = unzip.decompress(b64decode(text, validate=True), _MAX_NOTES_BYTES)
    except (ValueError, zlib.error) as error:
        raise RanksOutOfStep(f"what rank {rank} says of its tensors is garbled: {error}") from error
    notes = from_json(data, tag="tensors", rank=rank)
    if isinstance(notes, str) or not isinstance(notes, Sequence):
        raise RanksOutOfStep(f"rank {rank} names no tensors")
    return notes


def _held(told: Sequence[Sequence[Note]]) -> dict[Note, list[int]]:
    """Return who says to have the same, in the same order on all ranks."""
    held: dict[Note, list[int]] = {}
    for rank, notes in enumerate(told):
        for note in notes:
            held.setdefault(note, []).append(rank)
    return held


def _digest(tensor: Tensor) -> str:
    return blake3(tensor.content(), max_threads=blake3.AUTO).hexdigest(_DIGEST_BYTES)


def _digests_by_key(
    doubtful: Sequence[tuple[Note, list[int]]], said: Sequence[Json]
) -> dict[tuple[Note, int], str]:
    """Return the digest of every part on every rank that has it."""
    found: dict[tuple[Note, int], str] = {}
    length = 2 * _DIGEST_BYTES
    for rank, text in enumerate(said):
        keys = [key for key, holders in doubtful if rank in holders]
        if not isinstance(text, str) or len(text) != length * len(keys):
            raise RanksOutOfStep(f"rank {rank} runs another version: its digests are not as many")
        for number, key in enumerate(keys):
            found[key, rank] = text[number * length : (number + 1) * length]
    return found


def _alike(
    held: Mapping[Note, list[int]], digests: Mapping[tuple[Note, int], str]
) -> dict[str, list[tuple[Note, tuple[int, ...]]]]:
    """Return, for each name, the parts and the ranks that have the same bytes for them."""
    found: dict[str, list[tuple[Note, tuple[int, ...]]]] = {}
    for note, holders in held.items():
        groups: dict[str, list[int]] = {}
        for rank in holders:
            groups.setdefault(digests.get((note, rank), ""), []).append(rank)
        found.setdefault(note.name, []).extend((note, tuple(ranks)) for ranks in groups.values())
    return found


def _agreed(
    alike: Mapping[str, list[tuple[Note, tuple[int, ...]]]], *, world: int
) -> Iterator[Shared]:
    for name, groups in alike.items():
        declared = [note.is_declared for note, _ in groups]
        if any(declared) and not all(declared):
            raise LayoutError(f"{name!r} has a layout on some ranks and none on others")
        if not any(declared):
            is_for_all = len(groups) == 1 and len(groups[0][1]) == world
        else:
            groups = _with_elements(groups)
            _check_grid(name, [note for note, _ in groups])
            is_for_all = len({note.region for note, _ in groups}) == len(groups)
            if not is_for_all:
                _warn_of_difference(name, groups)
        for note, holders in groups:
            yield Shared(note=note, holders=holders, is_for_all=is_for_all)


def _with_elements(
    groups: list[tuple[Note, tuple[int, ...]]],
) -> list[tuple[Note, tuple[int, ...]]]:
    """Leave out empty parts, unless the whole is empty."""
    return [one for one in groups if prod(one[0].lengths)] or groups[:1]


def _check_grid(name: str, notes: Sequence[Note]) -> None:
    """Check that the parts of a tensor are those of a grid over all of it.

    Raises:
        LayoutError: They are not; rows would be lost, or nobody could tell whose count.
    """
    first = notes[0]
    if any((note.shape, note.dtype) != (first.shape, first.dtype) for note in notes):
        raise LayoutError(f"the ranks say different shapes or types of {name!r}")
    regions = {note.region for note in notes}
    cells = 1
    for dimension, length in enumerate(first.shape):
        edges = sorted({region[dimension] for region in regions})
        stops = [0, *(edge.stop for edge in edges)]
        if [edge.start for edge in edges] != stops[:-1] or stops[-1] != length:
            raise _no_whole(name, first)
        cells *= len(edges)
    if cells != len(regions):
        raise _no_whole(name, first)


def _no_whole(name: str, note: Note) -> LayoutError:
    return LayoutError(
        f"the parts of {name!r} that the ranks have do not make up its shape {list(note.shape)}",
        hint="check its layout, and that all ranks that hold a part of it are saving",
    )


def _warn_of_difference(name: str, groups: Sequence[tuple[Note, tuple[int, ...]]]) -> None:
    by_region: dict[Region, list[tuple[int, ...]]] = {}
    for note, holders in groups:
        by_region.setdefault(note.region, []).append(holders)
    one, other = next(found for found in by_region.values() if len(found) > 1)[:2]
    _LOG.warning(
        "%r is declared to be the same on the ranks %s and %s, but it differs; each keeps its own",
        name,
        list(one[:_SHOWN]),
        list(other[:_SHOWN]),
    )


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
    parts: Sequence[Shared],
    shares: Sequence[tuple[Shared, Share]],
    own: Mapping[str, Tensor],
    metadata: Mapping[str, str],
) -> tuple[list[Item], dict[str, str]]:
    """Return the tensors of the file, in the order of the state, and its metadata."""
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
            ranks=None if part.is_for_all else part.holders,
        )
    index = Index(pieces=pieces, is_compared=True)
    return [*tensors.values()], {**metadata, PIECES: index.to_text()}


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


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)
