# SPDX-License-Identifier: Apache-2.0
"""Read the contents of an opened file in one parallel pass, into memory or only to check them.

The pass also compares the unverified reads of the index, and the CRC32 of the file.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ckptmgr.core.errors import ChecksumMismatch
from ckptmgr.files.load.compressed import check_frames
from ckptmgr.files.load.new_arrays import NewArrays
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.files.load.statistics import chunks_of
from ckptmgr.formats import safetensors_file
from ckptmgr.formats.file_crc import FileCrc
from ckptmgr.formats.index import TensorEntry, check_content
from ckptmgr.formats.index import check_crc as check_stored_crc
from ckptmgr.formats.mindspore import reader as mindspore_reader
from ckptmgr.formats.mindspore.reader import CkptIndex
from ckptmgr.formats.source import Source
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.io.gc_pause import gc_paused
from ckptmgr.io.scatter import Placement, read_scattered
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.io.unverified_reads import UnverifiedReads


def confirm_index(opened: OpenCheckpoint) -> None:
    """Check the bytes of the index, if they were read unverified.

    Raises:
        FormatError, CryptoError, CkptmgrError: They are damaged.
    """
    fill_arrays(opened, [], {})


def confirm_names(opened: OpenCheckpoint) -> None:
    """Check the index, by the CRC32 where nothing else vouches for it, which reads the file.

    Raises:
        FormatError, CryptoError, CkptmgrError: It is damaged.
    """
    if opened.index.crc is None or opened.is_sealed or opened.has_digests:
        confirm_index(opened)
    else:
        read_through(opened, check_crc=True)


def read_through(
    opened: OpenCheckpoint, *, check_crc: bool = False, units_at_once: int = 1
) -> None:
    """Read everything to have the source check it; one thread reads `units_at_once` units in a row.

    Raises:
        FormatError, CryptoError, CkptmgrError: From the source, or the CRC32 differs.
    """
    crc = _stated_crc(opened) if check_crc else None
    if opened.frames is not None:
        check_frames(opened.frames, crc=crc)
    else:
        read_every_byte(
            opened.source,
            unit_bytes=opened.unit_bytes,
            units_at_once=units_at_once,
            crc=crc,
            unverified=opened.unverified,
        )
    if crc is not None:
        check_stored_crc(opened.index.crc, crc.value())


def check_values(opened: OpenCheckpoint) -> None:
    """Raise FormatError if a bool is neither 0 nor 1; other types accept every value."""
    for entry in opened.index.tensors():
        if entry.spec.dtype.name == "bool":
            for _ in chunks_of(opened.source, entry):
                pass


def _stated_crc(opened: OpenCheckpoint) -> FileCrc | None:
    """Return the CRC32 computation for a file that has a CRC32, else None."""
    return None if opened.index.crc is None else opened.index.start_crc()


def read_every_byte(
    source: Source,
    *,
    unit_bytes: int,
    units_at_once: int = 1,
    crc: FileCrc | None = None,
    unverified: UnverifiedReads | None = None,
) -> None:
    """Read and check a source, in parallel unless `unit_bytes` is 0; `crc` gets every byte."""
    if unit_bytes:
        read_scattered(
            source,
            [],
            unit_bytes=unit_bytes,
            crc=crc,
            unverified=unverified,
            also_units=range(-(-source.size // unit_bytes)),
            units_at_once=units_at_once,
        )
        return
    buffer = memoryview(bytearray(min(PIECE_BYTES, source.size)))
    for start in range(0, source.size, PIECE_BYTES):
        view = buffer[: source.size - start]
        source.read_into(start, view)
        if crc is not None:
            crc.add(start, view)


def fill_arrays(
    opened: OpenCheckpoint,
    entries: Sequence[TensorEntry],
    arrays: Mapping[int, np.ndarray],
    *,
    check_crc: bool = False,
    made: NewArrays | None = None,
) -> None:
    """Read tensors, in file order, into the arrays for the `id` of their entries.

    `made` has those that need no placement each.

    Raises:
        FormatError, CryptoError, CkptmgrError: Damage was found; the memory is then undefined.
    """
    if check_crc:
        _refuse_missing_crc(opened)
    crc = _stated_crc(opened) if check_crc else None
    if crc is not None and opened.frames is None and not opened.unit_bytes:
        buffers = {key: flat_memory(array) for key, array in arrays.items()}
        check_stored_crc(opened.index.crc, _read_all_in_order(opened, buffers))
        return
    _read(opened, entries, arrays, crc=crc, made=made)
    if crc is not None:
        check_stored_crc(opened.index.crc, crc.value())


def _refuse_missing_crc(opened: OpenCheckpoint) -> None:
    index = opened.index
    is_vouched_for = opened.cipher is not None or opened.has_digests
    if isinstance(index, CkptIndex) and index.crc is None and not is_vouched_for:
        raise ChecksumMismatch(
            "crc_check was asked for, but the file has no CRC32: it was saved without one, or its end was cut off",
            path=opened.path,
            offset=index.body_bytes,
            hint="load it without crc_check if you know that it was saved without a CRC",
        )


def _read_all_in_order(opened: OpenCheckpoint, buffers: Mapping[int, memoryview]) -> int:
    """Read each tensor into the buffer for the `id` of its entry, if any; return the CRC32."""
    index = opened.index
    if isinstance(index, CkptIndex):
        return mindspore_reader.read_ckpt_into(
            opened.source, index, lambda entry: buffers.get(id(entry))
        )
    return safetensors_file.read_safetensors_into(
        opened.source, index, lambda entry: buffers.get(id(entry))
    )


def _read(
    opened: OpenCheckpoint,
    entries: Sequence[TensorEntry],
    arrays: Mapping[int, np.ndarray],
    *,
    crc: FileCrc | None,
    made: NewArrays | None,
) -> None:
    with gc_paused():
        others = entries if made is None else made.outside_arenas(entries)
        placements = sorted(_placements(others, arrays), key=operator.attrgetter("offset"))
    opened.read(
        placements,
        batches=() if made is None else made.batches,
        arenas=() if made is None else made.arenas,
        crc=crc,
    )
    for entry in entries:
        if entry.spec.dtype.name == "bool" and entry.pieces:
            content = flat_memory(arrays[id(entry)])
            check_content(entry, content, offset=entry.pieces[0].offset)


def _placements(
    entries: Iterable[TensorEntry], arrays: Mapping[int, np.ndarray]
) -> Iterator[Placement]:
    for entry in entries:
        target = flat_memory(arrays[id(entry)])
        pieces = entry.pieces
        if len(pieces) == 1:
            yield Placement(pieces[0].offset, target)
            continue
        for piece in pieces:
            yield Placement(piece.offset, target[: piece.length])
            target = target[piece.length :]
