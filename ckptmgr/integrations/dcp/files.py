# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint that ranks saved through DCP: its index, and checked reads of pieces."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.regions import Region, byte_runs, region_shape
from ckptmgr.files.load.bulk import confirm_index
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.values import read_values
from ckptmgr.formats.index import TensorEntry, check_content
from ckptmgr.integrations.dcp.index import INDEX_NAME, INDEX_VERSION, MARK, DcpIndex, parse_index
from ckptmgr.io.scatter import Placement
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRead:
    """A read of a part of a piece into flat writable memory of the same size."""

    name: str  # the stored name of the piece
    stored: Region  # the piece; its elements count from 0
    wanted: Region  # the part of it
    item_bytes: int  # bytes of an element
    target: memoryview


class ShardFile:
    """The open file of one rank."""

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened = opened
        self._entries: Mapping[str, TensorEntry] = {
            one.name: one for one in opened.index.entries if isinstance(one, TensorEntry)
        }
        self._is_confirmed = opened.unverified is None

    def size_bytes(self, name: str) -> int:
        """Return the size of a piece; raises as `read`."""
        return self._entry(name).spec.size_bytes

    def offset(self, name: str) -> int:
        """Return where a piece begins; raises as `read`."""
        return self._entry(name).pieces[0].offset

    def read(self, reads: Sequence[PieceRead]) -> None:
        """Read parts of pieces into their memory.

        Raises:
            CorruptCheckpoint: The bytes are damaged, or contradict the index. The memory is then
                undefined.
            OSError: From the disk.
        """
        placements = [one for read in reads for one in self._placements(read)]
        with translated_errors(self._opened.path):
            for batch in _apart(placements):
                self._fill(batch)
            for read in reads:
                entry = self._entry(read.name)
                check_content(entry, read.target, offset=entry.pieces[0].offset)

    def _placements(self, read: PieceRead) -> Iterator[Placement]:
        entry = self._entry(read.name)
        size_bytes = prod(region_shape(read.stored)) * read.item_bytes
        if entry.spec.size_bytes != size_bytes:
            raise self._damaged(
                f"has {entry.spec.size_bytes} bytes, but the index says {size_bytes}", read.name
            )
        start = entry.pieces[0].offset
        for run in byte_runs(read.stored, read.wanted, read.wanted, item_bytes=read.item_bytes):
            target = read.target[run.target_offset :][: run.length]
            yield Placement(start + run.source_offset, target)

    def _fill(self, placements: Sequence[Placement]) -> None:
        self._opened.read(placements, confirmed=() if self._is_confirmed else None)
        self._is_confirmed = True

    def _entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise self._damaged("is not in the file, but the index says so", name)
        return entry

    def _damaged(self, problem: str, name: str) -> CorruptCheckpoint:
        with translated_errors(self._opened.path):
            confirm_index(self._opened)  # damage may be the reason
        return CorruptCheckpoint(f"{name!r} {problem}", path=self._opened.path, tensor=name)


class ShardSet:
    """The files of one committed checkpoint."""

    def __init__(self, store: Store, manifest: Manifest, *, options: ReadOptions) -> None:
        self._store = store
        self._manifest = manifest
        self._options = options

    def index(self) -> DcpIndex:
        """Return the index of the checkpoint.

        Raises:
            UnsupportedCheckpoint: It was not saved through DCP.
            CorruptCheckpoint, KeyProblem: It is damaged, or the key is wrong.
        """
        with self._opened(0) as opened:
            if opened.metadata.get(MARK) != str(INDEX_VERSION):
                with translated_errors(opened.path):
                    confirm_index(opened)
                raise UnsupportedCheckpoint(
                    "was not saved through torch.distributed.checkpoint, or by a newer ckptmgr",
                    path=opened.path,
                    hint="load it with ckptmgr.CheckpointManager",
                )
            values = read_values(opened, choose=lambda name: name == INDEX_NAME)
            stored = values.get(INDEX_NAME)
            if not isinstance(stored, np.ndarray):
                raise CorruptCheckpoint("has no index", path=opened.path, tensor=INDEX_NAME)
            with translated_errors(opened.path):
                index = parse_index(stored.tobytes())
            if index.world != len(self._manifest.shards):
                raise CorruptCheckpoint(
                    f"the index is of {index.world} files, but there are {len(self._manifest.shards)}",
                    path=opened.path,
                )
            return index

    @contextmanager
    def file(self, rank: int) -> Iterator[ShardFile]:
        """Open the file of a rank; raises as `index`."""
        with self._opened(rank) as opened:
            yield ShardFile(opened)

    @contextmanager
    def _opened(self, rank: int) -> Iterator[OpenCheckpoint]:
        manifest = self._manifest.of_shard(rank)
        path = self._store.directory / manifest.name
        with contextlib.closing(self._store.open_data(path)) as raw:
            yield open_source(
                raw,
                path=os.fspath(path),
                options=self._options,
                manifest=manifest,
                is_for_loading=True,
            )


def _apart(placements: Iterable[Placement]) -> Iterator[list[Placement]]:
    """Yield the placements in ascending order, in batches that do not overlap."""
    left = sorted(placements, key=lambda one: one.offset)
    while left:
        batch: list[Placement] = []
        later: list[Placement] = []
        stop = 0
        for one in left:
            if one.offset >= stop:
                batch.append(one)
                stop = one.stop
            else:
                later.append(one)
        yield batch
        left = later
