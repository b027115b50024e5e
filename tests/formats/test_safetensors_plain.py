# SPDX-License-Identifier: Apache-2.0
"""The fast reader of headers agrees with the strict reader, or leaves the header to it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.safetensors_fast import read_plain_header
from ckptmgr.formats.safetensors_file import (
    SafetensorsIndex,
    build_safetensors_image,
    read_safetensors_index,
)
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Tensor
from tests.support.stored import image_bytes
from tests.support.strategies import metadata, named_tensor, safetensors_items

A: dict[str, Any] = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
B: dict[str, Any] = {"dtype": "F16", "shape": [1, 1], "data_offsets": [2, 4]}
HEAD = '{"__metadata__":{"k":"v"},'


def compact(header: object) -> str:
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False)


def file_of(header: str | bytes, data_bytes: int = 4) -> bytes:
    encoded = header.encode() if isinstance(header, str) else header
    return len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes)


def by_the_short_cut(data: bytes) -> list[str] | None:
    """Return the names of the tensors, or None where the header is not plain."""
    length = int.from_bytes(data[:8], "little")
    plain = read_plain_header(data[8 : 8 + length], data_start=8 + length)
    return None if plain is None else [entry.name for entry in plain.entries]


def index_of(
    data: bytes, monkeypatch: pytest.MonkeyPatch, *, is_strict: bool
) -> SafetensorsIndex | str:
    """Return the index of a file, or why there is none."""
    with monkeypatch.context() as patch:
        if is_strict:
            patch.setattr(
                "ckptmgr.formats.safetensors_file.read_plain_header", lambda *_, **__: None
            )
        try:
            return read_safetensors_index(BytesSource(data))
        except FormatError as error:
            return str(error)


@given(safetensors_items(), metadata())
def test_what_we_write_is_plain_but_for_escapes(items: list[Tensor], meta: dict[str, str]) -> None:
    data = image_bytes(build_safetensors_image(items, metadata=meta))
    names = {item.spec.name for item in items}
    is_plain = bool(items) and not any(compact(name) != f'"{name}"' for name in names)
    found = by_the_short_cut(data)
    assert (found is not None) == is_plain
    assert not is_plain or set(found or ()) == names


@pytest.mark.parametrize("meta", [None, {"format": "pt", "x": '},"\\"'}])
def test_what_the_stock_library_writes_is_plain(meta: dict[str, str] | None) -> None:
    arrays = {
        f"{dtype}{rows}": np.zeros((rows, 3), dtype)
        for rows in range(3)
        for dtype in ("float32", "int64", "uint8")
    }
    data = safetensors.numpy.save(arrays, metadata=meta)
    assert set(by_the_short_cut(data) or ()) == arrays.keys()


@pytest.mark.slow
@given(
    items=safetensors_items(),
    meta=metadata(),
    changes=st.lists(
        st.tuples(st.integers(0), st.sampled_from(list('{}[]:",\\ 0129aé\t')) | st.text(max_size=3))
    ),
    cut=st.integers(-1, 1),
)
@settings(
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_files_are_read_as_without_the_short_cut(
    items: list[Tensor],
    meta: dict[str, str],
    changes: list[tuple[int, str]],
    cut: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = image_bytes(build_safetensors_image(items, metadata=meta))
    length = 8 + int.from_bytes(whole[:8], "little")
    header = whole[8:length].decode()
    for at, text in changes:
        start = at % (len(header) + 1)
        header = header[:start] + text + header[start + (at % 3) :]
    data = file_of(header, max(0, len(whole) - length + cut))
    short = index_of(data, monkeypatch, is_strict=False)
    assert short == index_of(data, monkeypatch, is_strict=True)


@pytest.mark.parametrize(
    "header",
    [
        compact({"a": A, "b": B}),
        compact({"__metadata__": {}, "a": A, "b": B}) + "   ",
        compact({"__metadata__": {"a\n": '},"x":{'}, "é": A, "}": B}),
        compact({"": A, "},{": B}),
        compact(
            {
                "": {"dtype": "I8", "shape": [], "data_offsets": [0, 1]},
                "b": {**B, "data_offsets": [1, 3]},
            }
        ).replace("[1,3]}", '[1,3]},"c":{"dtype":"I8","shape":[],"data_offsets":[3,4]}'),
    ],
    ids=["no-metadata", "padded", "metadata-with-escapes", "odd-names", "short"],
)
def test_plain_header_is_read(header: str) -> None:
    assert by_the_short_cut(file_of(header)) is not None


NOT_PLAIN = {
    "white space": json.dumps({"a": A, "b": B}),
    "line break after it": compact({"a": A, "b": B}) + "\n",
    "escape": json.dumps({"ä": A, "b": B}, separators=(",", ":")),
    "order of the data": compact({"b": B, "a": A}),
    "order of the fields": compact({"a": dict(sorted(A.items())), "b": B}),
    "metadata at the end": compact({"a": A, "b": B, "__metadata__": {}}),
    "metadata in between": compact({"a": A, "__metadata__": {"k": "v"}, "b": B}),
    "tensor called metadata": compact({"a": A, "__metadata__": B}),
    "metadata twice": HEAD + compact({"__metadata__": A, "b": B})[1:],
    "metadata that is no JSON": '{"__metadata__":{x},' + compact({"a": A, "b": B})[1:],
    "fraction in the metadata": '{"__metadata__":{"k":1.5},' + compact({"a": A, "b": B})[1:],
    "deep metadata": '{"__metadata__":' + "[" * 100_000 + compact({"a": A})[1:],
    "key twice in the metadata": '{"__metadata__":{"k":"","k":""},' + compact({"a": A, "b": B})[1:],
    "no comma after the metadata": '{"__metadata__":{}' + compact({"a": A, "b": B})[1:],
    "name twice": compact({"a": A, "b": B}).replace('"b"', '"a"'),
    "name with the end of a tensor": compact({"a},": A, "b": B}).replace("a},", 'a},"'),
    "control character": compact({"a": A, "b": B}).replace('"b"', '"\t"'),
    "number that is no integer": compact({"a": A, "b": B}).replace("[2]", "[2.0]"),
    "leading zero": compact({"a": A, "b": B}).replace("[2]", "[02]"),
    "digits of another script": compact({"a": A, "b": B}).replace("[2]", "[٢]"),
    "number too large": compact({"a": {**A, "shape": [10**18]}, "b": B}),
    "too many dimensions": compact({"a": {**A, "shape": [2, *[1] * 64]}, "b": B}),
    "shape that no array has": compact(
        {"a": {"dtype": "U8", "shape": [0, 10**17, 10**17], "data_offsets": [0, 0]}, "b": B}
    ),
    "unknown type": compact({"a": {**A, "dtype": "U9"}, "b": B}),
    "one tensor is none": compact({"a": A, "b": [[[]]]}),
    "gap": compact({"a": A, "b": {**B, "data_offsets": [3, 5]}}),
    "size": compact({"a": {**A, "data_offsets": [0, 3]}, "b": B}),
    "nothing": "{}",
    "another name for a field": compact({"a": A, "b": B}).replace("shape", "Shape"),
    "more ends than tensors": '{"' + '},"' * 1000 + "]}}",
    "quote too much": compact({"a": A, "b": B}).replace('"b"', '"x":1,"b"'),
}


@pytest.mark.parametrize("header", NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_everything_else_is_left_to_the_strict_reader(
    header: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file_of(header)
    assert by_the_short_cut(data) is None
    short = index_of(data, monkeypatch, is_strict=False)
    assert short == index_of(data, monkeypatch, is_strict=True)


def test_header_that_is_not_utf8_is_left_to_the_strict_reader() -> None:
    assert (
        by_the_short_cut(file_of(compact({"a": A, "b": B}).encode().replace(b"b", b"\xff"))) is None
    )


def test_packed_int4_in_a_plain_header_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = image_bytes(build_safetensors_image([named_tensor("q", "int4", (4,))]))
    assert by_the_short_cut(data) == ["q"]
    short = index_of(data, monkeypatch, is_strict=False)
    assert short == index_of(data, monkeypatch, is_strict=True)
    assert isinstance(short, SafetensorsIndex)
    assert short.entries[0].spec.dtype.name == "int4"


@pytest.mark.parametrize(
    ("data_bytes", "problem"), [(0, "content ends"), (3, "content ends"), (5, "1 bytes")]
)
def test_contents_that_are_too_short_or_too_long_are_named_without_parsing_again(
    data_bytes: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = file_of(compact({"a": A, "b": B}), data_bytes)
    assert by_the_short_cut(data) == ["a", "b"]
    short = index_of(data, monkeypatch, is_strict=False)
    assert isinstance(short, str)
    assert problem in short
    assert short == index_of(data, monkeypatch, is_strict=True)
