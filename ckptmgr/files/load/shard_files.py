# SPDX-License-Identifier: Apache-2.0
"""Files of a sharded checkpoint, opened when needed: their contents, and the damaged ones.

The head of a file is not checked when it is opened, because this would read a digest range of every
file. It is checked with the first read of the file, and before a tensor counts as missing in it.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Self

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint
from ckptmgr.files.load.bulk import confirm_index
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.shard_pieces import Piece, ShardContents, StoredPiece, shard_contents
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store

_LOG = logging.getLogger(__name__)
_OPEN_FILES = 64


class OpenShards:
    """The files of many ranks, opened for reading. Use as a context manager."""

    def __init__(self, store: Store, manifest: Manifest, *, options: ReadOptions) -> None:
        self._store = store
        self._options = options
        self.manifest = manifest
        self.path = store.directory / manifest.name
        self._known: dict[int, ShardContents] = {}
        self._open: OrderedDict[int, tuple[OpenCheckpoint, contextlib.ExitStack]] = OrderedDict()
        self._confirmed: set[int] = set()
        self._damaged: dict[int, Exception] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1][1].close()

    @property
    def world(self) -> int:
        """The number of ranks that saved it."""
        return len(self.manifest.shards)

    @property
    def is_compared(self) -> bool:
        """Whether the ranks compared the tensors that they saved; see `Index`."""
        return all(self._is_file_compared(number) for number in range(self.world))

    def _is_file_compared(self, number: int) -> bool:
        found = self._found(number)
        if found is not None and not found.is_compared:
            found = self._found(number, is_checked=True)  # it may be a flipped bit
        return found is None or found.is_compared

    def leave_out(self, rank: int) -> None:
        """Take nothing from the file of a rank."""
        name = self.manifest.shards[rank].name
        self._damaged[rank] = CorruptCheckpoint("is left out", path=self._store.directory / name)

    def metadata(self, rank: int) -> Mapping[str, str]:
        """Return the metadata strings in the file of a rank, checked.

        Raises:
            CorruptCheckpoint: They are damaged.
        """
        known = self.file(rank)
        opened = self._opened(rank)
        if rank not in self._confirmed:
            with translated_errors(opened.path):
                confirm_index(opened)
            self._confirmed.add(rank)
        return known.metadata

    def file(self, rank: int) -> ShardContents:
        """Return the contents of the file of a rank, not checked yet; raises as `open_source`."""
        if rank not in self._known:
            self._opened(rank)
        return self._known[rank]

    def names(self, rank: int) -> list[str]:
        """Return the tensors that a rank has, in the order of the files.

        Raises:
            CorruptCheckpoint, FileNotFoundError: A damaged file may have had tensors that the
                others have not.
        """
        return list(dict.fromkeys(one.tensor for one in self._all_pieces() if one.is_for(rank)))

    def first_ranks(self) -> dict[str, int]:
        """Return the tensors of all ranks, each with its first rank; raises as `names`."""
        found: dict[str, int] = {}
        for piece in self._all_pieces():
            rank = min(piece.ranks or (0,))
            found[piece.tensor] = min(rank, found.get(piece.tensor, rank))
        return found

    def _all_pieces(self) -> list[Piece]:
        found = (self._found(number, is_checked=True) for number in range(self.world))
        files = [file for file in found if file is not None]
        all_pieces = [
            one.piece for file in files for pieces in file.pieces.values() for one in pieces
        ]
        tensors = {(piece.tensor, piece.ranks) for piece in all_pieces}
        if len(files) < self.world and len(tensors) not in {file.total for file in files}:
            raise next(iter(self._damaged.values()))
        return all_pieces

    def tensors(self) -> list[tuple[TensorSpec, tuple[int, ...] | None]]:
        """Return the specs of all whole tensors in file order, and their ranks if ranks differ."""
        found: dict[tuple[TensorSpec, tuple[int, ...] | None], None] = {}
        for number in range(self.world):
            self.metadata(number)
            for name, pieces in self.file(number).pieces.items():
                for one in pieces:
                    spec = TensorSpec(name=name, dtype=one.spec.dtype, shape=one.whole)
                    found.setdefault((spec, one.piece.ranks))
        return list(found)

    @property
    def piece_bytes(self) -> int:
        """Bytes of all pieces in all files."""
        files = (self.file(number) for number in range(self.world))
        return sum(
            one.spec.size_bytes
            for file in files
            for pieces in file.pieces.values()
            for one in pieces
        )

    def pieces(self, name: str, *, rank: int | None) -> Iterator[StoredPiece]:
        """Yield the pieces of a tensor of a rank (None: all), those in its own file first."""
        own = [] if rank is None or rank >= self.world else [rank]
        for number in (*own, *(n for n in range(self.world) if n not in own)):
            file = self._found(number)
            found = () if file is None else file.pieces.get(name, ())
            yield from (one for one in found if rank is None or one.piece.is_for(rank))

    def _found(self, number: int, *, is_checked: bool = False) -> ShardContents | None:
        """Return the contents of the file of a rank; note damage and return None."""
        if number in self._damaged:
            return None
        try:
            if is_checked:
                self.metadata(number)
            return self.file(number)
        except (CorruptCheckpoint, FileNotFoundError) as error:
            self._note_damage(number, error)
            return None

    def _has_new_damage(self) -> bool:
        """Check the heads of all files, and return whether new damage was found."""
        before = len(self._damaged)
        for number in range(self.world):
            self._found(number, is_checked=True)
        return len(self._damaged) > before

    def _note_damage(self, number: int, error: Exception) -> None:
        self._damaged[number] = error
        _LOG.warning("%s: %s is left out: %s", self.path, self.manifest.shards[number].name, error)

    def _opened(self, rank: int) -> OpenCheckpoint:
        if rank in self._open:
            self._open.move_to_end(rank)
            return self._open[rank][0]
        manifest = self.manifest.of_shard(rank)
        path = self._store.directory / manifest.name
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(contextlib.closing(self._store.open_data(path)))
            opened = open_source(
                raw, path=str(path), options=self._options, manifest=manifest, is_for_loading=True
            )
            self._confirmed.discard(rank)
            self._known[rank] = _known(opened, rank)
            self._open[rank] = opened, stack.pop_all()
        while len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)[1][1].close()
        return self._open[rank][0]


def _known(opened: OpenCheckpoint, rank: int) -> ShardContents:
    try:
        return shard_contents(opened, rank)
    except CkptmgrError:
        with translated_errors(opened.path):
            confirm_index(opened)  # raises if the cause is damage
        raise
