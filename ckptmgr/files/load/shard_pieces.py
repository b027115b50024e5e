# SPDX-License-Identifier: Apache-2.0
"""The index in the file of a rank: the tensor, region and ranks of each stored piece.

It is one JSON string in the metadata of the file, under `ckptmgr.pieces`. So the digests and the
seal of the file cover it, and it is read without the other files:

```
{"version": 1, "compared": true, "total": 2, "pieces": {
  "w[0:4,0:8]": {"tensor": "w", "shape": [8, 8], "start": [0, 0]},
  "rng":        {"ranks": [1]}}}
```
`docs/sharded-checkpoints.md` describes its fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from ckptmgr.core.errors import CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.regions import Region, region_at
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.io.scatter import Placement

PIECES = "ckptmgr.pieces"
PIECES_VERSION = 1
_MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Description of a stored tensor as a piece of a whole one.

    Attributes:
        tensor: Name of the whole tensor.
        shape: Shape of the whole tensor; None for that of the stored one.
        start: Its first element in the whole tensor; None for the first of all.
        ranks: The ranks that have this tensor, if ranks differ; else None.
    """

    tensor: str
    shape: tuple[int, ...] | None = None
    start: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None

    def region(self, stored: TensorSpec) -> Region:
        """Return the region of the stored elements in the whole tensor."""
        return region_at(self.start or (0,) * len(stored.shape), stored.shape)

    def whole(self, stored: TensorSpec) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return stored.shape if self.shape is None else self.shape

    def is_for(self, rank: int) -> bool:
        """Return whether a rank has this tensor."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The index of a file.

    Attributes:
        pieces: Name in the file to piece. A tensor that is not listed belongs to this rank alone.
        is_compared: Whether the ranks have compared all their tensors, so that shared ones are
            equal on all.
        total: Number of tensors in all files together; tensors of one name that differ between
            ranks count separately. None if unknown.
    """

    pieces: Mapping[str, Piece]
    is_compared: bool = False
    total: int | None = None

    def to_text(self) -> str:
        """Return the stored JSON."""
        pieces = {name: _to_json(name, piece) for name, piece in self.pieces.items()}
        body: dict[str, Any] = {"version": PIECES_VERSION, "compared": self.is_compared}
        if self.total is not None:
            body["total"] = self.total
        return json.dumps({**body, "pieces": pieces}, separators=(",", ":"))


def read_index(text: str | None, *, path: str) -> Index:
    """Return the index of a file; it is empty without a `text`.

    Raises:
        CorruptCheckpoint: It is no index.
        UnsupportedCheckpoint: Its version is unknown.
    """
    if text is None:
        return Index(pieces={})
    try:
        body = json.loads(text)
        version = body["version"]
        if isinstance(version, int) and version > PIECES_VERSION:
            raise UnsupportedCheckpoint(
                f"the index of its pieces has version {version}, this ckptmgr reads {PIECES_VERSION}",
                path=path,
                hint="upgrade ckptmgr",
            )
        if version != PIECES_VERSION or type(body["compared"]) is not bool:
            raise ValueError(f"version {version!r}, compared {body['compared']!r}")
        pieces = {name: _from_json(name, one) for name, one in body["pieces"].items()}
        total = body.get("total")
        if total is not None and type(total) is not int:
            raise ValueError(f"total {total!r}")
        return Index(pieces=pieces, is_compared=body["compared"], total=total)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, UnsupportedCheckpoint):
            raise
        raise CorruptCheckpoint(f"the index of its pieces is none: {error!r}", path=path) from error


def check_fits(piece: Piece, stored: TensorSpec, *, path: str) -> None:
    """Raise CorruptCheckpoint unless a stored tensor is inside its whole tensor."""
    whole, start = piece.whole(stored), piece.start or (0,) * len(stored.shape)
    is_inside = len(whole) == len(start) == len(stored.shape) and all(
        at + length <= size for at, length, size in zip(start, stored.shape, whole, strict=True)
    )
    if not is_inside:
        raise CorruptCheckpoint(
            f"it has the shape {list(stored.shape)} and starts at {list(start)}, which is not inside {list(whole)}",
            path=path,
            tensor=stored.name,
        )


