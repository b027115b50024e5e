# SPDX-License-Identifier: Apache-2.0
"""Images to bytes, and files to plain values that compare with `==`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckptmgr.formats.errors import FormatError
from ckptmgr.formats.image import Image
from ckptmgr.formats.index import TensorEntry, check_crc, read_tensor_into
from ckptmgr.formats.mindspore.entries import MapEntry, TextEntry
from ckptmgr.formats.mindspore.reader import read_ckpt_index, read_ckpt_into
from ckptmgr.formats.safetensors_file import read_safetensors_index, read_safetensors_into
from ckptmgr.formats.source import BytesSource, Source
from ckptmgr.formats.tensor import Item, Tensor, Text


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as it stands in a file: the name of its type, its shape, its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


StoredItem = Stored | str | tuple[Stored, ...]
"""A tensor, a text, or the three tensors of a map parameter."""


def image_bytes(image: Image) -> bytes:
    """Return the whole file that an image stands for."""
    start, crc = image.head_bytes, image.start_crc()
    contents = b"".join(bytes(view) for view in image.views(start, image.body_size - start))
    crc.add(start, memoryview(contents))
    return image.head(crc.value()) + contents + image.trailer(crc.value())


def format_error(read: Callable[[], object]) -> FormatError | None:
    """Return the FormatError that reading raises, or None; anything else passes through and fails the test."""
    try:
        read()
    except FormatError as error:
        return error
    return None


def stored_items(items: Iterable[Item]) -> dict[str, StoredItem]:
    """Return the values that a file of these items must read back to."""
    stored: dict[str, StoredItem] = {}
    for item in items:
        if isinstance(item, Tensor):
            stored[item.spec.name] = _stored(item)
        elif isinstance(item, Text):
            stored[item.name] = item.text
        else:
            stored[item.name] = (_stored(item.key), _stored(item.value), _stored(item.status))
    return stored


def read_ckpt(data: bytes, *, crc: bool = False) -> dict[str, StoredItem]:
    """Return the content of a `.ckpt`, in file order; with `crc`, after checking it."""
    source = BytesSource(data)
    index = read_ckpt_index(source)
    if crc:
        check_crc(index.crc, read_ckpt_into(source, index, lambda _: None))
    stored: dict[str, StoredItem] = {}
    for entry in index.entries:
        if isinstance(entry, TensorEntry):
            stored[entry.name] = read_entry(source, entry)
        elif isinstance(entry, TextEntry):
            stored[entry.name] = entry.text
        else:
            stored[entry.name] = _read_map(source, entry)
    return stored


def read_safetensors(data: bytes, *, crc: bool = False) -> dict[str, StoredItem]:
    """Return the content of a `.safetensors` file, in data order; with `crc`, after checking it."""
    source = BytesSource(data)
    index = read_safetensors_index(source)
    if crc:
        check_crc(index.crc, read_safetensors_into(source, index, lambda _: None))
    return {entry.name: read_entry(source, entry) for entry in index.entries}


def read_entry(source: Source, entry: TensorEntry) -> Stored:
    """Return one tensor of a file."""
    content = bytearray(entry.spec.size_bytes)
    read_tensor_into(source, entry, memoryview(content))
    return Stored(entry.spec.dtype.name, entry.spec.shape, bytes(content))


def _read_map(source: Source, entry: MapEntry) -> tuple[Stored, ...]:
    return tuple(read_entry(source, part) for part in (entry.key, entry.value, entry.status))


def _stored(tensor: Tensor) -> Stored:
    return Stored(tensor.spec.dtype.name, tensor.spec.shape, bytes(tensor.content()))
