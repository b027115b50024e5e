# SPDX-License-Identifier: Apache-2.0
"""Compresses one frame of at most 4 MiB.

Of the bytes of a weight only its exponent compresses; all else is noise, whose coding takes time
and saves nothing. So a frame is divided into planes of bytes (`planes`), of which only those are
coded that a sample shows to be worth it (`division`). A frame that does not become smaller is
stored uncompressed.

>>> packed = FramePacker(level=1).pack(memoryview(bytes(4000)), item_bytes=4)
>>> len(packed.stored) < 100
True

Source: RFC 8878 (zstd).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UnsupportedError
from .division import Division, PlaneChooser, PlannedPlane
from .elements import Numbers, last_pairs, take_bytes, take_exponents, take_signs
from .planes import CONSTANT, FLOAT, Plane, encode_head, head_size
from .planes import STORED as STORED_PLANE
from .planes import ZSTD as ZSTD_PLANE
from .table import FRAME_BYTES, PLANES, PLANES_GROUPS, STORED, ZSTD

LEVELS = range(1, 20)
"""Levels of zstd. Those above 1 are worth their time for sparse states, hardly for weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A packed frame; `stored` is valid until the next one is packed.

    It is the caller's own memory if the frame is stored uncompressed.
    """

    stored: bytes | memoryview
    group_bytes: int
    method: int


def check_level(level: int) -> None:
    """Raise UnsupportedError unless zstd has such a level."""
    if level not in LEVELS:
        raise UnsupportedError(
            f"a zstd level is {LEVELS.start} to {LEVELS.stop - 1}, but got {level}"
        )


class FramePacker:
    """Compresses frames at a zstd level, for one thread at a time; reuses its memory."""

    def __init__(self, *, level: int) -> None:
        check_level(level)
        self._chooser = PlaneChooser(level)
        self._stored = bytearray()
        self._room = bytearray()

    def pack(self, raw: memoryview, *, item_bytes: int) -> Packed:
        """Return the frame for `raw` (flat, format B), whose elements have `item_bytes` bytes."""
        size = raw.nbytes
        if not 0 < size <= FRAME_BYTES or size % item_bytes:
            raise ValueError(f"{size} bytes of elements of {item_bytes} are no frame")
        if item_bytes in PLANES_GROUPS:
            numbers: Numbers = np.frombuffer(raw, f"<u{item_bytes}")
            division = self._chooser.divide(numbers)
            if division is not None:
                divided = self._divided(numbers, division)
                if divided.nbytes < size:
                    return Packed(stored=divided, group_bytes=item_bytes, method=PLANES)
                return Packed(stored=raw, group_bytes=1, method=STORED)
        stored = self._chooser.whole(raw).compress(raw)
        if len(stored) < size:
            return Packed(stored=stored, group_bytes=1, method=ZSTD)
        return Packed(stored=raw, group_bytes=1, method=STORED)

    def _divided(self, numbers: Numbers, division: Division) -> memoryview:
        parts = division.parts
        start = at = head_size(len(parts))
        if len(self._stored) < start + numbers.nbytes:
            self._stored = bytearray(start + numbers.nbytes)
        stored = memoryview(self._stored)
        work = _Work(numbers, self._room_for(numbers), is_float=division.form == FLOAT)
        planes = []
        for part in parts:
            plane = work.put(part, stored[at:])
            planes.append(plane)
            at += plane.stored_bytes
        stored[:start] = encode_head(division.form, planes)
        return stored[:at]

    def memory(self) -> tuple[memoryview, ...]:
        """Return the memory that held frames and their planes, to be wiped."""
        return memoryview(self._stored), memoryview(self._room)

    def _room_for(self, numbers: Numbers) -> memoryview:
        size = 4 * len(numbers) if numbers.itemsize > 2 else 2 * len(numbers)
        if len(self._room) < size:
            self._room = bytearray(size)
        return memoryview(self._room)


class _Work:
    """Makes the planes of one frame; `room` is for a plane, signs and, if there are more, pairs."""

    def __init__(self, numbers: Numbers, room: memoryview, *, is_float: bool) -> None:
        count = len(numbers)
        self._numbers = numbers
        self._plane, self._signs = room[:count], room[count : 2 * count]
        self._pairs = last_pairs(numbers, room[2 * count :]) if is_float else None

    def put(self, part: PlannedPlane, stored: memoryview) -> Plane:
        """Put a plane at the start of `stored`."""
        size = part.width * len(self._numbers)
        if part.constant is not None:
            method, size = CONSTANT, part.width
            stored[:size] = part.constant.to_bytes(size, "little")
        elif part.coder is None:
            method = STORED_PLANE
            self._take(part, stored[:size])
        else:
            self._take(part, self._plane)
            coded = part.coder.compress(self._plane)
            method, source = ZSTD_PLANE, memoryview(coded)
            if len(coded) >= size:
                method, source = STORED_PLANE, self._plane
            size = source.nbytes
            stored[:size] = source
        return Plane(first_byte=part.first_byte, width=part.width, method=method, stored_bytes=size)

    def _take(self, part: PlannedPlane, target: memoryview) -> None:
        plane: Numbers = np.frombuffer(target, f"<u{part.width}")
        from_end = self._numbers.itemsize - part.first_byte
        if self._pairs is not None and from_end == 1:
            take_exponents(self._pairs, plane)
        elif self._pairs is not None and from_end == 2:
            take_signs(self._pairs, plane, self._signs)
        else:
            take_bytes(self._numbers, part.first_byte, plane)
