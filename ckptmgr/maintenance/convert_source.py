# SPDX-License-Identifier: Apache-2.0
"""Input of a conversion: opened once, and checked before any byte of it comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.crypto.mindspore.blocks import PLAINTEXT_BLOCK_BYTES
from ckptmgr.files.load.open import OpenCheckpoint, open_indexed, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import ENCRYPTED, kind_of, plaintext_of
from ckptmgr.files.load.tensors import CheckpointReader
from ckptmgr.files.open_checkpoint import checked_opening
from ckptmgr.formats.source import Source
from ckptmgr.io.filesystem import InputFile
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.io.unverified_reads import UnverifiedReads
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.real_files import real_file
from ckptmgr.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class DecryptionInput:
    """Opened encrypted file: its plaintext, checked as it is read.

    `unit_bytes` is the best size of reads. An image of the bytes checks the `unverified` reads,
    from which the index was made.
    """

    source: Source
    format: str
    manifest: Manifest | None
    unit_bytes: int
    unverified: UnverifiedReads | None = None

    def chunks(self) -> Iterator[memoryview]:
        """Yield the plaintext in order; each view is valid until the next one."""
        size = self.source.size
        buffer = memoryview(bytearray(min(PLAINTEXT_BLOCK_BYTES, size)))
        for offset in range(0, size, PLAINTEXT_BLOCK_BYTES):
            view = buffer[: size - offset]
            self.source.read_into(offset, view)
            yield view


@contextmanager
def open_plaintext(
    path: Path, options: ReadOptions, *, is_for_image: bool = False
) -> Iterator[DecryptionInput]:
    """Open an encrypted file for reading its plaintext.

    With `is_for_image` the plaintext is read as a `SourceImage`, which also checks `unverified`.

    Raises:
        KeyProblem: No key, a wrong one, or no seal.
        CorruptCheckpoint: Damaged, or not a checkpoint inside although it says so.
        UnsupportedCheckpoint: It is not encrypted.
    """
    manifest = _manifest_of(path, options)
    with open_raw(path) as raw, translated_errors(str(path)):
        plain = plaintext_of(raw, path=str(path), options=options, manifest=manifest)
        if plain.cipher is None:
            raise UnsupportedCheckpoint("is not encrypted; there is nothing to decrypt", path=path)
        unit_bytes = plain.unit_bytes or PIECE_BYTES
        if plain.format == OPAQUE:
            yield DecryptionInput(
                source=plain.source,
                format=OPAQUE,
                manifest=manifest,
                unit_bytes=unit_bytes,
            )
            return
        opened = open_indexed(
            plain, path=str(path), has_digests=manifest is not None, is_for_loading=is_for_image
        )
        yield DecryptionInput(
            source=opened.source,
            format=opened.format,
            manifest=manifest,
            unit_bytes=unit_bytes,
            unverified=opened.unverified,
        )


@contextmanager
def open_plain(
    path: Path, *, is_for_image: bool = False
) -> Iterator[tuple[OpenCheckpoint, Manifest | None]]:
    """Open a plain checkpoint for encrypting it; `is_for_image` as for `open_plaintext`.

    Raises:
        UnsupportedCheckpoint: It is encrypted already.
        CorruptCheckpoint: It is damaged.
    """
    manifest = _manifest_of(path, ReadOptions())
    with open_raw(path) as raw, translated_errors(str(path)):
        _refuse_encrypted(raw, path)
        opened = open_source(
            raw,
            path=str(path),
            options=ReadOptions(),
            manifest=manifest,
            is_for_loading=is_for_image,
        )
        yield opened, manifest


@contextmanager
def open_tensors(
    path: Path, options: ReadOptions
) -> Iterator[tuple[CheckpointReader, Manifest | None]]:
    """Open a checkpoint of any kind for reading its tensors one by one.

    Raises:
        KeyProblem: No key, a wrong one, or no seal.
        CorruptCheckpoint: It is damaged.
    """
    manifest = _manifest_of(path, options)
    with open_raw(path) as raw:
        yield CheckpointReader(checked_opening(raw, str(path), options, manifest)), manifest


@contextmanager
def open_bytes(path: Path) -> Iterator[InputFile]:
    """Open any plain file for encrypting it.

    Raises:
        UnsupportedCheckpoint: It is encrypted already.
    """
    with open_raw(path) as raw:
        _refuse_encrypted(raw, path)
        yield raw


@contextmanager
def open_raw(path: Path) -> Iterator[InputFile]:
    """Open a file, through links."""
    real = real_file(path)
    with contextlib.closing(Store(real.parent).fs.open(real)) as raw:
        yield raw


def _manifest_of(path: Path, options: ReadOptions) -> Manifest | None:
    real = real_file(path)
    return Store(real.parent, trust=options.trust).read_manifest(real.name, is_bare_taken=True)


def _refuse_encrypted(raw: Source, path: Path) -> None:
    if kind_of(raw, name=path.name) in ENCRYPTED:
        raise UnsupportedCheckpoint(
            "is encrypted already", path=path, hint="decrypt it first to change key or mode"
        )
