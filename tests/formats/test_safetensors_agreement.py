# SPDX-License-Identifier: Apache-2.0
"""Headers of other writers, read as the stock library reads them; exceptions: `safetensors_file`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ckptmgr.formats.errors import FormatError, UnsupportedError
from ckptmgr.formats.safetensors_file import SafetensorsIndex, read_safetensors_index
from ckptmgr.formats.source import BytesSource

safetensors = pytest.importorskip("safetensors", reason="needs safetensors")

# mx.save_safetensors("mlx.safetensors", {"a": mx.arange(3, dtype=mx.float32), "w": mx.ones((2, 3),
# dtype=mx.bfloat16)}) of MLX 0.32.0
OF_MLX = (
    b"\x85\0\0\0\0\0\0\0"
    b'{"__metadata__":null,"a":{"data_offsets":[12,24],"dtype":"F32","shape":[3]},'
    b'"w":{"data_offsets":[0,12],"dtype":"BF16","shape":[2,3]}}'
    b"\x80?\x80?\x80?\x80?\x80?\x80?\0\0\0\0\0\0\x80?\0\0\0@"
)

texts = st.text(st.characters(codec="utf-8"), max_size=4)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values: Any = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
metadata = st.none() | st.dictionaries(texts, texts, max_size=3) | values


@st.composite
def headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Return a header, and the size of the data; most are right but for one thing or none."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(texts.filter(lambda one: one != "__metadata__"), max_size=3)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        dtype, item_bytes = draw(st.sampled_from([("U8", 1), ("F32", 4), ("BF16", 2)]))
        end = at + item_bytes * shape_size(shape)
        tensor: dict[str, Any] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        if name in header:
            continue
        tensor |= draw(st.dictionaries(texts, values, max_size=2))
        header[name], at = shuffled(draw, tensor), end
    if draw(st.booleans()):
        header["__metadata__"] = draw(metadata)
    if header and draw(st.integers(0, 3)) == 0:
        damage(draw, header)
    return shuffled(draw, header), max(0, at + draw(st.sampled_from([0, 0, 0, 0, 1, -1])))


def shape_size(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def shuffled(draw: st.DrawFn, table: dict[str, Any]) -> dict[str, Any]:
    return {name: table[name] for name in draw(st.permutations(list(table)))}


def damage(draw: st.DrawFn, header: dict[str, Any]) -> None:
    tensor = header[draw(st.sampled_from(sorted(header)))]
    if not isinstance(tensor, dict) or not tensor:
        return
    field = draw(st.sampled_from(sorted(tensor)))
    if draw(st.booleans()):
        del tensor[field]
    else:
        tensor[field] = draw(values)


def of_library(path: Path) -> dict[str, Any] | None:
    """Return the result of the stock library, or None if it refuses the file."""
    try:
        with safetensors.safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                "metadata": opened.metadata() or {},
                "tensors": {
                    name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()
                },
            }
    except safetensors.SafetensorError:
        return None


def of_ours(data: bytes) -> SafetensorsIndex | FormatError:
    try:
        return read_safetensors_index(BytesSource(data))
    except FormatError as error:
        return error


def is_named_exception(header: dict[str, Any], found: FormatError) -> bool:
    """Return whether an error is for a spelling that no writer has, or a shape of no array."""
    return isinstance(found, UnsupportedError) and (
        "no array has the shape" in found.message
        or any(
            isinstance(one, list) or (isinstance(one, dict) and isinstance(one.get("dtype"), dict))
            for one in header.values()
        )
    )


TENSOR = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(headers())
@example(({"__metadata__": None, "a": TENSOR}, 2))
@example(({"__metadata__": None}, 0))
@example(({"a": {**TENSOR, "made_by": {"name": "x", "version": 1.5}}}, 2))
@example(({"a": {**TENSOR, "big": 10**30}}, 2))
@example(({"a": {"more": [], **TENSOR}}, 2))
@example(({"a": {**TENSOR, "shape": [2.0]}}, 2))
@example(({"a": {**TENSOR, "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}}, 0))
def test_header_is_read_where_the_library_reads_it(
    tmp_path: Path, drawn: tuple[dict[str, Any], int]
) -> None:
    header, size = drawn
    encoded = json.dumps(header, ensure_ascii=False).encode()
    data = struct.pack("<Q", len(encoded)) + encoded + bytes(size)
    path = tmp_path / "one.safetensors"
    path.write_bytes(data)
    expected, found = of_library(path), of_ours(data)
    if expected is None:
        assert isinstance(found, FormatError)
    elif isinstance(found, FormatError):
        assert is_named_exception(header, found), found
    else:
        assert found.metadata == expected["metadata"]
        assert {
            one.spec.name: (one.spec.dtype.safetensors, list(one.spec.shape))
            for one in found.entries
        } == expected["tensors"]


def test_file_of_mlx_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    (tmp_path / "mlx.safetensors").write_bytes(OF_MLX)
    expected = of_library(tmp_path / "mlx.safetensors")
    assert expected == {"metadata": {}, "tensors": {"a": ("F32", [3]), "w": ("BF16", [2, 3])}}
    index = read_safetensors_index(BytesSource(OF_MLX))
    assert [(one.name, list(one.spec.shape)) for one in index.entries] == [
        ("w", [2, 3]),
        ("a", [3]),
    ]


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        b'{"__metadata__":{"a":"b","a":"c"},"t":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
    ],
)
def test_name_twice_in_one_object_is_refused_although_the_library_takes_it(
    tmp_path: Path, header: bytes
) -> None:
    data = struct.pack("<Q", len(header)) + header + b"ab"
    (tmp_path / "twice.safetensors").write_bytes(data)
    assert of_library(tmp_path / "twice.safetensors") is not None
    assert "twice" in str(of_ours(data))
