# SPDX-License-Identifier: Apache-2.0
"""Fast reader of a `.safetensors` header in the usual layout.

The usual layout: metadata first or absent, then the tensors in data order, with their fields in one
order, no escapes and no white space. With ten thousands of small tensors, parsing JSON takes most
of the time of a load; here each description is compared with its only possible text. Everything
unusual, damage included, is left to the strict reader, `safetensors_file`.

Source: safetensors 0.8.0 (`Metadata` and `TensorInfo` as serde spells them).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from .dtypes import BY_SAFETENSORS, DType
from .errors import UnsupportedError
from .index import TensorEntry, entries_of
from .strict_json import has_too_many_values, parse_value
from .tensor import TensorSpec, check_count, check_shape

_METADATA = '{"__metadata__":'
_BETWEEN = '},"'
# A header of 100 MB can be cut into no more pieces than it can have tensors.
_LEAST_CHARS = len('":{"dtype":"I8","shape":[],"data_offsets":[0,0]},"')
# An object without inner objects, as metadata is: its end is found without building it.
_FLAT_OBJECT = re.compile(r'\{[^"{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"{}]*+)*+\}', re.DOTALL)
_SIZE = "(?:0|[1-9][0-9]{0,17})"
_FORM = re.compile(
    rf'"dtype":"([A-Z0-9_]+)","shape":\[((?:{_SIZE}(?:,{_SIZE}){{0,63}})?)\],"data_offsets":'
)
# In JSON, control characters are spelled otherwise, and a backslash starts another spelling.
_SPECIAL = bytes([*range(0x20), ord("\\")])
_ORDINARY = bytes(set(range(256)) - set(_SPECIAL))


class PlainHeader(NamedTuple):
    """The contents of a header: its metadata, not checked, and the tensors in data order."""

    metadata: object
    entries: list[TensorEntry]


class _Form(NamedTuple):
    dtype: DType
    shape: tuple[int, ...]
    size_bytes: int


def read_plain_header(encoded: bytes, *, data_start: int) -> PlainHeader | None:
    """Return the contents of a header, or None for everything unusual; the tensors have no gaps.

    `data_start` is the offset of the data in the file.

    Raises:
        UnsupportedError: It has too many tensors.
    """
    try:
        text = encoded.decode().rstrip(" ")
    except UnicodeDecodeError:
        return None
    found: tuple[object, int] | None = {}, 0
    opening = '{"'
    if text.startswith(_METADATA):
        found, opening = _metadata(text, encoded), ',"'
    if found is None:
        return None
    metadata, start = found
    if not text.startswith(opening, start) or not text.endswith("]}}"):
        return None
    tensors = text[start + len(opening) : -len("}}")]
    check_count(tensors.count(_BETWEEN) + 1)
    is_too_short = len(tensors) < tensors.count(_BETWEEN) * _LEAST_CHARS
    if is_too_short or tensors.encode().translate(None, _ORDINARY):
        return None
    entries = _read_tensors(tensors.split(_BETWEEN), data_start=data_start)
    return None if entries is None else PlainHeader(metadata, entries)


def _metadata(text: str, encoded: bytes) -> tuple[object, int] | None:
    """Return the metadata at the start of a text and its end; None if unusual or too large."""
    if has_too_many_values(encoded):  # most of them may be tensors
        match = _FLAT_OBJECT.match(text, len(_METADATA))
        if match is None or has_too_many_values(match[0].encode()):
            return None
    return parse_value(text, len(_METADATA))


def _read_tensors(texts: list[str], *, data_start: int) -> list[TensorEntry] | None:
    """Parse texts like `name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]`."""
    forms: dict[str, _Form | None] = {}
    found: dict[str, _Form] = {}
    offsets = []
    offset = 0
    for text in texts:
        name, _, rest = text.partition('":{')
        spelling, _, range_text = rest.rpartition("[")
        form = forms.get(spelling)
        if form is None:
            form = forms[spelling] = _read_form(spelling)
        if form is None or '"' in name:
            return None
        stop = offset + form.size_bytes
        if range_text != f"{offset},{stop}]":
            return None
        found[name] = form
        offsets.append(data_start + offset)
        offset = stop
    if len(found) < len(texts) or "__metadata__" in found:
        return None
    shapes = [form.shape for form in found.values()]
    return entries_of(
        found,
        [form.dtype for form in found.values()],
        shapes,
        offsets,
        [form.size_bytes for form in found.values()],
    )


def _read_form(spelling: str) -> _Form | None:
    """Return the type and shape that `spelling` describes, or None."""
    match = _FORM.fullmatch(spelling)
    dtype = None if match is None else BY_SAFETENSORS.get(match[1])
    if match is None or dtype is None:
        return None
    shape = tuple(map(int, match[2].split(","))) if match[2] else ()
    spec = TensorSpec("", dtype, shape)
    try:
        check_shape(spec)
    except UnsupportedError:
        return None
    return _Form(dtype, shape, spec.size_bytes)
