# SPDX-License-Identifier: Apache-2.0
"""Fast reader of the plain tensors of a MindSpore `.ckpt`: messages in the layout of every writer.

With ten thousands of small tensors, reading the messages takes most of the time of a load. Many of
them have the same type and shape and differ only in the name: the bytes between name and content
are then compared with an earlier message instead of parsed. Everything unusual, damage included, is
left to the strict reader, `records`.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from ..dtypes import DType
from ..index import TensorEntry, entries_of
from ..tensor import check_count, most_dimensions
from .entries import record_kind_of
from .fields import (
    CHECKPOINT_VALUE,
    MAX_DIM,
    TENSOR_CONTENT,
    TENSOR_DIMS,
    TENSOR_TYPE,
    VALUE_TAG,
    VALUE_TENSOR,
)
from .wire import AHEAD_BYTES, LENGTH_DELIMITED, VARINT, WireReader

_MAX_LAYOUTS = 4096
# The bytes before the name, of a message below 16 KiB: two keys and two lengths.
_PREFIX_BYTES = 5
_VALUE_KEY = CHECKPOINT_VALUE << 3 | LENGTH_DELIMITED
_TAG_KEY = VALUE_TAG << 3 | LENGTH_DELIMITED
_TENSOR_KEY = VALUE_TENSOR << 3 | LENGTH_DELIMITED
_DIM_KEY = TENSOR_DIMS << 3 | VARINT
_TYPE_KEY = TENSOR_TYPE << 3 | LENGTH_DELIMITED
_CONTENT_KEY = TENSOR_CONTENT << 3 | LENGTH_DELIMITED


class _Layout(NamedTuple):
    """The layout of a message, shared by those that differ only in name and content.

    Offsets count from the start of the message.
    """

    name: int
    head: int
    content: int
    stop: int
    encoded: bytes
    dtype: DType
    shape: tuple[int, ...]


class PlainTensors:
    """Reads tensors as long as they are plain."""

    def __init__(self, wire: WireReader) -> None:
        self._wire = wire
        # By the first bytes of the message, which hold the lengths of the message and the name.
        self._layouts: dict[bytes, _Layout] = {}

    def take(self, offset: int, taken: set[str]) -> tuple[list[TensorEntry], int]:
        """Return the plain tensors from the message at `offset` on, and their end.

        Their names are added to `taken`. A tensor whose name is in `taken`, or repeats an earlier
        one, is not plain. Nor is a tensor before something that is not: both may be slices of one
        tensor.
        """
        found: dict[str, _Layout] = {}
        contents: list[int] = []
        while offset < self._wire.size:
            data, at = self._wire.around(offset)
            start = offset - at
            at = self._take_from(data, at, start, found=found, contents=contents, taken=taken)
            if start + at == offset:
                if found:
                    offset = contents.pop() - found.popitem()[1].content
                break
            offset = start + at
            check_count(len(taken) + len(found))
        taken.update(found)
        layouts = found.values()
        entries = entries_of(
            found,
            [layout.dtype for layout in layouts],
            [layout.shape for layout in layouts],
            contents,
            [layout.stop - layout.content for layout in layouts],
        )
        return entries, offset

    def _take_from(
        self,
        data: bytes,
        at: int,
        start: int,
        *,
        found: dict[str, _Layout],
        contents: list[int],
        taken: Container[str],
    ) -> int:
        """Read plain tensors from a window that starts at `start`; return the position behind."""
        last = self._wire.size - start
        limit = last if len(data) == last else max(at + 1, len(data) - AHEAD_BYTES)
        layouts = self._layouts
        while at < limit:
            layout = layouts.get(data[at : at + _PREFIX_BYTES])
            if layout is None or not data.startswith(layout.encoded, at + layout.head):
                layout = self._read_layout(data, at)
                if layout is None:
                    return at
            try:
                name = data[at + layout.name : at + layout.head].decode()
            except UnicodeDecodeError:
                return at
            stop = at + layout.stop
            if stop > last or name in found or name in taken:
                return at
            found[name] = layout
            contents.append(start + at + layout.content)
            at = stop
        return at

    def _read_layout(self, data: bytes, at: int) -> _Layout | None:
        """Return the layout of the message at `at`, or None for everything unusual."""
        try:
            stop, tag = _length(data, at, _VALUE_KEY)
            head, name = _length(data, tag, _TAG_KEY)
            read = _read_head(data, head, stop)
        except (IndexError, UnicodeDecodeError):
            return None
        if read is None:
            return None
        content, dtype, shape = read
        encoded = data[head:content]
        layout = _Layout(name - at, head - at, content - at, stop - at, encoded, dtype, shape)
        if layout.name <= _PREFIX_BYTES and len(self._layouts) < _MAX_LAYOUTS:
            self._layouts[data[at : at + _PREFIX_BYTES]] = layout
        return layout


def _read_head(data: bytes, at: int, stop: int) -> tuple[int, DType, tuple[int, ...]] | None:
    """Return the start of the content of a tensor that ends at `stop`, its type and its shape.

    For everything unusual it returns None or raises IndexError.
    """
    end, at = _length(data, at, _TENSOR_KEY)
    dims = []
    while data[at] == _DIM_KEY:
        dim, at = _varint(data, at + 1)
        dims.append(dim)
    type_stop, at = _length(data, at, _TYPE_KEY)
    type_name = data[at:type_stop]
    content_stop, at = _length(data, type_stop, _CONTENT_KEY)
    if not stop == end == content_stop or len(dims) > most_dimensions():
        return None
    if max(dims, default=0) > MAX_DIM:
        return None
    kind = record_kind_of(type_name.decode(), tuple(dims), stop - at)
    return None if kind is None else (at, *kind)


def _length(data: bytes, at: int, key: int) -> tuple[int, int]:
    """Return stop and start of the payload of a field; IndexError unless the field has this key."""
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
