# SPDX-License-Identifier: Apache-2.0
"""Order and alignment of the tensors in a new `.safetensors` file.

| layout | the data begins at a multiple of | order of the tensors |
|---|---|---|
| of the library | 8 | its element types, then names |
| compact | 64 | descending item size, then names |
| aligned | 4096 | first those whose size is a multiple of 64, then the others; each as in compact |

The format forbids gaps. So in the aligned layout every tensor but the others is at a multiple of
64, for vector instructions and imports without a copy, and direct I/O can read the data straight
into arrays that lie alike. In every layout a tensor is at a multiple of its item size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import attrgetter

from .dtypes import SAFETENSORS_ORDER
from .index import TensorEntry
from .safetensors_header import spelling_of
from .tensor import Tensor

LIBRARY_ALIGNMENT = 8
COMPACT_ALIGNMENT = 64
DATA_ALIGNMENT = 4096
LEAST_ALIGNED_BYTES = 1 << 20
"""Less data is compact: the padding would be a share of the file, and no large read begins in it."""

_TENSOR_ALIGNMENT = 64

_name = attrgetter("spec.name")
_item_bytes = attrgetter("spec.dtype.item_bytes")


def in_library_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors in the order of the library."""
    return sorted(tensors, key=_library_place)


def in_own_order(tensors: Iterable[Tensor]) -> tuple[list[Tensor], int]:
    """Return tensors in our order, and the alignment of the data: compact or aligned."""
    by_name = sorted(tensors, key=_name)
    placed = sorted(by_name, key=_item_bytes, reverse=True)  # keeps the names in order
    sizes_bytes = list(_sizes(placed))
    if sum(sizes_bytes) < LEAST_ALIGNED_BYTES:
        return placed, COMPACT_ALIGNMENT
    even: list[Tensor] = []
    odd: list[Tensor] = []
    for tensor, size_bytes in zip(placed, sizes_bytes, strict=True):
        (odd if size_bytes % _TENSOR_ALIGNMENT else even).append(tensor)
    return [*even, *odd], DATA_ALIGNMENT


def in_listed_order(entries: Sequence[TensorEntry]) -> Sequence[TensorEntry]:
    """Return the entries of a file as they are shown: those of an aligned one by size and name.

    So the order that a user sees does not depend on the layout. Any other file keeps its own.
    """
    if not entries or entries[0].pieces[0].offset % DATA_ALIGNMENT:
        return entries
    sizes = [piece[1] % _TENSOR_ALIGNMENT for _, (piece,) in entries]
    odd = next((index for index, size in enumerate(sizes) if size), len(sizes))
    if odd in (0, len(sizes)) or not all(sizes[odd:]):
        return entries
    # Two runs that are sorted are merged in linear time, and nothing is called for each tensor.
    places = [(-spec[1].item_bytes, spec[0]) for spec, _ in entries]
    is_ours = sorted(places[:odd]) == places[:odd] and sorted(places[odd:]) == places[odd:]
    if not is_ours:
        return entries
    return [entries[index] for index in sorted(range(len(entries)), key=places.__getitem__)]


def _library_place(tensor: Tensor) -> tuple[int, str]:
    return SAFETENSORS_ORDER.index(spelling_of(tensor.spec.dtype) or ""), tensor.spec.name


def _sizes(tensors: Iterable[Tensor]) -> Iterator[int]:
    """Yield the sizes in bytes; shapes that repeat are multiplied once."""
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    for (_, dtype, shape), _ in tensors:
        key = (dtype.item_bytes, shape)
        size_bytes = known.get(key)
        if size_bytes is None:
            size_bytes = known[key] = prod(shape) * dtype.item_bytes
        yield size_bytes
