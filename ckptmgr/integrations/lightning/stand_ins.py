# SPDX-License-Identifier: Apache-2.0
"""Functions that stand in for methods of one object, such as a loop of Lightning."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


class StandIns:
    """Puts functions in the place of methods, until `undo`."""

    def __init__(self) -> None:
        self._placed: list[tuple[Any, str]] = []

    def put(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Have a method of `owner` call `function(method, ...)`."""
        vars(owner)[name] = partial(function, getattr(owner, name))
        self._placed.append((owner, name))

    def undo(self) -> None:
        """Give the objects their methods back."""
        for owner, name in self._placed:
            vars(owner).pop(name, None)
        self._placed.clear()
