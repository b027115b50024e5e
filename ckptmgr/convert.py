# SPDX-License-Identifier: Apache-2.0
"""Decrypt and encrypt checkpoint files as streams: constant memory, and only checked bytes come out.

* A file target is published like a save: temporary file, synced, renamed, with a manifest. After an error there is none.
* What comes out of a decrypted sealed file is byte for byte what was sealed: an ordinary `.ckpt`, CRC trailer included.
* Damage is never sealed over: the input's digests and CRC32 are checked on the way, before the output exists.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.crypto.key import Key
from ckptmgr.crypto.mindspore_blocks import PLAINTEXT_BLOCK_BYTES, BlockSealer
from ckptmgr.digest import RANGE_BYTES, FileDigest
from ckptmgr.errors import (
    CheckpointNotFound,
    ChecksumMismatch,
    NotBuiltYet,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.image import Image, Segment
from ckptmgr.formats.source import Source
from ckptmgr.formats.trailer import crc32
from ckptmgr.fsio import InputFile, OutputFile
from ckptmgr.lease import lease_path
from ckptmgr.loader import OpenCheckpoint, ReadOptions, open_source, translated_errors
from ckptmgr.manifest import SUFFIX, FileEntry, Manifest
from ckptmgr.model import Checkpoint
from ckptmgr.naming import parse_name
from ckptmgr.pipeline import write_image
from ckptmgr.store import Store

_PRIVATE = 0o600


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion did.

    Attributes:
        source: The input.
        target: The checkpoint that was written.
        source_bytes: Size of the input.
    """

    source: Path
    target: Checkpoint
    source_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plaintext:
    """An encrypted file that was opened: its plaintext, checked as it is read."""

    source: Source
    format: str
    cipher: str
    is_sealed: bool

    def chunks(self) -> Iterator[memoryview]:
        """Yield the plaintext in order; each view is valid until the next one."""
        return _chunks(self.source, 0, self.source.size)


