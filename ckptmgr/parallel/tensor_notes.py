# SPDX-License-Identifier: Apache-2.0
"""What ranks tell each other about their tensors before they share the writing of them."""

from __future__ import annotations

import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptmgr.core.regions import Region, region_at
from ckptmgr.files.load.shard_pieces import PIECES, read_index
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import Tensor
from ckptmgr.parallel.coordinator import Json, RanksOutOfStep, from_json, to_json

_MAX_NOTES_BYTES = 1 << 30


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


def notes_of(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> Iterator[Note]:
    """Yield what there is to say about tensors; the index in the metadata says what they are parts of."""
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


def packed(notes: Iterable[Note]) -> str:
    """Return notes as they travel; names of tensors repeat themselves, so they become ten times shorter."""
    return b64encode(zlib.compress(to_json([note.to_json() for note in notes]))).decode()


def told_by(answers: Sequence[Json]) -> list[list[Note]]:
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


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r} is no shape")
    return tuple(value)
