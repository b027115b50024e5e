# SPDX-License-Identifier: Apache-2.0
"""Tables of frames that are well-formed and wrong."""

from __future__ import annotations

import struct

import pytest
from blake3 import blake3

from ckptmgr.formats.compressed.table import (
    HEAD,
    ZSTD,
    Frame,
    encode_tail,
    frame_digest,
    read_table,
)
from ckptmgr.formats.errors import ChecksumError, FormatError, UnsupportedError
from ckptmgr.formats.source import BytesSource

ONE = b"0123456789abcdef"


def frame(offset: int, **changes: int) -> Frame:
    sizes = {"stored_bytes": 16, "raw_bytes": 20, "group_bytes": 1, "method": ZSTD, **changes}
    return Frame(offset=offset, digest=frame_digest(ONE), **sizes)


def read(*frames: Frame, body: bytes = ONE + ONE) -> None:
    read_table(BytesSource(HEAD + body + encode_tail(frames, offset=len(HEAD + body))))


def with_end(file: bytes, *, count: int, raw_bytes: int, reserved: int = 0) -> bytes:
    """Return a file whose end says something else, under a digest that fits."""
    table = file[-64 - 56 * 2 : -64]
    counts = struct.pack("<QQQ", count, raw_bytes, reserved)
    return file[:-64] + counts + blake3(HEAD + table + counts).digest() + b"CKPZTBL1"


def test_table_of_two_frames_is_read_back() -> None:
    read(frame(16), frame(32))


@pytest.mark.parametrize(
    "frames",
    [
        (frame(16), frame(16)),
        (frame(16), frame(31)),
        (frame(17), frame(33)),
        (frame(32), frame(48)),
    ],
    ids=["twice", "overlapping", "a gap", "behind the end"],
)
def test_frames_that_do_not_tile_the_file_are_refused(frames: tuple[Frame, ...]) -> None:
    with pytest.raises(FormatError, match="overlap, or leave a gap"):
        read(*frames)


def test_bytes_that_belong_to_no_frame_are_refused() -> None:
    with pytest.raises(FormatError, match="24 bytes between the frames"):
        read(frame(16))


def test_frame_that_reaches_into_the_table_is_refused() -> None:
    with pytest.raises(FormatError, match="bytes between the frames"):
        read(frame(16), frame(32, stored_bytes=17))


def test_padding_that_is_not_zero_is_refused() -> None:
    with pytest.raises(FormatError, match="not zero"):
        read(frame(16), body=ONE + b"\0\0\0\0\0\0\0\x01")


def test_size_that_no_writer_makes_is_refused() -> None:
    tail = encode_tail([frame(16)], offset=32)
    with pytest.raises(FormatError, match="bytes between"):
        read_table(BytesSource(HEAD + ONE + b"\0" + tail))


def test_end_that_states_another_total_is_refused() -> None:
    file = HEAD + ONE + ONE + encode_tail([frame(16), frame(32)], offset=48)
    with pytest.raises(FormatError, match="the 41 bytes that the end states"):
        read_table(BytesSource(with_end(file, count=2, raw_bytes=41)))


def test_end_that_uses_what_is_reserved_is_refused() -> None:
    file = HEAD + ONE + ONE + encode_tail([frame(16), frame(32)], offset=48)
    with pytest.raises(UnsupportedError, match="a newer version"):
        read_table(BytesSource(with_end(file, count=2, raw_bytes=40, reserved=1)))


@pytest.mark.parametrize("count", [2**21 + 1, 2**40, 2**64 - 1])
def test_table_of_too_many_frames_is_refused(count: int) -> None:
    file = HEAD + ONE + ONE + encode_tail([frame(16), frame(32)], offset=48)
    with pytest.raises(UnsupportedError, match="more than 2097152"):
        read_table(BytesSource(with_end(file, count=count, raw_bytes=40)))


@pytest.mark.parametrize("count", [3, 2**21])
def test_table_that_does_not_fit_into_the_file_is_refused(count: int) -> None:
    file = HEAD + ONE + ONE + encode_tail([frame(16), frame(32)], offset=48)
    with pytest.raises(FormatError, match="does not fit"):
        read_table(BytesSource(with_end(file, count=count, raw_bytes=40)))


def test_table_of_another_length_does_not_match_its_digest() -> None:
    file = HEAD + ONE + ONE + encode_tail([frame(16), frame(32)], offset=48)
    with pytest.raises(ChecksumError, match="table of frames"):
        read_table(BytesSource(with_end(file, count=1, raw_bytes=20)))
