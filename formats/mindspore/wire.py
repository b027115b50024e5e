# SPDX-License-Identifier: Apache-2.0
"""Protobuf wire format, bounded: varints and length-delimited fields.

* Reading walks field headers through a small window; payloads are skipped, not read, so that the
  index of a file costs a few reads per megabyte of headers, however large its contents are.
* A length is compared with the enclosing message before anything is done with it.
* Groups, field number 0, varints of more than 10 bytes or 64 bits are errors that name their
  offset.

Source: protobuf.dev/programming-guides/encoding (wire types, varints, field numbers).

>>> from ..source import BytesSource
>>> encode_bytes_field(1, b"w").hex()
'0a0177'
>>> wire = WireReader(BytesSource(encode_bytes_field(1, b"w")))
>>> [(field.number, wire.payload(field)) for field in wire.fields(0, wire.size)]
[(1, b'w')]
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from ..errors import FormatError, TruncatedError, UnsupportedError
from ..source import Source, read_bytes

VARINT, FIXED64, LENGTH_DELIMITED, FIXED32 = 0, 1, 2, 5

_FIXED_BYTES = {FIXED64: 8, FIXED32: 4}
_MAX_VARINT_BYTES = 10
_ONE_BYTE = tuple(bytes([value]) for value in range(0x80))
_WINDOW_BYTES = 16 * 1024
# Where windows follow each other, nearly everything is read: in fewer, longer reads.
_LONGEST_WINDOW_BYTES = 256 * 1024
AHEAD_BYTES = 1024
MAX_FIELDS = 1 << 20
"""Of all messages that one reader parses, numbers of packed fields included. A field takes some
microseconds and as little as two bytes, so the length of a file alone would not bound the time."""


class Field(NamedTuple):
    """One field of a message.

    `wire_type` is 0 varint, 1 fixed64, 2 length-delimited or 5 fixed32; `[start, stop)` is the
    payload; `value` is the unsigned value of a varint, else 0.
    """

    number: int
    wire_type: int
    offset: int
    start: int
    stop: int
    value: int


class WireReader:
    """Reads protobuf fields of a source by offset. Not thread-safe."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._window = b""
        self._window_start = 0
        self._window_bytes = _WINDOW_BYTES
        self._taken = 0
        self.size = source.size

    def fields(self, start: int, stop: int) -> Iterator[Field]:
        """Yield the fields of the message `[start, stop)` in order.

        Raises:
            FormatError: A tag, varint or length that the wire format does not allow.
            TruncatedError: A field reaches past the end of the source.
            UnsupportedError: The reader parsed more than `MAX_FIELDS` fields.
        """
        offset = start
        while offset < stop:
            field = self.field(offset, stop)
            yield field
            offset = field.stop

    def varints(self, field: Field) -> Iterator[int]:
        """Yield the varints of a packed field; of an unpacked one, its value."""
        if field.wire_type == VARINT:
            yield field.value
            return
        offset = field.start
        while offset < field.stop:
            self._count(offset)
            value, offset = self._varint(offset, field.stop)
            yield value

    def payload(self, field: Field) -> bytes:
        """Return the payload of a length-delimited field."""
        return self.read(field.start, field.stop - field.start)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, through the window when they are few."""
        if length > _WINDOW_BYTES:
            return read_bytes(self._source, offset, length)
        self._cover(offset, offset + length)
        position = offset - self._window_start
        return self._window[position : position + length]

    def around(self, offset: int) -> tuple[bytes, int]:
        """Return a window and the position of `offset` in it; a KiB follows, or the source ends."""
        self._cover(offset, min(offset + AHEAD_BYTES, self.size))
        return self._window, offset - self._window_start

    def field(self, offset: int, stop: int) -> Field:
        """Return the field at `offset` of a message up to `stop`; raises as `fields` does."""
        self._count(offset)
        tag, start = self._varint(offset, stop)
        number, wire_type = tag >> 3, tag & 7
        if not 0 < tag >> 3 < 1 << 29:
            raise FormatError(f"field number {number} does not exist", offset=offset)
        value = 0
        if wire_type == VARINT:
            value, end = self._varint(start, stop)
        elif wire_type == LENGTH_DELIMITED:
            length, start = self._varint(start, stop)
            end = start + length
        elif wire_type in _FIXED_BYTES:
            end = start + _FIXED_BYTES[wire_type]
        else:
            raise FormatError(f"wire type {wire_type} is not used by checkpoints", offset=offset)
        if end > stop:
            raise self._overrun(offset, end, stop)
        return Field(number, wire_type, offset, start, end, value)

    def _count(self, offset: int) -> None:
        self._taken += 1
        if self._taken > MAX_FIELDS:
            raise UnsupportedError(f"more than {MAX_FIELDS} fields", offset=offset)

    def _varint(self, offset: int, stop: int) -> tuple[int, int]:
        position = offset - self._window_start
        if offset < stop and 0 <= position < len(self._window) and self._window[position] < 0x80:
            return self._window[position], offset + 1  # most are one byte
        limit = min(offset + _MAX_VARINT_BYTES, stop)
        self._cover(offset, limit)
        value = shift = 0
        for position in range(offset - self._window_start, limit - self._window_start):
            byte = self._window[position]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> 64:
                    raise FormatError("a varint has more than 64 bits", offset=offset)
                return value, self._window_start + position + 1
            shift += 7
        if limit == stop:
            raise self._overrun(offset, stop + 1, stop)
        raise FormatError("a varint has more than 10 bytes", offset=offset)

    def _overrun(self, offset: int, end: int, stop: int) -> FormatError:
        if stop == self.size:
            return TruncatedError(
                f"a field needs bytes up to {end}, but the data ends at {stop}", offset=offset
            )
        return FormatError(f"a field reaches past the end of its message at {stop}", offset=offset)

    def _cover(self, start: int, stop: int) -> None:
        end = self._window_start + len(self._window)
        if self._window_start <= start and stop <= end:
            return
        is_next = self._window_start < start < end + AHEAD_BYTES
        longer = min(2 * self._window_bytes, _LONGEST_WINDOW_BYTES)
        self._window_bytes = longer if is_next else _WINDOW_BYTES
        length = max(stop - start, min(self._window_bytes, self.size - start))
        self._window = read_bytes(self._source, start, length)
        self._window_start = start


def encode_varint(value: int) -> bytes:
    """Return the varint of an unsigned value."""
    if value < 0x80:
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_varint_field(number: int, value: int) -> bytes:
    """Return a varint field."""
    return encode_varint(number << 3 | VARINT) + encode_varint(value)


@lru_cache(maxsize=4096)
def encode_length_prefix(number: int, length: int) -> bytes:
    """Return the bytes that precede a length-delimited payload of `length` bytes."""
    return encode_varint(number << 3 | LENGTH_DELIMITED) + encode_varint(length)


def encode_bytes_field(number: int, payload: bytes) -> bytes:
    """Return a length-delimited field."""
    return encode_length_prefix(number, len(payload)) + payload
