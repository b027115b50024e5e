# SPDX-License-Identifier: Apache-2.0
"""Subjects of the tests of staging: items of known bytes, and mappings of this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import Item, MapTensors, Tensor, TensorSpec, Text, tensor_from_array
from ckptmgr.state.items import tensors_of

MIB = 1 << 20


def filled(name: str, size_bytes: int, value: int = 7) -> Tensor:
    """A tensor of equal bytes."""
    return tensor_from_array(name, np.full(size_bytes, value, np.uint8))


def failing(name: str, size_bytes: int, error: BaseException) -> Tensor:
    """A tensor whose content cannot be had."""

    def content() -> memoryview:
        raise error

    spec = TensorSpec(name=name, dtype=BY_NAME["uint8"], shape=(size_bytes,))
    return Tensor(spec=spec, content=content)


def map_tensors(name: str) -> MapTensors:
    """A map parameter of three small tensors."""
    key, value, status = (
        tensor_from_array(part, np.arange(3)) for part in ("key", "value", "status")
    )
    return MapTensors(name=name, key=key, value=value, status=status)


def values(items: Sequence[Item]) -> list[object]:
    """Everything that items say, as comparable values."""
    found: list[object] = []
    for item in items:
        found.append(item.text if isinstance(item, Text) else type(item))
        found += [(tensor.spec, bytes(tensor.content())) for tensor in tensors_of(item)]
    return found


def mapping_flags(view: memoryview) -> set[str]:
    """The kernel's flags of the mapping that a view lies in (`VmFlags` of /proc/self/smaps)."""
    address = np.frombuffer(view, np.uint8).ctypes.data
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise LookupError(hex(address))
