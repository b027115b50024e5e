# SPDX-License-Identifier: Apache-2.0
"""The protobuf wire format, and forged lengths and counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import TruncatedError
from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.mindspore.wire import (
    WireReader,
    encode_bytes_field,
    encode_length_prefix,
    encode_varint,
    encode_varint_field,
)
from ckptmgr.formats.source import BytesSource
from tests.support.stored import format_error


class CountingSource(BytesSource):
    """A source that counts reads and the bytes they ask for."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads = 0
        self.bytes_read = 0

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.reads += 1
        self.bytes_read += buffer.nbytes
        super().read_into(offset, buffer)


def fields_of(data: bytes) -> list[tuple[int, int, int, bytes]]:
    wire = WireReader(BytesSource(data))
    return [
        (field.number, field.wire_type, field.value, wire.payload(field))
        for field in wire.fields(0, len(data))
    ]


@given(st.integers(0, 2**64 - 1))
def test_varint_written_reads_back(value: int) -> None:
    assert fields_of(encode_varint_field(7, value))[0][2] == value


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02")]
)
def test_varint_published_examples(value: int, encoded: str) -> None:
    assert encode_varint(value).hex() == encoded


@given(st.integers(1, 2**29 - 1), st.binary(max_size=300))
def test_bytes_field_written_reads_back(number: int, payload: bytes) -> None:
    assert fields_of(encode_bytes_field(number, payload)) == [(number, 2, 0, payload)]


def test_fields_of_every_wire_type_are_walked() -> None:
    data = bytes.fromhex("0801 110102030405060708 1a0161 2501020304")
    assert [(number, kind) for number, kind, _, _ in fields_of(data)] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 5),
    ]


def test_varint_longer_than_needed_is_accepted() -> None:
    assert fields_of(bytes.fromhex("08 81808000"))[0][2] == 1


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        ("08 ffffffffffffffffffff01", "more than 10 bytes"),
        ("08 ffffffffffffffffff02", "more than 64 bits"),
        ("00", "field number 0"),
        ("8280808010 00", "field number 536870912"),
        ("0b 0c", "wire type 3"),
        ("0c", "wire type 4"),
        ("0e", "wire type 6"),
        ("0f", "wire type 7"),
    ],
)
def test_fields_malformed_are_refused_with_offset(encoded: str, message: str) -> None:
    prefix = encode_bytes_field(9, b"before")
    with pytest.raises(FormatError, match=message) as caught:
        fields_of(prefix + bytes.fromhex(encoded))
    assert not isinstance(caught.value, TruncatedError)
    assert caught.value.offset is not None
    assert caught.value.offset >= len(prefix)


@pytest.mark.parametrize(
    "encoded", ["0a", "0a05 61", "08", "0880", "0a80", "25 010203", "11 01", "80", "0affffffff0f"]
)
def test_fields_cut_short_are_truncated(encoded: str) -> None:
    with pytest.raises(TruncatedError):
        fields_of(bytes.fromhex(encoded))


def test_length_of_two_to_the_63_allocates_nothing() -> None:
    with pytest.raises(TruncatedError, match="the data ends at"):
        fields_of(encode_length_prefix(1, 2**63))


def test_field_past_its_message_is_refused_even_inside_the_file() -> None:
    inner = encode_length_prefix(2, 4) + b"ab"
    data = encode_bytes_field(1, inner) + b"more bytes of the file"
    wire = WireReader(BytesSource(data))
    outer = wire.field(0, len(data))
    with pytest.raises(FormatError, match="past the end of its message") as caught:
        list(wire.fields(outer.start, outer.stop))
    assert not isinstance(caught.value, TruncatedError)


def test_packed_and_plain_numbers_read_alike() -> None:
    packed = encode_bytes_field(1, encode_varint(3) + encode_varint(300))
    wire = WireReader(BytesSource(packed))
    assert list(wire.varints(wire.field(0, len(packed)))) == [3, 300]
    plain = encode_varint_field(1, 300)
    wire = WireReader(BytesSource(plain))
    assert list(wire.varints(wire.field(0, len(plain)))) == [300]


def test_packed_number_cut_short_is_refused() -> None:
    data = encode_bytes_field(1, b"\x80") + b"\x08\x01"
    wire = WireReader(BytesSource(data))
    with pytest.raises(FormatError, match="past the end of its message"):
        list(wire.varints(wire.field(0, len(data))))


def test_payload_larger_than_the_window_is_read_whole() -> None:
    payload = bytes(range(256)) * 200
    assert fields_of(encode_bytes_field(1, payload))[0][3] == payload


def test_walk_skips_payloads_instead_of_reading_them() -> None:
    source = CountingSource(b"".join(encode_bytes_field(1, bytes(1_000_000)) for _ in range(5)))
    wire = WireReader(source)
    assert len(list(wire.fields(0, wire.size))) == 5
    assert source.bytes_read < 200_000


def test_walk_of_many_small_fields_takes_few_reads() -> None:
    source = CountingSource(encode_bytes_field(1, bytes(50)) * 10_000)
    wire = WireReader(source)
    assert len(list(wire.fields(0, wire.size))) == 10_000
    assert source.reads < 10


def test_walk_skips_payloads_behind_many_small_fields() -> None:
    large = encode_bytes_field(1, bytes(1_000_000))
    source = CountingSource(encode_bytes_field(1, bytes(50)) * 10_000 + large * 5)
    wire = WireReader(source)
    assert len(list(wire.fields(0, wire.size))) == 10_005
    assert source.bytes_read < 1_000_000


@given(st.binary(max_size=64))
def test_walk_of_any_bytes_raises_nothing_but_format_errors(data: bytes) -> None:
    error = format_error(lambda: fields_of(data))
    assert error is None or error.offset is not None
