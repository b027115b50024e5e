# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import ChecksumMismatch, TruncatedCheckpoint
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.io.digest import FileDigest, VerifyingSource, digest_of

CONTENT = bytes(range(100))
RANGE_BYTES = 16


def digest_in_ranges(content: bytes, range_bytes: int = RANGE_BYTES) -> FileDigest:
    ranges = [
        blake3(content[start : start + range_bytes]).digest()
        for start in range(0, len(content), range_bytes)
    ]
    return FileDigest(size_bytes=len(content), ranges=tuple(ranges), range_bytes=range_bytes)


def source(content: bytes = CONTENT, digest: FileDigest | None = None) -> VerifyingSource:
    return VerifyingSource(
        BytesSource(content), digest or digest_in_ranges(CONTENT), path="/runs/net-1.ckpt"
    )


def test_digest_of_a_small_file_is_one_range() -> None:
    digest = digest_of(BytesSource(CONTENT))
    assert digest.size_bytes == 100
    assert digest.ranges == (blake3(CONTENT).digest(),)


def test_digest_of_nothing_has_no_ranges_and_a_total() -> None:
    digest = digest_of(BytesSource(b""))
    assert digest.ranges == ()
    assert len(digest.total) == 32


def test_digest_of_a_large_file_has_a_range_for_every_16_mib() -> None:
    content = bytes(16 << 20) + b"end"
    digest = digest_of(BytesSource(content))
    assert digest.ranges == (blake3(content[:-3]).digest(), blake3(b"end").digest())


def test_total_depends_on_size_and_on_every_range() -> None:
    digest = digest_in_ranges(CONTENT)
    others = [
        FileDigest(size_bytes=99, ranges=digest.ranges, range_bytes=16),
        FileDigest(size_bytes=100, ranges=digest.ranges, range_bytes=17),
        FileDigest(size_bytes=100, ranges=digest.ranges[::-1], range_bytes=16),
    ]
    assert len({digest.total, *(other.total for other in others)}) == 4


@given(pieces=st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6))
def test_checked_source_reads_any_pieces_in_any_order(pieces: list[tuple[int, int]]) -> None:
    checked = source()
    for start, length in pieces:
        length = min(length, 100 - start)
        assert read_bytes(checked, start, length) == CONTENT[start : start + length]


@given(position=st.integers(0, 99), start=st.integers(0, 99), length=st.integers(1, 100))
def test_damaged_byte_is_never_handed_out(position: int, start: int, length: int) -> None:
    damaged = bytearray(CONTENT)
    damaged[position] ^= 1
    length = min(length, 100 - start)
    checked = source(bytes(damaged))
    first, last = start // RANGE_BYTES, (start + length - 1) // RANGE_BYTES
    if first <= position // RANGE_BYTES <= last:
        with pytest.raises(ChecksumMismatch, match="do not match the digest") as caught:
            read_bytes(checked, start, length)
        assert caught.value.offset == position // RANGE_BYTES * RANGE_BYTES
        assert str(caught.value).startswith("/runs/net-1.ckpt: ")
    else:
        assert read_bytes(checked, start, length) == CONTENT[start : start + length]


def test_damaged_range_is_not_remembered_as_checked() -> None:
    damaged = bytearray(CONTENT)
    damaged[20] ^= 1
    checked = source(bytes(damaged))
    assert read_bytes(checked, 1, 2) == CONTENT[1:3]
    for _ in range(2):
        with pytest.raises(ChecksumMismatch):
            read_bytes(checked, 17, 2)
    assert read_bytes(checked, 1, 2) == CONTENT[1:3]


def test_shorter_file_is_truncated() -> None:
    with pytest.raises(TruncatedCheckpoint, match="99 bytes, but the manifest says 100") as caught:
        source(CONTENT[:-1])
    assert caught.value.offset == 99


def test_longer_file_does_not_match() -> None:
    with pytest.raises(ChecksumMismatch, match="101 bytes, but the manifest says 100"):
        source(CONTENT + b"x")


def test_size_of_the_checked_source_is_that_of_the_manifest() -> None:
    assert source().size == 100
