# SPDX-License-Identifier: Apache-2.0
"""Parts of a state that are one and the same: two stored values that differ cannot both go there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ckptmgr.state.flatten import Flattener
from ckptmgr.state.overlaps import bytes_for, clashes
from ckptmgr.state.paths import Path


class SharedTargets:
    """What is to be restored into which memory and which objects, so far.

    Args:
        look_into: Called with a stored value before the contents of its arrays are looked at.
    """

    def __init__(self, *, look_into: Callable[[Any], None]) -> None:
        self._look_into = look_into
        self._targets: dict[object, Any] = {}
        self._stored: dict[object, Any] = {}
        self._objects: dict[object, tuple[Path, object, Any]] = {}

    def add_array(self, target: Any, stored: Any, path: Path) -> None:
        """Note that an array of the state is to be filled with a stored one of the same shape and type."""
        self._targets[path], self._stored[path] = target, stored

    def add_object(self, key: object, target: object, stored: Any, path: Path) -> str | None:
        """Note that an object of the state is to be filled; return why it cannot be, or None.

        Args:
            key: The same for two targets that are one.
            target: The object, which is held.
            stored: What it is to be filled with.
            path: Where in the state.
        """
        other, _, first = self._objects.setdefault(key, (path, target, stored))
        if first is stored:
            return None
        self._look_into([first, stored])
        if _are_equal(first, stored):
            return None
        return f"is the same object as {other}, stored are two different values"

    def problems(self) -> list[str]:
        """Return what is wrong with the arrays, each after its path."""
        found = clashes(self._targets, self._stored, self._look_into)
        return [f"{one.later} {one}" for one in found]


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two stored values are the same, bit for bit: NaN equals itself."""
    if isinstance(one, np.ndarray):
        return np.array_equal(bytes_for(one, one), bytes_for(one, other))
    (tensors, skeleton, _), (others, other_skeleton, _) = (
        Flattener().run(value) for value in (one, other)
    )
    return skeleton == other_skeleton and all(
        mine.spec == its.spec and mine.content() == its.content()
        for mine, its in zip(tensors, others, strict=True)
    )
