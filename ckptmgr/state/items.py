# SPDX-License-Identifier: Apache-2.0
"""Items of a staged state: their tensors, copies over other memory, descriptions for the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ckptmgr.formats.dtypes import BY_NAME, packed_dtype
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, TensorSpec, Text

SlabOffset = tuple[int, int]
TensorContent = Callable[[], memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """The bytes `start` to `stop` of a tensor; a class, so that `CudaMemory` recognises it."""

    whole: Tensor
    start: int
    stop: int

    def __call__(self) -> memoryview:
        """Return the bytes."""
        return self.whole.content()[self.start : self.stop]


def tensors_of(item: Item) -> tuple[Tensor, ...]:
    """Return the tensors in an item: none of a text, three of a map parameter."""
    if isinstance(item, MapTensors):
        return (item.key, item.value, item.status)
    return (item,) if isinstance(item, Tensor) else ()


def tensors_in(items: Sequence[Item]) -> list[Tensor]:
    """Return the tensors in all items, in order."""
    found = [item for item in items if isinstance(item, Tensor)]
    if len(found) == len(items):  # nearly always; there may be many items
        return found
    return [tensor for item in items for tensor in tensors_of(item)]


def replace_contents(items: Sequence[Item], contents: Sequence[TensorContent]) -> list[Item]:
    """Return the same items with other contents, one for each tensor in order."""
    rest = iter(contents)
    return [_replaced(item, rest) for item in items]


def _replaced(item: Item, contents: Iterator[TensorContent]) -> Item:
    if isinstance(item, Tensor):
        return Tensor(spec=item.spec, content=next(contents))
    if isinstance(item, MapTensors):
        key, value, status = (
            Tensor(spec=tensor.spec, content=next(contents)) for tensor in tensors_of(item)
        )
        return MapTensors(name=item.name, key=key, value=value, status=status)
    return item


def describe_items(items: Sequence[Item], places: Sequence[SlabOffset]) -> list[dict[str, object]]:
    """Return items as plain values for JSON; `places` has the slab and offset of each tensor."""
    rest = iter(places)
    return [_described(item, rest) for item in items]


def _described(item: Item, places: Iterator[SlabOffset]) -> dict[str, object]:
    if isinstance(item, Text):
        return {"name": item.name, "text": item.text}
    if isinstance(item, MapTensors):
        parts = [_described(tensor, places) for tensor in tensors_of(item)]
        return {"name": item.name, "map": parts}
    slab, offset = next(places)
    packed = item.spec.dtype.packed_shape
    return {
        "name": item.spec.name,
        "dtype": item.spec.dtype.name,
        "shape": item.spec.shape,
        **({} if packed is None else {"packed_shape": packed}),
        "slab": slab,
        "offset": offset,
        "length": item.spec.size_bytes,
    }


def items_from(description: Sequence[Mapping[str, Any]], slabs: Sequence[memoryview]) -> list[Item]:
    """Return the items of a description by `StagedState.describe`, over its slabs.

    Raises:
        ValueError: The description does not fit the slabs.
    """
    try:
        return [_item_from(entry, slabs) for entry in description]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"this describes no staged items: {error!r}") from error


def _item_from(entry: Mapping[str, Any], slabs: Sequence[memoryview]) -> Item:
    if "text" in entry:
        return Text(name=entry["name"], text=entry["text"])
    if "map" in entry:
        key, value, status = (_tensor_from(part, slabs) for part in entry["map"])
        return MapTensors(name=entry["name"], key=key, value=value, status=status)
    return _tensor_from(entry, slabs)


def _tensor_from(entry: Mapping[str, Any], slabs: Sequence[memoryview]) -> Tensor:
    if "packed_shape" not in entry:
        dtype, shape = BY_NAME[entry["dtype"]], tuple(entry["shape"])
    else:
        dtype, shape = packed_dtype(entry["dtype"], tuple(entry["packed_shape"]))
    spec = TensorSpec(name=entry["name"], dtype=dtype, shape=shape)
    start = entry["offset"]
    stop = start + entry["length"]
    if entry["length"] != spec.size_bytes:
        raise ValueError(f"{spec.name!r} has {entry['length']} bytes instead of {spec.size_bytes}")
    if stop == start:
        return Tensor(spec=spec, content=lambda: memoryview(b""))
    slab = slabs[entry["slab"]]
    if not 0 <= start < stop <= slab.nbytes:
        raise ValueError(f"{spec.name!r} lies outside a slab of {slab.nbytes} bytes")
    return Tensor(spec=spec, content=partial(slab.__getitem__, slice(start, stop)))
