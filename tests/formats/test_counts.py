# SPDX-License-Identifier: Apache-2.0
"""Files with more items than any model are refused by counting, before objects are made."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ckptmgr.formats import strict_json, tensor
from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.formats.mindspore import wire
from ckptmgr.formats.mindspore import writer as mindspore_writer
from ckptmgr.formats.mindspore.reader import read_ckpt_index
from ckptmgr.formats.mindspore.wire import MAX_FIELDS, WireReader, encode_bytes_field
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.safetensors_file import build_safetensors_image, read_safetensors_index
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.strategy import parse_strategy
from ckptmgr.formats.strict_json import MAX_VALUES, parse_object
from ckptmgr.formats.tensor import (
    MAX_TENSORS,
    Item,
    MapTensors,
    TensorSpec,
    Text,
    tensor_from_array,
)
from tests.support.stored import image_bytes
from tests.support.strategies import named_tensor

PART = 64  # of the real limits, because a million of anything takes a test too long
MILLION = 1_000_000 // PART


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have limits that a small file exceeds."""
    monkeypatch.setattr(tensor, "MAX_TENSORS", MAX_TENSORS // PART)
    monkeypatch.setattr(strict_json, "MAX_VALUES", MAX_VALUES // PART)
    monkeypatch.setattr(wire, "MAX_FIELDS", MAX_FIELDS // PART)
    monkeypatch.setattr(mindspore_writer, "MAX_FIELDS", MAX_FIELDS // PART)


def test_limits_are_beyond_every_model() -> None:
    assert (MAX_TENSORS, MAX_FIELDS, MAX_VALUES) == (524_288, 1_048_576, 2_097_152)


def table(of: Callable[[int], str], count: int = MILLION) -> bytes:
    return b"{" + ",".join(map(of, range(count))).encode() + b"}"


def safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def plain(index: int) -> str:
    return f'"{index}":{{"dtype":"U8","shape":[1],"data_offsets":[{index},{index + 1}]}}'


def unusual(index: int) -> str:
    return f'"{index}":{{"shape":[1],"dtype":"U8","data_offsets":[{index},{index + 1}]}}'


def record(name: bytes, content: bytes = b"x") -> bytes:
    tensor = b"\x08%c\x12\x05UInt8" % len(content) + encode_bytes_field(3, content)
    return encode_bytes_field(1, encode_bytes_field(1, name) + encode_bytes_field(2, tensor))


MANY: dict[str, Callable[[], bytes]] = {
    "plain tensors": lambda: safetensors(table(plain), bytes(MILLION)),
    "plain tensors without data": lambda: safetensors(table(plain)),
    "unusual tensors": lambda: safetensors(table(unusual), bytes(MILLION)),
    "names": lambda: safetensors(table(lambda index: f'"{index}":{{}}', 2 * MILLION)),
    "tensors behind nested metadata": lambda: safetensors(
        b'{"__metadata__":{"a":{}},' + table(plain)[1:], bytes(MILLION)
    ),
    "numbers": lambda: safetensors(table(lambda index: f'"{index}":0', 3 * MILLION)),
    "lists": lambda: safetensors(b'{"a":[' + b"[]," * (2 * MILLION) + b"[]]}"),
    "metadata": lambda: safetensors(
        b'{"__metadata__":' + table(lambda index: f'"{index}":""', 3 * MILLION) + b',"":{}}'
    ),
}
MANY_RECORDS: dict[str, Callable[[], bytes]] = {
    "plain tensors": lambda: b"".join(record(b"%d" % index) for index in range(MILLION)),
    "empty tensors": lambda: b"".join(record(b"%d" % index, b"") for index in range(MILLION // 4)),
    "unknown fields": lambda: b"\x10\x00" * (2 * MILLION),
    "unknown fields of one tensor": lambda: encode_bytes_field(
        1, encode_bytes_field(1, b"w") + b"\x20\x00" * (2 * MILLION)
    ),
    "metadata": lambda: encode_bytes_field(
        17229, table(lambda index: f'"{index}":""', 3 * MILLION)
    ),
}
MANY_LAYOUTS: dict[str, Callable[[], bytes]] = {
    "operators": lambda: (
        b"\x08\x00"
        + b"".join(
            encode_bytes_field(2, encode_bytes_field(1, b"%d" % index) + b"\x12\x02\x08\x00")
            for index in range(MILLION // 3)
        )
    ),
    "unknown fields": lambda: b"\x08\x00" + b"\x78\x00" * (2 * MILLION),
    "packed numbers": lambda: (
        b"\x08\x00"
        + 3
        * encode_bytes_field(
            2,
            encode_bytes_field(1, b"op")
            + encode_bytes_field(
                2, b"\x08\x00" + encode_bytes_field(2, encode_bytes_field(1, b"\1" * MILLION))
            ),
        )
    ),
    "json": lambda: (
        b'{"parallel_layout_item":' + table(lambda index: f'"{index}":{{}}', 2 * MILLION) + b"}"
    ),
}


@pytest.mark.parametrize("make", MANY.values(), ids=MANY.keys())
def test_safetensors_file_of_too_many_is_refused(few: None, make: Callable[[], bytes]) -> None:
    with pytest.raises(UnsupportedError, match="more than"):
        read_safetensors_index(BytesSource(make()))


@pytest.mark.parametrize("make", MANY_RECORDS.values(), ids=MANY_RECORDS.keys())
def test_ckpt_of_too_many_is_refused(few: None, make: Callable[[], bytes]) -> None:
    with pytest.raises(UnsupportedError, match="more than"):
        read_ckpt_index(BytesSource(make()))


@pytest.mark.parametrize("make", MANY_LAYOUTS.values(), ids=MANY_LAYOUTS.keys())
def test_strategy_of_too_many_is_refused(few: None, make: Callable[[], bytes]) -> None:
    with pytest.raises(FormatError, match="more than"):
        parse_strategy(make())


def test_metadata_whose_text_is_long_are_no_values(few: None) -> None:
    text = '[{\\"a\\":[1]},\\\\' * (MAX_VALUES // PART)
    for end in (b"}", b',"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'):
        header = b'{"__metadata__":{"state":"%s"}' % text.encode() + end
        index = read_safetensors_index(BytesSource(safetensors(header, b"x" * (end != b"}"))))
        assert index.metadata["state"].startswith('[{"a":[1]},')


def test_text_that_never_ends_is_counted_in_one_pass(few: None) -> None:
    with pytest.raises(FormatError, match="not JSON"):
        parse_object(b'{"' + b'\\",' * (2 * MAX_VALUES // PART), what="header", offset=0)


@pytest.mark.slow
def test_a_hundred_thousand_tensors_are_written_and_read() -> None:
    zeros = np.zeros(1, np.uint8)
    items: list[Item] = [tensor_from_array(f"layers.{index}.w", zeros) for index in range(100_000)]
    assert (
        len(read_ckpt_index(BytesSource(image_bytes(build_ckpt_image(items)))).entries) == 100_000
    )
    data = image_bytes(build_safetensors_image(items))
    assert len(read_safetensors_index(BytesSource(data)).entries) == 100_000


def test_writers_refuse_more_than_a_reader_takes(few: None) -> None:
    items: list[Item] = [named_tensor(str(index)) for index in range(MAX_TENSORS // PART)]
    for build, read in (
        (build_ckpt_image, read_ckpt_index),
        (build_safetensors_image, read_safetensors_index),
    ):
        assert len(read(BytesSource(image_bytes(build(items)))).entries) == len(items)
        with pytest.raises(UnsupportedError, match="more than 8192 tensors"):
            build([*items, named_tensor("one more")])


@pytest.mark.parametrize(
    "item",
    [
        Text(name="", text="a"),
        named_tensor("", "uint8", (0, 1, 1, 1)),
        MapTensors(
            name="",
            key=named_tensor("key", "int32", (3,)),
            value=named_tensor("value", "float32", (3, 2)),
            status=named_tensor("status", "int32", (3,)),
        ),
    ],
    ids=["text", "empty", "map"],
)
def test_writer_refuses_what_a_reader_would_count_as_too_much(few: None, item: Item) -> None:
    count = MAX_FIELDS // PART // 10
    names = map(str, range(count))
    renamed = [named(item, name) for name in names]
    with pytest.raises(UnsupportedError, match="fields, of"):
        build_ckpt_image([one for two in renamed for one in (two, other(two))])
    some = renamed[: MAX_FIELDS // PART // 64]
    data = image_bytes(build_ckpt_image([one for two in some for one in (two, other(two))]))
    assert len(read_ckpt_index(BytesSource(data)).entries) == 2 * len(some)


def named(item: Item, name: str) -> Item:
    if isinstance(item, Text | MapTensors):
        return replace(item, name=name)
    return item._replace(spec=TensorSpec(name, item.spec.dtype, item.spec.shape))


def other(item: Item) -> Item:
    name = item.name if isinstance(item, Text | MapTensors) else item.spec.name
    return named_tensor(f"{name}-", "uint8", (1,))


def test_fields_of_one_reader_are_counted_together(few: None) -> None:
    most = MAX_FIELDS // PART
    reader = WireReader(BytesSource(b"\x08\x01" * most))
    assert len(list(reader.fields(0, most))) == most // 2
    with pytest.raises(UnsupportedError, match="more than"):
        list(reader.fields(0, reader.size))
