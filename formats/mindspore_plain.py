# SPDX-License-Identifier: Apache-2.0
"""A short cut through the plain tensors of a MindSpore `.ckpt`: messages as every writer lays them out.

With ten thousands of small tensors it is most of the time of a load. Many of them have the same type and shape, and only
the name differs: what stands between name and content is then compared with what was read before, not parsed again.
Everything unusual, damage included, is left to the strict reader, `mindspore_records`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from .dtypes import DType
from .index import Piece, TensorEntry
from .mindspore import (
    CHECKPOINT_VALUE,
    MAX_DIM,
    MAX_RANK,
    TENSOR_CONTENT,
    TENSOR_DIMS,
    TENSOR_TYPE,
    VALUE_TAG,
    VALUE_TENSOR,
)
from .mindspore_entries import kind_of
from .tensor import TensorSpec
from .wire import AHEAD_BYTES, LENGTH_DELIMITED, VARINT, WireReader

_MAX_HEADS = 4096
_VALUE_KEY = CHECKPOINT_VALUE << 3 | LENGTH_DELIMITED
_TAG_KEY = VALUE_TAG << 3 | LENGTH_DELIMITED
_TENSOR_KEY = VALUE_TENSOR << 3 | LENGTH_DELIMITED
_DIM_KEY = TENSOR_DIMS << 3 | VARINT
_TYPE_KEY = TENSOR_TYPE << 3 | LENGTH_DELIMITED
_CONTENT_KEY = TENSOR_CONTENT << 3 | LENGTH_DELIMITED


class _Head(NamedTuple):
    """What stands between the name and the content of a tensor, and what it says."""

    encoded: bytes
    dtype: DType
    shape: tuple[int, ...]
    content_bytes: int


class _Message(NamedTuple):
    """A plain tensor; offsets are positions in the window."""

    name: str
    head: _Head
    content: int
    stop: int


class PlainTensors:
    """Takes tensors as long as they are plain.

    Args:
        wire: The file.
    """

    def __init__(self, wire: WireReader) -> None:
        self._wire = wire
        # By the bytes from head to end of the message.
        self._heads: dict[int, _Head] = {}

    def take(self, offset: int, taken: Container[str]) -> tuple[list[TensorEntry], int]:
        """Return the plain tensors from the message at `offset` on, and where they end.

        A tensor whose name is in `taken`, or used by one before it, is not plain. Nor is one before something that is not:
        both may be slices of one tensor.
        """
        found: dict[str, TensorEntry] = {}
        before = offset
        data, at = self._wire.around(offset)
        start = offset - at
        while start + at < self._wire.size:
            if at + AHEAD_BYTES > len(data):
                offset = start + at
                data, at = self._wire.around(offset)
                start = offset - at
            message = self._message(data, at)
            if message is None or message.name in taken or message.name in found:
                return list(found.values())[:-1], before
            name, head, content, stop = message
            if start + stop > self._wire.size:
                return list(found.values())[:-1], before
            spec = TensorSpec(name=name, dtype=head.dtype, shape=head.shape)
            found[name] = TensorEntry(spec, (Piece(start + content, head.content_bytes),))
            before, at = start + at, stop
        return list(found.values()), start + at

    def _message(self, data: bytes, at: int) -> _Message | None:
        try:
            stop, tag = _length(data, at, _VALUE_KEY)
            end, first = _length(data, tag, _TAG_KEY)
            name = data[first:end].decode()
            head = self._heads.get(stop - end)
            if head is None or not data.startswith(head.encoded, end):
                head = _read_head(data, end, stop)
                if head is None:
                    return None
                if len(self._heads) < _MAX_HEADS:
                    self._heads[stop - end] = head
        except (IndexError, UnicodeDecodeError):
            return None
        return _Message(name, head, end + len(head.encoded), stop)


def _read_head(data: bytes, at: int, stop: int) -> _Head | None:
    """Return the head at `at` of a tensor whose content ends at `stop`; IndexError or None for everything unusual."""
    first = at
    end, at = _length(data, at, _TENSOR_KEY)
    dims = []
    while data[at] == _DIM_KEY:
        dim, at = _varint(data, at + 1)
        dims.append(dim)
    type_stop, at = _length(data, at, _TYPE_KEY)
    type_name = data[at:type_stop]
    content_stop, at = _length(data, type_stop, _CONTENT_KEY)
    if not stop == end == content_stop or len(dims) > MAX_RANK or max(dims, default=0) > MAX_DIM:
        return None
    kind = kind_of(type_name.decode(), tuple(dims), stop - at)
    return None if kind is None else _Head(data[first:at], *kind, stop - at)


def _length(data: bytes, at: int, key: int) -> tuple[int, int]:
    """Return where the payload of a field ends and starts; IndexError unless the field has this key."""
    if data[at] != key:
        raise IndexError
    length = data[at + 1]
    if length < 0x80:
        return at + 2 + length, at + 2
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
