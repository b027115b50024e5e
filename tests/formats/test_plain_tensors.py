# SPDX-License-Identifier: Apache-2.0
"""The short cut through plain tensors: it finds what the strict reader finds, or leaves the message to it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.mindspore import MAX_DIM, MAX_RANK
from ckptmgr.formats.mindspore_records import (
    PlainHead,
    TensorRecord,
    expect_bytes,
    read_plain_tensor,
    read_record,
)
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.wire import (
    WireReader,
    encode_bytes_field,
    encode_length_prefix,
    encode_varint,
    encode_varint_field,
)


def message(
    name: bytes = b"w",
    dims: tuple[int, ...] = (2, 3),
    type_name: bytes = b"Float32",
    content: bytes = bytes(24),
) -> bytes:
    tensor = b"".join(encode_varint_field(1, dim) for dim in dims)
    tensor += encode_bytes_field(2, type_name) + encode_bytes_field(3, content)
    return encode_bytes_field(1, encode_bytes_field(1, name) + encode_bytes_field(2, tensor))


def by_the_short_cut(data: bytes, offset: int = 0) -> tuple[object, int] | None:
    return read_plain_tensor(WireReader(BytesSource(data)), offset)


def by_the_strict_reader(data: bytes, offset: int = 0) -> tuple[object, int] | None:
    wire = WireReader(BytesSource(data))
    try:
        field = wire.field(offset, wire.size)
        return read_record(wire, expect_bytes(field)), field.stop
    except FormatError:
        return None


@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=300).map(str.encode),
    dims=st.lists(st.integers(0, MAX_DIM), max_size=5).map(tuple),
    content=st.binary(max_size=300),
    before=st.integers(0, 20_000),
)
@settings(max_examples=60)
def test_plain_tensor_is_found_wherever_it_lies(
    name: bytes, dims: tuple[int, ...], content: bytes, before: int
) -> None:
    data = bytes(before) + message(name, dims, content=content) + b"more"
    found = by_the_short_cut(data, before)
    assert found is not None
    assert found == by_the_strict_reader(data, before)


@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "long name", "ä"]),
            st.sampled_from([(), (2,), (1, 2), (2, 1), (300,)]),
            st.sampled_from([b"Int8", b"Bool", b"Float32"]),
            st.sampled_from([0, 1, 8, 200]),
        )
    ),
    change=st.none() | st.tuples(st.integers(0), st.integers(0, 255)),
)
@settings(max_examples=100)
def test_heads_seen_before_change_nothing(
    tensors: list[tuple[str, tuple[int, ...], bytes, int]], change: tuple[int, int] | None
) -> None:
    parts = [message(n.encode(), dims, kind, b"x" * size) for n, dims, kind, size in tensors]
    data = bytearray(b"".join(parts))
    if change is not None and data:
        data[change[0] % len(data)] = change[1]
    heads: dict[int, PlainHead] = {}
    wire, offset = WireReader(BytesSource(data)), 0
    while offset < len(data):
        found = read_plain_tensor(wire, offset, heads)
        assert found == by_the_short_cut(bytes(data), offset)
        if found is None:
            break
        offset = found[1]


@given(data=st.data())
@settings(max_examples=300)
def test_changed_bytes_never_read_as_something_else(data: st.DataObject) -> None:
    changed = bytearray(message(dims=(2, 300)))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(changed[: data.draw(st.integers(1, len(changed)))])
    found = by_the_short_cut(cut)
    assert found is None or found == by_the_strict_reader(cut)


@pytest.mark.parametrize(
    "data",
    [
        message(dims=(1,) * (MAX_RANK + 1)),
        message(dims=(MAX_DIM + 1,)),
        message(type_name=b"F" * 65),
        message(type_name="Flöat".encode()),
        message(name=b"\xff"),
        message(name=b"w" * 20_000),
        message()[:-1],
        message()[:5],
        b"",
        b"\x0a" + b"\xff" * 12,
        encode_bytes_field(2, b""),
    ],
    ids=[
        "rank",
        "dim",
        "long-type",
        "type-not-ascii",
        "name-not-utf8",
        "name-past-the-window",
        "content-cut",
        "head-cut",
        "empty",
        "varint-too-long",
        "another-field",
    ],
)
def test_everything_else_is_left_to_the_strict_reader(data: bytes) -> None:
    assert by_the_short_cut(data) is None


def test_long_content_is_not_read() -> None:
    class Head(BytesSource):
        @property
        def size(self) -> int:
            return 1 << 40

    length = (1 << 40) - 100
    tensor = encode_bytes_field(2, b"Int8") + encode_length_prefix(3, length)
    value = encode_bytes_field(1, b"w") + b"\x12" + encode_varint(len(tensor) + length) + tensor
    data = b"\x0a" + encode_varint(len(value) + length) + value
    found = read_plain_tensor(WireReader(Head(data + bytes(1 << 15))), 0)
    assert found is not None
    record, stop = found
    assert isinstance(record, TensorRecord)
    assert (record.piece.offset, record.piece.length) == (len(data), length)
    assert stop == len(data) + length
