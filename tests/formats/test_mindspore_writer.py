# SPDX-License-Identifier: Apache-2.0
"""The bytes of a `.ckpt`, and items that are refused rather than written unloadable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.formats.dtypes import DTYPES
from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.formats.mindspore.fields import MAX_METADATA_BYTES, MAX_RANK, MAX_TEXT_BYTES
from ckptmgr.formats.mindspore.reader import read_ckpt_index
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, TensorSpec, Text
from tests.support.stored import image_bytes, read_ckpt, stored_items
from tests.support.strategies import ckpt_items, encodable_texts, named_tensor, tensor_of

BROKEN = Path(__file__).parents[1] / "golden" / "files" / "broken"


def map_of(
    *, key: str = "int32", value: tuple[int, ...] = (2, 3), status: tuple[int, ...] = (2,)
) -> MapTensors:
    return MapTensors(
        name="m",
        key=named_tensor("key", key, (2,)),
        value=named_tensor("value", "float32", value),
        status=named_tensor("status", "int32", status),
    )


def hollow(*shape: int, dtype: str = "uint8") -> Tensor:
    """Return a tensor that gives no content: only its shape is looked at."""
    spec = TensorSpec(name="w", dtype=next(d for d in DTYPES if d.name == dtype), shape=shape)
    return tensor_of(spec, b"")


@given(ckpt_items(), st.booleans(), st.integers(1, 40))
def test_items_written_read_back_in_order(items: list[Item], crc: bool, slice_bytes: int) -> None:
    data = image_bytes(build_ckpt_image(items, crc=crc, slice_bytes=slice_bytes))
    assert list(read_ckpt(data, crc=crc).items()) == list(stored_items(items).items())


@given(ckpt_items(min_size=0), st.dictionaries(encodable_texts(), encodable_texts()))
def test_metadata_written_reads_back(items: list[Item], metadata: dict[str, str]) -> None:
    data = image_bytes(build_ckpt_image(items, metadata=metadata))
    assert read_ckpt_index(BytesSource(data)).metadata == metadata


def test_metadata_absent_leaves_no_field() -> None:
    data = image_bytes(build_ckpt_image([named_tensor("w")]))
    assert read_ckpt_index(BytesSource(data)).metadata is None


def test_tensor_bytes_are_those_of_mindspore() -> None:
    one = named_tensor("w", "float32", (1,), bytes.fromhex("0000803f"))
    expected = "0a160a0177121108011207466c6f617433321a040000803f"
    assert image_bytes(build_ckpt_image([one])).hex() == expected
    with_crc = image_bytes(build_ckpt_image([one], crc=True)).hex()
    assert with_crc == expected + "6372635f6e756d" + "0000000000008bb6f039"


def test_scalar_is_written_without_dims() -> None:
    scalar = named_tensor("p", "float32", (), bytes.fromhex("0000c03f"))
    expected = "0a140a0170120f1207466c6f617433321a040000c03f"
    assert image_bytes(build_ckpt_image([scalar])).hex() == expected


@pytest.mark.parametrize(("text", "content"), [("hi", "6800000069000000"), ("", "00000000")])
def test_text_is_written_as_utf32(text: str, content: str) -> None:
    data = image_bytes(build_ckpt_image([Text(name="s", text=text)])).hex()
    assert data.endswith(f"08001203737472 1a{len(content) // 2:02x}{content}".replace(" ", ""))


def test_map_slices_are_those_of_mindspore() -> None:
    item = MapTensors(
        name="m",
        key=named_tensor("key", "int32", (3,), bytes.fromhex("010000000200000007000000")),
        value=named_tensor(
            "value",
            "float32",
            (3, 2),
            bytes.fromhex("0000803f" * 2 + "00000040" * 2 + "0000e040" * 2),
        ),
        status=named_tensor("status", "int32", (3,), bytes.fromhex("010000000100000002000000")),
    )
    data = image_bytes(build_ckpt_image([item], slice_bytes=2 * 16))
    assert data == (BROKEN / "map_2slices.ckpt").read_bytes()


def test_slice_smaller_than_a_map_row_still_holds_one_row() -> None:
    data = image_bytes(build_ckpt_image([map_of()], slice_bytes=1))
    assert [len(entry.pieces) for entry in read_ckpt_index(BytesSource(data)).tensors()] == [
        2,
        2,
        2,
    ]


def test_content_is_neither_asked_for_nor_copied_while_building() -> None:
    def content() -> memoryview:
        raise AssertionError("asked for too early")

    image = build_ckpt_image([Tensor(spec=named_tensor("w").spec, content=content)])
    assert image.size == 28


def test_image_of_slices_asks_for_the_content_once() -> None:
    asked: list[int] = []
    tensor = named_tensor("w", "uint8", (100,))

    def content() -> memoryview:
        asked.append(1)
        return tensor.content()

    image_bytes(build_ckpt_image([Tensor(spec=tensor.spec, content=content)], slice_bytes=9))
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("items", "metadata", "message"),
    [
        ([], None, "nothing to save"),
        ([named_tensor("w"), named_tensor("w")], None, "two items have this name.*'w'"),
        ([named_tensor("w"), Text(name="w", text="t")], None, "two items have this name"),
        ([named_tensor("m"), map_of()], None, "two items have this name"),
        ([named_tensor("\ud800")], None, "lone surrogate"),
        ([Text(name="s", text="a\0")], None, "ends in a NUL.*'s'"),
        ([Text(name="s", text="\0")], None, "ends in a NUL"),
        ([Text(name="s", text="a" * (MAX_TEXT_BYTES // 4 + 1))], None, "the text needs"),
        ([hollow(2**31, 0)], None, "2147483648 is outside.*'w'"),
        ([hollow(-1)], None, "-1 is outside"),
        ([hollow(*[1] * (MAX_RANK + 1))], None, "65 dimensions"),
        ([map_of(value=(3, 2))], None, "the value of a map parameter needs one row per key.*'m'"),
        ([map_of(value=())], None, "the value of a map"),
        ([map_of(status=(1,))], None, "the status of a map"),
        ([map_of(value=(2, 0, 2**31))], None, "2147483648 is outside"),
        ([], {"a": "\ud800"}, "lone surrogate"),
        ([], {"a": "b" * MAX_METADATA_BYTES}, "the metadata has"),
    ],
)
def test_items_a_ckpt_cannot_hold_are_refused(
    items: Sequence[Item], metadata: Mapping[str, str] | None, message: str
) -> None:
    with pytest.raises(FormatError, match=message):
        build_ckpt_image(items, metadata=metadata)


@pytest.mark.parametrize("dtype", [d.name for d in DTYPES if d.mindspore is None])
def test_dtype_mindspore_cannot_load_is_refused(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot load {dtype}.*'w'"):
        build_ckpt_image([hollow(2, dtype=dtype)])


def test_map_keys_mindspore_would_misread_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="key is int64; convert it to one of float16"):
        build_ckpt_image([map_of(key="int64")])


def test_scalar_map_key_is_refused() -> None:
    scalar = MapTensors(
        name="m",
        key=named_tensor("key", "int32", ()),
        value=named_tensor("value", "float32", ()),
        status=named_tensor("status", "int32", ()),
    )
    with pytest.raises(FormatError, match="the key of a map parameter needs"):
        build_ckpt_image([scalar])


def test_slice_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="slice_bytes must be at least 1"):
        build_ckpt_image([named_tensor("w")], slice_bytes=0)


@pytest.mark.parametrize("length", [0, 7, 9])
def test_content_of_another_length_is_refused_when_it_is_read(length: int) -> None:
    image = build_ckpt_image([tensor_of(named_tensor("w").spec, bytes(length))])
    with pytest.raises(FormatError, match=rf"has {length} bytes.*float32\[2\] needs 8.*'w'"):
        image_bytes(image)


def test_content_of_wider_items_is_written_as_bytes() -> None:
    words = memoryview(bytearray(range(8))).cast("i")
    tensor = Tensor(spec=named_tensor("w", "int32").spec, content=lambda: words)
    assert read_ckpt(image_bytes(build_ckpt_image([tensor]))) == {
        "w": stored_items([named_tensor("w", "int32", (2,), bytes(range(8)))])["w"]
    }
