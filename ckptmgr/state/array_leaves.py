# SPDX-License-Identifier: Apache-2.0
"""Leaves of NumPy, JAX and MindSpore arrays; those of torch are in `torch_values`."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np

from ckptmgr.formats.tensor import Tensor
from ckptmgr.state.arrays import array_bytes, to_tensor
from ckptmgr.state.leaves import ARRAYS, Leaf, storage_spec
from ckptmgr.state.paths import Node, Path, unsupported
from ckptmgr.state.scalars import encode_dtype


def _dtype_of(dtype: np.dtype) -> tuple[Node, str]:
    """Return the skeleton node and the table's name of an element type; None and "" if absent."""
    if dtype.fields is not None:
        return encode_dtype(dtype), ""
    return _plain_dtype_of(dtype)


@lru_cache(maxsize=256)
def _plain_dtype_of(dtype: np.dtype) -> tuple[Node, str]:
    # Cached, because NumPy computes the name on each access.
    return encode_dtype(dtype), dtype.name if dtype.isnative else ""


def is_storable(dtype: np.dtype) -> bool:
    """Return whether the elements of an array are plain bytes."""
    return _dtype_of(dtype)[0] is not None


def _checked_type(dtype: np.dtype, path: Path) -> tuple[Node, str]:
    """Return the node and the table's name, or "", of the element type of an array.

    Raises UnsupportedState if its elements are not plain bytes.
    """
    node, spelling = _plain_dtype_of(dtype) if dtype.isbuiltin else _dtype_of(dtype)
    if node is None:
        raise unsupported(
            path, f"is an array with elements of type {dtype}", "store numbers, or a list"
        )
    return node, spelling


def array_leaf(array: np.ndarray, path: Path, name: str) -> Leaf:
    """Return the leaf of a NumPy array."""
    dtype, shape = array.dtype, array.shape
    node, spelling = _checked_type(dtype, path)
    spec, is_bytes = storage_spec(name, spelling, shape, dtype.itemsize)
    rest: dict[str, Node] = {"stored": "uint8"} if is_bytes else {}
    tensor = Tensor(spec, partial(array_bytes, array) if array.nbytes else _nothing)
    return Leaf(path, "array", node, shape, rest, array, tensor, dtype.itemsize, ARRAYS)


def _nothing() -> memoryview:
    return memoryview(b"")


def foreign_leaf(value: object, path: Path, name: str) -> Leaf:
    """Return the leaf of a JAX or MindSpore array, which is restored as a NumPy array."""
    own = to_tensor(name, value)
    dtype = own.spec.dtype
    spec, is_bytes = storage_spec(name, dtype.name, own.spec.shape, dtype.item_bytes)
    rest: dict[str, Node] = {"stored": "uint8"} if is_bytes else {}
    tensor = Tensor(spec=spec, content=own.content)
    node = encode_dtype(dtype.to_numpy())
    return Leaf(path, "array", node, own.spec.shape, rest, value, tensor, dtype.item_bytes, None)
