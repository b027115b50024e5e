# SPDX-License-Identifier: Apache-2.0
"""The layout of a frame whose elements are divided into planes, each stored in its own way.

```
head     form(1) || number of planes(1) || 0(6)
         for each plane: first byte(1) || bytes(1) || method(1) || 0(1) || stored bytes(4)
planes   in the order of the head, without gaps
```
Little-endian. A plane holds the same `bytes` bytes of every element; the planes of a frame cover
each byte of an element once. Form 0 leaves elements as they are; in form 1 the sign bit has traded
places with the eight bits below it (`elements`).

* Method 0: the bytes of the plane as they are. Method 1: one zstd frame that expands to them.
  Method 2: the bytes of one element, for all.
* The sizes of all planes follow from the table of frames, so nothing expands to more than a frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import FormatError, TruncatedError, UnsupportedError
from .table import Frame

AS_IT_IS, FLOAT = 0, 1
STORED, ZSTD, CONSTANT = 0, 1, 2
STORED_WIDTHS = (4, 2, 1)
"""Bytes of an element that a plane may hold, unless they are the same in all."""

_HEAD = struct.Struct("<BB6s")
_PLANE = struct.Struct("<BBBBI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """Bytes of every element from `first_byte` on, `width` of them, stored by `method`."""

    first_byte: int
    width: int
    method: int
    stored_bytes: int


def head_size(planes: int) -> int:
    """Return the length of the head of a frame of `planes` planes."""
    return _HEAD.size + planes * _PLANE.size


def encode_head(form: int, planes: Sequence[Plane]) -> bytes:
    """Return the head of a frame."""
    return _HEAD.pack(form, len(planes), bytes(6)) + b"".join(
        _PLANE.pack(one.first_byte, one.width, one.method, 0, one.stored_bytes) for one in planes
    )


def read_head(frame: Frame, stored: memoryview) -> tuple[int, list[tuple[Plane, memoryview]]]:
    """Return the form of a frame and its planes, each with its stored bytes.

    Raises:
        TruncatedError: The frame ends in its head.
        UnsupportedError: A newer version wrote it.
        FormatError: The head contradicts itself or the table.
    """
    if stored.nbytes < _HEAD.size:
        raise TruncatedError("a frame of planes ends in its head", offset=frame.offset)
    form, count, zeros = _HEAD.unpack_from(stored)
    if form not in (AS_IT_IS, FLOAT) or zeros != bytes(6):
        raise UnsupportedError(f"a frame of planes of the unknown form {form}", offset=frame.offset)
    start = head_size(count)
    if stored.nbytes < start:
        raise TruncatedError("a frame of planes ends in its head", offset=frame.offset)
    planes = []
    covered: list[int] = []
    for fields in _PLANE.iter_unpack(stored[_HEAD.size : start]):
        plane = _parse(frame, fields)
        planes.append((plane, stored[start : start + plane.stored_bytes]))
        covered += range(plane.first_byte, plane.first_byte + plane.width)
        start += plane.stored_bytes
    if sorted(covered) != list(range(frame.group_bytes)):
        raise FormatError(
            f"planes do not cover each of {frame.group_bytes} bytes once", offset=frame.offset
        )
    if start != stored.nbytes:
        raise FormatError(
            f"a frame of {stored.nbytes} bytes has planes up to {start}", offset=frame.offset
        )
    return form, planes


def _parse(frame: Frame, fields: tuple[int, int, int, int, int]) -> Plane:
    first_byte, width, method, zero, stored_bytes = fields
    if method not in (STORED, ZSTD, CONSTANT) or zero:
        raise UnsupportedError(
            f"a plane is stored by the unknown method {method}", offset=frame.offset
        )
    if width not in STORED_WIDTHS and (method != CONSTANT or not 0 < width <= frame.group_bytes):
        raise FormatError(f"a plane of {width} bytes of each element", offset=frame.offset)
    raw_bytes = width if method == CONSTANT else frame.raw_bytes // frame.group_bytes * width
    if not 0 < stored_bytes <= raw_bytes or (method != ZSTD and stored_bytes != raw_bytes):
        raise FormatError(
            f"a plane of {stored_bytes} bytes stands for {raw_bytes}", offset=frame.offset
        )
    return Plane(first_byte=first_byte, width=width, method=method, stored_bytes=stored_bytes)
