# SPDX-License-Identifier: Apache-2.0
"""Save a list of tensors under a name: build the image, seal it, stream it, publish it.

It runs in the calling thread: in the training loop, in a background thread, or in the worker
process (see `engine`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import KeyProblem, SaveFailed, UnsupportedCheckpoint
from ckptmgr.crypto.errors import CryptoError
from ckptmgr.files.save.job import SaveOptions, SaveOrder
from ckptmgr.files.save.pipeline import Written, container_for, sealer_for, write_image
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.finite import FiniteWatch
from ckptmgr.formats.image import Image
from ckptmgr.formats.tensor import Item, Tensor
from ckptmgr.io.buffers import buffer_bytes
from ckptmgr.io.digest import FileDigest, differing_ranges
from ckptmgr.io.filesystem import InputFile, OutputFile
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.state.devices import accelerators, synchronize
from ckptmgr.state.skeleton import types_of_bytes
from ckptmgr.store.manifest.codec import FileEntry, Manifest
from ckptmgr.store.manifest.model import health_of
from ckptmgr.store.store import Store

if TYPE_CHECKING:  # a plain save needs none of these
    from ckptmgr.crypto.container.writer import ContainerSealer
    from ckptmgr.crypto.mindspore.blocks import BlockSealer
    from ckptmgr.files.save.compressed import WrittenFrames


def build_image(
    items: Sequence[Item], *, options: SaveOptions, metadata: Mapping[str, str] | None = None
) -> Image:
    """Return the plaintext image of a file.

    Raises:
        FormatError: The items cannot be stored in this format; names the tensor.
    """
    with gc_paused():
        if options.format == "safetensors":
            from ckptmgr.formats.safetensors_file import build_safetensors_image

            if options.has_crc and metadata:
                from ckptmgr.files.load.state import with_skeleton_crc

                metadata = with_skeleton_crc(metadata)
            return build_safetensors_image(
                items,
                metadata=metadata,
                crc=options.has_crc,
                is_crc_for_mindspore=options.has_manifest,
                is_as_library=options.is_as_library,
            )
        from ckptmgr.formats.mindspore.writer import build_ckpt_image

        return build_ckpt_image(items, metadata=metadata, crc=options.has_crc)


def save_items(
    store: Store, order: SaveOrder, *, on_used: Callable[[Tensor], object] | None = None
) -> Manifest:
    """Write and publish a file in the store's directory; return its manifest once it is durable.

    `on_used` is called with each tensor whose bytes were all copied or encrypted, from any thread.

    Raises:
        UnsupportedCheckpoint: The items cannot be stored; nothing was changed.
        StoreFull: Not enough space; nothing was changed.
        SaveFailed: With `verify_after_write`: the disk does not hold the bytes that were written;
            nothing was changed.
        OSError: From the disk.
    """
    synchronize(order.items, accelerators())
    options, path = order.options, str(store.directory / order.name)
    with _refusals(path):
        image = build_image(order.items, options=options, metadata=order.metadata)
        if order.metadata:
            from ckptmgr.files.load.state import check_documents

            # A compressed file may take next to nothing for a text.
            stored_bytes = 0 if options.compression_level is not None else image.size
            check_documents(order.metadata, stored_bytes=stored_bytes)
        finite = FiniteWatch(_true_types(order))
        image.watch_finite(finite)
        if on_used is not None:
            image.watch_uses(on_used)
        size_bytes, write_content = _writing(image, options)
        started = time.perf_counter()
        with store.publisher.new_file(
            order.name,
            series=order.series,
            size_bytes=size_bytes,
            mode=options.file_mode,
            is_rank_file=order.is_rank_file,
            has_manifest=options.has_manifest,
        ) as new:
            with new.writing() as file:
                written = write_content(file)
            figures = {"write_s": written.write_s, "until_synced_s": time.perf_counter() - started}
            if options.verify_after_write:
                with new.reading() as stored:
                    check_written(stored, written.digest, path=path)
                figures["verify_s"] = time.perf_counter() - started - figures["until_synced_s"]
            figures["buffer_bytes"] = buffer_bytes()
            health = None
            if finite.first is not None:
                figures["not_finite"] = finite.count
                health = health_of(finite.first, is_encrypted=options.key is not None)
            manifest = order.draft.completed(_entry(order, written.digest), figures, health=health)
            new.publish(manifest)
    return manifest


def _true_types(order: SaveOrder) -> Mapping[str, str]:
    """Return the types of the tensors that are stored as bytes, by name."""
    from ckptmgr.files.load.state import SKELETON

    skeleton = (order.metadata or {}).get(SKELETON)
    return {} if skeleton is None else types_of_bytes(skeleton)


def _entry(order: SaveOrder, digest: FileDigest) -> FileEntry:
    options = order.options
    return FileEntry(
        name=order.name,
        digest=digest,
        format=options.format,
        cipher=None if options.key is None else options.mode,
        key_id=None if options.key is None else options.key.key_id,
    )


def _writing(
    image: Image, options: SaveOptions
) -> tuple[int, Callable[[OutputFile], Written | WrittenFrames]]:
    """Return the size of the file, 0 where it is unknown, and the function that writes it."""
    if options.compression_level is not None:
        return 0, partial(_write_compressed, image, options, options.compression_level)
    sealer = _sealer_of(image, options)
    size_bytes = image.size if sealer is None else sealer.sealed_size
    return size_bytes, partial(write_image, image, sealer=sealer)


def _write_compressed(
    image: Image, options: SaveOptions, level: int, file: OutputFile
) -> WrittenFrames:
    from ckptmgr.files.save.compressed import frames_sealer, plan_of, read_image, write_frames

    sealer = None if options.key is None else frames_sealer(image.size, options.key, options.mode)
    return write_frames(
        plan_of(image),
        read_image(image),
        file,
        level=level,
        sealer=sealer,
        is_head_late=image.head_bytes > 0,
        release=image.release,
        wipe=image.wipe_copy,
    )


def _sealer_of(image: Image, options: SaveOptions) -> BlockSealer | ContainerSealer | None:
    if options.key is None:
        return None
    if options.format == "safetensors":
        return container_for(image, options.key, options.mode)
    return sealer_for(image, options.key, options.mode)


def check_written(file: InputFile, digest: FileDigest, *, path: str) -> None:
    """Raise SaveFailed unless a file that was read back equals the written bytes."""
    bad = [] if file.size == digest.size_bytes else [(file.size, digest.size_bytes)]
    bad = bad or differing_ranges(file, digest)
    if bad:
        more = f" (and {len(bad) - 1} more ranges)" if len(bad) > 1 else ""
        raise SaveFailed(
            f"read back from the disk, the bytes {bad[0][0]}..{bad[0][1]} are not those that were written{more}",
            path=path,
            hint="nothing was published and the earlier checkpoints are intact; check disk and memory of this machine",
        )


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Translate errors of the lower layers into those of a save; no file is damaged then."""
    try:
        yield
    except FormatError as error:
        raise UnsupportedCheckpoint(f"cannot be saved: {error}", path=path) from error
    except CryptoError as error:
        raise KeyProblem(str(error), path=path, hint=error.hint) from error
