# SPDX-License-Identifier: Apache-2.0
"""Heal encrypted and compressed files of many ranks: each is written anew, under a new name.

The same tensors are other bytes each time they are sealed or compressed, so no digest can say that a file is what it was.
Instead nothing goes into the new file that is not proven by the manifest: tensors come from the other files, or from ranges
of the damaged one that match their digests; so does its description, or it says nothing that the others do not say as well.
A file that somebody put in its place proves nothing.

In this order: the new file durable, under the name of an attempt of its own; the manifest replaced by one that names it (the
commit point), durable; the damaged file removed. What an interruption leaves is collected like any other attempt.
"""

from __future__ import annotations

import contextlib
import stat
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ckptmgr.chain import contradiction
from ckptmgr.crypto.container_unlock import find_copies
from ckptmgr.crypto.keyring import ring_of
from ckptmgr.digest import differing_ranges
from ckptmgr.errors import (
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.formats.index import TensorEntry, read_tensor_into
from ckptmgr.formats.source import Source
from ckptmgr.formats.tensor import Tensor
from ckptmgr.fsio import remove_name
from ckptmgr.healing import Healing, PaddedSource
from ckptmgr.loader import OpenCheckpoint, ReadOptions, bytes_of, open_source
from ckptmgr.lower_errors import translated_errors
from ckptmgr.manifest import FileEntry, Manifest
from ckptmgr.pieces import PIECES, Piece, read_index
from ckptmgr.saver import SaveOptions, SaveOrder, save_items
from ckptmgr.shard_files import ShardFiles
from ckptmgr.shard_names import new_attempt_id, parse_shard_name, shard_name
from ckptmgr.sharded import ShardedCheckpoint
from ckptmgr.store import Store

_CRC_KEY = "crc_num"


class SealedRepair:
    """Heals one checkpoint; the lease must be held.

    Args:
        store: The directory, with the keys of the manifest.
        manifest: Of all files, proven as far as the store insists on it.
        options: The key.
        clock: Seconds since 1970; names the new files.
    """

    def __init__(
        self, store: Store, manifest: Manifest, *, options: ReadOptions, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._options = options
        self._clock = clock

    def run(self) -> list[Healing]:
        """Heal what can be healed; return what was done for every file that was damaged, by its old name.

        Raises:
            KeyProblem: A key is missing: that of the files, or one that proves the manifest.
            UnsupportedCheckpoint: A later checkpoint names this one by its id, and no key tells that it is the same save.
            OSError: From the disk. Files that were healed before stay so.
        """
        done: dict[str, Healing] = {}
        is_going_on = True
        # A file that could not be healed may be after another one was.
        while is_going_on:
            found = [self._treated(rank) for rank in range(len(self._manifest.shards))]
            new = [one for one in found if one is not None]
            done |= {one.name: one for one in new}
            is_going_on = any(one.problem is None for one in new)
        return [done[name] for name in sorted(done)]

    def _check_changeable(self) -> None:
        store, manifest = self._store, self._manifest
        checkpoint = manifest.to_checkpoint(store.directory)
        if manifest.file.cipher is not None and self._options.key is None:
            raise KeyProblem(
                "its files are encrypted; what is healed is encrypted anew",
                path=checkpoint.path,
                hint="pass the key (CLI: --key)",
            )
        store.check_rewritable(checkpoint)
        changed = replace(manifest, shards=(self._renamed(0), *manifest.shards[1:]))
        if contradiction(changed.to_checkpoint(store.directory), store.scan()) is not None:
            raise UnsupportedCheckpoint(
                "a later checkpoint names it by its id, which would change",
                path=checkpoint.path,
                hint="load it, which takes the copies where they are whole, and save it again",
            )

    def _treated(self, rank: int) -> Healing | None:
        entry = self._manifest.shards[rank]
        with contextlib.ExitStack() as stack:
            try:
                raw = stack.enter_context(
                    contextlib.closing(self._store.fs.open(self._store.directory / entry.name))
                )
            except FileNotFoundError:
                return Healing(name=entry.name, bad_bytes=0, problem="it is gone")
            source = PaddedSource(raw, entry.digest.size_bytes)
            bad = differing_ranges(source, entry.digest)
            if not bad and raw.size == source.size:
                return None
            self._check_changeable()
            found = Healing(name=entry.name, bad_bytes=sum(stop - start for start, stop in bad))
            files = stack.enter_context(
                ShardedCheckpoint(self._store, self._manifest, options=self._options)
            )
            files.leave_out(rank)
            try:
                patient = _opened_patient(self._manifest, rank, source, files, self._options)
                patient.check()
            except CkptmgrError as error:
                return replace(found, problem=error.message)
            self._replace(rank, patient)
            sources = tuple(self._manifest.shards[other].name for other in sorted(files.used))
        return replace(found, sources=sources)

    def _replace(self, rank: int, patient: _Patient) -> None:
        """Write the file anew, commit it, and remove the old one."""
        store, old = self._store, self._manifest.shards[rank]
        status = store.fs.status(store.directory / old.name)
        order = SaveOrder(
            name=self._renamed(rank).name,
            items=[
                Tensor(spec=entry.spec, content=partial(patient.content, entry))
                for entry in patient.entries
            ],
            options=replace(
                patient.save_options(),
                file_mode=0o400 if status is None else stat.S_IMODE(status.mode),
            ),
            series=self._manifest.series,
            describe=partial(self._described, rank),
            metadata=patient.plain_metadata(),
        )
        changed = save_items(ShardFiles(store.directory, fs=store.fs), order)
        store.update_manifest(changed)
        self._manifest = changed
        remove_name(store.fs, store.directory / old.name)
        store.fs.sync_directory(store.directory)

    def _described(self, rank: int, entry: FileEntry, _: Mapping[str, float]) -> Manifest:
        shards = list(self._manifest.shards)
        shards[rank] = entry
        return replace(self._manifest, file=shards[0], shards=tuple(shards))

    def _renamed(self, rank: int) -> FileEntry:
        entry = self._manifest.shards[rank]
        old = parse_shard_name(entry.name)
        if old is None:
            raise CorruptCheckpoint("is not the name of the file of a rank", path=entry.name)
        prefix = shard_name(old.stem, rank, world=old.world, attempt_id=old.attempt_id, format="")
        name = shard_name(
            old.stem,
            rank,
            world=old.world,
            attempt_id=new_attempt_id(self._clock()),
            format=entry.name.removeprefix(prefix),
        )
        return replace(entry, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patient:
    """A damaged file that could be opened.

    Attributes:
        opened: The file.
        is_proven: Whether what is read of it matches the digests of the manifest.
        rank: Whose it is.
        files: Those of the others.
        options: The key.
        slot_count: For how many keys it is encrypted.
        lock: Held while files are read: several threads ask for the tensors of the new one.
    """

    opened: OpenCheckpoint
    is_proven: bool
    rank: int
    files: ShardedCheckpoint
    options: ReadOptions
    slot_count: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def entries(self) -> list[TensorEntry]:
        """Its tensors."""
        return [one for one in self.opened.index.entries if isinstance(one, TensorEntry)]

    def check(self) -> None:
        """Raise unless all of it can be had; reads everything.

        Raises:
            CkptmgrError: It cannot; says why.
        """
        kept = 0 if self.options.key is None else len(ring_of(self.options.key).recipients)
        if self.slot_count > kept:
            raise UnsafeWrite(f"it is encrypted for {self.slot_count} keys; given: {kept}")
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
        return bytes_of(self.files.read(wanted, rank=rank)[piece.tensor])

    def _pieces(self) -> Mapping[str, Piece]:
        return read_index(self.opened.metadata.get(PIECES), path=self.opened.path).pieces

    def _check_described_by_others(self) -> None:
        """Raise unless the other files show that the description is right: the same texts, and no tensor is missing."""
        self.files.names(self.rank)
        mine = _description(self.opened.metadata, self.opened.path)
        others = (rank for rank in range(self.files.world) if rank != self.rank)
        if not any(
            _description(self.files.metadata(one), self.opened.path) == mine for one in others
        ):
            raise CorruptCheckpoint(
                "its description is damaged, or another than that of all others"
            )

    def plain_metadata(self) -> dict[str, str]:
        """Return the strings that were kept in it, without those that the format adds by itself."""
        names = {entry.name for entry in self.entries}
        found = self.opened.metadata
        return {key: text for key, text in found.items() if key != _CRC_KEY and key not in names}

    def save_options(self) -> SaveOptions:
        """Return how it was written."""
        is_compressed = self.opened.compressed_bytes is not None
        return SaveOptions(
            format=self.opened.format,
            key=None if self.opened.cipher is None else self.options.key,
            mode=self.opened.cipher or "AES-GCM",
            has_crc=self.opened.index.crc is not None,
            compression_level=1 if is_compressed else None,
        )


def _description(metadata: Mapping[str, str], path: str) -> tuple[object, ...]:
    """Return what a file says that all files say alike."""
    index = read_index(metadata.get(PIECES), path=path)
    own = (PIECES, _CRC_KEY)
    texts = {key: text for key, text in metadata.items() if key not in own}
    return (index.total, index.is_compared, texts)


def _opened_patient(
    manifest: Manifest, rank: int, source: Source, files: ShardedCheckpoint, options: ReadOptions
) -> _Patient:
    path = str(files.path.parent / manifest.shards[rank].name)
    is_proven = True
    try:
        opened = open_source(source, path=path, options=options, manifest=manifest.of_shard(rank))
    except CorruptCheckpoint:
        lenient = replace(options, trusted_keys=())
        opened, is_proven = open_source(source, path=path, options=lenient), False
    entry = manifest.shards[rank]
    if (opened.format, opened.cipher) != (entry.format, entry.cipher):
        raise CorruptCheckpoint("another kind of file is in its place", path=path)
    is_container = opened.cipher is not None and opened.format == "safetensors"
    slot_count = 0
    if is_container:
        with translated_errors(path):
            slot_count = len(find_copies(source)[0].header.slots)
    return _Patient(
        opened=opened,
        is_proven=is_proven,
        rank=rank,
        files=files,
        options=options,
        slot_count=slot_count,
    )
