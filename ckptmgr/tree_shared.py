# SPDX-License-Identifier: Apache-2.0
"""Arrays of a state that are one and the same memory: two stored values that differ cannot both go there."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptmgr.leaves import framework_of
from ckptmgr.tree_nodes import Path

_Place = tuple[object, ...]


class SharedTargets:
    """What is to be copied into which memory, so far.

    Only arrays that are the same elements in the same order are told; not parts of one another.

    Args:
        has_contents: Whether the stored values can be compared. Otherwise they differ unless they are the same memory.
    """

    def __init__(self, *, has_contents: bool) -> None:
        self._has_contents = has_contents
        self._first: dict[_Place, tuple[Path, Any]] = {}

    def other_value(self, target: Any, stored: Any, path: Path) -> Path | None:
        """Return where in the state a value that differs from this one goes to the same memory, or None.

        Args:
            target: An array of the state.
            stored: What is to be copied into it; of the same shape and type.
            path: Where in the state.
        """
        if 0 in stored.shape:
            return None
        found, first = self._first.setdefault(_place_of(target), (path, stored))
        if first is stored or _place_of(first) == _place_of(stored):
            return None
        return None if self._has_contents and _are_equal(first, stored) else found


def _place_of(array: Any) -> _Place:
    if isinstance(array, np.ndarray):
        return ("numpy", array.__array_interface__["data"][0], array.shape, array.strides)
    if framework_of(array) == "torch":
        return ("torch", str(array.device), array.data_ptr(), tuple(array.shape), array.stride())
    return ("object", id(array))


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two stored values of one kind, shape and type are the same, bit for bit: NaN equals itself."""
    if isinstance(one, np.ndarray):
        return np.array_equal(_bytes(one), _bytes(other))
    import torch

    parts = [value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other)]
    return torch.equal(*parts)


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
