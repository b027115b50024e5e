# SPDX-License-Identifier: Apache-2.0
"""Reads a MindSpore `.ckpt`: first an index, then contents straight into the caller's memory.

Stricter than MindSpore: where it fills with zeros, cuts, overwrites or crashes, this reader raises
an error with offset and tensor. Lenient like protobuf: fields of unknown number are skipped, dims
may be packed, fields may come in any order.

Source: `_parse_ckpt_proto`, `_load_ckpt_into_param_dict` of MindSpore 2.10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..errors import ChecksumError, FormatError, UnsupportedError
from ..file_crc import TRAILER_BYTES, BodyCrc, FileCrc, crc32, decode_trailer
from ..index import (
    READ_BYTES,
    ContentRun,
    TensorEntry,
    check_buffer,
    check_content,
    check_crc,
)
from ..source import Source, read_bytes
from ..strict_json import parse_object, parse_strings
from ..tensor import check_count
from .entries import CkptEntry, MapEntry, join_records
from .fast_reader import PlainTensors
from .fields import CHECKPOINT_METADATA, CHECKPOINT_VALUE, MAX_METADATA_BYTES
from .records import MapRecord, TensorRecord, expect_bytes, read_record
from .wire import Field, WireReader


@dataclass(frozen=True, slots=True, kw_only=True)
class CkptIndex:
    """The contents of a `.ckpt`, in file order.

    `metadata` holds the strings of our metadata field, or None without that field. `crc` is the
    CRC32 in the trailer, or None without a trailer; it covers the `body_bytes` before the trailer.
    """

    entries: tuple[CkptEntry, ...]
    metadata: Mapping[str, str] | None
    crc: int | None
    body_bytes: int
    format: ClassVar[str] = "ckpt"

    @property
    def listed(self) -> tuple[CkptEntry, ...]:
        """The entries in the order that users see."""
        return self.entries

    def start_crc(self) -> FileCrc:
        """Return a new computation of the CRC32 in the file."""
        return BodyCrc(self.body_bytes)

    def tensors(self) -> Iterator[TensorEntry]:
        """Yield every tensor, those of map parameters included, in file order."""
        for entry in self.entries:
            if isinstance(entry, TensorEntry):
                yield entry
            elif isinstance(entry, MapEntry):
                yield from (entry.key, entry.value, entry.status)


def read_ckpt_index(source: Source) -> CkptIndex:
    """Return the index of a `.ckpt` without reading its tensor contents.

    Raises:
        FormatError: The bytes are not a whole `.ckpt`; names offset and tensor.
        TruncatedError: They end too early.
        ChecksumError: They would need a newer version, but do not have the CRC32 in the trailer.
        UnsupportedError: An element type this version does not know.
    """
    reader = _IndexReader(source)
    try:
        reader.read()
    except UnsupportedError as error:
        _check_body(source, error)
        raise
    return CkptIndex(
        entries=tuple(reader.entries),
        metadata=reader.metadata,
        crc=reader.crc,
        body_bytes=reader.body_bytes,
    )


def read_ckpt_into(
    source: Source, index: CkptIndex, buffers: Callable[[TensorEntry], memoryview | None]
) -> int:
    """Read every content once, in file order, and return the CRC32 of the body.

    `buffers` returns the memory for a tensor (flat, writable, format B, `spec.size_bytes` bytes),
    or None if only its CRC is needed.

    Raises:
        FormatError: A bool is neither 0 nor 1.
    """
    scratch = memoryview(bytearray(min(READ_BYTES, index.body_bytes)))
    offset = value = 0
    for piece, entry, view in _wanted(index, buffers):
        value = _crc_range(source, offset, piece.offset, value, scratch)
        value = _read_piece(source, entry, piece, view, value)
        offset = piece.offset + piece.length
    return _crc_range(source, offset, index.body_bytes, value, scratch)


def _check_body(source: Source, error: UnsupportedError) -> None:
    """Raise ChecksumError if the file has a trailer with another CRC32: it is damaged, not new."""
    body_bytes = source.size - TRAILER_BYTES
    stored = decode_trailer(read_bytes(source, max(0, body_bytes), min(TRAILER_BYTES, source.size)))
    if stored is None:
        return
    scratch = memoryview(bytearray(min(READ_BYTES, body_bytes)))
    try:
        check_crc(stored, _crc_range(source, 0, body_bytes, 0, scratch))
    except ChecksumError as damage:
        raise damage from error


def _wanted(
    index: CkptIndex, buffers: Callable[[TensorEntry], memoryview | None]
) -> list[tuple[ContentRun, TensorEntry, memoryview]]:
    wanted = []
    for entry in index.tensors():
        buffer = buffers(entry)
        if buffer is not None:
            check_buffer(entry, buffer)
            for piece in entry.pieces:
                wanted.append((piece, entry, buffer[: piece.length]))
                buffer = buffer[piece.length :]
    # The slices of a map interleave its three tensors.
    return sorted(wanted, key=lambda item: item[0].offset)


def _read_piece(
    source: Source, entry: TensorEntry, piece: ContentRun, buffer: memoryview, value: int
) -> int:
    for start in range(0, piece.length, READ_BYTES):
        view = buffer[start : start + READ_BYTES]
        source.read_into(piece.offset + start, view)
        check_content(entry, view, offset=piece.offset + start)
        value = crc32(view, value)
    return value


def _crc_range(source: Source, start: int, stop: int, value: int, scratch: memoryview) -> int:
    for offset in range(start, stop, READ_BYTES):
        view = scratch[: min(READ_BYTES, stop - offset)]
        source.read_into(offset, view)
        value = crc32(view, value)
    return value


class _IndexReader:
    """Walks the records of a file and joins them into entries."""

    def __init__(self, source: Source) -> None:
        self._wire = WireReader(source)
        self._run: list[TensorRecord | MapRecord] = []
        self._names: set[str] = set()
        self.entries: list[CkptEntry] = []
        self.metadata: Mapping[str, str] | None = None
        self.crc: int | None = None
        self.body_bytes = 0

    def read(self) -> None:
        plain = PlainTensors(self._wire)
        while self.body_bytes < self._wire.size and self.crc is None:
            found, self.body_bytes = plain.take(self.body_bytes, self._names)
            if found:
                self._end_run()
                self.entries.extend(found)
            if self.body_bytes < self._wire.size:
                self._read_field()
        self._end_run()
        if not self.entries and self.metadata is None:
            raise FormatError("the file holds no parameters", offset=0)

    def _read_field(self) -> None:
        self.crc = self._trailer()
        if self.crc is None:
            field = self._wire.field(self.body_bytes, self._wire.size)
            self._take(field)
            self.body_bytes = field.stop

    def _trailer(self) -> int | None:
        # The marker starts like a group, which is an error: a trailer can only stand between two
        # fields, and a tensor whose content ends in the same 17 bytes is none. MindSpore cuts such
        # a file and then cannot load it.
        if self._wire.size - self.body_bytes != TRAILER_BYTES:
            return None
        return decode_trailer(self._wire.read(self.body_bytes, TRAILER_BYTES))

    def _take(self, field: Field) -> None:
        if field.number == CHECKPOINT_VALUE:
            self._add(read_record(self._wire, expect_bytes(field)))
        elif field.number == CHECKPOINT_METADATA:
            self._take_metadata(expect_bytes(field))

    def _add(self, record: TensorRecord | MapRecord) -> None:
        if not self._run or self._run[0].name != record.name:
            self._end_run()
            if record.name in self._names:
                raise FormatError(
                    "two parameters have this name", offset=record.offset, tensor=record.name
                )
            self._names.add(record.name)
            check_count(len(self._names))
        self._run.append(record)

    def _take_metadata(self, field: Field) -> None:
        if self.metadata is not None:
            raise FormatError("the metadata comes twice", offset=field.offset)
        if field.stop - field.start > MAX_METADATA_BYTES:
            raise UnsupportedError(
                f"metadata of more than {MAX_METADATA_BYTES} bytes", offset=field.offset
            )
        parsed = parse_object(self._wire.payload(field), what="metadata", offset=field.start)
        self.metadata = parse_strings(parsed, what="metadata", offset=field.start)

    def _end_run(self) -> None:
        if self._run:
            self.entries.append(join_records(self._wire, self._run))
            self._run = []
