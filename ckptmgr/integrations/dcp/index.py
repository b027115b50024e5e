# SPDX-License-Identifier: Apache-2.0
"""Index of a PyTorch DCP checkpoint: its tensors and the rank with each piece, as JSON.

The file of rank 0 has it as a uint8 tensor, `~index`, so a reader opens that file and those that it
needs. The name of a piece in the file of its rank follows from tensor and offsets.

>>> dcp_piece_name("layer.weight", (0, 0)), dcp_piece_name("layer.weight", (512, 0)), dcp_piece_name("format", None)
('layer.weight', 'layer.weight~@512,0', '~format')
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.formats.strict_json import parse_object

MARK = "ckptmgr.dcp"
"""The metadata key of files that were written for DCP; its value is the version of the index."""
INDEX_NAME = "~index"
INDEX_VERSION = 1
ObjectPath = tuple[str | int, ...]

_RESERVED = ("__", "ckptmgr.")
_RESERVED_NAMES = ("format", "crc_num")
_WHAT = "index of the checkpoint"
_MAX_SIZE = (1 << 63) - 1
# A list in a state has at most as many elements as are saved; a path must not cause more.
_MAX_LIST_INDEX = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPiece:
    """A box of a tensor, and the rank with its file; no sizes for values that are no tensors."""

    rank: int
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """A tensor stored in pieces, which together have as many elements as the whole."""

    dtype: str  # as torch spells it, without `torch.`
    shape: tuple[int, ...]
    pieces: tuple[RankPiece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpIndex:
    """The contents of a checkpoint."""

    world: int  # number of ranks that saved
    tensors: Mapping[str, CutTensor]
    objects: Mapping[str, int]  # name of a value that is no tensor to the rank with its file
    paths: Mapping[str, ObjectPath] | None  # in the nested state; None for a flat one

    def problem(self) -> str | None:
        """Return a contradiction in the index, or None."""
        for name, rank in self.objects.items():
            if rank >= self.world:
                return f"{name!r} is in the file of rank {rank} of {self.world}"
        for name, tensor in self.tensors.items():
            problem = _problem(tensor, self.world)
            if problem is not None:
                return f"{name!r} {problem}"
        return None

    def to_json(self) -> bytes:
        """Return it as it is stored."""
        document = {
            "version": INDEX_VERSION,
            "world": self.world,
            "tensors": {
                name: [
                    one.dtype,
                    one.shape,
                    [[piece.rank, piece.offsets, piece.sizes] for piece in one.pieces],
                ]
                for name, one in self.tensors.items()
            },
            "objects": dict(self.objects),
            "paths": None if self.paths is None else dict(self.paths),
        }
        return json.dumps(document, separators=(",", ":")).encode()


def parse_index(data: bytes) -> DcpIndex:
    """Return an index from a file.

    Raises:
        FormatError: It is no index, or contradicts itself.
        UnsupportedError: Its version is unknown here.
    """
    document = parse_object(data, what=_WHAT, offset=0)
    if document.get("version") != INDEX_VERSION:
        raise UnsupportedError(
            f"the {_WHAT} has version {document.get('version')!r:.20}; upgrade ckptmgr"
        )
    try:
        index = DcpIndex(
            world=_integer(document["world"]),
            tensors={name: _tensor(one) for name, one in _mapping(document["tensors"])},
            objects={name: _integer(rank) for name, rank in _mapping(document["objects"])},
            paths=None
            if document["paths"] is None
            else {name: _path(path) for name, path in _mapping(document["paths"])},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the {_WHAT} is damaged: {error}") from error
    problem = index.problem()
    if problem is not None:
        raise FormatError(f"the {_WHAT} is damaged: {problem}")
    return index


def dcp_piece_name(fqn: str, offsets: Sequence[int] | None) -> str:
    """Return the stored name of a piece: that of the tensor, with its offsets unless all are 0."""
    name = fqn.replace("~", "~0")
    if name in _RESERVED_NAMES or name.startswith(_RESERVED):
        name = f"~{name}"
    return f"{name}~@{','.join(map(str, offsets))}" if offsets and any(offsets) else name


def _problem(tensor: CutTensor, world: int) -> str | None:
    for piece in tensor.pieces:
        if piece.rank >= world:
            return f"has a piece in the file of rank {piece.rank} of {world}"
        if not len(piece.offsets) == len(piece.sizes) == len(tensor.shape) or any(
            offset + size > whole
            for offset, size, whole in zip(piece.offsets, piece.sizes, tensor.shape, strict=True)
        ):
            return (
                f"has a piece {list(piece.sizes)} at {list(piece.offsets)} of {list(tensor.shape)}"
            )
    held = sum(prod(piece.sizes) for piece in tensor.pieces)
    if held != prod(tensor.shape):
        return f"has {prod(tensor.shape)} elements, but its pieces have {held}"
    return None


def _tensor(value: object) -> CutTensor:
    dtype, shape, pieces = _list(value)
    if not isinstance(dtype, str):
        raise TypeError(f"{dtype!r} is no element type")
    return CutTensor(dtype=dtype, shape=_integers(shape), pieces=tuple(map(_piece, _list(pieces))))


def _piece(value: object) -> RankPiece:
    rank, offsets, sizes = _list(value)
    return RankPiece(rank=_integer(rank), offsets=_integers(offsets), sizes=_integers(sizes))


def _path(value: object) -> ObjectPath:
    return tuple(key if isinstance(key, str) else _position(key) for key in _list(value))


def _position(value: object) -> int:
    position = _integer(value)
    if position > _MAX_LIST_INDEX:
        raise ValueError(f"{position} is no position in a list")
    return position


def _mapping(value: object) -> Sequence[tuple[str, object]]:
    if not isinstance(value, dict):
        raise TypeError("something is no object")
    return list(value.items())


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("something is no list")
    return value


def _integers(value: object) -> tuple[int, ...]:
    return tuple(map(_integer, _list(value)))


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_SIZE:
        raise ValueError(f"{value!r:.40} is no count")
    return value
