# SPDX-License-Identifier: Apache-2.0
"""Leaves of NumPy, JAX and MindSpore arrays; those of torch are in `torch_values`."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from ckptmgr.formats.tensor import Tensor, TensorSpec
from ckptmgr.state.arrays import array_bytes, framework_of, to_tensor
from ckptmgr.state.leaves import ARRAYS, Leaf, LeafForm, leaf_form
from ckptmgr.state.paths import Node, Path, Place, unsupported
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


def _form_of(dtype: np.dtype, shape: tuple[int, ...]) -> LeafForm | None:
    """Return the form of arrays; None if their elements are not plain bytes."""
    node, spelling = _dtype_of(dtype)
    if node is None:
        return None
    return leaf_form("array", node, shape, dtype.itemsize, spelling=spelling, finder=ARRAYS)


_usual_form = lru_cache(maxsize=1024)(_form_of)


def array_leaf(array: np.ndarray, place: Place, name: str) -> Leaf:
    """Return the leaf of a NumPy array.

    Raises UnsupportedState if its elements are not plain bytes.
    """
    dtype, shape = array.dtype, array.shape
    form = _usual_form(dtype, shape) if dtype.isbuiltin else _form_of(dtype, shape)
    if form is None:
        what = f"is an array with elements of type {dtype}"
        raise unsupported(Path(*place), what, "store numbers, or a list")
    content = partial(array_bytes, array) if array.nbytes else _nothing
    return _leaf(place, form, array, name, content)


def _leaf(
    place: Place, form: LeafForm, value: object, name: str, content: Callable[[], memoryview]
) -> Leaf:
    rest: dict[str, Node] = {"stored": "uint8"} if form.is_bytes else {}
    spec = TensorSpec(name, form.stored_dtype, form.stored_shape)
    return Leaf(place, form, rest, value, Tensor(spec, content))


def _nothing() -> memoryview:
    return memoryview(b"")


def foreign_leaf(value: object, place: Place, name: str) -> Leaf:
    """Return the leaf of a JAX or MindSpore array, which is restored as a NumPy array."""
    own = to_tensor(name, value)
    _, dtype, shape = own.spec
    node = encode_dtype(dtype.to_numpy())
    form = leaf_form("array", node, shape, dtype.item_bytes, spelling=dtype.name, finder=None)
    return _leaf(place, form, value, name, own.content)


def stored_form(value: Any) -> Tensor:
    """Return the nameless tensor that stores a plain array of any framework.

    Raises:
        UnsupportedState: No tensor does.
    """
    place = Path().place
    if framework_of(value) == "torch":
        from ckptmgr.state.torch_values import torch_leaf

        return torch_leaf(value, place, "").tensor
    if framework_of(value) == "numpy":
        return array_leaf(np.asarray(value), place, "").tensor
    return foreign_leaf(value, place, "").tensor
