# SPDX-License-Identifier: Apache-2.0
"""Sources of a repair: a damaged file of several ranks, as far as the manifest proves it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.crypto.container.header import HeaderCopy
from ckptmgr.crypto.container.unlock import find_copies
from ckptmgr.crypto.keys.ring import block_key
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.shard_pieces import PIECES, Piece, read_index
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.files.save.job import SaveOptions
from ckptmgr.formats.index import TensorEntry, read_tensor_into
from ckptmgr.formats.source import Source
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.maintenance.rekey_change import check_same_recipients
from ckptmgr.store.manifest.codec import Manifest

_CRC_KEY = "crc_num"


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedShard:
    """Damaged file that could be opened.

    Attributes:
        is_proven: Whether reads from it are checked against the digests of the manifest.
        files: The files of the other ranks.
        header: Of a container, with its recipients; else None.
        lock: Held while files are read: several threads write the new file.
    """

    opened: OpenCheckpoint
    is_proven: bool
    rank: int
    files: ShardedCheckpoint
    options: ReadOptions
    header: HeaderCopy | None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def entries(self) -> list[TensorEntry]:
        """Its tensors."""
        return [one for one in self.opened.index.entries if isinstance(one, TensorEntry)]

    def check(self) -> None:
        """Read all of it.

        Raises:
            CkptmgrError: Not all of it can be had.
        """
        key = self.options.trust.keys
        if key is not None and self.header is not None:
            check_same_recipients(self.header, key, path=self.opened.path)
        elif key is not None and self.opened.cipher is not None:
            with translated_errors(self.opened.path):
                block_key(key)
        if len(self.entries) < len(self.opened.index.entries):
            raise UnsupportedCheckpoint("it holds more than tensors")
        if not self.is_proven:
            self._check_described_by_others()
        for entry in self.entries:
            self.content(entry)

    def content(self, entry: TensorEntry) -> memoryview:
        """Return the bytes of a tensor, proven.

        Raises:
            CorruptCheckpoint: No file has them.
        """
        with self.lock:
            return self._content(entry)

    def _content(self, entry: TensorEntry) -> memoryview:
        piece = self._pieces().get(entry.name)
        if piece is not None:
            with contextlib.suppress(CorruptCheckpoint, UnsupportedCheckpoint, FileNotFoundError):
                return self._copy(entry, piece)
        if not self.is_proven:
            raise CorruptCheckpoint("what is damaged is in no other file", tensor=entry.name)
        buffer = memoryview(bytearray(entry.spec.size_bytes))
        with translated_errors(self.opened.path):
            read_tensor_into(self.opened.source, entry, buffer)
        return buffer

    def _copy(self, entry: TensorEntry, piece: Piece) -> memoryview:
        rank = piece.ranks[0] if piece.ranks else 0
        stored = next(self.files.pieces(piece.tensor, rank=rank), None)
        if (
            stored is None
            or (stored.piece.ranks, stored.whole) != (piece.ranks, piece.whole(entry.spec))
            or stored.spec.dtype != entry.spec.dtype
        ):
            raise CorruptCheckpoint("the others hold another tensor", tensor=entry.name)
        wanted = {piece.tensor: piece.region(entry.spec)}
        return flat_memory(self.files.read(wanted, rank=rank)[piece.tensor])

    def _pieces(self) -> Mapping[str, Piece]:
        return read_index(self.opened.metadata.get(PIECES), path=self.opened.path).pieces

    def _check_described_by_others(self) -> None:
        """Raise unless another file confirms the metadata and index, and no tensor is missing.

        Then the shard held copies only. A file of another rank in its place has the same metadata,
        but lacks the shard's own tensors.
        """
        self.files.check_complete()
        mine = _description(self.opened.metadata, self.opened.path)
        others = (rank for rank in range(self.files.world) if rank != self.rank)
        if not any(
            _description(self.files.metadata(one), self.opened.path) == mine for one in others
        ):
            raise CorruptCheckpoint(
                "its description is damaged, or another than that of all others"
            )

    def plain_metadata(self) -> dict[str, str]:
        """Return its metadata, without the strings that the format adds."""
        names = {entry.name for entry in self.entries}
        found = self.opened.metadata
        return {key: text for key, text in found.items() if key != _CRC_KEY and key not in names}

    def save_options(self) -> SaveOptions:
        """Return the options that it was written with."""
        is_compressed = self.opened.compressed_bytes is not None
        return SaveOptions(
            format=self.opened.format,
            key=None if self.opened.cipher is None else self.options.trust.keys,
            mode=self.opened.cipher or "AES-GCM",
            has_crc=self.opened.index.crc is not None,
            compression_level=1 if is_compressed else None,
        )


def _description(metadata: Mapping[str, str], path: str) -> tuple[object, ...]:
    """Return the metadata that the files of all ranks share."""
    index = read_index(metadata.get(PIECES), path=path)
    own = (PIECES, _CRC_KEY)
    texts = {key: text for key, text in metadata.items() if key not in own}
    return (index.total, index.is_compared, texts)


def open_damaged_shard(
    manifest: Manifest, rank: int, source: Source, files: ShardedCheckpoint, options: ReadOptions
) -> DamagedShard:
    """Open a damaged file, checked by its digests where they match its index, else without.

    `source` has the right size; `files` are those of the other ranks.

    Raises:
        CkptmgrError: It does not open.
    """
    path = str(files.path.parent / manifest.shards[rank].name)
    is_proven = True
    try:
        opened = open_source(source, path=path, options=options, manifest=manifest.of_shard(rank))
    except CorruptCheckpoint:
        lenient = replace(options, trust=replace(options.trust, trusted_keys=()))
        opened, is_proven = open_source(source, path=path, options=lenient), False
    entry = manifest.shards[rank]
    if (opened.format, opened.cipher) != (entry.format, entry.cipher):
        raise CorruptCheckpoint("another kind of file is in its place", path=path)
    is_container = opened.cipher is not None and opened.format == "safetensors"
    header = None
    if is_container:
        with translated_errors(path):
            header = find_copies(source)[0].header
    return DamagedShard(
        opened=opened,
        is_proven=is_proven,
        rank=rank,
        files=files,
        options=options,
        header=header,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """Repair of a damaged file, possible or done.

    Attributes:
        bad_bytes: Length of the ranges that differ from their digests.
        sources: The files that hold copies of the damaged content.
        problem: Why it cannot be repaired, or None.
    """

    name: str
    bad_bytes: int
    sources: tuple[str, ...] = ()
    problem: str | None = None


class PaddedSource:
    """File at its right size: an excess is cut off, and zeros stand for missing bytes."""

    def __init__(self, raw: Source, size: int) -> None:
        self._raw = raw
        self.size = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`."""
        there = min(max(0, self._raw.size - offset), buffer.nbytes)
        if there:
            self._raw.read_into(offset, buffer[:there])
        buffer[there:] = bytes(buffer.nbytes - there)
