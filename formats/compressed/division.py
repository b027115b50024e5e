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
# skips ahead, and what is left is Huffman coding with a new code every 64 KiB.
_FREQUENCIES = {"window_log": 16, "hash_log": 6, "min_match": 7}
_REPETITIONS = {"min_match": 7}
_PIECES, _PIECE_BYTES = 4, 16 << 10
_SAMPLE_BYTES = _PIECES * _PIECE_BYTES
# A plane is coded if that saves a twentieth of it. The float form must save 0.05 bits of each
# element; in a sample of 8,000, frequencies are wrong by 0.02 bits.
_WORTH_BITS = 8 * 0.95
_WORTH_FORM_BITS = 0.05
_ZSTD_MOST_EVEN_BITS = 7  # zstd stores a block without a byte that is more frequent than this


class Part(NamedTuple):
    """A plane to be made: coded by `coder`, or stored, or if all are the same `constant`."""

    first_byte: int
    width: int
    constant: int | None = None
    coder: zstandard.ZstdCompressor | None = None


class Division(NamedTuple):
    """How a frame is divided."""

    form: int
    parts: Sequence[Part]


def compressor(level: int, **parameters: int) -> zstandard.ZstdCompressor:
    """Return a compressor of frames."""
    import zstandard

    chosen = zstandard.ZstdCompressionParameters.from_level(
        level, source_size=FRAME_BYTES, write_content_size=1, write_checksum=0, **parameters
    )
    return zstandard.ZstdCompressor(compression_params=chosen)


class Chooser:
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
        form, planes, bits = _best_form(sample)
        same = _same_bytes(numbers, form) if 0 in bits else {}
        varied = [at for at in range(len(planes)) if at not in same]
        coded = [at for at in varied if bits[at] < _WORTH_BITS]
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

    def _smallest(
        self, sample: Numbers, *coders: zstandard.ZstdCompressor
    ) -> tuple[int, zstandard.ZstdCompressor]:
        return min(
            ((len(one.compress(sample.data)), one) for one in coders),
            key=lambda pair: pair[0],
        )


def _sample(numbers: Numbers) -> Numbers:
    """Return pieces from all over a large frame, or all of a small one."""
    if numbers.nbytes <= _SAMPLE_BYTES:
        return numbers
    length = _PIECE_BYTES // numbers.itemsize
    starts = (index * (len(numbers) - length) // (_PIECES - 1) for index in range(_PIECES))
    return np.concatenate([numbers[start : start + length] for start in starts])


def _best_form(sample: Numbers) -> tuple[int, list[Numbers], list[float]]:
    """Return the better form, the planes of a sample in it, and the bits for each of their bytes."""
    columns = sample.view(np.uint8).reshape(-1, sample.itemsize)
    planes: list[Numbers] = list(np.ascontiguousarray(columns.T))
    bits = [_entropy_bits(plane) for plane in planes]
    room = memoryview(bytearray(2 * len(sample)))
    pairs = last_pairs(sample, room)
    signs, exponents = np.empty((2, len(sample)), np.uint8)
    take_exponents(pairs, exponents)
    take_signs(pairs, signs, memoryview(bytearray(len(sample))))
    float_bits = [_entropy_bits(signs), _entropy_bits(exponents)]
    if sum(float_bits) + _WORTH_FORM_BITS > sum(bits[-2:]):
        return AS_IT_IS, planes, bits
    return FLOAT, [*planes[:-2], signs, exponents], [*bits[:-2], *float_bits]


def _entropy_bits(plane: Numbers) -> float:
    """Return the bits that a code by frequency needs for a byte, or 8 if zstd would not code it."""
    counts = np.bincount(plane)
    if counts.max() <= len(plane) >> _ZSTD_MOST_EVEN_BITS:
        return 8.0
    shares = counts[counts > 0] / len(plane)
    return float(-(shares * np.log2(shares)).sum())


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
) -> list[Part]:
    """Return stored planes, as wide as they can be, before all others."""
    stored, others = [], []
    at = 0
    while at < size:
        if at in same:
            stop = next((one for one in range(at, size) if one not in same), size)
            value = int.from_bytes(bytes(same[one] for one in range(at, stop)), "little")
            others.append(Part(at, stop - at, constant=value))
        elif at in coders:
            stop = at + 1
            others.append(Part(at, 1, coder=coders[at]))
        else:
            # The last two bytes in the float form are each taken by themselves.
            last = at + 1 if form == FLOAT and at == size - 2 else size - 2 * (form == FLOAT)
            end = next((one for one in range(at, last) if one in same or one in coders), last)
            stop = at + next(width for width in STORED_WIDTHS if at + width <= end)
            stored.append(Part(at, stop - at))
        at = stop
    return [*stored, *others]
