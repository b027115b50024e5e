# SPDX-License-Identifier: Apache-2.0
"""A source as an image: the same bytes in any order, each read once, and no damage that is not found in the end."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import ChecksumMismatch
from ckptmgr.formats.file_crc import TRAILER_BYTES
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import RANGE_BYTES, FileDigest, VerifyingSource, digest_of
from ckptmgr.io.source_image import SourceImage
from ckptmgr.io.unverified_reads import UnverifiedReads

WINDOW = 64
BLOCK = (4 << 20) - 48
CONTENT = random.Random(0).randbytes(2 * RANGE_BYTES + 5 * (1 << 20))
DIGEST = digest_of(BytesSource(CONTENT))


class Watched(BytesSource):
    """Remembers its reads."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads: list[tuple[int, int]] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads.append((offset, buffer.nbytes))
        super().read_into(offset, buffer)


def held_bytes(image: SourceImage) -> int:
    return sum(one.buffer.nbytes for one in image._windows.values() if one.buffer is not None)


def used(image: SourceImage, pieces: Iterable[tuple[int, int]]) -> bytes:
    """Use the pieces in the order given and return the image."""
    found = {}
    for offset, length in pieces:
        found[offset] = b"".join(map(bytes, image.views(offset, length)))
        image.release(offset, length)
    return b"".join(found[offset] for offset in sorted(found))


def blocks(size: int) -> list[tuple[int, int]]:
    return [(start, min(BLOCK, size - start)) for start in range(0, size, BLOCK)]


@given(
    cuts=st.sets(st.integers(1, 5 * WINDOW - 1)),
    size=st.integers(1, 5 * WINDOW),
    trailer=st.sampled_from([0, TRAILER_BYTES]),
    order=st.randoms(use_true_random=False),
)
def test_pieces_in_any_order_are_the_source_and_every_byte_is_read_once(
    cuts: set[int], size: int, trailer: int, order: random.Random
) -> None:
    source = Watched(CONTENT[: size + trailer])
    image = SourceImage(source, size, window_bytes=WINDOW)
    ends = [*sorted(cut for cut in cuts if cut < size), size]
    pieces = [(start, stop - start) for start, stop in zip([0, *ends], ends, strict=False)]
    order.shuffle(pieces)
    assert used(image, pieces) == CONTENT[:size]
    assert sum(length for _, length in source.reads) == size + trailer
    assert held_bytes(image) == 0


@settings(max_examples=12)
@given(order=st.randoms(use_true_random=False), body=st.sampled_from([0, 5, 17, 1 << 20]))
def test_checked_source_is_the_image_in_any_order(order: random.Random, body: int) -> None:
    size = len(CONTENT) - min(body, TRAILER_BYTES)
    image = SourceImage(VerifyingSource(BytesSource(CONTENT), DIGEST, path="x"), size)
    pieces = blocks(size)
    order.shuffle(pieces)
    assert used(image, pieces) == CONTENT[:size]
    assert held_bytes(image) == 0


@settings(max_examples=12)
@given(order=st.randoms(use_true_random=False), position=st.integers(0, len(CONTENT) - 1))
def test_damage_is_found_before_all_was_used(order: random.Random, position: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[position] ^= 1
    size = len(CONTENT) - TRAILER_BYTES
    image = SourceImage(VerifyingSource(BytesSource(damaged), DIGEST, path="x"), size)
    pieces = blocks(size)
    order.shuffle(pieces)
    with pytest.raises(ChecksumMismatch, match="do not match the digest"):
        used(image, pieces)


@pytest.mark.parametrize("size", [RANGE_BYTES, RANGE_BYTES - 5, RANGE_BYTES - (4 << 20)])
def test_damage_in_what_follows_the_image_is_found(size: int) -> None:
    content = CONTENT[: size + TRAILER_BYTES]
    digest = digest_of(BytesSource(content))
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    image = SourceImage(VerifyingSource(BytesSource(damaged), digest, path="x"), size)
    with pytest.raises(ChecksumMismatch):
        used(image, blocks(size))


def test_few_windows_are_held_when_two_ranges_are_used_at_once() -> None:
    image = SourceImage(VerifyingSource(BytesSource(CONTENT), DIGEST, path="x"), len(CONTENT))
    pieces, most = blocks(len(CONTENT)), 0
    for offset, length in [pieces[half + step] for step in range(4) for half in (0, 4)]:
        list(image.views(offset, length))
        most = max(most, held_bytes(image))
        image.release(offset, length)
    assert most <= 5 * (4 << 20)


def test_source_with_ranges_of_another_length_is_read_as_it_is() -> None:
    content = CONTENT[: 5 * WINDOW]
    ranges = digest_of(BytesSource(content)).ranges
    digest = FileDigest(size_bytes=len(content), ranges=ranges, range_bytes=8 * WINDOW)
    source = VerifyingSource(BytesSource(content), digest, path="x")
    image = SourceImage(source, len(content), window_bytes=WINDOW)
    assert used(image, [(0, len(content))]) == content


@pytest.mark.parametrize("place", [0, WINDOW + 5, 3 * WINDOW - 1])
def test_what_was_seen_and_is_not_there_any_more_is_noticed(place: int) -> None:
    content = bytearray(CONTENT[: 3 * WINDOW])
    source = BytesSource(content)
    unverified = UnverifiedReads(source.size, source.read_into, piece_bytes=WINDOW, path="x")
    unverified.read_into(place, memoryview(bytearray(1)))
    image = SourceImage(source, source.size, window_bytes=WINDOW, unverified=unverified)
    assert used(image, [(0, source.size)]) == content
    content[place] ^= 1
    image = SourceImage(source, source.size, window_bytes=WINDOW, unverified=unverified)
    with pytest.raises(ChecksumMismatch, match="changed while it was being read"):
        used(image, [(0, source.size)])


def test_failed_read_is_tried_again() -> None:
    class Failing(BytesSource):
        failures = 1

        def read_into(self, offset: int, buffer: memoryview) -> None:
            if self.failures:
                self.failures -= 1
                raise OSError(5, "Input/output error")
            super().read_into(offset, buffer)

    image = SourceImage(Failing(CONTENT[:WINDOW]), WINDOW, window_bytes=WINDOW)
    with pytest.raises(OSError, match="Input/output"):
        used(image, [(0, WINDOW)])
    assert used(image, [(0, WINDOW)]) == CONTENT[:WINDOW]
