# SPDX-License-Identifier: Apache-2.0
"""Reads one `Value` of a MindSpore `.ckpt`: a tensor, or a slice of a tensor or map parameter.

Missing required fields and repeated singular fields are errors; protobuf would fill in the missing
ones and let the last one win.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import FormatError, UnsupportedError
from ..index import ContentRun
from .fields import (
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


class TensorRecord(NamedTuple):
    """A `TensorProto` that starts at `offset`; `piece` is its content."""

    name: str
    offset: int
    dims: tuple[int, ...]
    type_name: str
    piece: ContentRun


class MapRecord(NamedTuple):
    """A `MapTensorProto` of three tensors."""

    name: str
    offset: int
    parts: tuple[TensorRecord, ...]


def read_record(wire: WireReader, value: Field) -> TensorRecord | MapRecord:
    """Return the record in a `Value` message."""
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
    """Return a field that must be length-delimited."""
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
        ContentRun(content.start, content.stop - content.start),
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
