# SPDX-License-Identifier: Apache-2.0
"""Open a checkpoint file: raw bytes -> checked -> decrypted -> indexed, all through one descriptor.

Each stage is a source over the one below; no byte leaves a stage unchecked, and nothing is read that is not needed.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckptmgr.clusters import Clusters
from ckptmgr.collector import collector_paused
from ckptmgr.crypto.keyring import Keys
from ckptmgr.crypto.signing import PublicKey
from ckptmgr.destinations import match
from ckptmgr.errors import ChecksumMismatch, UnsupportedCheckpoint
from ckptmgr.formats import mindspore_reader, safetensors_file
from ckptmgr.formats.detect import Kind, detect
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.file_crc import BodyCrc, FileCrc
from ckptmgr.formats.index import TensorEntry, check_content, read_tensor_into
from ckptmgr.formats.index import check_crc as check_stored_crc
from ckptmgr.formats.mindspore_entries import CkptEntry, MapEntry
from ckptmgr.formats.mindspore_reader import CkptIndex
from ckptmgr.formats.safetensors_crc import ContentsCrc
from ckptmgr.formats.safetensors_file import SafetensorsIndex
from ckptmgr.formats.source import Source
from ckptmgr.formats.tensor import flat_memory
from ckptmgr.formats.zstd_source import FramesSource
from ckptmgr.frame_reader import check_frames, read_frames
from ckptmgr.glimpses import Glimpses
from ckptmgr.lower_errors import translated_errors
from ckptmgr.manifest import Manifest
from ckptmgr.naming import OPAQUE
from ckptmgr.plaintext import Plaintext, plaintext_of
from ckptmgr.scatter import Placement, piece_bytes_of, read_scattered
from ckptmgr.tree_nodes import StateMismatch
from ckptmgr.units import PIECE_BYTES

_offset_of = operator.attrgetter("offset")


class MapArrays(NamedTuple):
    """The arrays of a MindSpore MapParameter."""

    key: np.ndarray
    value: np.ndarray
    status: np.ndarray


Value = np.ndarray | str | MapArrays


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How to read a file.

    Attributes:
        key: The key, or None. Given a key, files that are not authenticated as a whole are refused.
        mode: The cipher mode to insist on, or None to take the one the file names.
        allow_unsealed: Accept plain and unsealed files although a key is given.
        rank: Which file of a sharded checkpoint to read, and `world`, out of how many; None for none.
        world: Number of ranks that read.
        trusted_keys: Whose signatures count. Given any, files whose manifest none of them signed are refused.
    """

    key: Keys | None = None
    mode: str | None = None
    allow_unsealed: bool = False
    rank: int | None = None
    world: int = 1
    trusted_keys: tuple[PublicKey, ...] = ()

    @property
    def is_strict(self) -> bool:
        """Whether manifests must be authenticated by what was given."""
        return (self.key is not None or bool(self.trusted_keys)) and not self.allow_unsealed


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCheckpoint:
    """A checkpoint file that was opened, checked as far as it was read, and indexed.

    Attributes:
        path: For messages.
        source: The plaintext.
        index: What it holds and where.
        cipher: The cipher mode, or None for a plain file.
        is_sealed: Whether the file as a whole is authenticated.
        has_digests: Whether a manifest vouches for every byte that is read.
        unit_bytes: What the source checks at once; 0 where it is read tensor by tensor.
        glimpses: What the index was made from, where that is still to be checked by reading the contents.
    """

    path: str
    source: Source
    index: CkptIndex | SafetensorsIndex
    cipher: str | None
    is_sealed: bool
    has_digests: bool
    unit_bytes: int = PIECE_BYTES
    glimpses: Glimpses | None = None

    @property
    def format(self) -> str:
        """`ckpt` or `safetensors`."""
        return "ckpt" if isinstance(self.index, CkptIndex) else "safetensors"

    @property
    def compressed_bytes(self) -> int | None:
        """Bytes of the compressed file that the source expands, or None when it is not compressed."""
        return self.source.stored_bytes if isinstance(self.source, FramesSource) else None

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata strings of the file."""
        return dict(self.index.metadata or {})


def open_source(
    raw: Source,
    *,
    path: str,
    options: ReadOptions,
    manifest: Manifest | None = None,
    is_for_loading: bool = False,
) -> OpenCheckpoint:
    """Open a checkpoint over raw bytes.

    Args:
        raw: The bytes as stored.
        path: For messages.
        options: Key and what to accept.
        manifest: Checks every byte that is read against its digests.
        is_for_loading: All contents will be read with `read_values`, which also checks the index; otherwise that is done
            here, at the price of reading most of a `.ckpt` once more.

    Raises:
        CorruptCheckpoint, KeyProblem, UnsupportedCheckpoint: See `ckptmgr.errors`.
    """
    with translated_errors(path):
        plain = plaintext_of(raw, path=path, options=options, manifest=manifest)
    return open_indexed(
        plain, path=path, has_digests=manifest is not None, is_for_loading=is_for_loading
    )


def open_indexed(
    plain: Plaintext, *, path: str, has_digests: bool, is_for_loading: bool
) -> OpenCheckpoint:
    """Open the checkpoint that a plaintext is.

    Args:
        plain: The plaintext.
        path: For messages.
        has_digests: Whether a manifest vouches for it.
        is_for_loading: As for `open_source`.

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
        glimpses = plain.glimpses if is_for_loading else None
        index = None
        if glimpses is not None:
            # Where unchecked bytes make no sense, the checked ones say what is wrong.
            with contextlib.suppress(FormatError):
                index = _index(glimpses, path, plain.format)
        if index is None:
            index, glimpses = _index(plain.source, path, plain.format), None
        return OpenCheckpoint(
            path=path,
            source=plain.source,
            index=index,
            cipher=plain.cipher,
            is_sealed=plain.is_sealed,
            has_digests=has_digests,
            unit_bytes=plain.unit_bytes,
            glimpses=glimpses,
        )


