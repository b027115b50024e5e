# SPDX-License-Identifier: Apache-2.0
"""Summary of a checkpoint file: the envelope without a key, and with it the tensors.

The tensors are read for their statistics only, and checked like those of a load.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CheckpointNotFound, UnsupportedCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.detect import cipher_of
from ckptmgr.files.load.container import container_format, container_openers
from ckptmgr.files.load.open import OpenCheckpoint, open_indexed
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import ENCRYPTED, Plaintext, kind_of, plaintext_of
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.files.load.statistics import TensorStats, stats_of
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore.entries import MapEntry, TextEntry
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One whole tensor, its requested statistics, and the ranks that have it if ranks differ."""

    spec: TensorSpec
    stats: TensorStats | None = None
    ranks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaintextSummary:
    """Summary of the decrypted file.

    Attributes:
        format: `ckpt`, `safetensors`, or `OPAQUE`: a file that is no checkpoint.
        size_bytes: Size of the expanded plaintext.
        compressed_bytes: Size of the compressed plaintext, or None.
        is_sealed: Whether an encrypted file is authenticated as a whole.
        crc: The stored CRC32, unchecked; or None.
        metadata: Metadata strings of the file.
        tensors: The chosen ones in file order; parts of a map parameter are `map.key`, `map.value`,
            `map.status`.
        texts: The chosen named strings.
    """

    format: str
    size_bytes: int
    compressed_bytes: int | None
    is_sealed: bool
    crc: int | None
    metadata: Mapping[str, str]
    tensors: tuple[StoredTensor, ...]
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSummary:
    """Summary of one checkpoint file; `plain` is None for an encrypted file without a key."""

    checkpoint: Checkpoint
    manifest: Manifest | None
    stored_bytes: int
    cipher: str | None
    plain: PlaintextSummary | None


def inspect_file(
    store: Store,
    checkpoint: Checkpoint,
    *,
    options: ReadOptions,
    choose: Callable[[str], bool] = lambda _: True,
    has_stats: bool = False,
) -> FileSummary:
    """Return the summary of a checkpoint; with `has_stats`, read the tensors for their statistics.

    Raises:
        CkptmgrError: It is damaged, does not open with the key, or its kind is unknown.
        OSError: From the disk.
    """
    path = str(checkpoint.path)
    if checkpoint.shards:
        if has_stats:
            raise UnsupportedCheckpoint(
                f"was saved by {len(checkpoint.shards)} ranks; figures are those of single files",
                path=path,
                hint=f"look at one of them: {checkpoint.shards[0]}",
            )
        return _of_many_ranks(store, checkpoint, options, choose)
    with translated_errors(path), contextlib.closing(store.fs.open(checkpoint.path)) as raw:
        manifest = store.read_manifest(checkpoint.name, is_bare_taken=True)
        plain, kind = None, kind_of(raw, name=path)
        if kind is Kind.CKPTMGR_CONTAINER:
            format = container_format(raw) if manifest is None else checkpoint.format
            checkpoint = replace(checkpoint, opened_by=container_openers(raw), format=format)
        if options.trust.keys is not None or kind not in ENCRYPTED:
            source = plaintext_of(raw, path=path, options=options, manifest=manifest)
            plain = _plain(
                source, path, choose, has_manifest=manifest is not None, has_stats=has_stats
            )
        return FileSummary(
            checkpoint=checkpoint,
            manifest=manifest,
            stored_bytes=raw.size,
            cipher=cipher_of(raw),
            plain=plain,
        )


def _of_many_ranks(
    store: Store, checkpoint: Checkpoint, options: ReadOptions, choose: Callable[[str], bool]
) -> FileSummary:
    manifest = store.read_manifest(checkpoint.name)
    if manifest is None or not manifest.shards:
        raise CheckpointNotFound("there is no manifest", path=checkpoint.path)
    plain = None
    if options.trust.keys is not None or manifest.file.cipher is None:
        with ShardedCheckpoint(store, manifest, options=options) as files:
            found = [(spec, ranks) for spec, ranks in files.tensors() if choose(spec.name)]
            plain = PlaintextSummary(
                format=manifest.file.format,
                size_bytes=files.piece_bytes,
                compressed_bytes=None,
                is_sealed=manifest.file.cipher is not None,
                crc=None,
                metadata={},
                tensors=tuple(StoredTensor(spec=spec, ranks=ranks) for spec, ranks in found),
                texts={},
            )
    return FileSummary(
        checkpoint=checkpoint,
        manifest=manifest,
        stored_bytes=checkpoint.size_bytes,
        cipher=manifest.file.cipher,
        plain=plain,
    )


def indexed_tensors(opened: OpenCheckpoint) -> Iterator[tuple[str, TensorEntry]]:
    """Yield every tensor with its name; map parameters as `map.key`, `map.value`, `map.status`."""
    for entry in opened.index.entries:
        if isinstance(entry, MapEntry):
            for part in (entry.key, entry.value, entry.status):
                yield f"{entry.name}.{part.name}", part
        elif not isinstance(entry, TextEntry):
            yield entry.name, entry


def _plain(
    plain: Plaintext,
    path: str,
    choose: Callable[[str], bool],
    *,
    has_manifest: bool,
    has_stats: bool,
) -> PlaintextSummary:
    if plain.format == OPAQUE:
        return PlaintextSummary(
            format=OPAQUE,
            size_bytes=plain.source.size,
            compressed_bytes=None,
            is_sealed=plain.is_sealed,
            crc=None,
            metadata={},
            tensors=(),
            texts={},
        )
    opened = open_indexed(plain, path=path, has_digests=has_manifest, is_for_loading=False)
    texts = [entry for entry in opened.index.entries if isinstance(entry, TextEntry)]
    return PlaintextSummary(
        format=opened.format,
        size_bytes=opened.source.size,
        compressed_bytes=opened.compressed_bytes,
        is_sealed=opened.is_sealed,
        crc=opened.index.crc,
        metadata=opened.metadata,
        tensors=tuple(
            StoredTensor(
                spec=TensorSpec(name=name, dtype=entry.spec.dtype, shape=entry.spec.shape),
                stats=stats_of(opened.source, entry) if has_stats else None,
            )
            for name, entry in indexed_tensors(opened)
            if choose(name)
        ),
        texts={entry.name: entry.text for entry in texts if choose(entry.name)},
    )
