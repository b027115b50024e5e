# SPDX-License-Identifier: Apache-2.0
"""Files of more than 4 GiB, of which only the requested parts exist: no offset is cut to 32 bits."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator

import numpy as np

from ckptmgr import RangeSource, open_checkpoint
from ckptmgr.formats.mindspore.wire import (
    encode_bytes_field,
    encode_length_prefix,
    encode_varint_field,
)

GIB = 1 << 30
ROWS, ROW_BYTES = 512 << 10, 1024
SLICE_BYTES = ROWS * ROW_BYTES


def pattern(start: int, length: int) -> bytes:
    """Return bytes that tell where they stand: those at 4 GiB and more differ from those 4 GiB before."""
    numbers = np.arange(start, start + length, dtype=np.uint64)
    return ((numbers ^ (numbers >> np.uint64(28))) & np.uint64(0xFF)).astype(np.uint8).tobytes()


class Sparse:
    """A file that is the pattern, but for some pieces."""

    def __init__(self, size_bytes: int, pieces: dict[int, bytes]) -> None:
        self.size_bytes = size_bytes
        self._pieces = pieces

    def get(self, start: int, length: int) -> bytes:
        found = bytearray(pattern(start, length))
        for at, piece in self._pieces.items():
            low, high = max(start, at), min(start + length, at + len(piece))
            if low < high:
                found[low - start : high - start] = piece[low - at : high - at]
        return bytes(found)

    def source(self) -> RangeSource:
        return RangeSource(self.get, size_bytes=self.size_bytes)


def test_rows_of_a_large_safetensors_file_are_those_of_their_offset() -> None:
    rows, row_bytes = 5 * GIB // 4096, 4096
    described = {
        "large": {"dtype": "U8", "shape": [rows, row_bytes], "data_offsets": [0, 5 * GIB]},
        "last": {"dtype": "U8", "shape": [9], "data_offsets": [5 * GIB, 5 * GIB + 9]},
    }
    header = json.dumps(described).encode()
    head = struct.pack("<Q", len(header)) + header
    file = Sparse(len(head) + 5 * GIB + 9, {0: head})
    with open_checkpoint(file.source()) as reader:
        assert np.asarray(reader.read("last")).tobytes() == pattern(len(head) + 5 * GIB, 9)
        for row in (0, GIB // 4096, 4 * GIB // 4096 - 1, 4 * GIB // 4096, rows - 1):
            found = np.asarray(reader.read("large", rows=slice(row, row + 1)))
            assert found.tobytes() == pattern(len(head) + row * row_bytes, row_bytes)


def ckpt_pieces(slices: int) -> Iterator[tuple[int, bytes]]:
    """Yield where the heads of the slices of one tensor stand in a `.ckpt`, the heads, and at last its size."""
    at = 0
    shape = b"".join(encode_varint_field(1, size) for size in (slices * ROWS, ROW_BYTES))
    described = shape + encode_bytes_field(2, b"UInt8")
    for _ in range(slices):
        content = encode_length_prefix(3, SLICE_BYTES)
        tensor = len(described) + len(content) + SLICE_BYTES
        value = encode_bytes_field(1, b"large") + encode_length_prefix(2, tensor)
        head = encode_length_prefix(1, len(value) + tensor) + value + described + content
        yield at, head
        at += len(head) + SLICE_BYTES
    yield at, b""


def test_rows_of_a_large_ckpt_are_those_of_their_slice() -> None:
    pieces = dict(ckpt_pieces(10))
    size_bytes = max(pieces)
    file = Sparse(size_bytes, pieces)
    assert size_bytes > 4 * GIB
    starts = [at + len(head) for at, head in pieces.items() if head]
    with open_checkpoint(file.source()) as reader:
        assert reader.spec("large").shape == (10 * ROWS, ROW_BYTES)
        for index, start in enumerate(starts):
            for row in (0, 12345, ROWS - 1):
                number = index * ROWS + row
                found = np.asarray(reader.read("large", rows=slice(number, number + 1)))
                assert found.tobytes() == pattern(start + row * ROW_BYTES, ROW_BYTES)