def _index(source: Source, path: str, format: str | None) -> CkptIndex | SafetensorsIndex:
    if format is None:
        is_named = path.endswith(".safetensors") or isinstance(source, FramesSource)
        is_safetensors = is_named or detect(source) is Kind.SAFETENSORS
        format = "safetensors" if is_safetensors else "ckpt"
    with collector_paused():
        if format == "safetensors":
            return safetensors_file.read_safetensors_index(source)
        return mindspore_reader.read_ckpt_index(source)


def everything(name: str) -> bool:
    """Choose every name."""
    del name
    return True


def read_values(
    opened: OpenCheckpoint,
    *,
    choose: Callable[[str], bool] = everything,
    check_crc: bool = False,
) -> dict[str, Value]:
    """Read tensors straight into new arrays, in file order.

    Args:
        opened: The checkpoint.
        choose: Which names to read.
        check_crc: Compare the CRC32 of the whole file with the stored one.

    Raises:
        CorruptCheckpoint: Damage was found; nothing is returned.
        ChecksumMismatch: The CRC differs, or a plain `.ckpt` that nothing else vouches for has none: its end may be cut off.
    """
    with translated_errors(opened.path):
        arrays: dict[int, np.ndarray] = {}
        chosen: Sequence[CkptEntry] = opened.index.entries
        if choose is not everything:
            chosen = [entry for entry in chosen if choose(entry.name)]
        entries = list(_tensors_in(chosen))
        clusters = _clusters(opened, arrays)
        if clusters is not None:
            entries = clusters.take(entries)
        for one in entries:
            arrays[id(one)] = np.empty(one.spec.shape, one.spec.dtype.to_numpy())
        fill_arrays(opened, entries, arrays, check_crc=check_crc, clusters=clusters)
        return {entry.name: _value(entry, arrays) for entry in chosen}


def _clusters(opened: OpenCheckpoint, arrays: dict[int, np.ndarray]) -> Clusters | None:
    """Return what takes small tensors, where the file is read in pieces."""
    if not opened.unit_bytes or isinstance(opened.source, FramesSource):
        return None
    return Clusters(arrays, grid_bytes=piece_bytes_of(opened.unit_bytes))


def read_into(
    opened: OpenCheckpoint, into: Mapping[str, object], *, check_crc: bool = False
) -> None:
    """Read the tensors that `into` names straight into the arrays there.

    Args:
        opened: The checkpoint.
        into: Name to NumPy array or torch tensor; see `ckptmgr.destinations`.
        check_crc: Compare the CRC32 of the whole file with the stored one.

    Raises:
        StateMismatch: What is stored does not fit all arrays; names every difference. Nothing was changed.
        CorruptCheckpoint: Damage was found while reading; the content of the arrays is then undefined.
    """
    with translated_errors(opened.path):
        try:
            found = match(opened.index.entries, into)
        except StateMismatch:
            confirm_index(opened)  # damage that looks like a difference
            raise
    try:
        with translated_errors(opened.path):
            fill_arrays(opened, found.entries, found.arrays, check_crc=check_crc)
    except BaseException as error:
        error.add_note("the content of the arrays given as into is undefined now; load them again")
        raise
    found.finish()


def confirm_index(opened: OpenCheckpoint) -> None:
    """Check the bytes that the index was made from, where that was left to the reading of the contents.

    Raises:
        FormatError, CryptoError, CkptmgrError: They are damaged.
    """
    fill_arrays(opened, [], {})


def read_through(
    opened: OpenCheckpoint, *, check_crc: bool = False, units_at_once: int = 1
) -> None:
    """Read everything and keep nothing: the source checks all of it on the way.

    Args:
        opened: The checkpoint.
        check_crc: Also compare the CRC32 of the whole file with the stored one, where there is one.
        units_at_once: How many units of the source one thread reads one after the other.

    Raises:
        FormatError, CryptoError, CkptmgrError: What the source raises, or the CRC32 differs.
    """
    crc = _stated_crc(opened) if check_crc else None
    if isinstance(opened.source, FramesSource):
        check_frames(opened.source, crc=crc)
    else:
        read_every_byte(
            opened.source,
            unit_bytes=opened.unit_bytes,
            units_at_once=units_at_once,
            crc=crc,
            glimpses=opened.glimpses,
        )
    if crc is not None:
        check_stored_crc(opened.index.crc, crc.value())


