# SPDX-License-Identifier: Apache-2.0
"""Input of a conversion: opened once, and checked before any byte of it comes out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import UnsupportedCheckpoint
from ckptmgr.core.names import OPAQUE
from ckptmgr.files.load.open import open_indexed
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import plaintext_of
from ckptmgr.files.load.tensors import CheckpointReader
from ckptmgr.files.open_checkpoint import checked_opening
from ckptmgr.io.filesystem import InputFile
from ckptmgr.io.source_image import SourceImage
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.maintenance.contents import NewContent
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.real_files import real_file
from ckptmgr.store.store import Store


@contextmanager
def open_plaintext(
    path: Path, options: ReadOptions
) -> Iterator[tuple[NewContent, Manifest | None]]:
    """Open an encrypted file for reading its plaintext, checked as it is read.

    Raises:
        KeyProblem: No key, a wrong one, or no seal.
        CorruptCheckpoint: Damaged, or not a checkpoint inside although it says so.
        UnsupportedCheckpoint: It is not encrypted.
    """
    with open_file(path, options) as (raw, manifest), translated_errors(str(path)):
        plain = plaintext_of(raw, path=str(path), options=options, manifest=manifest)
        if plain.cipher is None:
            raise UnsupportedCheckpoint("is not encrypted; there is nothing to decrypt", path=path)
        format, unverified = OPAQUE, None
        if plain.format != OPAQUE:
            opened = open_indexed(
                plain, path=str(path), has_digests=manifest is not None, is_for_loading=True
            )
            format, unverified = opened.format, opened.unverified
        image = SourceImage(
            plain.source,
            plain.source.size,
            window_bytes=plain.unit_bytes or PIECE_BYTES,
            unverified=unverified,
        )
        yield NewContent(image=image, format=format), manifest


@contextmanager
def open_tensors(
    path: Path, options: ReadOptions
) -> Iterator[tuple[CheckpointReader, Manifest | None]]:
    """Open a checkpoint of any kind for reading its tensors one by one.

    Raises:
        KeyProblem: No key, a wrong one, or no seal.
        CorruptCheckpoint: It is damaged.
    """
    with open_file(path, options) as (raw, manifest):
        yield CheckpointReader(checked_opening(raw, str(path), options, manifest)), manifest


@contextmanager
def open_file(
    path: Path, options: ReadOptions, *, has_manifest: bool = True
) -> Iterator[tuple[InputFile, Manifest | None]]:
    """Open a file, through links, with the manifest that it may have."""
    real = real_file(path)
    store = Store(real.parent, trust=options.trust)
    manifest = store.read_manifest(real.name, is_bare_taken=True) if has_manifest else None
    with contextlib.closing(store.fs.open(real)) as raw:
        yield raw, manifest
