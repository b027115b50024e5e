# SPDX-License-Identifier: Apache-2.0
"""`.safetensors`: ours, the stock library's, and hostile ones."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import assume, given
from hypothesis import strategies as st

from ckptmgr import TruncatedError
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.errors import ChecksumError, FormatError, UnsupportedError
from ckptmgr.formats.index import READ_BYTES
from ckptmgr.formats.safetensors_file import (
    build_safetensors_image,
    read_safetensors_index,
)
from ckptmgr.formats.safetensors_header import MAX_HEADER_BYTES
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, Text, tensor_from_array
from tests.support.stored import Stored, format_error, image_bytes, read_safetensors, stored_items
from tests.support.strategies import (
    is_negative_scalar,
    metadata,
    named_tensor,
    safetensors_items,
    tensor_of,
)

A = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
B = {"dtype": "U8", "shape": [1], "data_offsets": [2, 3]}


def file_of(header: object, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def stock_deserialize(data: bytes) -> list[tuple[str, dict[str, list[int]]]]:
    opened: list[tuple[str, dict[str, list[int]]]] = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
    return opened


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    header: dict[str, dict[str, object]] = json.loads(
        data[8 : 8 + int.from_bytes(data[:8], "little")]
    )
    return header


@given(safetensors_items(), metadata(), st.booleans())
def test_items_written_read_back(items: list[Tensor], meta: dict[str, str], crc: bool) -> None:
    assume(not (crc and any(map(is_negative_scalar, items))))
    data = image_bytes(build_safetensors_image(items, metadata=meta, crc=crc))
    assert read_safetensors(data, crc=crc) == stored_items(items)
    stored = read_safetensors_index(BytesSource(data)).metadata
    assert {"format": "pt", **meta}.items() <= stored.items()


@given(safetensors_items())
def test_layout_is_aligned_and_in_header_order(items: list[Tensor]) -> None:
    data = image_bytes(build_safetensors_image(items))
    assert int.from_bytes(data[:8], "little") % 64 == 64 - 8
    header = header_of(data)
    del header["__metadata__"]
    end = 0
    for entry in read_safetensors_index(BytesSource(data)).entries:
        assert entry.pieces[0].offset % entry.spec.dtype.item_bytes == 0
    for info in header.values():
        assert isinstance(info["data_offsets"], list)
        start, stop = info["data_offsets"]
        assert start == end
        end = stop


def test_order_does_not_depend_on_the_order_of_the_items() -> None:
    items = [named_tensor("b"), named_tensor("c", "float64"), named_tensor("a")]
    data = image_bytes(build_safetensors_image(items))
    assert list(header_of(data)) == ["__metadata__", "c", "a", "b"]
    assert data == image_bytes(build_safetensors_image(items[::-1]))


def test_format_of_the_caller_is_kept() -> None:
    data = image_bytes(build_safetensors_image([], metadata={"format": "ms"}))
    assert header_of(data) == {"__metadata__": {"format": "ms"}}


def test_int4_is_stored_as_mindspore_stores_it() -> None:
    data = image_bytes(build_safetensors_image([named_tensor("q", "int4", (4,))]))
    assert header_of(data) == {
        "__metadata__": {"format": "pt", "q": "Int4"},
        "q": {"dtype": "I8", "shape": [4], "data_offsets": [0, 4]},
    }


def test_int4_mark_on_another_type_is_plain_metadata() -> None:
    data = file_of({"__metadata__": {"a": "Int4"}, "a": A}, b"ab")
    assert read_safetensors(data) == {"a": Stored("uint8", (2,), b"ab")}


STOCK_TYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
]


@pytest.mark.parametrize("name", STOCK_TYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (3, 0, 2)])
def test_stock_library_and_ours_read_each_other(name: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(BY_NAME[name].to_numpy())
    ours = image_bytes(build_safetensors_image([tensor_from_array("w", array)], crc=True))
    loaded = safetensors.numpy.load(ours)["w"]
    assert (loaded.dtype, loaded.shape) == (array.dtype, array.shape)
    assert loaded.tobytes() == array.tobytes()
    theirs = safetensors.numpy.save({"w": array}, metadata={"k": "v"})
    assert read_safetensors(theirs) == {"w": Stored(name, shape, array.tobytes())}


@pytest.mark.parametrize(
    "name",
    [
        "bfloat16",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
    ],
)
def test_stock_library_for_torch_reads_rare_types(name: str) -> None:
    torch = pytest.importorskip("torch")
    stock = pytest.importorskip("safetensors.torch")
    item = named_tensor("w", name, (2, 2))
    loaded = stock.load(image_bytes(build_safetensors_image([item])))["w"]
    assert str(loaded.dtype) == f"torch.{name}"
    assert bytes(loaded.view(torch.uint8).numpy().data) == bytes(item.content())


@given(safetensors_items(), metadata())
def test_stock_library_opens_everything_we_write(items: list[Tensor], meta: dict[str, str]) -> None:
    data = image_bytes(build_safetensors_image(items, metadata=meta))
    opened = {name: info["shape"] for name, info in stock_deserialize(data)}
    assert opened == {item.spec.name: list(item.spec.shape) for item in items}


def test_header_in_another_order_than_the_data_is_accepted() -> None:
    data = file_of({"b": B, "a": A}, b"abc")
    assert list(read_safetensors(data).items()) == [
        ("a", Stored("uint8", (2,), b"ab")),
        ("b", Stored("uint8", (1,), b"c")),
    ]


def test_header_of_nothing_is_an_empty_file() -> None:
    assert read_safetensors(file_of({})) == {}


def test_empty_tensors_may_share_a_place_with_others() -> None:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [2, 2]}
    assert list(read_safetensors(file_of({"b": B, "e": empty, "a": A}, b"abc"))) == ["a", "e", "b"]


def with_a(**changes: object) -> dict[str, object]:
    return {"a": {**A, **changes}}


NESTED = b'{"a":' * 100_000


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", TruncatedError, "only 0 bytes"),
        (b"\x02\0\0\0\0\0\0", TruncatedError, "only 7 bytes"),
        (b"\x03" + bytes(7) + b"{}", TruncatedError, "3 bytes wanted"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), FormatError, "claims 100000001 bytes"),
        (b"\xff" * 8, FormatError, "claims 18446744073709551615"),
        (file_of(b""), FormatError, "does not start"),
        (file_of([]), FormatError, "does not start"),
        (file_of(NESTED), FormatError, "nested too deeply"),
        (file_of(b'{"a":1,"a":1}'), FormatError, "'a' twice"),
        (file_of({"__metadata__": []}), FormatError, "not an object"),
        (file_of({"__metadata__": {"a": 1}}), FormatError, "no string"),
        (file_of({"__metadata__": {"crc_num": "x"}}), FormatError, "not a number"),
        (file_of({"__metadata__": {"crc_num": "-1"}}), FormatError, "not a number"),
        (file_of({"__metadata__": {"crc_num": "1" * 21}}), FormatError, "not a number"),
        (file_of({"a": 1}), FormatError, "needs dtype, shape"),
        (file_of({"a": {"dtype": "U8", "shape": []}}), FormatError, "needs dtype, shape"),
        (file_of({"a": ["U8", [2], [0, 2]]}, b"ab"), UnsupportedError, "as a list"),
        (file_of(with_a(more=[{"b": 1e999}]), b"ab"), FormatError, "number"),
        (file_of({"\ud800": A}, b"ab"), FormatError, "lone surrogate"),
        (file_of(with_a(dtype="F2"), b"ab"), UnsupportedError, "dtype 'F2'.*'a'"),
        (file_of(with_a(dtype="F4"), b"ab"), FormatError, r"has 2 bytes, but F4\[2\] needs 1"),
        (file_of(with_a(dtype="F4", shape=[3]), b"ab"), FormatError, "12 bits.* no whole bytes"),
        (file_of(b" \n" * 9), FormatError, "does not start"),
        (file_of(with_a(dtype=None), b"ab"), UnsupportedError, "dtype None"),
        (file_of(with_a(dtype=[]), b"ab"), UnsupportedError, "unknown dtype"),
        (file_of(with_a(shape=2), b"ab"), FormatError, "shape is not a list"),
        (file_of(with_a(shape=[True, 2]), b"ab"), FormatError, "shape is not a list"),
        (file_of(with_a(shape=[-2]), b"ab"), FormatError, "shape is not a list"),
        (file_of(with_a(shape=["2"]), b"ab"), FormatError, "shape is not a list"),
        (file_of(with_a(shape=[2**63]), b"ab"), FormatError, "needs 9223372036854775808"),
        (file_of(with_a(shape=[2**64]), b"ab"), FormatError, "shape is not a list"),
        (file_of(with_a(shape=[2.0]), b"ab"), FormatError, "shape is not a list"),
        (file_of(with_a(shape=[2**62, 8]), b"ab"), FormatError, "needs 36893488147419103232"),
        (
            file_of(with_a(shape=[2] + [1] * 64), b"ab"),
            UnsupportedError,
            r"more than (32|64) dimensions",
        ),
        (
            file_of(with_a(shape=[8456394893526610284, 0], dtype="F32", data_offsets=[0, 0])),
            UnsupportedError,
            "no array has the shape.*'a'",
        ),
        (file_of(with_a(shape=[3]), b"ab"), FormatError, "has 2 bytes.* needs 3"),
        (file_of(with_a(data_offsets=[0]), b"ab"), FormatError, "not a range"),
        (file_of(with_a(data_offsets=[2, 0]), b"ab"), FormatError, "not a range"),
        (file_of(with_a(data_offsets=[0, 2, 3]), b"ab"), FormatError, "not a range"),
        (file_of(with_a(data_offsets={}), b"ab"), FormatError, "not a list"),
        (file_of(with_a(data_offsets=[0, 2**64]), b"ab"), FormatError, "not a list"),
        (file_of({"a": A}, b"a"), TruncatedError, "the content ends at"),
        (file_of({"a": A}, b"abc"), FormatError, "1 bytes follow"),
        (file_of({"b": B}, b"abc"), FormatError, "gap before it.*'b'"),
        (file_of({"a": A, "b": {**B, "data_offsets": [1, 2]}}, b"ab"), FormatError, "overlaps"),
        (file_of({"a": A, "b": A}, b"ab"), FormatError, "overlaps"),
    ],
)
def test_file_damaged_is_refused(data: bytes, error: type[FormatError], message: str) -> None:
    with pytest.raises(FormatError, match=message) as caught:
        read_safetensors(data)
    assert type(caught.value) is error


def test_tensors_and_metadata_may_be_called_like_the_fields_of_a_tensor() -> None:
    names = ("data_offsets", "dtype", "shape")
    tensors = [named_tensor(name, "uint8", (1,)) for name in names]
    data = image_bytes(build_safetensors_image(tensors))
    assert [one.name for one in read_safetensors_index(BytesSource(data)).entries] == list(names)
    strings: dict[str, str] = dict.fromkeys(names, "x")
    tensor = [named_tensor("w", "uint8", (1,))]
    data = image_bytes(build_safetensors_image(tensor, metadata=strings))
    assert read_safetensors_index(BytesSource(data)).metadata == {"format": "pt", **strings}


def test_tensor_in_the_place_of_the_header_is_refused() -> None:
    with pytest.raises(FormatError, match="no table of names"):
        read_safetensors(file_of(A, b"ab"))


def test_bool_of_two_is_refused_when_it_is_read() -> None:
    data = file_of(with_a(dtype="BOOL"), b"\x01\x02")
    assert len(read_safetensors_index(BytesSource(data)).entries) == 1
    with pytest.raises(FormatError, match="bool has the value 2"):
        read_safetensors(data)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([Text(name="s", text="t")], "cannot hold a Text; use .ckpt.*'s'"),
        (
            [
                MapTensors(
                    name="m",
                    key=named_tensor("k"),
                    value=named_tensor("v"),
                    status=named_tensor("s"),
                )
            ],
            "cannot hold a MapTensors",
        ),
        ([named_tensor("w"), named_tensor("w")], "two items have this name"),
        ([named_tensor("__metadata__")], "also a metadata key"),
        ([named_tensor("format")], "also a metadata key"),
        ([named_tensor("mine")], "also a metadata key.*'mine'"),
        ([named_tensor("\ud800")], "lone surrogate"),
        ([named_tensor("w", "uint8", (1,) * 65)], "64 dimensions"),
        ([named_tensor("w", "complex128")], "cannot hold complex128"),
    ],
)
def test_items_safetensors_cannot_hold_are_refused(items: Sequence[Item], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        build_safetensors_image(items, metadata={"mine": "x"})


def test_metadata_key_of_the_crc_is_refused() -> None:
    with pytest.raises(FormatError, match="'crc_num' is reserved"):
        build_safetensors_image([], metadata={"crc_num": "1"})


def test_tensor_named_like_the_crc_clashes_only_with_it() -> None:
    item = named_tensor("crc_num")
    assert read_safetensors(image_bytes(build_safetensors_image([item]))) == stored_items([item])
    with pytest.raises(FormatError, match="also a metadata key"):
        build_safetensors_image([item], crc=True)


def test_metadata_with_lone_surrogate_is_refused() -> None:
    with pytest.raises(FormatError, match="lone surrogate"):
        build_safetensors_image([], metadata={"a": "\ud800"})


def test_header_of_more_than_100_mb_is_refused() -> None:
    with pytest.raises(FormatError, match="the header has 100000056 bytes; 100000000 fit"):
        build_safetensors_image([], metadata={"a": "b" * (MAX_HEADER_BYTES - 40)})


@pytest.mark.parametrize("length", [0, 7, 9])
@pytest.mark.parametrize("crc", [False, True])
def test_content_of_another_length_is_refused(length: int, crc: bool) -> None:
    item = tensor_of(named_tensor("w").spec, bytes(length))
    with pytest.raises(FormatError, match=r"needs 8.*'w'"):
        image_bytes(build_safetensors_image([item], crc=crc))


@pytest.mark.parametrize("where", [-1, -9, -17])
def test_content_changed_fails_the_crc(where: int) -> None:
    items = [named_tensor("w", "float32", (3,)), named_tensor("b", "int64", (1,))]
    data = bytearray(image_bytes(build_safetensors_image(items, crc=True)))
    data[where] ^= 1
    assert list(read_safetensors(bytes(data))) == ["b", "w"]
    with pytest.raises(ChecksumError):
        read_safetensors(bytes(data), crc=True)


def test_crc_absent_does_not_count_as_checked() -> None:
    with pytest.raises(ChecksumError, match="has no CRC32"):
        read_safetensors(image_bytes(build_safetensors_image([])), crc=True)


def test_crc_streams_contents_larger_than_a_read_block() -> None:
    item = named_tensor("w", "uint8", (READ_BYTES + 3,), bytes(READ_BYTES + 3))
    data = image_bytes(build_safetensors_image([item], crc=True))
    assert list(read_safetensors(data, crc=True)) == ["w"]


@given(st.binary(max_size=60).map(lambda tail: file_of(b"{" + tail)))
def test_any_header_raises_nothing_but_format_errors(data: bytes) -> None:
    error = format_error(lambda: read_safetensors(data))
    assert error is None or str(error)


@given(safetensors_items(), st.data())
def test_any_splice_is_refused_or_read_by_the_stock_library_too(
    items: list[Tensor], data: st.DataObject
) -> None:
    whole = image_bytes(build_safetensors_image(items))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, min(len(whole), start + 12)))
    spliced = whole[:start] + data.draw(st.binary(max_size=12)) + whole[stop:]
    try:
        ours = read_safetensors_index(BytesSource(spliced))
    except FormatError:
        return
    theirs = stock_deserialize(spliced)
    assert {entry.name for entry in ours.entries} == {name for name, _ in theirs}
