# SPDX-License-Identifier: Apache-2.0
"""Reading one tensor's content out of its pieces."""

from __future__ import annotations

import pytest

from ckptmgr import TruncatedError
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.errors import ChecksumError, FormatError
from ckptmgr.formats.index import READ_BYTES, ContentRun, TensorEntry, check_crc, read_tensor_into
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import TensorSpec


def entry_of(dtype: str, *pieces: ContentRun) -> TensorEntry:
    size_bytes = sum(piece.length for piece in pieces)
    return TensorEntry(
        spec=TensorSpec(name="w", dtype=BY_NAME[dtype], shape=(size_bytes,)), pieces=pieces
    )


def test_pieces_are_joined_in_their_order() -> None:
    buffer = bytearray(5)
    entry = entry_of("uint8", ContentRun(4, 3), ContentRun(0, 2))
    read_tensor_into(BytesSource(b"ab..cde"), entry, memoryview(buffer))
    assert bytes(buffer) == b"cdeab"


@pytest.mark.parametrize("length", [0, 2, 4])
def test_buffer_of_another_size_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"the buffer has {length} bytes; 'w' needs 3"):
        read_tensor_into(
            BytesSource(b"abc"), entry_of("uint8", ContentRun(0, 3)), memoryview(bytearray(length))
        )


def test_source_that_became_shorter_is_truncated() -> None:
    with pytest.raises(TruncatedError):
        read_tensor_into(
            BytesSource(b"ab"), entry_of("uint8", ContentRun(0, 3)), memoryview(bytearray(3))
        )


def test_wrong_bool_far_into_a_large_tensor_is_found() -> None:
    data = bytearray(READ_BYTES + 10)
    data[READ_BYTES + 7] = 255
    entry = entry_of("bool", ContentRun(0, len(data)))
    with pytest.raises(FormatError, match="bool has the value 255") as caught:
        read_tensor_into(BytesSource(data), entry, memoryview(bytearray(len(data))))
    assert caught.value.offset == READ_BYTES + 7


@pytest.mark.parametrize("stored", [None, 1])
def test_crc_absent_or_different_is_reported(stored: int | None) -> None:
    with pytest.raises(ChecksumError):
        check_crc(stored, 2)


def test_crc_equal_passes() -> None:
    assert check_crc(2, 2) is None  # type: ignore[func-returns-value]
