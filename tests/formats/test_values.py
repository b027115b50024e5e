# SPDX-License-Identifier: Apache-2.0
"""The plain values of the format layer: types, tensors, images, sources, trailers, errors."""

from __future__ import annotations

import threading
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import TruncatedError
from ckptmgr.formats.dtypes import BY_NAME, DTYPES, dtype_of
from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.formats.file_crc import BodyCrc, crc32, crc32_combine, decode_trailer, encode_trailer
from ckptmgr.formats.image import Extent, Image, LateHead
from ckptmgr.formats.source import BytesSource, read_bytes
from ckptmgr.formats.tensor import content_of, tensor_from_array
from tests.support.strategies import named_tensor, tensor_of


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_dtype_has_the_size_numpy_gives_it(dtype: object) -> None:
    row = next(item for item in DTYPES if item is dtype)
    assert row.to_numpy().itemsize == row.item_bytes


def test_int4_is_held_as_int8() -> None:
    assert BY_NAME["int4"].to_numpy() == np.dtype(np.int8)


def test_dtype_unknown_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'float7'"):
        dtype_of("float7")


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(12, dtype="<i2").reshape(3, 4)[:, ::2],
        np.arange(6, dtype=">u8").reshape(2, 3).T,
        np.array(7, "<i8"),
        np.array(7, ">i8"),
        np.zeros((0, 3), ">f8"),
        np.array([True, False]),
    ],
)
def test_tensor_from_any_array_gives_little_endian_c_order(array: np.ndarray) -> None:
    tensor = tensor_from_array("w", array)
    assert tensor.spec.shape == array.shape
    expected = array.astype(array.dtype.newbyteorder("<")).tobytes("C")
    assert bytes(tensor.content()) == expected
    assert tensor.spec.size_bytes == len(expected)


def test_tensor_from_contiguous_array_is_not_copied() -> None:
    array = np.zeros(4, "f4")
    view = tensor_from_array("w", array).content()
    array[0] = 1
    assert bytes(view[:4]) == np.float32(1).tobytes()


def test_tensor_from_array_takes_the_given_row() -> None:
    array = np.zeros(2, np.int8)
    assert tensor_from_array("q", array, dtype=BY_NAME["int4"]).spec.dtype.mindspore == "Int4"


def test_tensor_of_unknown_type_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="datetime64"):
        tensor_from_array("w", np.zeros(1, "datetime64[s]"))


def test_content_function_checks_the_length() -> None:
    assert bytes(content_of(named_tensor("w", "uint8", (2,), b"ab"))) == b"ab"
    with pytest.raises(FormatError, match="has 3 bytes"):
        content_of(tensor_of(named_tensor("w", "uint8", (2,)).spec, b"abc"))


@given(st.lists(st.binary(max_size=9), max_size=8), st.data())
def test_image_views_are_the_bytes_of_the_range(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    image = Image([Extent.of(part) for part in parts])
    start = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, len(whole) - start))
    assert b"".join(image.views(start, length)) == whole[start : start + length]
    assert image.size == len(whole)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), (0, 5), (4, 1)])
def test_image_range_outside_is_refused(offset: int, length: int) -> None:
    image = Image([Extent.of(b"abcd")])
    with pytest.raises(ValueError, match="outside the 4-byte body"):
        list(image.views(offset, length))


def test_image_content_too_short_is_refused() -> None:
    image = Image([Extent(lambda: memoryview(b"ab"), 0, 3)])
    with pytest.raises(FormatError, match="gave 2 bytes"):
        list(image.views(0, 3))


def test_image_asks_again_only_for_contents_long_unused() -> None:
    asked: list[int] = []

    def content_of(number: int) -> Extent:
        def content() -> memoryview:
            asked.append(number)
            return memoryview(bytes([number]))

        return Extent(content, 0, 1)

    image = Image([content_of(number) for number in range(6)])
    for _ in range(2):
        list(image.views(0, 1))
    list(image.views(0, 6))
    list(image.views(5, 1))
    list(image.views(0, 1))
    assert asked == [0, 1, 2, 3, 4, 5, 0]


def test_image_is_read_by_several_threads() -> None:
    whole = bytes(range(256)) * 8
    image = Image([Extent.of(whole[start : start + 64]) for start in range(0, len(whole), 64)])
    seen: dict[int, bytes] = {}

    def read(offset: int) -> None:
        seen[offset] = b"".join(image.views(offset, 512))

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(0, 2048, 512)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(seen[offset] for offset in sorted(seen)) == whole


def test_image_with_trailer_is_17_bytes_longer() -> None:
    image = Image([Extent.of(b"abcd")], has_crc_trailer=True)
    assert (image.size, image.body_size) == (21, 4)
    assert image.trailer(crc32(b"abcd")) == b"crc_num" + zlib.crc32(b"abcd").to_bytes(10, "big")
    assert Image([]).trailer(0) == b""


def test_image_with_a_late_head_gives_views_only_of_what_follows_it() -> None:
    head = LateHead(size_bytes=3, start_crc=lambda: BodyCrc(7), encode=lambda crc: b"%03d" % crc)
    image = Image([Extent.of(b"abcd")], late_head=head)
    assert (image.size, image.body_size, image.head_bytes) == (7, 7, 3)
    assert b"".join(image.views(4, 2)) == b"bc"
    assert image.head(42) == b"042"
    for offset in (0, 2):
        with pytest.raises(ValueError, match="or in its late head"):
            list(image.views(offset, 4))


def test_crc_of_an_image_is_what_its_file_states() -> None:
    images = [Image([Extent.of(b"abcd")], has_crc_trailer=has_one) for has_one in (False, True)]
    crcs = [image.start_crc() for image in images]
    for crc in crcs:
        crc.add(0, memoryview(b"abcd"))
    assert [crc.value() for crc in crcs] == [0, crc32(b"abcd")]
    assert images[0].head(0) == b""


def test_trailer_is_decoded_only_where_it_is_one() -> None:
    assert decode_trailer(encode_trailer(0x8BB6F039)) == 0x8BB6F039
    assert decode_trailer(b"crc_num" + bytes(9)) is None
    assert decode_trailer(b"crc-num" + bytes(10)) is None


@given(st.binary(), st.binary())
def test_crc_is_zlibs_and_combines(first: bytes, second: bytes) -> None:
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)
    assert crc32_combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 5), (5, 0), (0, 2**62)])
def test_source_range_outside_is_truncated(offset: int, length: int) -> None:
    with pytest.raises(TruncatedError, match="the data ends at 4") as caught:
        read_bytes(BytesSource(b"abcd"), offset, length)
    assert caught.value.offset == offset


@given(st.binary(max_size=20), st.data())
def test_source_gives_the_range(data: bytes, draw: st.DataObject) -> None:
    start = draw.draw(st.integers(0, len(data)))
    length = draw.draw(st.integers(0, len(data) - start))
    assert read_bytes(BytesSource(bytearray(data)), start, length) == data[start : start + length]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (FormatError("it is odd"), "it is odd"),
        (FormatError("it is odd", offset=3), "it is odd (offset 3)"),
        (FormatError("it is odd", tensor="w"), "it is odd (tensor 'w')"),
        (FormatError("it is odd", offset=0, tensor=""), "it is odd (offset 0, tensor '')"),
    ],
)
def test_error_text_names_the_place(error: FormatError, text: str) -> None:
    assert str(error) == text
