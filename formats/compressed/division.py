# SPDX-License-Identifier: Apache-2.0
"""Decides from a sample of a frame how it is compressed.

* A plane whose bytes are of unequal frequency is coded; the exponents of weights are, and save all
  that can be saved. Noise is stored. Bytes that are the same in all elements, as the low ones of
  fp32 copies of bf16 weights, are stored once: all elements are looked at for that.
* The float form is taken where it makes frequencies more unequal.
* Elements that repeat are better compressed as they are (scattered zeros in optimizer states). They
  make even the lowest bytes unequal; only then is it tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .elements import Numbers, float_form, last_pairs, take_exponents, take_signs
from .planes import AS_IT_IS, FLOAT, STORED_WIDTHS, head_size
from .table import FRAME_BYTES

if TYPE_CHECKING:
    import zstandard

# A plane of exponents has no repetitions. Matches that zstd finds by chance cost time and space. A
# table of 64 positions for matches of 7 bytes finds runs, and hardly anything else: the search
# skips ahead, and the rest is Huffman coding with a new code every 64 KiB.
_FREQUENCIES = {"window_log": 16, "hash_log": 6, "min_match": 7}
_REPETITIONS = {"min_match": 7}
_PIECES, _PIECE_BYTES = 4, 16 << 10
_SAMPLE_BYTES = _PIECES * _PIECE_BYTES
_WORTH = 0.95  # a plane is coded if that saves a twentieth of it
# Of squares, which have no sign, a sample does not show the gain of the float form in longer frames.
_FORM_SLACK = 0.2 / 8
_MOST_OF_ONE_BYTE = 32  # bytes that zstd needs for a sample in which all bytes are the same


class PlannedPlane(NamedTuple):
    """A plane to be made: coded by `coder`, or stored, or if all are the same `constant`."""

    first_byte: int
    width: int
    constant: int | None = None
    coder: zstandard.ZstdCompressor | None = None


class Division(NamedTuple):
    """How a frame is divided."""

    form: int
    parts: Sequence[PlannedPlane]


def compressor(level: int, **parameters: int) -> zstandard.ZstdCompressor:
    """Return a compressor of frames."""
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=FRAME_BYTES, write_content_size=1, write_checksum=0, **parameters
    )
    return zstandard.ZstdCompressor(compression_params=chosen)


class PlaneChooser:
    """Chooses for one thread at a time; `level` is that of zstd."""

    def __init__(self, level: int) -> None:
        self._is_thorough = level > 1
        self._plain = compressor(level)
        self._frequencies = compressor(1, **_FREQUENCIES)
        self._repetitions = compressor(level, **_REPETITIONS)

    def whole(self, raw: memoryview) -> zstandard.ZstdCompressor:
        """Return what compresses a frame as it is."""
        sample = _sample(np.frombuffer(raw, np.uint8))
        return self._smallest(sample, self._frequencies, self._plain)[1]

    def divide(self, numbers: Numbers) -> Division | None:
        """Return the division of a frame, or None if it is better compressed as it is."""
        sample = _sample(numbers)
        form, planes, sizes = self._best_form(sample)
        same = _same_bytes(numbers, form) if min(sizes) < _MOST_OF_ONE_BYTE else {}
        varied = [at for at in range(len(planes)) if at not in same]
        coded = [at for at in varied if sizes[at] < _WORTH * planes[at].nbytes]
        if not coded and not same:
            return None
        coders = dict.fromkeys(coded, self._frequencies)
        if self._is_thorough or (varied and varied[0] in coded):
            size = head_size(len(planes)) + sum(planes[at].nbytes for at in varied)
            for at in coded:
                best, coders[at] = self._smallest(planes[at], self._frequencies, self._repetitions)
                size += best - planes[at].nbytes
            if len(self._plain.compress(sample.data)) < size:
                return None
        return Division(form, _parts(same, coders, len(planes), form))

    def _best_form(self, sample: Numbers) -> tuple[int, list[Numbers], list[int]]:
        """Return the better form, the planes of a sample in it, and their sizes when coded."""
        count = len(sample)
        columns = sample.view(np.uint8).reshape(count, sample.itemsize)
        planes: list[Numbers] = list(np.ascontiguousarray(columns.T))
        sizes = [self._size(plane) for plane in planes]
        pairs = last_pairs(sample, memoryview(bytearray(2 * count)))
        signs, exponents = np.empty((2, count), np.uint8)
        take_exponents(pairs, exponents)
        take_signs(pairs, signs, memoryview(bytearray(count)))
        float_sizes = [self._size(signs), self._size(exponents)]
        is_varied = _MOST_OF_ONE_BYTE < float_sizes[1] < _WORTH * count
        if not is_varied or sum(float_sizes) > sum(sizes[-2:]) + _FORM_SLACK * count:
            return AS_IT_IS, planes, sizes
        return FLOAT, [*planes[:-2], signs, exponents], [*sizes[:-2], *float_sizes]

    def _size(self, plane: Numbers) -> int:
        return min(plane.nbytes, len(self._frequencies.compress(plane.data)))

    def _smallest(
        self, sample: Numbers, *coders: zstandard.ZstdCompressor
    ) -> tuple[int, zstandard.ZstdCompressor]:
        found = ((len(one.compress(sample.data)), one) for one in coders)
        return min(found, key=lambda pair: pair[0])


def _sample(numbers: Numbers) -> Numbers:
    """Return pieces from all over a large frame, or all of a small one."""
    if numbers.nbytes <= _SAMPLE_BYTES:
        return numbers
    length = _PIECE_BYTES // numbers.itemsize
    starts = (index * (len(numbers) - length) // (_PIECES - 1) for index in range(_PIECES))
    return np.concatenate([numbers[start : start + length] for start in starts])


def _same_bytes(numbers: Numbers, form: int) -> dict[int, int]:
    """Return the bytes that all elements have in common, by their place."""
    size = numbers.itemsize
    both, any_of = int(np.bitwise_and.reduce(numbers)), int(np.bitwise_or.reduce(numbers))
    if form == FLOAT:
        both, any_of = float_form(both, size), float_form(any_of, size)
    ends = zip(both.to_bytes(size, "little"), any_of.to_bytes(size, "little"), strict=True)
    return {at: low for at, (low, high) in enumerate(ends) if low == high}


def _parts(
    same: dict[int, int], coders: dict[int, zstandard.ZstdCompressor], size: int, form: int
) -> list[PlannedPlane]:
    """Return stored planes, as wide as they can be, before all others."""
    stored, others = [], []
    at = 0
    while at < size:
        if at in same:
            stop = next((one for one in range(at, size) if one not in same), size)
            value = int.from_bytes(bytes(same[one] for one in range(at, stop)), "little")
            others.append(PlannedPlane(at, stop - at, constant=value))
        elif at in coders:
            stop = at + 1
            others.append(PlannedPlane(at, 1, coder=coders[at]))
        else:
            # The last two bytes in the float form are each taken by themselves.
            last = at + 1 if form == FLOAT and at == size - 2 else size - 2 * (form == FLOAT)
            end = next((one for one in range(at, last) if one in same or one in coders), last)
            stop = at + next(width for width in STORED_WIDTHS if at + width <= end)
            stored.append(PlannedPlane(at, stop - at))
        at = stop
    return [*stored, *others]
