# SPDX-License-Identifier: Apache-2.0
"""The pieces of tensors in one file of many: what each is a part of, and where its bytes lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.regions import Region
from ckptmgr.files.load.shard_pieces import PIECES, Piece, check_fits, read_index
from ckptmgr.files.load.values import OpenCheckpoint
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.io.scatter import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A piece of a tensor in the file of a rank.

    Attributes:
        file_rank: Whose file.
        piece: What it is.
        spec: As what it is stored.
        region: The elements that are stored, in the whole tensor.
    """

    file_rank: int
    piece: Piece
    spec: TensorSpec
    region: Region

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.piece.whole(self.spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """What is known about a file without keeping it open."""

    metadata: Mapping[str, str]
    is_compared: bool
    total: int | None
    pieces: Mapping[str, tuple[StoredPiece, ...]]


def known_file(opened: OpenCheckpoint, rank: int) -> KnownFile:
    """Return what the file of a rank holds.

    Raises:
        CorruptCheckpoint: Its index is none, or does not fit its tensors.
        UnsupportedCheckpoint: It holds more than tensors.
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
    return KnownFile(
        metadata=opened.metadata,
        is_compared=index.is_compared,
        total=index.total,
        pieces={name: tuple(found) for name, found in pieces.items()},
    )


def placed(entry: TensorEntry, offset: int, target: memoryview) -> Iterator[Placement]:
    """Yield where bytes of a tensor lie in its file, which may hold it in several runs."""
    for run in entry.pieces:
        if offset < run.length and target.nbytes:
            part = target[: run.length - offset]
            yield Placement(run.offset + offset, part)
            target = target[part.nbytes :]
            offset = 0
        else:
            offset -= run.length
