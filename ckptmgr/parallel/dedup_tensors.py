# SPDX-License-Identifier: Apache-2.0
"""Descriptions and digests that ranks exchange before a deduplicated save, and their comparison."""

from __future__ import annotations

import logging
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from blake3 import blake3

from ckptmgr.core.regions import Region, region_at
from ckptmgr.files.load.shard_pieces import PIECES, read_index
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.strict_json import Json
from ckptmgr.formats.tensor import Tensor
from ckptmgr.parallel.coordinator import RanksOutOfStep, from_json, to_json
from ckptmgr.parallel.errors import LayoutError

_LOG = logging.getLogger(__name__)
_MAX_NOTES_BYTES = 1 << 30
_DIGEST_BYTES = 16
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNote:
    """A rank's description of a tensor."""

    name: str
    dtype: str
    lengths: tuple[int, ...]  # shape of the part on the rank
    shape: tuple[int, ...]  # of the whole
    start: tuple[int, ...]  # of the part in the whole
    is_declared: bool  # by a layout; otherwise the tensor counts as whole

    @property
    def region(self) -> Region:
        """The elements that the rank holds, in the whole."""
        return region_at(self.start, self.lengths)

    def to_json(self) -> Json:
        """Return it as it is sent."""
        own: list[Json] = [self.name, self.dtype, list(self.lengths)]
        return [*own, list(self.shape), list(self.start)] if self.is_declared else own

    @classmethod
    def from_json(cls, value: Json, *, rank: int) -> TensorNote:
        """Return the note of another rank; raise RanksOutOfStep unless it is one."""
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


