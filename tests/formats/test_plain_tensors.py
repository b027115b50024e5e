# SPDX-License-Identifier: Apache-2.0
"""The fast reader of tensors agrees with the strict reader, or leaves the message to it."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.mindspore import fast_reader as mindspore_plain
from ckptmgr.formats.mindspore.entries import CkptEntry, join_records
from ckptmgr.formats.mindspore.fast_reader import PlainTensors
from ckptmgr.formats.mindspore.fields import MAX_DIM, MAX_RANK
from ckptmgr.formats.mindspore.reader import CkptIndex, read_ckpt_index
from ckptmgr.formats.mindspore.records import expect_bytes, read_record
from ckptmgr.formats.mindspore.wire import (
    WireReader,
    encode_bytes_field,
    encode_length_prefix,
    encode_varint,
    encode_varint_field,
)
from ckptmgr.formats.source import BytesSource


def message(
    name: bytes = b"w",
    dims: tuple[int, ...] = (2, 3),
    type_name: bytes = b"Float32",
    content: bytes = bytes(24),
) -> bytes:
    tensor = b"".join(encode_varint_field(1, dim) for dim in dims)
    tensor += encode_bytes_field(2, type_name) + encode_bytes_field(3, content)
    return encode_bytes_field(1, encode_bytes_field(1, name) + encode_bytes_field(2, tensor))


def by_the_short_cut(data: bytes, offset: int = 0) -> tuple[TensorEntry, int] | None:
    """Return the first plain tensor, and where those that follow each other end."""
    found, stop = PlainTensors(WireReader(BytesSource(data))).take(offset, set())
    return (found[0], stop) if found else None


def by_the_strict_reader(data: bytes, offset: int = 0) -> tuple[CkptEntry, int] | None:
    wire = WireReader(BytesSource(data))
    try:
        field = wire.field(offset, wire.size)
        return join_records(wire, [read_record(wire, expect_bytes(field))]), field.stop
    except FormatError:
        return None


@given(
    name=st.text(st.characters(exclude_categories=["Cs"]), max_size=300).map(str.encode),
    dims=st.lists(st.integers(1, 4), max_size=5).map(tuple),
    before=st.integers(0, 20_000),
)
@settings(max_examples=60)
def test_plain_tensor_is_found_wherever_it_lies(
    name: bytes, dims: tuple[int, ...], before: int
) -> None:
    data = bytes(before) + message(name, dims, content=bytes(4 * prod(dims)))
    found = by_the_short_cut(data, before)
    assert found is not None
    assert found == by_the_strict_reader(data, before)


NO_SHORT_CUT = type("NoShortCut", (PlainTensors,), {"take": lambda self, offset, _: ([], offset)})


def index_of(data: bytes, monkeypatch: pytest.MonkeyPatch, *, is_strict: bool) -> CkptIndex | str:
    """Return the index of a file, or why there is none."""
    with monkeypatch.context() as patch:
        if is_strict:
            patch.setattr("ckptmgr.formats.mindspore.reader.PlainTensors", NO_SHORT_CUT)
        try:
            return read_ckpt_index(BytesSource(data))
        except FormatError as error:
            return str(error)


PARTS = st.tuples(
    st.sampled_from([b"a", b"a", b"b", b"long name", "ä".encode(), b"x" * 140]),
    st.sampled_from([(), (2,), (1, 2), (2, 1), (0,), (50,)]),
    st.sampled_from([b"Int8", b"Bool", b"Float32", b"str", b"Odd"]),
    st.sampled_from([0, 1, 2, 8, 200]),
)


@given(parts=st.lists(PARTS, max_size=8), change=st.none() | st.tuples(st.integers(0), st.binary()))
@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_files_are_read_as_without_the_short_cut(
    parts: list[tuple[bytes, tuple[int, ...], bytes, int]],
    change: tuple[int, bytes] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = b"".join(message(n, dims, kind, b"\0" * size) for n, dims, kind, size in parts)
    if change is not None:
        at = change[0] % (len(data) + 1)
        data = data[:at] + change[1] + data[at + len(change[1]) :]
    short = index_of(data, monkeypatch, is_strict=False)
    assert short == index_of(data, monkeypatch, is_strict=True)


def test_tensor_in_two_slices_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    one, empty = message(b"a", (2,), b"Int8", b"xy"), message(b"a", (2,), b"Int8", b"")
    other = message(b"b", (2,), b"Int8", b"xy")
    assert by_the_short_cut(one + one) is None
    data = other + one + empty + one.replace(b"a", b"c")
    found = index_of(data, monkeypatch, is_strict=False)
    assert isinstance(found, CkptIndex)
    assert [entry.name for entry in found.entries] == ["b", "a", "c"]
    assert found == index_of(data, monkeypatch, is_strict=True)


def test_no_more_layouts_are_kept_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore_plain, "_MAX_LAYOUTS", 1)
    data = message(b"a", (2,), b"Int8", b"xy") + message(b"b", (3,), b"Int8", b"xyz")
    found, stop = PlainTensors(WireReader(BytesSource(data))).take(0, set())
    assert ([entry.name for entry in found], stop) == (["a", "b"], len(data))


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
            return len(data) + length

    length = (1 << 40) - (1 << 20)
    dims = encode_varint_field(1, 1 << 20) + encode_varint_field(1, (1 << 20) - 1)
    tensor = dims + encode_bytes_field(2, b"Int8") + encode_length_prefix(3, length)
    value = encode_bytes_field(1, b"w") + b"\x12" + encode_varint(len(tensor) + length) + tensor
    data = b"\x0a" + encode_varint(len(value) + length) + value
    wire = WireReader(Head(data + bytes(1 << 15)))
    (entry,), stop = PlainTensors(wire).take(0, set())
    assert entry.pieces == ((len(data), length),)
    assert stop == len(data) + length
