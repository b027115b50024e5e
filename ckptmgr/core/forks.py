# SPDX-License-Identifier: Apache-2.0
"""Registry of objects that a forked child must reset.

The child has no threads of its parent, but copies of their locks.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class HoldsParentState(Protocol):
    """An object that may hold locks, threads or files of the process that made it."""

    def forget_parent(self) -> None:
        """Leave all of these to the parent; called in a forked child."""
        ...


_objects: weakref.WeakKeyDictionary[HoldsParentState, None] = weakref.WeakKeyDictionary()


def reset_in_child(one: HoldsParentState) -> None:
    """Call `forget_parent` of an object in every forked child, in the order of registration."""
    _objects[one] = None


def keep_in_child(one: HoldsParentState) -> None:
    """Take an object out of the registry."""
    _objects.pop(one, None)


def _reset_all() -> None:
    for one in list(_objects):
        one.forget_parent()


os.register_at_fork(after_in_child=_reset_all)
