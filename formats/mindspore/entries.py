# SPDX-License-Identifier: Apache-2.0
"""Joins and checks the adjacent records of one parameter in a MindSpore `.ckpt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ..dtypes import BY_MINDSPORE, BY_NAME, DType
from ..errors import FormatError, UnsupportedError
from ..index import TensorEntry
from ..tensor import TensorSpec, check_shape
from .fields import MAP_PARTS, MAX_TEXT_BYTES, SCALAR_DIMS, TEXT_TYPE
from .records import MapRecord, TensorRecord
from .wire import WireReader


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEntry:
    """A named string."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MapEntry:
    """A MapParameter; its tensors are called key, value and status."""

    name: str
    key: TensorEntry
    value: TensorEntry
    status: TensorEntry


CkptEntry = TensorEntry | TextEntry | MapEntry


def join_records(wire: WireReader, records: Sequence[TensorRecord | MapRecord]) -> CkptEntry:
    """Return the entry that adjacent records of one name make.

    Raises:
        FormatError: They do not belong together, or their content does not fill their shape
            exactly.
        UnsupportedError: The element type is unknown.
    """
    first = records[0]
    if len(records) == 1 and isinstance(first, TensorRecord) and first.type_name != TEXT_TYPE:
        return _tensor_entry([first])
    tensors = [record for record in records if isinstance(record, TensorRecord)]
    maps = [record for record in records if isinstance(record, MapRecord)]
    if tensors and maps:
        raise FormatError(
            "the name is used by a tensor and by a map", offset=first.offset, tensor=first.name
        )
    if maps:
        return _map_entry(maps)
    _check_same(tensors)
    if tensors[0].type_name == TEXT_TYPE:
        return _text_entry(wire, tensors)
    return _tensor_entry(tensors)


def record_kind_of(
    type_name: str, dims: tuple[int, ...], size_bytes: int
) -> tuple[DType, tuple[int, ...]] | None:
    """Return type and shape of a tensor of one record that its content fills; None if unusual."""
    dtype = BY_MINDSPORE.get(type_name)
    if dtype is None or not size_bytes:
        return None
    shape = () if dims == SCALAR_DIMS else dims
    return (dtype, shape) if prod(shape) * dtype.item_bytes == size_bytes else None


def _check_same(records: Sequence[TensorRecord]) -> None:
    first = records[0]
    for record in records[1:]:
        if (record.dims, record.type_name) != (first.dims, first.type_name):
            raise FormatError(
                f"a slice of {record.type_name}{list(record.dims)} follows one of"
                f" {first.type_name}{list(first.dims)} under the same name",
                offset=record.offset,
                tensor=first.name,
            )


def _tensor_entry(records: Sequence[TensorRecord]) -> TensorEntry:
    first = records[0]
    dtype = BY_MINDSPORE.get(first.type_name)
    if dtype is None:
        raise _unknown_type(first)
    size_bytes = sum(record.piece.length for record in records)
    shape = first.dims
    if shape == SCALAR_DIMS and size_bytes:
        shape = ()
    _check_size(first, dtype, shape, size_bytes)
    return _entry(first.name, dtype, shape, records)


def _text_entry(wire: WireReader, records: Sequence[TensorRecord]) -> TextEntry:
    record = records[0]
    name, piece = record.name, record.piece
    if len(records) > 1:
        raise FormatError("a text comes twice", offset=records[1].offset, tensor=name)
    if record.dims not in (SCALAR_DIMS, (), (1,)):
        raise FormatError(
            f"a text has the shape {list(record.dims)}", offset=record.offset, tensor=name
        )
    if piece.length == 0 or piece.length % 4:
        raise FormatError(
            f"a text of {piece.length} bytes is not UTF-32", offset=piece.offset, tensor=name
        )
    if piece.length > MAX_TEXT_BYTES:
        raise UnsupportedError(
            f"a text of {piece.length} bytes is more than {MAX_TEXT_BYTES}",
            offset=piece.offset,
            tensor=name,
        )
    try:
        text = wire.read(*piece).decode("utf-32-le", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError(
            "a text holds an invalid character", offset=piece.offset + error.start, tensor=name
        ) from None
    return TextEntry(name=name, text="" if text == "\0" else text)


def _map_entry(records: Sequence[MapRecord]) -> MapEntry:
    name = records[0].name
    key, value, status = (
        _map_part(label, [record.parts[index] for record in records])
        for index, label in enumerate(MAP_PARTS)
    )
    for record in records:
        if len({part.dims[0] for part in record.parts}) > 1:
            raise FormatError(
                "key, value and status of a map differ in rows", offset=record.offset, tensor=name
            )
    return MapEntry(name=name, key=key, value=value, status=status)


def _map_part(label: str, records: Sequence[TensorRecord]) -> TensorEntry:
    first = records[0]
    # Map parameters spell types as NumPy does. int4 is not NumPy's.
    dtype = BY_NAME.get(first.type_name)
    if dtype is None or dtype.name == "int4":
        raise _unknown_type(first)
    for record in records:
        if not record.dims:
            raise FormatError(
                f"the {label} of a map has no rows", offset=record.offset, tensor=record.name
            )
        _check_size(record, dtype, record.dims, record.piece.length)
    _check_same([record._replace(dims=record.dims[1:]) for record in records])
    shape = (sum(record.dims[0] for record in records), *first.dims[1:])
    return _entry(label, dtype, shape, records)


def _entry(
    name: str, dtype: DType, shape: tuple[int, ...], records: Sequence[TensorRecord]
) -> TensorEntry:
    pieces = tuple([record.piece for record in records if record.piece.length])
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    check_shape(spec, offset=records[0].offset)
    return TensorEntry(spec=spec, pieces=pieces)


def _check_size(
    record: TensorRecord, dtype: DType, shape: tuple[int, ...], size_bytes: int
) -> None:
    expected = prod(shape) * dtype.item_bytes
    if size_bytes != expected:
        raise FormatError(
            f"the content has {size_bytes} bytes, but {dtype.name}{list(shape)} needs {expected}",
            offset=record.piece.offset,
            tensor=record.name,
        )


def _unknown_type(record: TensorRecord) -> UnsupportedError:
    return UnsupportedError(
        f"unknown element type {record.type_name!r}", offset=record.offset, tensor=record.name
    )
