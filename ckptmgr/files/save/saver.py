# SPDX-License-Identifier: Apache-2.0
"""Save a list of tensors under a name: build the image, seal it, stream it, publish it.

It runs where it is called: in the training loop, in a background thread, or in the worker process (see `engine`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ckptmgr.core.errors import KeyProblem, SaveFailed, UnsupportedCheckpoint
from ckptmgr.core.names import extension_of
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.files.save.compressed import (
    WrittenFrames,
    frames_sealer,
    plan_of,
    read_image,
    write_frames,
)
from ckptmgr.files.save.pipeline import Written, container_for, sealer_for, write_image
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.image import Image
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.tensor import Item
from ckptmgr.io.buffers import buffer_bytes
from ckptmgr.io.digest import FileDigest, differing_ranges
from ckptmgr.io.filesystem import InputFile, OutputFile
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.state.devices import accelerators, synchronize
from ckptmgr.store.manifest.codec import FileEntry, Manifest
from ckptmgr.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How files are written.

    Attributes:
        format: `ckpt` or `safetensors`.
        key: Encrypts and seals, or None.
        mode: Cipher mode used with a key.
        has_crc: Write a CRC32 trailer (`.ckpt`; inside the encryption) or `crc_num` (`.safetensors`).
        compression_level: Level of zstd for `safetensors`, or None.
        file_mode: Permission bits of data and manifest; MindSpore's 0400 by default.
        verify_after_write: Read the file back from the disk before it is published, and compare it.
    """

    format: str = "ckpt"
    key: Keys | None = None
    mode: str = "AES-GCM"
    has_crc: bool = False
    compression_level: int | None = None
    file_mode: int = 0o400
    verify_after_write: bool = False

    @property
    def extension(self) -> str:
        """What follows the dot in the names of files: the format, and the ending of a container or a compressed file."""
        return extension_of(
            self.format,
            is_encrypted=self.key is not None,
            is_compressed=self.compression_level is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOrder:
    """What to save, as what, and how.

    Attributes:
        name: Base name of the data file.
        items: What it holds.
        options: How it is written.
        series: Series the file belongs to.
        describe: Makes the manifest from the file's entry and the stage figures (seconds, bytes).
        metadata: Strings kept in the file.
    """

    name: str
    items: Sequence[Item]
    options: SaveOptions
    series: str
    describe: Callable[[FileEntry, Mapping[str, float]], Manifest]
    metadata: Mapping[str, str] | None = None


class Publish(Protocol):
    """Carry out an order durably; `save_items` is one, the worker process has another."""

    def __call__(self, store: Store, order: SaveOrder, /) -> Manifest:
        """Save and return the manifest once it is durable."""
        ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Publishes nothing, because the state could not be had: raises why. Many ranks tell each other before anybody writes."""

    error: Exception

    def __call__(self, store: Store, order: SaveOrder, /) -> Manifest:
        """Raise the error."""
        raise self.error


def build_image(
    items: Sequence[Item], *, options: SaveOptions, metadata: Mapping[str, str] | None = None
) -> Image:
    """Return the plaintext image of a file.

    Raises:
        FormatError: The items cannot be stored in this format; names the tensor.
    """
    with gc_paused():
        if options.format == "safetensors":
            return build_safetensors_image(items, metadata=metadata, crc=options.has_crc)
        return build_ckpt_image(items, metadata=metadata, crc=options.has_crc)


def save_items(store: Store, order: SaveOrder) -> Manifest:
    """Save what is ordered in the store's directory; return the manifest once it is durable.

    Raises:
        UnsupportedCheckpoint: The items cannot be stored; nothing was changed.
        StoreFull: Not enough space; nothing was changed.
        SaveFailed: With `verify_after_write`: the disk does not hold what was written; nothing was changed.
        OSError: From the disk.
    """
    synchronize(order.items, accelerators())
    options, path = order.options, str(store.directory / order.name)
    with _refusals(path):
        image = build_image(order.items, options=options, metadata=order.metadata)
        size_bytes, write_content = _writing(image, options)
        stats: dict[str, float] = {}

        def write(file: OutputFile) -> FileDigest:
            written = write_content(file)
            stats["write_s"] = written.write_s
            return written.digest

        def read_back(file: InputFile, digest: FileDigest) -> None:
            stats["until_synced_s"] = time.perf_counter() - started
            check_written(file, digest, path=path)
            stats["verify_s"] = time.perf_counter() - started - stats["until_synced_s"]

        def describe_file(digest: FileDigest) -> Manifest:
            stats.setdefault("until_synced_s", time.perf_counter() - started)
            stats["buffer_bytes"] = buffer_bytes()
            entry = FileEntry(
                name=order.name,
                digest=digest,
                format=options.format,
                cipher=None if options.key is None else options.mode,
                key_id=None if options.key is None else options.key.key_id,
            )
            return order.describe(entry, stats)

        started = time.perf_counter()
        return store.publish(
            order.name,
            series=order.series,
            size_bytes=size_bytes,
            write=write,
            describe=describe_file,
            mode=options.file_mode,
            read_back=read_back if options.verify_after_write else None,
        )


def _writing(
    image: Image, options: SaveOptions
) -> tuple[int, Callable[[OutputFile], Written | WrittenFrames]]:
    """Return the size of the file, 0 where it is known last, and what writes it."""
    if options.compression_level is not None:
        return 0, partial(_write_compressed, image, options, options.compression_level)
    sealer = _sealer_of(image, options)
    size_bytes = image.size if sealer is None else sealer.sealed_size
    return size_bytes, partial(write_image, image, sealer=sealer)


def _write_compressed(
    image: Image, options: SaveOptions, level: int, file: OutputFile
) -> WrittenFrames:
    sealer = None if options.key is None else frames_sealer(image.size, options.key, options.mode)
    return write_frames(
        plan_of(image),
        read_image(image),
        file,
        level=level,
        sealer=sealer,
        is_head_late=image.head_bytes > 0,
    )


def _sealer_of(image: Image, options: SaveOptions) -> BlockSealer | ContainerSealer | None:
    if options.key is None:
        return None
    if options.format == "safetensors":
        return container_for(image, options.key, options.mode)
    return sealer_for(image, options.key, options.mode)


def check_written(file: InputFile, digest: FileDigest, *, path: str) -> None:
    """Raise SaveFailed unless a file that was read back is what was written."""
    bad = [] if file.size == digest.size_bytes else [(file.size, digest.size_bytes)]
    bad = bad or differing_ranges(file, digest)
    if bad:
        more = f" (and {len(bad) - 1} more ranges)" if len(bad) > 1 else ""
        raise SaveFailed(
            f"read back from the disk, the bytes {bad[0][0]}..{bad[0][1]} are not those that were written{more}",
            path=path,
            hint="nothing was published and the earlier checkpoints are intact; check disk and memory of this machine",
        )


@contextlib.contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Turn errors of the lower layers into ones that say what cannot be saved; nothing on the disk is damaged then."""
    try:
        yield
    except FormatError as error:
        raise UnsupportedCheckpoint(f"cannot be saved: {error}", path=path) from error
    except CryptoError as error:
        raise KeyProblem(str(error), path=path, hint=error.hint) from error
