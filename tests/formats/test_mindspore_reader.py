# SPDX-License-Identifier: Apache-2.0
"""Reading `.ckpt`: files that must load, and files that MindSpore half-loads and we refuse."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import TruncatedError
from ckptmgr.formats.errors import ChecksumError, FormatError, UnsupportedError
from ckptmgr.formats.file_crc import crc32, encode_trailer
from ckptmgr.formats.index import READ_BYTES, TensorEntry, check_crc
from ckptmgr.formats.mindspore.fields import MAX_METADATA_BYTES, MAX_TEXT_BYTES
from ckptmgr.formats.mindspore.reader import read_ckpt_index, read_ckpt_into
from ckptmgr.formats.mindspore.wire import (
    encode_bytes_field,
    encode_length_prefix,
    encode_varint,
    encode_varint_field,
)
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, Text
from tests.support.stored import (
    Stored,
    format_error,
    image_bytes,
    read_ckpt,
    read_entry,
    stored_items,
)
from tests.support.strategies import ckpt_items, named_tensor

METADATA_FIELD = 17229


def tensor_message(
    *dims: int, type_name: bytes = b"Float32", content: bytes | None = bytes(4), more: bytes = b""
) -> bytes:
    message = b"".join(encode_varint_field(1, dim) for dim in dims)
    message += encode_bytes_field(2, type_name) if type_name else b""
    return message + (b"" if content is None else encode_bytes_field(3, content)) + more


def record(name: str | bytes | None, message: bytes, *, field: int = 2, more: bytes = b"") -> bytes:
    encoded = name.encode() if isinstance(name, str) else name
    value = b"" if encoded is None else encode_bytes_field(1, encoded)
    return encode_bytes_field(1, value + encode_bytes_field(field, message) + more)


def map_message(*parts: bytes) -> bytes:
    return b"".join(encode_bytes_field(1, part) for part in parts)


def int32s(*dims: int, rows: int = 1, type_name: bytes = b"int32") -> bytes:
    return tensor_message(*dims, type_name=type_name, content=bytes(4 * rows))


W = record("w", tensor_message(1))
MAP = map_message(int32s(1), int32s(1), int32s(1))
NO_TENSOR = encode_bytes_field(1, encode_bytes_field(1, b"w"))
BOTH = record("w", tensor_message(1), more=encode_bytes_field(3, MAP))


def text_message(content: bytes, *dims: int) -> bytes:
    return tensor_message(*(dims or (0,)), type_name=b"str", content=content)


def test_fields_of_unknown_number_are_skipped_everywhere() -> None:
    unknown = (
        encode_varint_field(77, 5)
        + encode_bytes_field(78, b"x" * 40)
        + bytes.fromhex("25 01020304")
    )
    inner = tensor_message(1, more=unknown)
    whole = unknown + record("w", unknown + inner, more=unknown) + unknown
    map_whole = record("m", MAP + unknown, field=3)
    assert list(read_ckpt(whole + map_whole)) == ["w", "m"]


def test_dims_packed_are_accepted() -> None:
    packed = encode_bytes_field(1, encode_varint(2) + encode_varint(3))
    data = record("w", packed + tensor_message(content=bytes(24)))
    assert read_ckpt(data) == {"w": Stored("float32", (2, 3), bytes(24))}


def test_fields_in_another_order_are_accepted() -> None:
    message = encode_bytes_field(3, bytes(4)) + encode_bytes_field(2, b"Float32")
    value = encode_bytes_field(2, message) + encode_bytes_field(1, b"w")
    assert read_ckpt(encode_bytes_field(1, value)) == {"w": Stored("float32", (), bytes(4))}


def test_slices_of_any_cut_are_joined() -> None:
    content = bytes(range(12))
    cuts = [content[:5], b"", content[5:6], content[6:]]
    data = b"".join(record("w", tensor_message(3, content=cut)) for cut in cuts)
    assert read_ckpt(data) == {"w": Stored("float32", (3,), content)}


@pytest.mark.parametrize(("content", "shape"), [(bytes(4), ()), (b"", (0,))])
def test_dims_of_zero_mean_a_scalar_only_with_content(
    content: bytes, shape: tuple[int, ...]
) -> None:
    data = record("w", tensor_message(0, content=content))
    assert read_ckpt(data) == {"w": Stored("float32", shape, content)}


@pytest.mark.parametrize(
    ("content", "text"),
    [("68000000", "h"), ("00000000", ""), ("00d80000", "\ud800"), ("6100000000000000", "a\0")],
)
def test_text_is_read_as_written(content: str, text: str) -> None:
    assert read_ckpt(record("s", text_message(bytes.fromhex(content)))) == {"s": text}


@pytest.mark.parametrize("dims", [(0,), (1,)])
def test_text_dims_of_one_item_are_accepted(dims: tuple[int, ...]) -> None:
    assert read_ckpt(record("s", text_message(b"h\0\0\0", *dims))) == {"s": "h"}


def test_text_without_dims_is_accepted() -> None:
    message = tensor_message(type_name=b"str", content=b"h\0\0\0")
    assert read_ckpt(record("s", message)) == {"s": "h"}


def test_map_of_64_bit_keys_is_read_although_mindspore_misreads_it() -> None:
    keys = tensor_message(1, type_name=b"int64", content=bytes(8))
    data = record("m", map_message(keys, int32s(1), int32s(1)), field=3)
    assert read_ckpt(data)["m"] == (
        Stored("int64", (1,), bytes(8)),
        Stored("int32", (1,), bytes(4)),
        Stored("int32", (1,), bytes(4)),
    )


CUT = W[:-1]
MANY_DIMS = tensor_message(*[1] * 65)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", FormatError, "no parameters"),
        (encode_varint_field(99, 1), FormatError, "no parameters"),
        (encode_trailer(0), FormatError, "no parameters"),
        (CUT, TruncatedError, "the data ends at"),
        (W + b"\0", FormatError, "field number 0"),
        (W + encode_trailer(0) * 2, FormatError, "wire type 3"),
        (encode_varint_field(1, 1), FormatError, "field 1 has wire type 0"),
        (encode_bytes_field(1, b""), FormatError, "no name"),
        (record(None, tensor_message(1)), FormatError, "no name"),
        (record(b"\xff", tensor_message(1)), FormatError, "not UTF-8"),
        (NO_TENSOR, FormatError, "has no content"),
        (BOTH, FormatError, "both a tensor and a map"),
        (record("w", tensor_message(1), more=encode_bytes_field(2, b"")), FormatError, "twice"),
        (record("w", tensor_message(1), more=encode_bytes_field(1, b"v")), FormatError, "twice"),
        (record("w", tensor_message(1, type_name=b"")), FormatError, "type is missing"),
        (record("w", tensor_message(1, content=None)), FormatError, "content is missing"),
        (record("w", b""), FormatError, "type is missing"),
        (
            record("w", tensor_message(1, more=encode_bytes_field(3, bytes(4)))),
            FormatError,
            "field 3 comes twice",
        ),
        (
            record("w", tensor_message(1, more=encode_bytes_field(2, b"Int32"))),
            FormatError,
            "field 2 comes twice",
        ),
        (record("w", tensor_message(1) + encode_varint_field(2, 1)), FormatError, "wire type 0"),
        (record("w", bytes.fromhex("0d01000000")), FormatError, "field 1 has wire type 5"),
        (record("w", tensor_message(2)), FormatError, "has 4 bytes.* needs 8"),
        (record("w", tensor_message(1, content=bytes(5))), FormatError, "has 5 bytes"),
        (record("w", tensor_message(content=b"")), FormatError, "has 0 bytes"),
        (record("w", tensor_message(0, content=bytes(8))), FormatError, "has 8 bytes"),
        (record("w", tensor_message(0, 3)), FormatError, "has 4 bytes"),
        (record("w", tensor_message(2**64 - 1)), FormatError, "dimension is negative"),
        (record("w", tensor_message(2**31)), FormatError, "dimension is negative or more"),
        (record("w", tensor_message(*[2**31 - 1] * 64)), FormatError, "has 4 bytes"),
        (record("w", MANY_DIMS), FormatError, "more than 64 dimensions"),
        (
            record("w", tensor_message(2**31 - 1, 2**31 - 1, 2**31 - 1, 0, content=b"")),
            UnsupportedError,
            "no array has the shape",
        ),
        (record("w", tensor_message(1, type_name=b"float32")), UnsupportedError, "'float32'"),
        (record("w", tensor_message(1, type_name=b"Complex64")), UnsupportedError, "'Complex64'"),
        (record("w", tensor_message(1, type_name=b"\xff")), UnsupportedError, "unknown element"),
        (record("w", tensor_message(1, type_name=b"F" * 99)), UnsupportedError, "unknown element"),
        (W + record("x", tensor_message(1)) + W, FormatError, "two parameters have this name"),
        (W + W, FormatError, "has 8 bytes"),
        (
            record("w", tensor_message(2)) + record("w", tensor_message(2, type_name=b"Int32")),
            FormatError,
            r"Int32\[2\] follows one of Float32\[2\]",
        ),
        (
            record("w", tensor_message(2)) + record("w", tensor_message(1, 2)),
            FormatError,
            r"Float32\[1, 2\] follows",
        ),
        (W + record("w", MAP, field=3), FormatError, "by a tensor and by a map"),
        (record("s", text_message(b"")), FormatError, "0 bytes is not UTF-32"),
        (record("s", text_message(bytes(3))), FormatError, "3 bytes is not UTF-32"),
        (record("s", text_message(b"a\0\0\0\0\0\x11\0")), FormatError, "invalid character"),
        (record("s", text_message(b"a\0\0\0", 2)), FormatError, r"text has the shape \[2\]"),
        (record("s", text_message(b"a\0\0\0")) * 2, FormatError, "text comes twice"),
        (
            record("s", text_message(bytes(MAX_TEXT_BYTES + 4))),
            UnsupportedError,
            "text of 67108868 bytes",
        ),
        (record("m", map_message(int32s(1)), field=3), FormatError, "has 1 tensors"),
        (record("m", MAP + map_message(int32s(1)), field=3), FormatError, "has 4 tensors"),
        (record("m", encode_varint_field(1, 1), field=3), FormatError, "wire type 0"),
        (
            record("m", map_message(int32s(1), int32s(2, rows=2), int32s(1)), field=3),
            FormatError,
            "differ in rows",
        ),
        (
            record("m", map_message(int32s(), int32s(1), int32s(1)), field=3),
            FormatError,
            "the key of a map has no rows",
        ),
        (
            record("m", map_message(int32s(2), int32s(1), int32s(1)), field=3),
            FormatError,
            "has 4 bytes",
        ),
        (
            record("m", map_message(int32s(1, type_name=b"Int32"), *[int32s(1)] * 2), field=3),
            UnsupportedError,
            "'Int32'",
        ),
        (
            record("m", map_message(int32s(4, type_name=b"int4"), *[int32s(1)] * 2), field=3),
            UnsupportedError,
            "'int4'",
        ),
        (
            record("m", MAP, field=3)
            + record("m", map_message(int32s(1), int32s(1, 1), int32s(1)), field=3),
            FormatError,
            r"int32\[1\] follows one of int32\[\]",
        ),
        (encode_varint_field(METADATA_FIELD, 1) + W, FormatError, "wire type 0"),
        (encode_bytes_field(METADATA_FIELD, b"{}") * 2 + W, FormatError, "metadata comes twice"),
        (encode_bytes_field(METADATA_FIELD, b"[]") + W, FormatError, "does not start"),
        (encode_bytes_field(METADATA_FIELD, b'{"a": 1}') + W, FormatError, "no string"),
        (
            encode_bytes_field(METADATA_FIELD, b" " * (MAX_METADATA_BYTES + 1)) + W,
            UnsupportedError,
            "metadata of more than",
        ),
    ],
)
def test_file_damaged_is_refused_with_its_place(
    data: bytes, error: type[FormatError], message: str
) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_ckpt(data)
    assert type(caught.value) is error
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(data)


def test_error_names_the_tensor_and_its_offset() -> None:
    data = W + record("fc1.weight", tensor_message(2))
    with pytest.raises(FormatError) as caught:
        read_ckpt(data)
    assert (caught.value.tensor, caught.value.offset) == ("fc1.weight", len(data) - 4)


def test_huge_claim_in_a_small_file_allocates_nothing() -> None:
    data = record("w", tensor_message(2**31 - 1, content=b"\0", type_name=b"UInt8"))
    read_ckpt(W)  # its imports stay
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            read_ckpt(data)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_bool_of_two_is_refused_when_it_is_read() -> None:
    data = record("b", tensor_message(3, type_name=b"Bool", content=b"\x00\x02\x01"))
    source = BytesSource(data)
    (entry,) = read_ckpt_index(source).tensors()
    with pytest.raises(FormatError, match="bool has the value 2") as caught:
        read_entry(source, entry)
    assert (caught.value.offset, caught.value.tensor) == (len(data) - 2, "b")


def test_index_does_not_read_contents() -> None:
    class Sparse:
        """Claims 3 GiB of zeros between a head and the end."""

        size = 3 * 2**30 + 100
        head = b""

        def read_into(self, offset: int, buffer: memoryview) -> None:
            assert buffer.nbytes < 100_000
            part = self.head[offset : offset + buffer.nbytes]
            buffer[: len(part)] = part
            buffer[len(part) :] = bytes(buffer.nbytes - len(part))

    source = Sparse()
    content = 3 * 2**30
    message = tensor_message(3, 2**30, type_name=b"UInt8", content=None)
    message += encode_length_prefix(3, content)
    value = encode_bytes_field(1, b"w") + encode_length_prefix(2, len(message) + content)
    source.head = encode_length_prefix(1, len(value) + len(message) + content) + value + message
    source.size = len(source.head) + content
    (entry,) = read_ckpt_index(source).tensors()
    assert entry.spec.shape == (3, 2**30)


def ends_like_a_trailer(crc: bool) -> bytes:
    content = bytes(3) + b"crc_num" + bytes(10)
    items = [named_tensor("w", "uint8", (len(content),), content)]
    return image_bytes(build_ckpt_image(items, crc=crc))


@pytest.mark.parametrize("crc", [False, True])
def test_content_that_ends_like_a_trailer_is_kept(crc: bool) -> None:
    data = ends_like_a_trailer(crc)
    index = read_ckpt_index(BytesSource(data))
    assert (index.crc is not None) is crc
    assert read_ckpt(data, crc=crc) == {
        "w": Stored("uint8", (20,), bytes(3) + b"crc_num" + bytes(10))
    }


def test_crc_wrong_is_reported_only_when_asked_for() -> None:
    data = W + encode_trailer(crc32(W) ^ 1)
    assert list(read_ckpt(data)) == ["w"]
    with pytest.raises(ChecksumError, match="but the file states 0x"):
        read_ckpt(data, crc=True)


def test_crc_of_more_than_32_bits_never_matches() -> None:
    with pytest.raises(ChecksumError):
        read_ckpt(W + encode_trailer(crc32(W) + 2**32), crc=True)


def test_crc_absent_does_not_count_as_checked() -> None:
    with pytest.raises(ChecksumError, match="has no CRC32"):
        read_ckpt(W, crc=True)


@given(ckpt_items(), st.integers(1, 40), st.integers(0, 7))
def test_reading_all_gives_contents_and_crc_in_one_pass(
    items: list[Item], slice_bytes: int, skipped: int
) -> None:
    source = BytesSource(image_bytes(build_ckpt_image(items, crc=True, slice_bytes=slice_bytes)))
    index = read_ckpt_index(source)
    wanted = [entry for i, entry in enumerate(index.tensors()) if i != skipped]
    contents = {id(entry): bytearray(entry.spec.size_bytes) for entry in wanted}

    def buffer_of(entry: TensorEntry) -> memoryview | None:
        return memoryview(contents[id(entry)]) if id(entry) in contents else None

    check_crc(index.crc, read_ckpt_into(source, index, buffer_of))
    for entry in wanted:
        assert bytes(contents[id(entry)]) == read_entry(source, entry).content


def test_body_of_several_read_blocks_has_the_same_crc() -> None:
    data = image_bytes(
        build_ckpt_image(
            [named_tensor("w", "uint8", (2 * READ_BYTES + 5,), bytes(2 * READ_BYTES + 5))]
        )
    )
    source = BytesSource(data)
    index = read_ckpt_index(source)
    buffer = memoryview(bytearray(2 * READ_BYTES + 5))
    assert read_ckpt_into(source, index, lambda _: buffer) == crc32(data)


def test_buffer_of_another_size_is_refused() -> None:
    source = BytesSource(W)
    index = read_ckpt_index(source)
    with pytest.raises(ValueError, match="the buffer has 3 bytes; 'w' needs 4"):
        read_ckpt_into(source, index, lambda _: memoryview(bytearray(3)))


@given(st.binary(max_size=80))
def test_any_bytes_raise_nothing_but_format_errors(data: bytes) -> None:
    error = format_error(lambda: read_ckpt(data))
    assert error is None or error.offset is not None


@given(ckpt_items(), st.data())
def test_any_splice_raises_nothing_but_format_errors(
    items: list[Item], data: st.DataObject
) -> None:
    whole = image_bytes(build_ckpt_image(items, metadata={"a": "b"}))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    spliced = whole[:start] + data.draw(st.binary(max_size=12)) + whole[stop:]
    error = format_error(lambda: read_ckpt(spliced))
    assert error is None or error.offset is not None


def test_texts_and_maps_keep_their_place_among_tensors() -> None:
    items: list[Item] = [named_tensor("a"), Text(name="b", text="t"), named_tensor("c")]
    data = image_bytes(build_ckpt_image(items))
    index = read_ckpt_index(BytesSource(data))
    assert [entry.name for entry in index.entries] == ["a", "b", "c"]
    assert read_ckpt(data) == stored_items(items)
