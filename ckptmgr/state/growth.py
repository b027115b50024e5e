# SPDX-License-Identifier: Apache-2.0
"""Containers that a training fills: those that a program builds empty, and keys that come later.

A restore takes what is stored into a container that was empty when the saved run began, and into no
other one: a model that is built with no layers by mistake is still refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from ckptmgr.state.arrays import framework_of
from ckptmgr.state.configs import is_config
from ckptmgr.state.jax_shards import placed_as
from ckptmgr.state.paths import Path
from ckptmgr.state.records import is_nnx, record_of
from ckptmgr.state.scalars import PLAIN_TYPES


class Built(NamedTuple):
    """The containers of a state as a program builds it.

    Attributes:
        empty: Names of those without elements, also of arrays whose first dimension is 0.
        keys: Name of each mapping to its keys.
    """

    empty: frozenset[str]
    keys: Mapping[str, frozenset[object]]

    def later_keys(self, now: Built) -> Iterator[str]:
        """Yield the names of entries that a state has now, and that a restore would refuse."""
        for name, keys in now.keys.items():
            known = self.keys.get(name)
            if known is not None and name not in self.empty:
                yield from (f"{name}/{key}" if name else str(key) for key in keys - known)


def built(state: object) -> Built:
    """Return the containers of a state; no method of an object in it is called."""
    empty: set[str] = set()
    keys: dict[str, frozenset[object]] = {}
    stack: list[tuple[Any, Path]] = [(state, Path())]
    while stack:
        value, path = stack.pop()
        if type(value) in PLAIN_TYPES:
            continue
        if is_empty_array(value):
            empty.add(path.tensor_name())
            continue
        content = _entries(value)
        if isinstance(content, Mapping):
            name = "" if value is state else path.tensor_name()
            keys[name] = frozenset(content)
            parts = [(one, path.key(key)) for key, one in content.items()]
        elif isinstance(content, list | tuple | deque):
            parts = [(one, path.index(index)) for index, one in enumerate(content)]
        else:
            continue
        if not parts and value is not state:
            empty.add(path.tensor_name())
        stack += parts
    return Built(frozenset(empty), keys)


def is_empty_array(value: Any) -> bool:
    """Return whether a value is an array, and no parameter, whose first dimension is 0."""
    if framework_of(value) is None or type(value).__name__.endswith("Parameter"):
        return False
    return tuple(value.shape[:1]) == (0,)


def takes_rows(target: Any, stored: Any) -> bool:
    """Return whether an empty array is like a stored one but for its first dimension."""
    return (
        is_empty_array(target)
        and framework_of(stored) is not None
        and tuple(target.shape[1:]) == tuple(stored.shape[1:])
        and len(target.shape) == len(stored.shape)
        and str(target.dtype) == str(stored.dtype)
    )


def is_empty(value: Any) -> bool:
    """Return whether a value is a container without entries, or an array without rows."""
    if framework_of(value) is not None:
        return is_empty_array(value)
    content = _entries(value)
    return content is not None and not content


def with_entries(target: MutableMapping[Any, Any], stored: Mapping[Any, Any]) -> object:
    """Return an empty mapping with the entries of another one."""
    for key, value in stored.items():  # not update(), which would count the keys of a Counter
        target[key] = value
    return target


def as_rows(target: Any, stored: Any) -> object:
    """Return a stored array as one of the library of `target`."""
    if framework_of(target) == "jax":
        return placed_as(target, stored, is_weak=bool(target.weak_type))
    return stored


def _entries(value: Any) -> object:
    """Return a container, or the fields of a record; None for every other value."""
    if is_nnx(value) or is_config(value):
        return None
    if isinstance(value, list | tuple | deque | Mapping):
        return value
    if hasattr(value, "state_dict") or hasattr(value, "load_state_dict"):
        return None
    record = record_of(value)
    try:
        return None if record is None or record.put is None else record.content(value)
    except ValueError:  # a field is not set
        return None
