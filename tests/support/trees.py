# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the tree: a round trip through plain bytes, and an equality that sees types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ckptmgr.formats.dtypes import BY_MINDSPORE, BY_SAFETENSORS
from ckptmgr.state.tree import FlatState, flatten, unflatten


def reader(flat: FlatState) -> Callable[[str], np.ndarray]:
    """Return what reads the tensors back from bytes, as a file would."""
    stored: dict[str, np.ndarray] = {}
    for tensor in flat.tensors:
        spec, content = tensor.spec, bytes(tensor.content())
        assert len(content) == spec.size_bytes
        assert spec.dtype.mindspore in BY_MINDSPORE
        assert spec.dtype.safetensors in BY_SAFETENSORS
        assert spec.name not in stored
        assert not spec.name.startswith("__")
        array = np.frombuffer(content, spec.dtype.to_numpy())
        stored[spec.name] = array.reshape(spec.shape)
    return stored.__getitem__


def round_trip(state: object) -> Any:
    """Return the state after flatten and unflatten."""
    flat = flatten(state)
    assert flat.skeleton.isascii()
    assert flatten(state).skeleton == flat.skeleton
    return unflatten(flat.skeleton, reader(flat))


def same(left: Any, right: Any) -> bool:
    """Return whether two states are equal in types, order, bits of floats and arrays."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return bool(left.hex() == right.hex())
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    if isinstance(left, np.ndarray):
        return same_array(left, right)
    if isinstance(left, np.generic):
        return same_array(np.asarray(left), np.asarray(right))
    if isinstance(left, Mapping):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, set | frozenset):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    return bool(left == right)


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    """Return whether two arrays have the same type, shape and bytes."""
    is_alike = left.dtype == right.dtype and left.shape == right.shape
    return bool(is_alike and left.tobytes() == right.tobytes())