def piece_name(tensor: str, region: Region, *, taken: Mapping[str, object]) -> str:
    """Return a name for a piece that no other tensor of the file has.

    >>> from ckptmgr.core.regions import Interval
    >>> piece_name("w", (Interval(0, 4), Interval(0, 8)), taken={})
    'w[0:4,0:8]'
    """
    name = f"{tensor}[{','.join(f'{one.start}:{one.stop}' for one in region)}]"
    if name not in taken:
        return name
    return next(free for number in count(2) if (free := f"{name}~{number}") not in taken)


def _to_json(name: str, piece: Piece) -> dict[str, Any]:
    body: dict[str, Any] = {} if piece.tensor == name else {"tensor": piece.tensor}
    if piece.shape is not None:
        body |= {"shape": list(piece.shape), "start": list(piece.start or ())}
    if piece.ranks is not None:
        body["ranks"] = list(piece.ranks)
    return body


def _from_json(name: str, body: Mapping[str, Any]) -> Piece:
    tensor = body.get("tensor", name)
    if not isinstance(tensor, str) or not body.keys() <= {"tensor", "shape", "start", "ranks"}:
        raise ValueError(f"{name!r} is described by {sorted(body)}")
    shape, start, ranks = (_numbers(body.get(key)) for key in ("shape", "start", "ranks"))
    if (shape is None) != (start is None):
        raise ValueError(f"{name!r} has a shape without a start, or a start without a shape")
    if ranks is not None and (not ranks or max(ranks) >= _MAX_RANKS):
        raise ValueError(f"{name!r} is of the ranks {ranks[:8]}")
    return Piece(tensor=tensor, shape=shape, start=start, ranks=ranks)


def _numbers(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError(f"{value!r} is no list of numbers")
    return tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A piece in the file of a rank; `spec` of the stored tensor, `region` in the whole tensor."""

    file_rank: int
    piece: Piece
    spec: TensorSpec
    region: Region

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.piece.whole(self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardContents:
    """Contents of the file of a rank, known without keeping it open."""

    metadata: Mapping[str, str]
    is_compared: bool
    total: int | None
    pieces: Mapping[str, tuple[StoredPiece, ...]]


def shard_contents(opened: OpenCheckpoint, rank: int) -> ShardContents:
    """Return the contents of the file of a rank.

    Raises:
        CorruptCheckpoint: Its index is damaged, or does not fit its tensors.
        UnsupportedCheckpoint: It contains texts or map parameters.
    """
    index = read_index(opened.metadata.get(PIECES), path=opened.path)
    pieces: dict[str, list[StoredPiece]] = {}
    for entry in opened.index.entries:
        if not isinstance(entry, TensorEntry):
            raise UnsupportedCheckpoint(
                f"{entry.name!r} is no tensor; files of many ranks hold tensors only",
                path=opened.path,
            )
        piece = index.pieces.get(entry.name, Piece(tensor=entry.name, ranks=(rank,)))
        check_fits(piece, entry.spec, path=opened.path)
        stored = StoredPiece(
            file_rank=rank, piece=piece, spec=entry.spec, region=piece.region(entry.spec)
        )
        pieces.setdefault(piece.tensor, []).append(stored)
    return ShardContents(
        metadata=opened.metadata,
        is_compared=index.is_compared,
        total=index.total,
        pieces={name: tuple(found) for name, found in pieces.items()},
    )


def placed(entry: TensorEntry, offset: int, target: memoryview) -> Iterator[Placement]:
    """Yield the placements of bytes of a tensor, which may be in several runs of its file."""
    for run in entry.pieces:
        if offset < run.length and target.nbytes:
            part = target[: run.length - offset]
            yield Placement(run.offset + offset, part)
            target = target[part.nbytes :]
            offset = 0
        else:
            offset -= run.length