def tensor_notes_of(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Iterator[TensorNote]:
    """Yield a note for each tensor; an index in the metadata gives their regions."""
    declared = read_index(metadata.get(PIECES), path="the state").pieces
    for tensor in tensors:
        spec, piece = tensor.spec, declared.get(tensor.spec.name)
        is_part = piece is not None and piece.shape is not None
        yield TensorNote(
            name=spec.name,
            dtype=spec.dtype.name,
            lengths=spec.shape,
            shape=spec.shape if piece is None else piece.whole(spec),
            start=(piece.start if piece is not None else None) or (0,) * len(spec.shape),
            is_declared=is_part,
        )


def pack_notes(notes: Iterable[TensorNote]) -> str:
    """Return notes as they are sent; compression makes the repetitive names ten times shorter."""
    return b64encode(zlib.compress(to_json([note.to_json() for note in notes]))).decode()


def unpack_notes(answers: Sequence[Json]) -> list[list[TensorNote]]:
    """Return the notes of all ranks; equal answers are parsed once. Raises as `from_json`."""
    known: dict[Json, list[TensorNote]] = {}
    for rank, answer in enumerate(answers):
        if not isinstance(answer, str):
            raise RanksOutOfStep(f"rank {rank} names no tensors: {answer!r}")
        if answer not in known:
            known[answer] = [
                TensorNote.from_json(one, rank=rank) for one in _unpacked(answer, rank)
            ]
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


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTensor:
    """A tensor, or a part of one, with the same bytes on its holders."""

    note: TensorNote
    holders: tuple[int, ...]
    is_for_all: bool  # the one tensor of this name; otherwise that of its holders only

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks whose tensor it is, where ranks differ; None when all have the same one."""
        return None if self.is_for_all else self.holders


Parts = Mapping[str, list[tuple[TensorNote, tuple[int, ...]]]]
"""Name to the parts of a tensor, each with the ranks that have the same bytes for it."""


def holders_by_note(notes_by_rank: Sequence[Sequence[TensorNote]]) -> dict[TensorNote, list[int]]:
    """Return the ranks of each equal note, in the same order on all ranks."""
    holders: dict[TensorNote, list[int]] = {}
    for rank, notes in enumerate(notes_by_rank):
        for note in notes:
            holders.setdefault(note, []).append(rank)
    return holders


def digest_of_tensor(tensor: Tensor) -> str:
    """Return the digest of the content of a tensor."""
    return blake3(tensor.content(), max_threads=blake3.AUTO).hexdigest(_DIGEST_BYTES)


def digests_by_part(
    candidates: Sequence[tuple[TensorNote, list[int]]], answers: Sequence[Json]
) -> dict[tuple[TensorNote, int], str]:
    """Return the digest of every part on every rank that has it.

    `answers` are the digests of each rank, concatenated in the order of `candidates`.
    """
    found: dict[tuple[TensorNote, int], str] = {}
    length = 2 * _DIGEST_BYTES
    keys_of: dict[int, list[TensorNote]] = {}
    for key, holders in candidates:
        for rank in holders:
            keys_of.setdefault(rank, []).append(key)
    for rank, text in enumerate(answers):
        keys = keys_of.get(rank, [])
        if not isinstance(text, str) or len(text) != length * len(keys):
            raise RanksOutOfStep(f"rank {rank} runs another version: its digests are not as many")
        for number, key in enumerate(keys):
            found[key, rank] = text[number * length : (number + 1) * length]
    return found


def equal_parts(
    holders_of: Mapping[TensorNote, list[int]], digests: Mapping[tuple[TensorNote, int], str]
) -> Parts:
    """Return, for each name, the parts and the ranks that have the same bytes for them."""
    found: dict[str, list[tuple[TensorNote, tuple[int, ...]]]] = {}
    for note, holders in holders_of.items():
        groups: dict[str, list[int]] = {}
        for rank in holders:
            groups.setdefault(digests.get((note, rank), ""), []).append(rank)
        found.setdefault(note.name, []).extend((note, tuple(ranks)) for ranks in groups.values())
    return found


def shared_tensors(parts: Parts, *, world: int) -> Iterator[SharedTensor]:
    """Yield each distinct tensor or part with its holders; raise LayoutError on contradictions."""
    for name, groups in parts.items():
        declared = [note.is_declared for note, _ in groups]
        if any(declared) and not all(declared):
            raise LayoutError(f"{name!r} has a layout on some ranks and none on others")
        if not any(declared):
            is_for_all = len(groups) == 1 and len(groups[0][1]) == world
        else:
            _check_alike(name, [note for note, _ in groups])
            groups = _with_elements(groups)
            _check_grid(name, [note for note, _ in groups])
            is_for_all = len({note.region for note, _ in groups}) == len(groups)
            if not is_for_all:
                _warn_of_difference(name, groups)
        for note, holders in groups:
            yield SharedTensor(note=note, holders=holders, is_for_all=is_for_all)


def _with_elements(
    groups: list[tuple[TensorNote, tuple[int, ...]]],
) -> list[tuple[TensorNote, tuple[int, ...]]]:
    """Leave out empty parts, unless the whole is empty."""
    return [one for one in groups if prod(one[0].lengths)] or groups[:1]


def _check_alike(name: str, notes: Sequence[TensorNote]) -> None:
    first = notes[0]
    if any((note.shape, note.dtype) != (first.shape, first.dtype) for note in notes):
        raise LayoutError(f"the ranks say different shapes or types of {name!r}")


def _check_grid(name: str, notes: Sequence[TensorNote]) -> None:
    """Raise LayoutError unless the parts of a tensor are those of a grid over all of it.

    Otherwise rows would be lost or ambiguous.
    """
    first = notes[0]
    if not prod(first.shape):
        return
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


def _no_whole(name: str, note: TensorNote) -> LayoutError:
    return LayoutError(
        f"the parts of {name!r} that the ranks have do not make up its shape {list(note.shape)}",
        hint="check its layout, and that all ranks that hold a part of it are saving",
    )


def _warn_of_difference(name: str, groups: Sequence[tuple[TensorNote, tuple[int, ...]]]) -> None:
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