@contextlib.contextmanager
def open_plaintext(path: Path, options: ReadOptions) -> Iterator[Plaintext]:
    """Open an encrypted file for reading its plaintext.

    Args:
        path: The file.
        options: The key, and whether a file without seal is accepted.

    Raises:
        KeyProblem: No key, a wrong one, or no seal.
        CorruptCheckpoint: Damaged, or not a checkpoint inside.
        UnsupportedCheckpoint: It is not encrypted.
    """
    with _opened(path, options) as opened, translated_errors(str(path)):
        if opened.cipher is None:
            raise UnsupportedCheckpoint("is not encrypted; there is nothing to decrypt", path=path)
        yield Plaintext(
            source=opened.source,
            format=opened.format,
            cipher=opened.cipher,
            is_sealed=opened.is_sealed,
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
        UnsafeWrite: The target is the input, or exists.
        CkptmgrError: As `open_plaintext`.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    with open_plaintext(source, options) as plaintext:
        image = _image_of(plaintext.source, plaintext.source.size, PLAINTEXT_BLOCK_BYTES)
        entry = _Entry(format=plaintext.format)
        return _publish(source, target, image, entry, options=options, clock=clock)


def encrypt_file(
    source: Path,
    target: Path,
    *,
    key: Key,
    mode: str = "AES-GCM",
    force: bool = False,
    clock: Callable[[], float] = time.time,
) -> Converted:
    """Write a plain `.ckpt` encrypted and sealed to a file; durable when this returns.

    Args:
        source: The plain file.
        target: Where to; in an existing directory.
        key: The key.
        mode: `AES-GCM`, `AES-CBC` or `SM4-CBC`.
        force: Whether an existing target may be replaced.
        clock: Seconds since the epoch; stamps the manifest of a file that had none.

    Raises:
        UnsafeWrite: The target is the input, or exists.
        UnsupportedCheckpoint: The input is encrypted already.
        NotBuiltYet: It is a safetensors file.
        CorruptCheckpoint: It is damaged; nothing was written.
        KeyProblem: The key does not fit the mode.
        OSError: From the disk; nothing was changed.
    """
    check_target(source, target, force=force)
    with _opened_plain(source) as opened, translated_errors(str(source)):
        sealer = _checking_sealer(opened, key, mode)
        image = _image_of(opened.source, sealer.body_bytes, RANGE_BYTES, sealer.has_crc)
        entry = _Entry(format="ckpt", mode=mode, key=key, sealer=sealer)
        return _publish(source, target, image, entry, options=ReadOptions(), clock=clock)


def encrypted_chunks(source: Path, *, key: Key, mode: str = "AES-GCM") -> Iterator[memoryview]:
    """Yield a plain `.ckpt` encrypted and sealed, in order, for a pipe; each view is valid until the next one.

    The seal comes last and only after the input proved whole, so a reader refuses what an error cut short.

    Raises:
        CkptmgrError: As `encrypt_file`.
    """
    with _opened_plain(source) as opened, translated_errors(str(source)):
        sealer = _checking_sealer(opened, key, mode)
        record = memoryview(bytearray(sealer.largest_record))
        crc = 0
        for index in range(sealer.block_count):
            start, length = sealer.plaintext_range(index)
            view = record[: sealer.record_range(index)[1]]
            plaintext = memoryview(bytearray(length))
            opened.source.read_into(start, plaintext)
            crc = crc32(plaintext, crc)
            sealer.seal_into(index, plaintext, view)
            yield view
        yield memoryview(sealer.finish(crc=crc if sealer.has_crc else None))


def check_target(source: Path, target: Path, *, force: bool) -> None:
    """Raise unless `target` may be written.

    Raises:
        CheckpointNotFound: There is no such input, or no directory for the output.
        UnsafeWrite: The target is the input (by any name), exists, or has the name of a manifest.
    """
    if not source.is_file():
        raise CheckpointNotFound("no such file", path=source)
    if not target.parent.is_dir():
        raise CheckpointNotFound("no such directory", path=target.parent)
    if target.name.endswith(SUFFIX):
        raise UnsafeWrite("is the name of a manifest", path=target, hint="choose another name")
    if not os.path.lexists(target):
        return
    if target.exists() and target.samefile(source):
        raise UnsafeWrite(
            "is the input itself", path=target, hint="write to another file and rename it then"
        )
    if target.is_dir() or not force:
        raise UnsafeWrite("exists", path=target, hint="choose another name, or pass --force")


class _CheckingSealer(BlockSealer):
    """A sealer that refuses to seal a body whose CRC32 is not the one its file stated."""

    def __init__(self, opened: OpenCheckpoint, key: Key, mode: str) -> None:
        index = opened.index
        self._stated = index.crc
        self._path = opened.path
        self.has_crc = index.crc is not None
        self.body_bytes = getattr(index, "body_bytes", opened.source.size)
        super().__init__(key, mode, plaintext_size=self.body_bytes, has_crc_trailer=self.has_crc)

    @property
    def largest_record(self) -> int:
        return self.record_range(0)[1] if self.block_count else 0

    def finish(self, *, crc: int | None = None) -> bytes:
        if crc != self._stated:
            raise ChecksumMismatch(
                f"the CRC32 is {crc or 0:#010x}, but the file states {self._stated or 0:#010x}",
                path=self._path,
                hint="the input is damaged; nothing was written",
            )
        return super().finish(crc=crc)


def _checking_sealer(opened: OpenCheckpoint, key: Key, mode: str) -> _CheckingSealer:
    if opened.format != "ckpt":
        raise NotBuiltYet(
            "encrypted safetensors files are not built yet",
            path=opened.path,
            hint="only .ckpt files can be encrypted by this version",
        )
    return _CheckingSealer(opened, key, mode)


@contextlib.contextmanager
def _opened_plain(path: Path) -> Iterator[OpenCheckpoint]:
    with contextlib.closing(_open_raw(path)) as raw:
        if detect(raw) is Kind.MINDSPORE_ENCRYPTED:
            raise UnsupportedCheckpoint(
                "is encrypted already", path=path, hint="decrypt it first to change key or mode"
            )
    with _opened(path, ReadOptions()) as opened:
        yield opened


@contextlib.contextmanager
def _opened(path: Path, options: ReadOptions) -> Iterator[OpenCheckpoint]:
    real = Path(os.path.realpath(path))
    manifest = _store_of(real, options).read_manifest(real.name)
    with contextlib.closing(_open_raw(real)) as raw:
        opened = open_source(raw, path=str(path), options=options)
        if manifest is not None and not opened.is_sealed:
            # The seal proves every block; without one the digests must.
            opened = open_source(raw, path=str(path), options=options, manifest=manifest)
        yield opened


def _open_raw(path: Path) -> InputFile:
    return Store(path.parent).fs.open(path)


def _store_of(path: Path, options: ReadOptions) -> Store:
    is_strict = options.key is not None and not options.allow_unsealed
    return Store(path.parent, key=options.key, must_authenticate=is_strict)


def _image_of(source: Source, size: int, segment_bytes: int, has_crc: bool = False) -> Image:
    """Return an image whose segments are read when their turn comes."""

    def segment(start: int) -> Segment:
        length = min(segment_bytes, size - start)

        def content() -> memoryview:
            view = memoryview(bytearray(length))
            source.read_into(start, view)
            return view

        return Segment(content, 0, length)

    return Image(map(segment, range(0, size, segment_bytes)), has_crc_trailer=has_crc)


def _chunks(source: Source, start: int, stop: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(PLAINTEXT_BLOCK_BYTES, stop - start)))
    for offset in range(start, stop, PLAINTEXT_BLOCK_BYTES):
        view = buffer[: min(PLAINTEXT_BLOCK_BYTES, stop - offset)]
        source.read_into(offset, view)
        yield view


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """What is special about the target."""

    format: str
    mode: str | None = None
    key: Key | None = None
    sealer: BlockSealer | None = None


