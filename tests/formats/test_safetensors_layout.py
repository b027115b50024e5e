# SPDX-License-Identifier: Apache-2.0
"""The layout of large `.safetensors` files: aligned for direct I/O and for vector instructions."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from ckptmgr.formats.safetensors_file import build_safetensors_image, read_safetensors_index
from ckptmgr.formats.safetensors_layout import in_listed_order
from ckptmgr.formats.source import BytesSource
from ckptmgr.formats.tensor import Tensor, tensor_from_array
from tests.support.stored import image_bytes, read_safetensors, stored_items

MIB = 1 << 20


def tensors(size_bytes: int) -> list[Tensor]:
    """Return a large tensor of that size in all, and small ones of odd sizes around it by name."""
    arrays: dict[str, np.ndarray] = {
        "a.bias": np.arange(3, dtype=np.float32),
        "b.weight": np.ones((size_bytes - 12 - 5 - 8) // 256 * 64, np.float32),
        "c.scale": np.arange(16, dtype=np.float32),
        "d.codes": np.arange(5, dtype=np.uint8),
        "e.step": np.array(7),
    }
    return [tensor_from_array(name, array) for name, array in arrays.items()]


def offsets(data: bytes) -> dict[str, int]:
    index = read_safetensors_index(BytesSource(data))
    return {entry.name: entry.pieces[0].offset for entry in index.entries}


@pytest.mark.parametrize("crc", [False, True])
def test_data_of_a_mib_begins_at_a_page_and_tensors_at_multiples_of_64(crc: bool) -> None:
    data = image_bytes(build_safetensors_image(tensors(2 * MIB), crc=crc))
    found = offsets(data)
    assert next(iter(found.values())) % 4096 == 0
    assert list(found) == ["b.weight", "c.scale", "e.step", "a.bias", "d.codes"]
    assert [found[name] % 64 for name in ("b.weight", "c.scale")] == [0, 0]
    assert read_safetensors(data, crc=crc) == stored_items(tensors(2 * MIB))


def test_data_of_less_is_not_padded_to_a_page() -> None:
    data = image_bytes(build_safetensors_image(tensors(MIB - 4096)))
    assert list(offsets(data)) == ["e.step", "a.bias", "b.weight", "c.scale", "d.codes"]
    assert 0 < min(offsets(data).values()) < 4096


@pytest.mark.parametrize("is_as_library", [False, True])
def test_files_of_mindspore_and_of_the_library_keep_the_bytes_of_the_library(
    is_as_library: bool,
) -> None:
    metadata = {"format": "ms"}
    items = tensors(2 * MIB)
    data = image_bytes(
        build_safetensors_image(items, metadata=metadata, is_as_library=is_as_library)
    )
    arrays = {
        item.spec.name: np.frombuffer(item.content(), item.spec.dtype.to_numpy()).reshape(
            item.spec.shape
        )
        for item in items
    }
    assert data == safetensors.numpy.save(arrays, metadata=metadata)


def test_library_reads_an_aligned_file() -> None:
    items = tensors(2 * MIB)
    loaded = safetensors.numpy.load(image_bytes(build_safetensors_image(items)))
    assert {name: bytes(array.tobytes()) for name, array in loaded.items()} == {
        item.spec.name: bytes(item.content()) for item in items
    }


@pytest.mark.parametrize("size_bytes", [MIB // 2, 2 * MIB])
def test_order_that_is_shown_does_not_depend_on_the_layout(size_bytes: int) -> None:
    data = image_bytes(build_safetensors_image(tensors(size_bytes)))
    entries = read_safetensors_index(BytesSource(data)).entries
    names = [entry.name for entry in in_listed_order(entries)]
    assert names == ["e.step", "a.bias", "b.weight", "c.scale", "d.codes"]


def file_with(sizes: dict[str, int]) -> bytes:
    """Return a file of another writer: uint8 tensors in the given order, data at 4096."""
    header, end = {}, 0
    for name, size in sizes.items():
        header[name] = (
            f'"{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{end},{end + size}]}}'
        )
        end += size
    encoded = f"{{{','.join(header.values())}}}".encode().ljust(4088)
    return len(encoded).to_bytes(8, "little") + encoded + bytes(end)


@pytest.mark.parametrize(
    "sizes",
    [{"b": 64, "a": 64, "c": 3}, {"a": 64, "c": 3, "b": 3}, {"b": 64, "c": 3, "a": 64}, {"a": 3}],
)
def test_order_of_a_file_of_another_writer_is_its_own(sizes: dict[str, int]) -> None:
    entries = read_safetensors_index(BytesSource(file_with(sizes))).entries
    assert [entry.name for entry in in_listed_order(entries)] == list(sizes)


def test_order_of_nothing_is_nothing() -> None:
    assert not in_listed_order(())
