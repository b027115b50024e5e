# SPDX-License-Identifier: Apache-2.0
"""Decrypt and encrypt checkpoint files as streams: constant memory, and only checked bytes come out.

* A file target is published like a save: temporary file, synced, renamed, with a manifest. After an error there is none.
* What comes out of a decrypted sealed file is byte for byte what was sealed: an ordinary `.ckpt`, CRC trailer included.
* Damage is never sealed over: the input's digests and CRC32 are checked on the way, before the output exists.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ckptmgr.container_reader import ENCRYPTED
from ckptmgr.convert_container import container_chunks, container_content
from ckptmgr.convert_target import Content, Converted, check_target, publish, store_of
from ckptmgr.crypto.keyring import Keys, block_key
from ckptmgr.crypto.mindspore_blocks import PLAINTEXT_BLOCK_BYTES, BlockSealer
from ckptmgr.errors import (
    ChecksumMismatch,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.formats.detect import detect
from ckptmgr.formats.source import Source
from ckptmgr.formats.trailer import crc32
from ckptmgr.fsio import InputFile
from ckptmgr.glimpses import Glimpses
from ckptmgr.loader import OpenCheckpoint, ReadOptions, open_source
from ckptmgr.lower_errors import translated_errors
from ckptmgr.manifest import Manifest
from ckptmgr.naming import CONTAINER_SUFFIX
from ckptmgr.source_image import SourceImage
from ckptmgr.store import Store
from ckptmgr.units import PIECE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Plaintext:
    """An encrypted file that was opened: its plaintext, checked as it is read."""

    source: Source
    format: str
    cipher: str
    is_sealed: bool
    manifest: Manifest | None
    unit_bytes: int
    glimpses: Glimpses | None

    def chunks(self) -> Iterator[memoryview]:
        """Yield the plaintext in order; each view is valid until the next one."""
        return _chunks(self.source, 0, self.source.size)


@contextlib.contextmanager
def open_plaintext(
    path: Path, options: ReadOptions, *, is_for_image: bool = False
) -> Iterator[Plaintext]:
    """Open an encrypted file for reading its plaintext.

    Args:
        path: The file.
        options: The key, and whether a file without seal is accepted.
        is_for_image: Whether the plaintext is read as a `SourceImage`, which then also checks what the format was seen from.

    Raises:
        KeyProblem: No key, a wrong one, or no seal.
        CorruptCheckpoint: Damaged, or not a checkpoint inside.
        UnsupportedCheckpoint: It is not encrypted.
    """
    opening = _opened(path, options, is_for_image=is_for_image)
    with opening as (opened, manifest), translated_errors(str(path)):
        if opened.cipher is None:
            raise UnsupportedCheckpoint("is not encrypted; there is nothing to decrypt", path=path)
        yield Plaintext(
            source=opened.source,
            format=opened.format,
            cipher=opened.cipher,
            is_sealed=opened.is_sealed,
            manifest=manifest,
            unit_bytes=opened.unit_bytes or PIECE_BYTES,
            glimpses=opened.glimpses,
        )


def decrypt_file(
    source: Path,
    target: Path,
    *,
    options: ReadOptions,
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> Converted:
    """Write the plaintext of an encrypted checkpoint to a file; durable when this returns.

    Args:
        source: The encrypted file.
        target: Where to; in an existing directory.
        options: The key, and whether a file without seal is accepted.
        force: Whether an existing target may be replaced.
        clock: Seconds since the epoch; stamps the manifest of a file that had none.

    Raises:
        UnsafeWrite: The target is the input, exists, or has the name of a container.
        StoreLocked: A live process writes the target, or its series in that directory.
        CkptmgrError: As `open_plaintext`.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    _check_name(target, is_container=False)
    with open_plaintext(source, options, is_for_image=True) as plaintext:
        image = SourceImage(
            plaintext.source,
            plaintext.source.size,
            window_bytes=plaintext.unit_bytes,
            glimpses=plaintext.glimpses,
        )
        content = Content(image=image, format=plaintext.format)
        return publish(
            source,
            target,
            content,
            options=options,
            manifest=plaintext.manifest,
            force=force,
            clock=clock,
        )