def _stated_crc(opened: OpenCheckpoint) -> FileCrc | None:
    """Return what computes the CRC32 that a file states, or None where it states none."""
    index = opened.index
    if index.crc is None:
        return None
    return BodyCrc(index.body_bytes) if isinstance(index, CkptIndex) else ContentsCrc(index.entries)


def read_every_byte(
    source: Source,
    *,
    unit_bytes: int,
    units_at_once: int = 1,
    crc: FileCrc | None = None,
    glimpses: Glimpses | None = None,
) -> None:
    """Read a source and keep nothing.

    Args:
        source: Checks what is read.
        unit_bytes: What it checks at once, for reading in parallel; 0 reads piece after piece.
        units_at_once: How many of these one thread reads one after the other.
        crc: Is given every byte.
        glimpses: What was seen of the source before; checked where it is read in parallel.

    Raises:
        FormatError, CryptoError, CkptmgrError: What the source raises.
    """
    if unit_bytes:
        read_scattered(
            source,
            [],
            unit_bytes=unit_bytes,
            crc=crc,
            glimpses=glimpses,
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
    clusters: Clusters | None = None,
) -> None:
    """Read the contents of some tensors into C-contiguous memory that exists.

    Args:
        opened: The checkpoint.
        entries: The tensors, in file order.
        arrays: `id` of an entry to its memory.
        check_crc: Compare the CRC32 of the whole file with the stored one.
        clusters: Other tensors, which are made as they are read; only where the file is read in pieces.

    Raises:
        FormatError, CryptoError, CkptmgrError: Damage was found; the memory is then undefined.
    """
    if check_crc:
        _refuse_missing_crc(opened)
    crc = _stated_crc(opened) if check_crc else None
    if opened.unit_bytes or isinstance(opened.source, FramesSource):
        _read(opened, entries, arrays, crc=crc, clusters=clusters)
        if crc is not None:
            check_stored_crc(opened.index.crc, crc.value())
    elif crc is not None:
        buffers = {key: bytes_of(array) for key, array in arrays.items()}
        check_stored_crc(opened.index.crc, _read_all_in_order(opened, buffers))
    else:
        for entry in entries:
            read_tensor_into(opened.source, entry, bytes_of(arrays[id(entry)]))


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
    """Read each tensor into the buffer for the `id` of its entry, if there is one; return the CRC32 that a file states."""
    index = opened.index
    if isinstance(index, CkptIndex):
        return mindspore_reader.read_all_into(
            opened.source, index, lambda entry: buffers.get(id(entry))
        )
    return safetensors_file.read_all_into(
        opened.source, index, lambda entry: buffers.get(id(entry))
    )


def _read(
    opened: OpenCheckpoint,
    entries: Sequence[TensorEntry],
    arrays: Mapping[int, np.ndarray],
    *,
    crc: FileCrc | None,
    clusters: Clusters | None,
) -> None:
    """Fill the arrays from a file that is read in pieces."""
    placements, bools = [], []
    for entry in entries:
        target = flat_memory(arrays[id(entry)])
        spec, pieces = entry
        if spec.dtype.name == "bool" and pieces:
            bools.append((entry, target))
        if len(pieces) == 1:
            placements.append(Placement(pieces[0].offset, target))
            continue
        for piece in pieces:
            placements.append(Placement(piece.offset, target[: piece.length]))
            target = target[piece.length :]
    placements.sort(key=_offset_of)
    if isinstance(opened.source, FramesSource):
        read_frames(opened.source, placements, crc=crc)
    else:
        made = [] if clusters is None else clusters.found
        read_scattered(
            opened.source,
            sorted([*placements, *made], key=_offset_of) if made else placements,
            unit_bytes=opened.unit_bytes,
            crc=crc,
            glimpses=opened.glimpses,
            also_units=() if opened.glimpses is None else opened.glimpses.units(opened.unit_bytes),
        )
    for entry, target in bools:
        check_content(entry, target, offset=entry.pieces[0].offset)


def _tensors_in(chosen: Iterable[CkptEntry]) -> Iterator[TensorEntry]:
    for entry in chosen:
        if isinstance(entry, TensorEntry):
            yield entry
        elif isinstance(entry, MapEntry):
            yield from (entry.key, entry.value, entry.status)


def _value(entry: CkptEntry, arrays: Mapping[int, np.ndarray]) -> Value:
    if isinstance(entry, TensorEntry):
        return arrays[id(entry)]
    if isinstance(entry, MapEntry):
        return MapArrays(*(arrays[id(part)] for part in (entry.key, entry.value, entry.status)))
    return entry.text


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of a C-contiguous array."""
    return flat_memory(array)
