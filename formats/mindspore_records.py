# SPDX-License-Identifier: Apache-2.0
"""One `Value` of a MindSpore `.ckpt` at a time: a whole tensor, a slice of one, or a slice of a map parameter.

Required fields are required and singular fields come once, unlike in protobuf, which fills in what is missing and lets
the last one win.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import FormatError, UnsupportedError
from .index import Piece
from .mindspore import (
    CHECKPOINT_VALUE,
    MAP_PARTS,
    MAPTENSOR_TENSOR,
    MAX_DIM,
    MAX_RANK,
    TENSOR_CONTENT,
    TENSOR_DIMS,
    TENSOR_TYPE,
    VALUE_MAPTENSOR,
    VALUE_TAG,
    VALUE_TENSOR,
)
from .wire import LENGTH_DELIMITED, VARINT, Field, WireReader

_MAX_TYPE_BYTES = 64
_MAX_HEADS = 4096
_VALUE_KEY = CHECKPOINT_VALUE << 3 | LENGTH_DELIMITED
_TAG_KEY = VALUE_TAG << 3 | LENGTH_DELIMITED
_TENSOR_KEY = VALUE_TENSOR << 3 | LENGTH_DELIMITED
_DIM_KEY = TENSOR_DIMS << 3 | VARINT
_TYPE_KEY = TENSOR_TYPE << 3 | LENGTH_DELIMITED
_CONTENT_KEY = TENSOR_CONTENT << 3 | LENGTH_DELIMITED


class TensorRecord(NamedTuple):
    """A `TensorProto`: `offset` is where it starts, `piece` where its content lies."""

    name: str
    offset: int
    dims: tuple[int, ...]
    type_name: str
    piece: Piece


class MapRecord(NamedTuple):
    """A `MapTensorProto` of three tensors."""

    name: str
    offset: int
    parts: tuple[TensorRecord, ...]


class PlainHead(NamedTuple):
    """What stands between the name and the content of a plain tensor, and what it says."""

    encoded: bytes
    dims: tuple[int, ...]
    type_name: str
    content_bytes: int


def read_plain_tensor(
    wire: WireReader, offset: int, heads: dict[int, PlainHead] | None = None
) -> tuple[TensorRecord, int] | None:
    """Return the tensor in the `Checkpoint` message at `offset`, and where the message ends.

    A short cut past `read_record` for messages as every writer lays them out; None stands for all others, damaged ones
    included. With ten thousands of small tensors it is most of the time of a load.

    Args:
        wire: The file.
        offset: Where the message starts.
        heads: Those seen before, by the bytes from head to end: many tensors have the same, and only the name differs.
    """
    data, at = wire.around(offset)
    start = offset - at
    try:
        stop, at = _length(data, at, _VALUE_KEY)
        end, at = _length(data, at, _TAG_KEY)
        name = data[at:end].decode()
        head = heads.get(stop - end) if heads else None
        if head is None or not data.startswith(head.encoded, end):
            head = _read_head(data, end, stop)
            if heads is not None and len(heads) < _MAX_HEADS:
                heads[stop - end] = head
    except (IndexError, UnicodeDecodeError):
        return None
    if start + stop > wire.size:
        return None
    content = end + len(head.encoded)
    piece = Piece(start + content, head.content_bytes)
    return TensorRecord(name, start + end, head.dims, head.type_name, piece), start + stop


def _read_head(data: bytes, at: int, stop: int) -> PlainHead:
    """Return the head at `at` of a tensor whose content ends at `stop`; IndexError for everything unusual."""
    first = at
    end, at = _length(data, at, _TENSOR_KEY)
    dims = []
    while data[at] == _DIM_KEY:
        dim, at = _varint(data, at + 1)
        dims.append(dim)
    type_stop, at = _length(data, at, _TYPE_KEY)
    type_name = data[at:type_stop]
    content_stop, at = _length(data, type_stop, _CONTENT_KEY)
    is_plain = (
        stop == end == content_stop
        and len(dims) <= MAX_RANK
        and (not dims or max(dims) <= MAX_DIM)
        and len(type_name) <= _MAX_TYPE_BYTES
        and type_name.isascii()
    )
    if not is_plain:
        raise IndexError
    return PlainHead(data[first:at], tuple(dims), type_name.decode(), stop - at)


def _length(data: bytes, at: int, key: int) -> tuple[int, int]:
    """Return where the payload of a field ends and starts; IndexError unless the field has this key."""
    if data[at] != key:
        raise IndexError
    length, at = _varint(data, at + 1)
    return at + length, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    for shift in range(7, 64, 7):
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
    raise IndexError


def read_record(wire: WireReader, value: Field) -> TensorRecord | MapRecord:
    """Return the record in a `Value` message.

    Raises:
        FormatError: A field is missing, doubled, or of the wrong wire type; names offset and tensor.
    """
    found: dict[int, Field] = {}
    for field in wire.fields(value.start, value.stop):
        if field.number in (VALUE_TAG, VALUE_TENSOR, VALUE_MAPTENSOR):
            _put_once(found, expect_bytes(field))
    if VALUE_TAG not in found:
        raise FormatError("a parameter has no name", offset=value.offset)
    name = _read_name(wire, found[VALUE_TAG])
    if (VALUE_TENSOR in found) == (VALUE_MAPTENSOR in found):
        message = "has both a tensor and a map" if VALUE_TENSOR in found else "has no content"
        raise FormatError(f"the parameter {message}", offset=value.offset, tensor=name)
    if VALUE_TENSOR in found:
        return _read_tensor(wire, found[VALUE_TENSOR], name)
    return _read_map(wire, found[VALUE_MAPTENSOR], name)


def expect_bytes(field: Field, *, tensor: str | None = None) -> Field:
    """Return a field that must be length-delimited.

    Raises:
        FormatError: It has another wire type.
    """
    if field.wire_type != LENGTH_DELIMITED:
        raise FormatError(
            f"field {field.number} has wire type {field.wire_type} instead of {LENGTH_DELIMITED}",
            offset=field.offset,
            tensor=tensor,
        )
    return field


def _put_once(found: dict[int, Field], field: Field, *, tensor: str | None = None) -> None:
    if field.number in found:
        raise FormatError(f"field {field.number} comes twice", offset=field.offset, tensor=tensor)
    found[field.number] = field


def _read_name(wire: WireReader, field: Field) -> str:
    try:
        return wire.payload(field).decode()
    except UnicodeDecodeError as error:
        raise FormatError("a name is not UTF-8", offset=field.start + error.start) from None


def _read_map(wire: WireReader, message: Field, name: str) -> MapRecord:
    parts = [
        _read_tensor(wire, expect_bytes(field, tensor=name), name)
        for field in wire.fields(message.start, message.stop)
        if field.number == MAPTENSOR_TENSOR
    ]
    if len(parts) != len(MAP_PARTS):
        raise FormatError(
            f"a map parameter has {len(parts)} tensors instead of {len(MAP_PARTS)}",
            offset=message.offset,
            tensor=name,
        )
    return MapRecord(name, message.offset, tuple(parts))


def _read_tensor(wire: WireReader, message: Field, name: str) -> TensorRecord:
    found: dict[int, Field] = {}
    dims: list[int] = []
    for field in wire.fields(message.start, message.stop):
        if field.number == TENSOR_DIMS:
            _add_dims(dims, wire, field, name)
        elif field.number in (TENSOR_TYPE, TENSOR_CONTENT):
            _put_once(found, expect_bytes(field, tensor=name), tensor=name)
    for number, what in ((TENSOR_TYPE, "type"), (TENSOR_CONTENT, "content")):
        if number not in found:
            raise FormatError(f"the {what} is missing", offset=message.offset, tensor=name)
    content = found[TENSOR_CONTENT]
    return TensorRecord(
        name,
        message.offset,
        tuple(dims),
        _read_type(wire, found[TENSOR_TYPE], name),
        Piece(content.start, content.stop - content.start),
    )


def _add_dims(dims: list[int], wire: WireReader, field: Field, name: str) -> None:
    if field.wire_type != VARINT:
        expect_bytes(field, tensor=name)
    for dim in wire.varints(field):
        if dim > MAX_DIM:
            # Negative numbers are unsigned ones beyond 2**63.
            raise FormatError(
                f"a dimension is negative or more than {MAX_DIM}", offset=field.offset, tensor=name
            )
        if len(dims) == MAX_RANK:
            raise FormatError(f"more than {MAX_RANK} dimensions", offset=field.offset, tensor=name)
        dims.append(dim)


def _read_type(wire: WireReader, field: Field, name: str) -> str:
    encoded = wire.read(field.start, min(field.stop - field.start, _MAX_TYPE_BYTES))
    if field.stop - field.start > _MAX_TYPE_BYTES or not encoded.isascii():
        raise UnsupportedError(
            f"unknown element type {encoded!r}", offset=field.offset, tensor=name
        )
    return encoded.decode()
