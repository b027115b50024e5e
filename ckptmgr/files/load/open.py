# SPDX-License-Identifier: Apache-2.0
"""Open a checkpoint file: raw bytes -> checked -> decrypted -> indexed, all through one descriptor.

Each stage is a source over the previous one, returns only checked bytes, and reads no more than
needed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors, unproven_error
from ckptmgr.core.errors import CorruptCheckpoint, UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.files.load.compressed import read_frames
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import Plaintext, plaintext_of
from ckptmgr.files.load.state import check_documents
from ckptmgr.formats import safetensors_file
from ckptmgr.formats.compressed.source import FramesSource
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.file_crc import FileCrc
from ckptmgr.formats.mindspore import reader as mindspore_reader
from ckptmgr.formats.mindspore.entries import CkptEntry
from ckptmgr.formats.mindspore.reader import CkptIndex
from ckptmgr.formats.safetensors_file import SafetensorsIndex
from ckptmgr.formats.source import Source
from ckptmgr.io.arenas import Arena
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.io.page_cache import bypass_page_cache_unless_shared
from ckptmgr.io.scatter import Placement, SmallTensorBatch, read_scattered
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.io.unverified_reads import UnverifiedReads
from ckptmgr.store.manifest.codec import Manifest

if TYPE_CHECKING:
    from ckptmgr.store.store import Store

_Result = TypeVar("_Result")
_offset_of = operator.attrgetter("offset")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint file that was opened, checked as far as it was read, and indexed.

    Attributes:
        path: For messages.
        source: The plaintext.
        index: The tensors and their places.
        cipher: The cipher mode, or None for a plain file.
        is_sealed: Whether the file as a whole is authenticated.
        has_digests: Whether a manifest vouches for every byte that is read.
        unit_bytes: The number of bytes that the source checks at once; 0 if it is read tensor by
            tensor.
        unverified: The reads of the index, if the read of the contents has to check them.
    """

    path: str
    source: Source
    index: CkptIndex | SafetensorsIndex
    cipher: str | None
    is_sealed: bool
    has_digests: bool
    unit_bytes: int = PIECE_BYTES
    unverified: UnverifiedReads | None = None

    @property
    def format(self) -> str:
        """`ckpt` or `safetensors`."""
        return self.index.format

    @property
    def entries(self) -> Sequence[CkptEntry]:
        """Its entries, in the order that users see; `index.entries` are in file order."""
        return self.index.listed

    @property
    def frames(self) -> FramesSource | None:
        """The source of a compressed file."""
        return self.source if isinstance(self.source, FramesSource) else None

    @property
    def compressed_bytes(self) -> int | None:
        """Bytes of the compressed file that the source expands, or None if it is not compressed."""
        return None if self.frames is None else self.frames.stored_bytes

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata strings of the file."""
        return dict(self.index.metadata or {})

    def read(
        self,
        placements: Sequence[Placement],
        *,
        batches: Sequence[SmallTensorBatch] = (),
        arenas: Sequence[Arena] = (),
        crc: FileCrc | None = None,
        confirmed: Iterable[int] | None = None,
    ) -> None:
        """Fill the targets of placements, in order of their offsets, batches and arenas, verified.

        Frames are verified by their table, cipher blocks by their tags, plain files by the digests
        of their ranges. `crc` gets every byte that it covers. The units in `confirmed` are read
        whole, to check the unverified reads of the index; by default all that have such reads.

        Raises:
            CkptmgrError, FormatError, CryptoError: The bytes or the index are damaged; the targets
                are then undefined.
            OSError: From the disk.
        """
        if self.frames is not None:
            read_frames(self.frames, placements, crc=crc)
        elif self.unit_bytes:
            unverified = self.unverified
            if confirmed is None:
                confirmed = () if unverified is None else unverified.units(self.unit_bytes)
            read_scattered(
                self.source,
                sorted([*placements, *batches], key=_offset_of) if batches else placements,
                arenas=arenas,
                unit_bytes=self.unit_bytes,
                crc=crc,
                unverified=unverified if confirmed else None,
                also_units=confirmed,
            )
        else:
            for one in placements:
                self.source.read_into(one.offset, one.target)


def open_source(
    raw: Source,
    *,
    path: str,
    options: ReadOptions,
    manifest: Manifest | None = None,
    is_for_loading: bool = False,
) -> OpenCheckpoint:
    """Open a checkpoint over raw bytes.

    With a manifest, every byte that is read is checked against its digests. `is_for_loading`:
    `read_values` will read all contents and check the index; otherwise the index is checked here,
    which may read most of a `.ckpt`.

    Raises:
        CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint: See `ckptmgr.errors`.
    """
    with translated_errors(path):
        plain = plaintext_of(raw, path=path, options=options, manifest=manifest)
    return open_indexed(
        plain, path=path, has_digests=manifest is not None, is_for_loading=is_for_loading
    )


def with_manifest(store: Store, name: str, read: Callable[[Manifest | None], _Result]) -> _Result:
    """Call `read` with the manifest of a file; retry if another process replaced both meanwhile."""
    manifest = store.read_manifest(name, is_bare_taken=True)
    while True:
        try:
            return read(manifest)
        except CorruptCheckpoint:
            # A writer may have replaced both files since the manifest was read.
            latest = store.read_manifest(name, is_bare_taken=True)
            if latest == manifest:
                raise
            manifest = latest


@contextmanager
def open_listed(
    store: Store, checkpoint: Checkpoint, *, options: ReadOptions, is_read_once: bool = True
) -> Iterator[tuple[OpenCheckpoint, Manifest | None]]:
    """Open a checkpoint of a store together with its manifest; `read_values` reads it.

    With `is_read_once` the read bypasses the page cache, unless other ranks may read the file, too.

    Raises:
        CkptmgrError: It is damaged or missing, or the keys do not open it.
        OSError: From the disk.
    """
    path = checkpoint.path
    with translated_errors(str(path)):
        manifest = store.read_manifest(checkpoint.name)
        if manifest is not None and manifest.shards:
            manifest = manifest.of_shard(_rank_of(checkpoint, options))
            path = store.directory / manifest.name
        if manifest is None and options.trust.is_strict:
            # The seal proves the writer of the file, not its step: an attacker could have renamed
            # an older file.
            raise unproven_error(checkpoint.path, options.trust)
        file = store.open_data(path)
        with contextlib.closing(
            bypass_page_cache_unless_shared(file) if is_read_once else file
        ) as raw:
            opened = open_source(
                raw,
                path=str(path),
                options=options,
                manifest=manifest,
                is_for_loading=True,
            )
            yield opened, manifest


def _rank_of(checkpoint: Checkpoint, options: ReadOptions) -> int:
    """Return the rank whose file of a sharded checkpoint this process reads.

    Raises:
        UnsupportedCheckpoint: The number of ranks differs from that of the save.
    """
    saved_by = len(checkpoint.shards)
    if options.rank is None or options.world != saved_by:
        readers = "no coordinator was given" if options.rank is None else f"{options.world} read"
        raise UnsupportedCheckpoint(
            f"was saved by {saved_by} ranks, but {readers}",
            path=checkpoint.path,
            hint="start as many ranks, or read the files one by one: each is an ordinary checkpoint",
        )
    return options.rank


def open_indexed(
    plain: Plaintext, *, path: str, has_digests: bool, is_for_loading: bool
) -> OpenCheckpoint:
    """Open the checkpoint in a plaintext; `has_digests` if a manifest vouches for it.

    Raises:
        CorruptCheckpoint: It is damaged.
        UnsupportedCheckpoint: It is no checkpoint.
    """
    if plain.format == OPAQUE:
        raise UnsupportedCheckpoint(
            "holds a file that is no checkpoint",
            path=path,
            hint="ckptmgr decrypt gives that file back",
        )
    with translated_errors(path):
        unverified = plain.unverified if is_for_loading else None
        index = None
        if unverified is not None:
            # If unchecked bytes cannot be parsed, the checked ones give the error.
            with contextlib.suppress(FormatError):
                index = _index(unverified, path, plain.format)
        if index is None:
            index, unverified = _index(plain.source, path, plain.format), None
        opened = OpenCheckpoint(
            path=path,
            source=plain.source,
            index=index,
            cipher=plain.cipher,
            is_sealed=plain.is_sealed,
            has_digests=has_digests,
            unit_bytes=plain.unit_bytes,
            unverified=unverified,
        )
        stored_bytes = plain.source.size if opened.frames is None else opened.frames.stored_bytes
        check_documents(index.metadata or {}, stored_bytes=stored_bytes)
        return opened


def _index(source: Source, path: str, format: str | None) -> CkptIndex | SafetensorsIndex:
    if format is None:
        is_named = path.endswith(".safetensors") or isinstance(source, FramesSource)
        is_safetensors = is_named or detect(source) is Kind.SAFETENSORS
        format = "safetensors" if is_safetensors else "ckpt"
    with gc_paused():
        if format == "safetensors":
            return safetensors_file.read_safetensors_index(source)
        return mindspore_reader.read_ckpt_index(source)
