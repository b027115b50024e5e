# SPDX-License-Identifier: Apache-2.0
"""Every single-bit flip and every truncation of small files: reported, or a different but well-formed value."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.mindspore.reader import read_ckpt_index
from ckptmgr.formats.mindspore.writer import build_ckpt_image
from ckptmgr.formats.safetensors_file import build_safetensors_image
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, Text
from tests.support.stored import StoredItem, image_bytes, read_ckpt, read_safetensors, stored_items
from tests.support.strategies import named_tensor

TENSORS: list[Tensor] = [
    named_tensor("fc.weight", "float32", (2, 3)),
    named_tensor("mask", "bool", (5,)),
    named_tensor("half", "bfloat16", (4,)),
    named_tensor("step", "int64", (), (7).to_bytes(8, "little")),
    named_tensor("empty", "float32", (0, 3)),
]
ITEMS: list[Item] = [
    *TENSORS,
    Text(name="note", text="hello"),
    MapTensors(
        name="map",
        key=named_tensor("key", "int32", (3,)),
        value=named_tensor("value", "float32", (3, 2)),
        status=named_tensor("status", "int32", (3,)),
    ),
]
METADATA = {"run": "r1"}


def ckpt(*, crc: bool) -> bytes:
    return image_bytes(build_ckpt_image(ITEMS, metadata=METADATA, crc=crc, slice_bytes=16))


def safetensors(*, crc: bool) -> bytes:
    return image_bytes(build_safetensors_image(TENSORS, crc=crc))


def bit_flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bit, bytes(flipped)


def outcome(data: bytes, *, crc: bool, is_ckpt: bool) -> dict[str, StoredItem] | None:
    """Return the content of a file, or None if it is refused; anything else fails the test."""
    try:
        return read_ckpt(data, crc=crc) if is_ckpt else read_safetensors(data, crc=crc)
    except FormatError:
        return None


@pytest.mark.slow
def test_ckpt_with_crc_and_any_bit_flipped_is_refused() -> None:
    data = ckpt(crc=True)
    assert outcome(data, crc=True, is_ckpt=True) == stored_items(ITEMS)
    passed = [bit for bit, flip in bit_flips(data) if outcome(flip, crc=True, is_ckpt=True)]
    assert passed == []


def test_ckpt_without_crc_and_any_bit_flipped_hardly_ever_reads_the_same() -> None:
    data = ckpt(crc=False)
    before = stored_items(ITEMS)
    same = [
        bit
        for bit, flip in bit_flips(data)
        if outcome(flip, crc=False, is_ckpt=True) == before
        and read_ckpt_index(BytesSource(flip)).metadata == METADATA
    ]
    # A text has no shape: its dims may be [0], [1] or absent.
    text_dims = data.index(b"\x08\x00\x12\x03str")
    assert {bit // 8 - text_dims for bit in same} == {0, 1}


def test_safetensors_with_crc_and_any_bit_flipped_never_gives_other_contents() -> None:
    data = safetensors(crc=True)
    before = stored_items(TENSORS)
    changed: set[str] = set()
    for _, flip in bit_flips(data):
        after = outcome(flip, crc=True, is_ckpt=False) or before
        assert after.keys() == before.keys()
        changed.update(name for name in before if after[name] != before[name])
    # MindSpore's CRC covers names and contents, but not shapes: those of empty tensors are free.
    assert changed == {"empty"}


def test_safetensors_without_crc_and_any_bit_flipped_raises_only_format_errors() -> None:
    outcomes = [
        outcome(flip, crc=False, is_ckpt=False) for _, flip in bit_flips(safetensors(crc=False))
    ]
    assert None in outcomes


@pytest.mark.parametrize("is_ckpt", [True, False])
def test_file_with_crc_cut_anywhere_is_refused(is_ckpt: bool) -> None:
    data = ckpt(crc=True) if is_ckpt else safetensors(crc=True)
    lengths = [
        length
        for length in range(len(data))
        if outcome(data[:length], crc=True, is_ckpt=is_ckpt) is not None
    ]
    assert lengths == []


def test_safetensors_cut_anywhere_is_refused() -> None:
    data = safetensors(crc=False)
    cuts = [outcome(data[:length], crc=False, is_ckpt=False) for length in range(len(data))]
    assert cuts == [None] * len(data)


def test_ckpt_cut_inside_a_parameter_is_refused() -> None:
    items = stored_items(ITEMS)
    whole = [dict(list(items.items())[:count]) for count in range(len(items) + 1)]
    data = ckpt(crc=False)
    survivors = [
        after
        for length in range(len(data))
        if (after := outcome(data[:length], crc=False, is_ckpt=True)) is not None
    ]
    # Only a cut exactly between two parameters looks like a smaller file. Between two slices of a map it looks like a
    # smaller map: nothing in the format shows it.
    assert [cut for cut in survivors if "map" not in cut] == whole[:-1]


@pytest.mark.parametrize("is_ckpt", [True, False])
@pytest.mark.parametrize("extra", [b"\0", b"\n", b" ", b"}", b"crc_num" + bytes(10)])
def test_bytes_appended_are_refused(is_ckpt: bool, extra: bytes) -> None:
    data = ckpt(crc=True) if is_ckpt else safetensors(crc=True)
    assert outcome(data + extra, crc=True, is_ckpt=is_ckpt) is None


def test_file_appended_to_itself_is_refused() -> None:
    data = ckpt(crc=False)
    assert outcome(data + data, crc=False, is_ckpt=True) is None