def _publish(
    source: Path,
    target: Path,
    image: Image,
    entry: _Entry,
    *,
    options: ReadOptions,
    clock: Callable[[], float],
) -> Converted:
    real = Path(os.path.realpath(source))
    directory = Path(os.path.realpath(target.parent))
    described = _description(real, directory / target.name, options, clock)
    store = Store(directory, key=entry.key)

    def write(file: OutputFile) -> FileDigest:
        return write_image(image, file, sealer=entry.sealer).digest

    def describe(digest: FileDigest) -> Manifest:
        file = FileEntry(
            name=target.name,
            digest=digest,
            format=entry.format,
            cipher=entry.mode,
            key_id=None if entry.key is None else entry.key.key_id,
        )
        return replace(described, file=file)

    with _lease_if_used(store, described.series):
        manifest = store.publish(
            target.name,
            series=described.series,
            size_bytes=image.size if entry.sealer is None else entry.sealer.sealed_size,
            write=write,
            describe=describe,
            mode=private_mode(real),
        )
    return Converted(
        source=source, target=manifest.to_checkpoint(directory), source_bytes=real.stat().st_size
    )


def private_mode(source: Path) -> int:
    """Return the permission bits of an output: at most 0600, and nothing the input's owner may not do."""
    return _PRIVATE & stat.S_IMODE(source.stat().st_mode) or stat.S_IRUSR


@contextlib.contextmanager
def _lease_if_used(store: Store, series: str) -> Iterator[None]:
    # A lease file is made only where the series has one already: a training run may be writing there.
    if store.fs.status(lease_path(store.directory, series)) is None:
        yield
        return
    with store.lease(series):
        yield


def _description(
    source: Path, target: Path, options: ReadOptions, clock: Callable[[], float]
) -> Manifest:
    """Return the manifest of the target but for its file: what is known about the source.

    In the directory of the source it belongs to no run, so that no run counts or removes it.
    """
    parsed = parse_name(target.name)
    series = target.stem if parsed is None else parsed.prefix
    store = _store_of(source, options)
    placeholder = FileEntry(name=target.name, digest=FileDigest(size_bytes=0, ranges=()), format="")
    manifest = store.read_manifest(source.name)
    if manifest is not None:
        run_id = "" if source.parent == target.parent else manifest.run_id
        return replace(
            manifest, file=placeholder, series=series, run_id=run_id, stats={}, replaces=None
        )
    known = next((c for c in store.scan() if c.path == source), None)
    return Manifest(
        file=placeholder,
        series=series,
        run_id="",
        step=0 if known is None else known.step,
        epoch=None if known is None else known.epoch,
        sequence=0,
        saved_at=datetime.fromtimestamp(clock(), UTC) if known is None else known.saved_at,
        why="manual" if known is None else known.why,
    )