def encrypt_file(
    source: Path,
    target: Path,
    *,
    key: Keys,
    mode: str = "AES-GCM",
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> Converted:
    """Write a plain checkpoint encrypted to a file; durable when this returns.

    A `.ckpt` stays one that MindSpore loads, with a seal; a safetensors file goes into a container.

    Args:
        source: The plain file.
        target: Where to; in an existing directory. The name of a container ends in `.ckpe`.
        key: The key.
        mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`; for safetensors also `SM4-GCM`.
        force: Whether an existing target may be replaced.
        clock: Seconds since the epoch; stamps the manifest of a file that had none.

    Raises:
        UnsafeWrite: The target is the input, exists, or has a name for something else.
        StoreLocked: A live process writes the target, or its series in that directory.
        UnsupportedCheckpoint: The input is encrypted already.
        CorruptCheckpoint: It is damaged; nothing was written.
        KeyProblem: The key does not fit the mode.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    opening = _opened_plain(source, is_for_image=True)
    with opening as (opened, manifest), translated_errors(str(source)):
        _check_name(target, is_container=opened.format == "safetensors")
        if opened.format == "safetensors":
            content = container_content(opened, key=key, mode=mode)
        else:
            content = _sealed_content(opened, key=key, mode=mode)
        return publish(
            source,
            target,
            content,
            options=ReadOptions(),
            manifest=manifest,
            force=force,
            clock=clock,
        )


def _sealed_content(opened: OpenCheckpoint, *, key: Keys, mode: str) -> Content:
    sealer = CheckingSealer(opened, key, mode)
    image = SourceImage(
        opened.source,
        sealer.body_bytes,
        has_crc_trailer=sealer.has_crc,
        glimpses=opened.glimpses,
    )
    return Content(image=image, format="ckpt", mode=mode, key=key, sealer=sealer)


def encrypted_chunks(source: Path, *, key: Keys, mode: str = "AES-GCM") -> Iterator[memoryview]:
    """Yield a plain checkpoint encrypted, in order, for a pipe; each view is valid until the next one.

    The end comes last and only after the input proved whole, so a reader refuses what an error cut short.

    Raises:
        CkptmgrError: As `encrypt_file`.
    """
    with _opened_plain(source) as (opened, _), translated_errors(str(source)):
        if opened.format == "safetensors":
            yield from container_chunks(opened, key=key, mode=mode)
            return
        sealer = CheckingSealer(opened, key, mode)
        crc = 0
        room = memoryview(bytearray(sealer.batch * sealer.largest_record))
        clear = memoryview(bytearray(room.nbytes))
        for first in range(0, sealer.block_count, sealer.batch):
            blocks = range(first, min(first + sealer.batch, sealer.block_count))
            plaintext = _joined(clear, map(sealer.plaintext_range, blocks))
            records = _joined(room, map(sealer.record_range, blocks))
            opened.source.read_into(sealer.plaintext_range(first)[0], plaintext.whole)
            crc = crc32(plaintext.whole, crc)
            sealer.seal_many(first, plaintext.parts, records.parts)
            yield records.whole
        yield memoryview(sealer.finish(crc=crc if sealer.has_crc else None))


class _Joined(NamedTuple):
    """Neighbouring pieces of memory, and all of them as one."""

    whole: memoryview
    parts: list[memoryview]


def _joined(room: memoryview, ranges: Iterable[tuple[int, int]]) -> _Joined:
    parts, end = [], 0
    for _, length in ranges:
        parts.append(room[end : end + length])
        end += length
    return _Joined(room[:end], parts)


class CheckingSealer(BlockSealer):
    """A sealer that refuses to seal a body whose CRC32 is not the one its file stated."""

    def __init__(self, opened: OpenCheckpoint, key: Keys, mode: str) -> None:
        index = opened.index
        self._stated = index.crc
        self._path = opened.path
        self.has_crc = index.crc is not None
        self.body_bytes = getattr(index, "body_bytes", opened.source.size)
        super().__init__(
            block_key(key),
            mode,
            plaintext_size=self.body_bytes,
            has_crc_trailer=self.has_crc,
        )

    @property
    def largest_record(self) -> int:
        """Bytes of the largest record; 0 where there is none."""
        return self.record_range(0)[1] if self.block_count else 0

    def finish(self, *, crc: int | None = None) -> bytes:
        """Return the seal; raise ChecksumMismatch when the CRC32 of the body is another one than the file states."""
        if crc != self._stated:
            raise ChecksumMismatch(
                f"the CRC32 is {crc or 0:#010x}, but the file states {self._stated or 0:#010x}",
                path=self._path,
                hint="the input is damaged; nothing was written",
            )
        return super().finish(crc=crc)


def _check_name(target: Path, *, is_container: bool) -> None:
    if target.name.endswith(CONTAINER_SUFFIX) != is_container:
        ending = "must end" if is_container else "must not end"
        raise UnsafeWrite(
            f"the name {ending} in {CONTAINER_SUFFIX}, which containers have",
            path=target,
            hint="choose another name",
        )


@contextlib.contextmanager
def _opened_plain(
    path: Path, *, is_for_image: bool = False
) -> Iterator[tuple[OpenCheckpoint, Manifest | None]]:
    with contextlib.closing(_open_raw(path)) as raw:
        if detect(raw) in ENCRYPTED:
            raise UnsupportedCheckpoint(
                "is encrypted already", path=path, hint="decrypt it first to change key or mode"
            )
    with _opened(path, ReadOptions(), is_for_image=is_for_image) as found:
        yield found


@contextlib.contextmanager
def _opened(
    path: Path, options: ReadOptions, *, is_for_image: bool
) -> Iterator[tuple[OpenCheckpoint, Manifest | None]]:
    real = Path(os.path.realpath(path))
    manifest = store_of(real, options).read_manifest(real.name)
    with contextlib.closing(_open_raw(real)) as raw:
        opened = open_source(
            raw, path=str(path), options=options, manifest=manifest, is_for_loading=is_for_image
        )
        yield opened, manifest


def _open_raw(path: Path) -> InputFile:
    return Store(path.parent).fs.open(path)


def _chunks(source: Source, start: int, stop: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PLAINTEXT_BLOCK_BYTES, stop - start)))
    for offset in range(start, stop, PLAINTEXT_BLOCK_BYTES):
        view = buffer[: min(PLAINTEXT_BLOCK_BYTES, stop - offset)]
        source.read_into(offset, view)
        yield view
