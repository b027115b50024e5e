# SPDX-License-Identifier: Apache-2.0
"""Repair damaged files of several ranks from the copies of their tensors in the other files.

The digests of the manifest say which ranges of a file are damaged, and prove the repair: a repaired
range has exactly the bytes that were saved, so the manifest stays as it is. A file is written only
when all of it can be repaired.

Content of the damaged file without a copy stays lost: tensors of one rank, the index of tensors, a
file that is gone. Encrypted and compressed files have other bytes each time they are made; they are
rewritten (`repair_sealed`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import prod

from blake3 import blake3

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import (
    CheckpointNotFound,
    CkptmgrError,
    CorruptCheckpoint,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import COMPRESSED_SUFFIX
from ckptmgr.core.regions import Interval, Region
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.shard_pieces import PIECES, Piece, read_index
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.io.digest import FileDigest, differing_ranges
from ckptmgr.io.filesystem import OutputFile
from ckptmgr.maintenance.repair_sealed import SealedRepair
from ckptmgr.maintenance.repair_source import PaddedSource, RepairResult
from ckptmgr.maintenance.rewriting import mode_like, write_beside
from ckptmgr.store.change_leases import lease_of_checkpoint
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store


def plan_repairs(store: Store, manifest: Manifest) -> list[RepairResult]:
    """Return the possible repair of every damaged file of several ranks; changes nothing."""
    return [
        found
        for rank in range(len(manifest.shards))
        if (found := _DamagedFile(store, manifest, rank).plan()) is not None
    ]


def repair_checkpoint(
    store: Store,
    checkpoint: Checkpoint,
    *,
    options: ReadOptions | None = None,
    clock: Callable[[], float] = time.time,
) -> list[RepairResult]:
    """Repair damaged files of several ranks; return the result for each of them.

    `clock` (seconds since 1970) names files that are rewritten.

    Raises:
        CheckpointNotFound: It has no manifest.
        KeyProblem: The key of the files, or the key that signs the manifest, is missing.
        UnsupportedCheckpoint: It is a single file, or rewriting it would break a later checkpoint's
            link.
        StoreLocked: A live process writes this series.
        OSError: From the disk. Files that were repaired before stay so.
    """
    with lease_of_checkpoint(store, checkpoint):
        manifest = store.read_manifest(checkpoint.name)
        if manifest is None:
            raise CheckpointNotFound("there is no manifest", path=checkpoint.path)
        if not manifest.shards:
            raise UnsupportedCheckpoint(
                "is a single file, which no other one has copies of", path=checkpoint.path
            )
        repair: Callable[[int], RepairResult | None] = partial(_repair_plain, store, manifest)
        if _must_be_rewritten(manifest):
            reading = options or ReadOptions()
            repair = SealedRepair(store, manifest, options=reading, clock=clock).repair
        done: dict[str, RepairResult] = {}
        has_progress = True
        # A file that could not be repaired may be repairable after another one was.
        while has_progress:
            tried = map(repair, range(len(manifest.shards)))
            found = {one.name: one for one in tried if one is not None}
            done |= found
            has_progress = any(one.problem is None for one in found.values())
        return [done[name] for name in sorted(done)]


def repair_hint(store: Store, manifest: Manifest) -> str | None:
    """Return how the damage of a checkpoint can be repaired, or None where that is not known."""
    repairable: list[RepairResult] = []
    if not _must_be_rewritten(manifest):
        with contextlib.suppress(OSError):
            repairable = [one for one in plan_repairs(store, manifest) if one.problem is None]
    if not repairable:
        return None
    repairs = "; ".join(f"{one.name} from {', '.join(one.sources)}" for one in repairable)
    return f"ckptmgr repair {store.directory / manifest.name} repairs {repairs}"


def _must_be_rewritten(manifest: Manifest) -> bool:
    """Return whether the bytes of files cannot be made again from their tensors."""
    is_compressed = manifest.file.name.endswith(COMPRESSED_SUFFIX)
    is_encrypted = manifest.file.cipher is not None or manifest.file.digest.blank_bytes > 0
    return is_compressed or is_encrypted


def _repair_plain(store: Store, manifest: Manifest, rank: int) -> RepairResult | None:
    """Repair the plain file of a rank if it is damaged, and return the result."""
    damaged = _DamagedFile(store, manifest, rank)
    found = damaged.plan()
    if found is not None and found.problem is None:
        write_beside(
            store,
            found.name,
            damaged.write,
            series=manifest.series,
            size_bytes=damaged.digest.size_bytes,
            mode=mode_like(store, found.name),
        )
    return found


class _DamagedFile:
    """Plain file of a rank that may be damaged."""

    def __init__(self, store: Store, manifest: Manifest, rank: int) -> None:
        self._store = store
        self._manifest = manifest
        self._rank = rank
        self._entry = manifest.shards[rank]
        self._path = store.directory / self._entry.name
        self.digest = self._entry.digest
        self._sources: set[int] = set()

    def plan(self) -> RepairResult | None:
        """Return the possible repair, or None when the file is as it was saved."""
        bad: list[tuple[int, int]] = []
        try:
            with self._opened() as source:
                bad = differing_ranges(source, self.digest)
                if not bad and self._has_size():
                    return None
                for start, stop in bad:
                    self._repaired_range(source, start, stop)
        except (CkptmgrError, FileNotFoundError) as error:
            problem = error.message if isinstance(error, CkptmgrError) else "it is gone"
            return self._result(bad, problem)
        return self._result(bad, None)

    def write(self, file: OutputFile) -> FileDigest:
        """Write all of the file as it was saved, range by range.

        Raises:
            CorruptCheckpoint: It cannot be repaired.
        """
        length, size_bytes = self.digest.range_bytes, self.digest.size_bytes
        with self._opened() as source:
            for start in range(0, size_bytes, length):
                content = bytearray(min(length, size_bytes - start))
                source.read_into(start, memoryview(content))
                if not self._is_right(content, start):
                    content = self._repaired_range(source, start, start + len(content))
                file.write_at(start, memoryview(content))
        return self.digest

    @contextmanager
    def _opened(self) -> Iterator[PaddedSource]:
        with contextlib.closing(self._store.fs.open(self._path)) as raw:
            yield PaddedSource(raw, self.digest.size_bytes)

    def _has_size(self) -> bool:
        status = self._store.fs.status(self._path)
        return status is not None and status.size_bytes == self.digest.size_bytes

    def _result(self, bad: list[tuple[int, int]], problem: str | None) -> RepairResult:
        return RepairResult(
            name=self._entry.name,
            bad_bytes=sum(stop - start for start, stop in bad),
            sources=tuple(self._manifest.shards[rank].name for rank in sorted(self._sources)),
            problem=problem,
        )

    def _is_right(self, content: bytearray, start: int) -> bool:
        digest: bytes = blake3(content).digest()
        return digest == self.digest.ranges[start // self.digest.range_bytes]

    def _repaired_range(self, source: PaddedSource, start: int, stop: int) -> bytearray:
        """Return a range of the file as it was saved.

        Raises:
            CorruptCheckpoint: No copies make it match its digest.
        """
        content = bytearray(stop - start)
        source.read_into(start, memoryview(content))
        opened = open_source(source, path=str(self._path), options=ReadOptions())
        index = read_index(opened.metadata.get(PIECES), path=str(self._path))
        with ShardedCheckpoint(self._store, self._manifest, options=ReadOptions()) as files:
            files.leave_out(self._rank)
            for entry in _tensors(opened):
                piece = index.pieces.get(entry.name)
                for at, copy in self._copies(files, entry, piece, start, stop):
                    content[at - start : at - start + copy.nbytes] = copy
            self._sources |= files.used
        if not self._is_right(content, start):
            raise CorruptCheckpoint(
                f"of the bytes {start}..{stop}, what is damaged is in no other file",
                path=self._path,
            )
        return content

    def _copies(
        self,
        files: ShardedCheckpoint,
        entry: TensorEntry,
        piece: Piece | None,
        start: int,
        stop: int,
    ) -> Iterator[tuple[int, memoryview]]:
        """Yield the content of a tensor in a file range from other files, with its offset."""
        before = 0
        for run in entry.pieces:
            low, high = max(start, run.offset), min(stop, run.offset + run.length)
            if low < high:
                first = before + low - run.offset
                found = self._content(files, entry, piece, first, first + high - low)
                if found is not None:
                    yield low, found
            before += run.length

    @staticmethod
    def _content(
        files: ShardedCheckpoint, entry: TensorEntry, piece: Piece | None, first: int, last: int
    ) -> memoryview | None:
        """Return bytes of a tensor from the other files, or None when they have none."""
        known = piece or Piece(tensor=entry.name)
        region, skipped = _rows(known.region(entry.spec), entry, first, last)
        # A piece that is not listed is this rank's own; the digest shows whether another is the
        # same.
        rank = None if piece is None else known.ranks[0] if known.ranks else 0
        try:
            array = files.read({known.tensor: region}, rank=rank)[known.tensor]
        except CkptmgrError:
            return None
        return flat_memory(array)[first - skipped : last - skipped]


def _rows(region: Region, entry: TensorEntry, first: int, last: int) -> tuple[Region, int]:
    """Return the rows that contain bytes of a stored tensor, and the bytes before them."""
    if not region:
        return region, 0
    row_bytes = prod(entry.spec.shape[1:]) * entry.spec.dtype.item_bytes
    top, bottom = first // row_bytes, -(-last // row_bytes)
    rows = Interval(region[0].start + top, region[0].start + bottom)
    return (rows, *region[1:]), top * row_bytes


def _tensors(opened: OpenCheckpoint) -> Iterator[TensorEntry]:
    yield from (entry for entry in opened.index.entries if isinstance(entry, TensorEntry))
