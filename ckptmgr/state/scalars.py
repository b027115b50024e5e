# SPDX-License-Identifier: Apache-2.0
"""Encoding of the values that a skeleton holds itself, and of element types.

Decoding refuses every spelling but the canonical one, because a skeleton may be untrusted.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import numpy as np

from ckptmgr.state.paths import Node, Path, TreeError, shown, unsupported
from ckptmgr.state.text_forms import encode_text_form, has_text_form

PLAIN_TYPES = frozenset({str, bytes, bool, int, float, complex, type(None)})
MOST_EQUAL_HASHES = 256
"""Number of keys of one dict or set that may share a hash; of the powers of two as floats 35 do."""
_MAX_KEY_DEPTH = 50
_MAX_PLAIN_INT = 2**53


def encode_atom(value: object) -> tuple[Node] | None:
    """Return the node of a value without parts, in a tuple; None for everything else."""
    encoder = ENCODERS.get(type(value))
    if encoder is not None:
        return (encoder(value),)
    if isinstance(value, np.generic):
        dtype = encode_dtype(value.dtype)
        if dtype is not None:
            content = np.asarray(value).tobytes()[: value.dtype.itemsize]
            return ({"scalar": [dtype, content.hex()]},)
        return None
    form = encode_text_form(value)
    return None if form is None else (form,)


def _encode_int(value: int) -> Node:
    return value if abs(value) < _MAX_PLAIN_INT else {"int": hex(value)}


def _encode_str(value: str) -> Node:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"text": value.encode("utf-8", "surrogatepass").hex()}
    return value


ENCODERS: dict[type, Callable[[Any], Node]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    str: _encode_str,
    float: lambda value: {"float": value.hex()},
    complex: lambda value: {"complex": [value.real.hex(), value.imag.hex()]},
    bytes: lambda value: {"bytes": value.hex()},
    bytearray: lambda value: {"bytearray": value.hex()},
}
"""Type of a value without parts to the function that returns its node."""

KEY_TYPES = frozenset(ENCODERS) - {bytearray}
"""Types of most keys of a dict; see `is_key`."""


def encode_key(key: object, path: Path, *, depth: int = 0) -> list[Node]:
    """Return the nodes of a dict key or set element: plain, or a tuple or frozenset."""
    if type(key) is str and key.isascii():  # most are
        return [key]
    atom = None if isinstance(key, bytearray) else encode_atom(key)
    if atom is not None:
        return [*atom]
    if depth < _MAX_KEY_DEPTH and type(key) in (tuple, frozenset):
        parts = [encode_key(part, path, depth=depth + 1) for part in key]  # type: ignore[attr-defined]
        kind = type(key).__name__
        if kind == "frozenset":
            parts.sort(key=json.dumps)
        return [*(node for part in parts for node in part), {kind: len(parts)}]
    raise unsupported(
        path,
        f"has a key of type {type(key).__qualname__}",
        "use str, int, float, bytes, None, a time, a path, or a tuple of these as keys",
    )


def has_too_many_equal_hashes(keys: Collection[object]) -> bool:
    """Return whether a dict of these keys would take time that grows with their number squared.

    The hashes of numbers, and of tuples of them, are no secret: multiples of 2**61 - 1 share one.
    """
    if len(keys) <= MOST_EQUAL_HASHES:
        return False
    counts = Counter(hash(key) for key in keys if type(key) is not str)
    return max(counts.values(), default=0) > MOST_EQUAL_HASHES


def is_key(value: object) -> bool:
    """Return whether a decoded value may be a dict key or a set element."""
    if isinstance(value, tuple | frozenset):
        return all(map(is_key, value))
    is_other = isinstance(value, np.generic) or has_text_form(value)
    return type(value) in KEY_TYPES or (is_other and _is_hashable(value))


def _is_hashable(value: object) -> bool:
    # A NumPy record that can be written to is no key, nor a signaling NaN of decimal.
    try:
        hash(value)
    except TypeError:
        return False
    return True


def decode_int(node: object) -> int:
    """Return the integer of a hexadecimal spelling; raise TreeError for another one."""
    if not isinstance(node, str) or not re.fullmatch("-?0x[0-9a-f]+", node):
        raise TreeError(f"an integer is spelled {shown(node)}")
    return int(node, 16)


def decode_float(node: object) -> float:
    """Return the float of a hexadecimal spelling; raise TreeError for another one."""
    if isinstance(node, str) and re.fullmatch(r"-?(0x[01]\.[0-9a-f]+p[+-][0-9]+|inf)|nan", node):
        try:
            return float.fromhex(node)
        except OverflowError:
            pass
    raise TreeError(f"a float is spelled {shown(node)}")


def decode_complex(node: object) -> complex:
    """Return the complex number of two spelled floats."""
    if not isinstance(node, list) or len(node) != 2:
        raise TreeError(f"a complex number is spelled {shown(node)}")
    return complex(decode_float(node[0]), decode_float(node[1]))


def decode_bytes(node: object) -> bytes:
    """Return the bytes of a hexadecimal spelling; raise TreeError for another one."""
    # A group that repeats would take hundreds of bytes of memory for each byte.
    if not isinstance(node, str) or len(node) % 2 or not re.fullmatch("[0-9a-f]*+", node):
        raise TreeError(f"bytes are spelled {shown(node)}")
    return bytes.fromhex(node)


def decode_text(node: object) -> str:
    """Return the string of hexadecimal UTF-8 in which lone surrogates are allowed."""
    try:
        return decode_bytes(node).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise TreeError(f"a string is spelled {shown(node)}") from None


def decode_scalar(node: object) -> np.generic:
    """Return a NumPy scalar from its type and bytes."""
    if not isinstance(node, list) or len(node) != 2:
        raise TreeError(f"a NumPy scalar is spelled {shown(node)}")
    dtype, content = decode_dtype(node[0]), decode_bytes(node[1])
    if len(content) != dtype.itemsize:
        raise TreeError(f"a {dtype} scalar has {len(content)} bytes")
    array: Any = np.ndarray((), dtype, buffer=content) if content else np.ndarray((), dtype)
    value: np.generic = array[()]
    return value


def encode_dtype(dtype: np.dtype) -> Node:
    """Return the JSON of a NumPy element type; None when its elements are not plain bytes."""
    if dtype.subdtype is not None:
        base = encode_dtype(dtype.subdtype[0])
        return None if base is None else {"base": base, "shape": list(dtype.subdtype[1])}
    if dtype.fields is not None:
        return _encode_fields(dtype)
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name if dtype.isnative else None
    return dtype.str if dtype.kind in "biufcmMSUV" and not dtype.hasobject else None


def _encode_fields(dtype: np.dtype) -> Node:
    fields: list[Node] = []
    by_name: Any = dtype.fields
    for name in dtype.names or ():
        inner, offset, *title = by_name[name]
        node = encode_dtype(inner)
        if node is None or title:
            return None
        fields.append([name, node, offset])
    return {"fields": fields, "itemsize": dtype.itemsize}


def decode_dtype(node: object) -> np.dtype:
    """Return the NumPy element type of its JSON; raise TreeError unless it is plain bytes."""
    return _named_dtype(node) if isinstance(node, str) else _checked_dtype(node)


@lru_cache(maxsize=256)
def _named_dtype(node: str) -> np.dtype:
    return _checked_dtype(node)


def _checked_dtype(node: object) -> np.dtype:
    try:
        return _decode_dtype(node)
    except (ValueError, TypeError, OverflowError, KeyError, RecursionError) as error:
        if isinstance(error, TreeError):
            raise
        raise TreeError(f"no NumPy element type is spelled {shown(node)} ({error})") from None


_TYPE_STRING = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[a-zA-Z]{1,9}\])?")


def _decode_dtype(node: object) -> np.dtype:
    if isinstance(node, str):
        if _TYPE_STRING.fullmatch(node):
            return np.dtype(node)
        return _ml_dtype(node)
    if isinstance(node, dict) and node.keys() == {"base", "shape"}:
        return np.dtype((_decode_dtype(node["base"]), decode_shape(node["shape"])))
    if isinstance(node, dict) and node.keys() == {"fields", "itemsize"}:
        fields = [(name, _decode_dtype(inner), offset) for name, inner, offset in node["fields"]]
        names, formats, offsets = zip(*fields, strict=True) if fields else ((), (), ())
        spec: Any = {"names": list(names), "formats": list(formats), "offsets": list(offsets)}
        spec["itemsize"] = node["itemsize"]
        dtype: np.dtype = np.dtype(spec)
        return dtype
    raise TreeError(f"no NumPy element type is spelled {shown(node)}")


def _ml_dtype(name: str) -> np.dtype:
    import ml_dtypes

    scalar_type = getattr(ml_dtypes, name, None) if name.isidentifier() else None
    if not isinstance(scalar_type, type) or not issubclass(scalar_type, np.generic):
        raise TreeError(f"no NumPy element type is spelled {shown(name)}")
    return np.dtype(scalar_type)


def decode_shape(node: object) -> tuple[int, ...]:
    """Return a tuple of non-negative 63-bit integers; raise TreeError for anything else."""
    if not isinstance(node, list) or not all(
        type(size) is int and 0 <= size < 2**63 for size in node
    ):
        raise TreeError(f"a shape is spelled {shown(node)}")
    return tuple(node)


def decode_strides(node: object, count: int) -> tuple[int, ...]:
    """Return `count` strides in bytes; raise TreeError for anything else."""
    if (
        not isinstance(node, list)
        or len(node) != count
        or not all(type(stride) is int and abs(stride) < 2**62 for stride in node)
    ):
        raise TreeError(f"the strides are {node!r}")
    return tuple(stride for stride in node if isinstance(stride, int))


def is_atom(value: object) -> bool:
    """Return whether a value has no parts and cannot change."""
    if isinstance(value, bytearray):
        return False
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Size | torch.dtype | torch.device):
        return True
    return encode_atom(value) is not None or has_text_form(value)


def is_history(value: object) -> bool:
    """Return whether a value is plain, or lists, tuples and dicts of plain values however deep."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            left.extend(one.values())
        elif isinstance(one, list | tuple | deque) and not hasattr(one, "_fields"):
            left.extend(one)
        elif type(one) not in PLAIN_TYPES and not (
            isinstance(one, np.generic) or has_text_form(one)
        ):
            return False
    return True
