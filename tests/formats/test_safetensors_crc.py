# SPDX-License-Identifier: Apache-2.0
"""MindSpore's CRC of a `.safetensors` file, its quirk for 0-d integers included."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from zlib import crc32

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.errors import UnsupportedError
from ckptmgr.formats.file_crc import crc32_combine
from ckptmgr.formats.image import MOST_LATE_BYTES
from ckptmgr.formats.safetensors_crc import ContentsCrc, append_zeros, fold_crc
from ckptmgr.formats.safetensors_file import (
    build_safetensors_image,
    read_safetensors_index,
    read_safetensors_into,
)
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Tensor, TensorSpec
from tests.support.stored import image_bytes, read_safetensors
from tests.support.strategies import is_negative_scalar, named_tensor, safetensors_items, tensor_of


def entry(
    name: str, dtype: str, shape: tuple[int, ...], *parts: bytes
) -> tuple[TensorSpec, Callable[[], Iterable[bytes]]]:
    return TensorSpec(name=name, dtype=BY_NAME[dtype], shape=shape), lambda: parts


def test_names_and_contents_are_folded_in_name_order() -> None:
    entries = [
        entry("b", "float32", (2,), b"12345", b"678"),
        entry("a", "uint8", (1,), b"9"),
        entry("名", "uint8", (0,)),
    ]
    assert fold_crc(entries) == crc32(b"a" + b"9" + b"b" + b"12345678" + "名".encode())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int4", "uint16", "int64", "uint64"])
def test_scalar_integer_counts_as_so_many_zero_bytes(dtype: str) -> None:
    content = (3).to_bytes(BY_NAME[dtype].item_bytes, "little")
    assert fold_crc([entry("k", dtype, (), content)]) == crc32(b"k\0\0\0")


@pytest.mark.parametrize("dtype", ["bool", "float16", "bfloat16", "float32", "float64"])
def test_scalar_of_another_type_counts_as_its_bytes(dtype: str) -> None:
    content = b"\1" * BY_NAME[dtype].item_bytes
    assert fold_crc([entry("k", dtype, (), content)]) == crc32(b"k" + content)


def test_integer_with_one_element_counts_as_its_bytes() -> None:
    assert fold_crc([entry("k", "uint8", (1,), b"\3")]) == crc32(b"k\3")


@given(st.binary(max_size=20), st.integers(0, 5000))
def test_append_zeros_equals_hashing_them(data: bytes, count: int) -> None:
    assert append_zeros(crc32(data), count) == crc32(bytes(count), crc32(data))


@given(st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**32 - 1))
def test_append_zeros_adds_up(first: int, second: int, value: int) -> None:
    assert append_zeros(append_zeros(value, first), second) == append_zeros(value, first + second)


def test_append_zeros_of_5_gb_equals_combining_megabytes() -> None:
    megabyte, count = crc32(bytes(2**20)), 5000
    combined = crc32(b"k")
    for _ in range(count):
        combined = crc32_combine(combined, megabyte, 2**20)
    assert append_zeros(crc32(b"k"), count * 2**20) == combined


@pytest.mark.parametrize("dtype", ["int4", "int8", "int16", "int32", "int64"])
def test_negative_scalar_has_no_crc(dtype: str) -> None:
    item = tensor_of(named_tensor("n", dtype, ()).spec, b"\xff" * BY_NAME[dtype].item_bytes)
    with pytest.raises(UnsupportedError, match=r"negative scalar \(-1\).*'n'"):
        build_safetensors_image([item], crc=True)


def test_scalar_of_all_bits_set_is_hashed_without_so_many_bytes() -> None:
    assert fold_crc([entry("k", "uint64", (), b"\xff" * 8)]) == append_zeros(crc32(b"k"), 2**64 - 1)


@given(
    safetensors_items(),
    st.lists(st.integers(0, 400), max_size=6),
    st.randoms(use_true_random=False),
)
def test_crc_of_pieces_in_any_order_is_that_of_the_image(
    items: list[Tensor], cuts: list[int], order: random.Random
) -> None:
    assume(not any(map(is_negative_scalar, items)))
    data = image_bytes(build_safetensors_image(items, crc=True))
    index = read_safetensors_index(BytesSource(data))
    crc = ContentsCrc(index.entries)
    ends = sorted({0, *(max(0, len(data) - cut) for cut in cuts), len(data)})
    pieces = list(itertools.pairwise(ends))
    order.shuffle(pieces)
    for start, stop in pieces:
        crc.add(start, memoryview(data)[start:stop])
    assert (
        crc.value() == index.crc == read_safetensors_into(BytesSource(data), index, lambda _: None)
    )
    assert crc.stop in (0, len(data))


def test_only_scalars_are_read_before_the_file_is_written() -> None:
    asked: list[str] = []

    def asking(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        tensor = named_tensor(name, dtype, shape)

        def content() -> memoryview:
            asked.append(name)
            return tensor.content()

        return tensor._replace(content=content)

    items = [asking("w", "float32", (2,)), asking("f", "float32", ()), asking("n", "int64", ())]
    image = build_safetensors_image(items, crc=True)
    assert asked == ["n"]
    assert read_safetensors(image_bytes(image), crc=True).keys() == {"w", "f", "n"}


@pytest.mark.parametrize("length", range(64))
def test_length_of_the_header_does_not_depend_on_the_crc(length: int) -> None:
    item = named_tensor("w", "float32", (2,))
    image = build_safetensors_image([item], metadata={"a": "b" * length}, crc=True)
    for crc in (0, 99, 123_456_789, 2**32 - 1):
        head = image.head(crc)
        assert len(head) == image.head_bytes
        assert len(head) % 64 == 0
        index = read_safetensors_index(BytesSource(head + bytes(8)))
        assert index.crc == crc
        assert index.entries[0].pieces[0].offset == len(head)


def test_header_too_long_to_be_late_states_the_crc_all_the_same() -> None:
    items = [named_tensor("w"), named_tensor("k", "int32", (), b"\3\0\0\0")]
    image = build_safetensors_image(items, metadata={"a": "b" * MOST_LATE_BYTES}, crc=True)
    assert image.head_bytes == 0
    assert read_safetensors(image_bytes(image), crc=True).keys() == {"w", "k"}
    assert image.body_size > MOST_LATE_BYTES


def test_negative_scalar_counts_as_the_unsigned_one_where_mindspore_need_not_check_it() -> None:
    item = named_tensor("n", "int8", (), b"\xff")
    data = image_bytes(build_safetensors_image([item], crc=True, is_crc_for_mindspore=False))
    crc = ContentsCrc(read_safetensors_index(BytesSource(data)).entries)
    crc.add(0, memoryview(data))
    assert crc.value() == append_zeros(crc32(b"n"), 255)
    assert read_safetensors(data, crc=True).keys() == {"n"}
