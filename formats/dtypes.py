# SPDX-License-Identifier: Apache-2.0
"""One table of element types: our name, size, and the spelling of MindSpore, safetensors and NumPy.

A type without a spelling in a column cannot be stored by that format as itself; `ckptmgr.state`
then stores its bytes as uint8 and records the true type. Types of less than a byte, for which NumPy
has no packed array, are held as bytes beside the shape in the header: see `packed_dtype`.

Source: mindspore-format 1.1 (tensor_type strings of `checkpoint.proto`), safetensors 0.8.0 `Dtype`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from .errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """An element type.

    `name` is NumPy's or ml_dtypes'; `mindspore` and `safetensors` are the spellings in a `.ckpt`
    and in a `.safetensors` header, or None. `packed_shape` is the shape in the header of a tensor
    whose elements have less than a byte; its array is flat and holds the bytes.
    """

    name: str
    item_bytes: int
    mindspore: str | None
    safetensors: str | None
    packed_shape: tuple[int, ...] | None = None

    def to_numpy(self) -> np.dtype:
        """Return the dtype of NumPy, or else of ml_dtypes; of `int4` and packed types the stored."""
        return _numpy_dtype(self.name)


_ROWS = (
    # name, bytes, MindSpore, safetensors
    ("bool", 1, "Bool", "BOOL"),
    ("int8", 1, "Int8", "I8"),
    ("int16", 2, "Int16", "I16"),
    ("int32", 4, "Int32", "I32"),
    ("int64", 8, "Int64", "I64"),
    ("uint8", 1, "UInt8", "U8"),
    ("uint16", 2, "UInt16", "U16"),
    ("uint32", 4, "UInt32", "U32"),
    ("uint64", 8, "UInt64", "U64"),
    ("float16", 2, "Float16", "F16"),
    ("bfloat16", 2, "BFloat16", "BF16"),
    ("float32", 4, "Float32", "F32"),
    ("float64", 8, "Float64", "F64"),
    # MindSpore's qint4x2: two 4-bit values in one stored byte.
    ("int4", 1, "Int4", None),
    # MindSpore writes complex tensors to .ckpt and then cannot load them: no spelling here, so that
    # we never do.
    ("complex64", 8, None, "C64"),
    ("complex128", 16, None, None),
    ("float8_e4m3fn", 1, None, "F8_E4M3"),
    ("float8_e5m2", 1, None, "F8_E5M2"),
    ("float8_e4m3fnuz", 1, None, "F8_E4M3FNUZ"),
    ("float8_e5m2fnuz", 1, None, "F8_E5M2FNUZ"),
    ("float8_e8m0fnu", 1, None, "F8_E8M0"),
)

DTYPES: tuple[DType, ...] = tuple(
    DType(name=name, item_bytes=size, mindspore=ms, safetensors=st) for name, size, ms, st in _ROWS
)

PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of the elements that safetensors packs, by spelling."""

SAFETENSORS_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8"),
    *("F6_E3M2", "F6_E2M3", "F4", "BOOL"),
)
"""The types in the order in which the library writes them: `Dtype`, from its last on."""

BY_NAME = {dtype.name: dtype for dtype in DTYPES}
BY_MINDSPORE = {dtype.mindspore: dtype for dtype in DTYPES if dtype.mindspore is not None}
BY_SAFETENSORS = {dtype.safetensors: dtype for dtype in DTYPES if dtype.safetensors is not None}


def packed_dtype(spelling: str, shape: tuple[int, ...]) -> tuple[DType, tuple[int, ...]]:
    """Return the type and the array's shape of packed elements whose header states `shape`.

    Raises:
        ValueError: The elements do not end at the end of a byte.
    """
    size_bits = prod(shape) * PACKED_BITS[spelling]
    if size_bits % 8:
        raise ValueError(f"{spelling}{list(shape)} has {size_bits} bits, which are no whole bytes")
    row = DType(
        name=spelling, item_bytes=1, mindspore=None, safetensors=spelling, packed_shape=shape
    )
    return row, (size_bits // 8,)


def dtype_of(name: str) -> DType:
    """Return the row called `name`, or raise UnsupportedError."""
    try:
        return BY_NAME[name]
    except KeyError:
        raise UnsupportedError(f"unsupported element type {name!r}") from None


@cache
def _numpy_dtype(name: str) -> np.dtype:
    import numpy as np

    if name == "int4":
        return np.dtype(np.int8)
    if name in PACKED_BITS:
        return np.dtype(np.uint8)
    if name != "bfloat16" and not name.startswith("float8"):
        return np.dtype(name)
    import ml_dtypes

    custom: np.dtype = np.dtype(getattr(ml_dtypes, name))
    return custom
