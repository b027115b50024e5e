# SPDX-License-Identifier: Apache-2.0
"""The CRC32 that MindSpore keeps in the metadata of a `.safetensors` file.

It folds, over the names in sorted order, the UTF-8 of the name and the content. Quirk: MindSpore hashes `bytes(array)`,
and for a 0-d integer of value v that is v zero bytes. Negative ones it cannot hash at all, nor any bfloat16 (its save
fails); here bfloat16 hashes its bytes like every other type.

Source: `_exec_save`, `_load_safetensors_into_param_dict` of MindSpore 2.10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .errors import UnsupportedError
from .tensor import TensorSpec
from .trailer import crc32, crc32_combine

_INTEGERS = frozenset(
    {"int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)
_ZEROS_PERIOD = 2**32 - 1
"""The CRC-32 polynomial is primitive: so many zero bytes bring every state back."""


def fold_crc(
    contents: Iterable[tuple[TensorSpec, Callable[[], Iterable[bytes | memoryview]]]],
) -> int:
    """Return MindSpore's CRC32 over tensors in any order, each with a function that yields its content in parts.

    The contents are taken in the given order, so that a file can be read from its start to its end.

    Raises:
        UnsupportedError: A negative 0-d integer.
    """
    pieces = {spec.name: _content_crc(spec, parts()) for spec, parts in contents}
    value = 0
    for name, piece in sorted(pieces.items()):
        value = crc32(name.encode(), value)
        value = (
            append_zeros(value, piece) if isinstance(piece, int) else crc32_combine(value, *piece)
        )
    return value


def _content_crc(spec: TensorSpec, parts: Iterable[bytes | memoryview]) -> tuple[int, int] | int:
    """Return the CRC32 and length of a content, or, for a 0-d integer, how many zero bytes stand for it."""
    if spec.shape == () and spec.dtype.name in _INTEGERS:
        return _scalar(spec, b"".join(parts))
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value, spec.size_bytes


def append_zeros(value: int, count: int) -> int:
    """Return the CRC32 of a byte string and `count` zero bytes after it, without making them.

    >>> append_zeros(crc32(b"a"), 3) == crc32(bytes(3), crc32(b"a"))
    True
    """
    count %= _ZEROS_PERIOD
    zeros_crc, zeros = crc32(b"\0"), 1
    while zeros <= count:
        if count & zeros:
            value = crc32_combine(value, zeros_crc, zeros)
        zeros_crc = crc32_combine(zeros_crc, zeros_crc, zeros)
        zeros *= 2
    return value


def _scalar(spec: TensorSpec, content: bytes) -> int:
    value = int.from_bytes(content, "little", signed=not spec.dtype.name.startswith("u"))
    if value < 0:
        raise UnsupportedError(
            f"MindSpore has no CRC for a negative scalar ({value}); save without crc, or store it"
            " with shape [1]",
            tensor=spec.name,
        )
    return value
