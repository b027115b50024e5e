# SPDX-License-Identifier: Apache-2.0
"""The CRC32 that MindSpore keeps in the metadata of a `.safetensors` file.

It covers, over the names in sorted order, the UTF-8 of the name and the content. Quirk: MindSpore
hashes `bytes(array)`, and for a 0-d integer of value v that is v zero bytes. It cannot hash
negative ones at all, nor any bfloat16 (its save fails); here bfloat16 hashes its bytes like every
other type, and a negative 0-d integer counts as the unsigned one of the same bytes.

Source: `_exec_save`, `_load_safetensors_into_param_dict` of MindSpore 2.10.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from .errors import UnsupportedError
from .file_crc import crc32, crc32_combine
from .index import TensorEntry
from .tensor import Tensor, TensorSpec, content_of

_INTEGERS = frozenset(
    {"int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
)
_ZEROS_PERIOD = 2**32 - 1
"""The CRC-32 polynomial is primitive: this many zero bytes bring every state back."""


def fold_crc(
    contents: Iterable[tuple[TensorSpec, Callable[[], Iterable[bytes | memoryview]]]],
) -> int:
    """Return MindSpore's CRC32 over tensors, each with a function that yields its content in parts.

    The contents are read in the given order, so that a file can be read from its start to its end.
    """
    return _fold({spec.name: _content_crc(spec, parts()) for spec, parts in contents})


def check_scalar(tensor: Tensor) -> None:
    """Raise if MindSpore has no CRC for a tensor; only the content of a 0-d integer is read.

    Raises:
        FormatError: Its content is shorter or longer than its type demands.
        UnsupportedError: A negative 0-d integer.
    """
    if _is_integer(tensor.spec):
        _refuse_negative(tensor.spec, bytes(content_of(tensor)))


def _refuse_negative(spec: TensorSpec, content: bytes) -> None:
    value = int.from_bytes(content, "little", signed=not spec.dtype.name.startswith("u"))
    if value < 0:
        raise UnsupportedError(
            f"MindSpore has no CRC for a negative scalar ({value}); save without crc, or store it"
            " with shape [1]",
            tensor=spec.name,
        )


class ContentsCrc:
    """Computes MindSpore's CRC32 of names and contents that are added in any order.

    `entries` are its tensors in data order, without gaps; `stop` is the end of the last content.
    With `is_for_mindspore` the CRC must be one that MindSpore can check.
    """

    def __init__(self, entries: Sequence[TensorEntry], *, is_for_mindspore: bool = False) -> None:
        self._entries = entries
        self._is_for_mindspore = is_for_mindspore
        self._starts = [entry.pieces[0].offset for entry in entries]
        self.stop = max((sum(entry.pieces[0]) for entry in entries), default=0)
        self._crcs: dict[tuple[int, int], _Crc] = {}
        self._scalars: dict[tuple[int, int], bytes] = {}

    def add(self, offset: int, view: memoryview) -> None:
        """Add bytes of the file, each once; bytes before the contents are skipped."""
        end = offset + view.nbytes
        # Of tensors that start at one place, the last one has the bytes.
        index = max(0, bisect_right(self._starts, offset) - 1)
        while index < len(self._starts) and self._starts[index] < end:
            spec, ((start, length),) = self._entries[index]
            low, high = max(start, offset), min(start + length, end)
            if low < high and _is_integer(spec):
                self._scalars[index, low] = bytes(view[low - offset : high - offset])
            elif low < high:
                self._crcs[index, low] = (crc32(view[low - offset : high - offset]), high - low)
            index += 1

    def value(self) -> int:
        """Return the CRC32 of all contents.

        Raises:
            UnsupportedError: MindSpore is to check it, and there is a negative 0-d integer.
        """
        crcs = [(0, 0)] * len(self._entries)
        for index, low in sorted(self._crcs):
            crcs[index] = _combined(crcs[index], self._crcs[index, low])
        scalars: defaultdict[int, bytes] = defaultdict(bytes)
        for index, low in sorted(self._scalars):
            scalars[index] += self._scalars[index, low]
        if self._is_for_mindspore:
            for index, content in scalars.items():
                _refuse_negative(self._entries[index].spec, content)
        return _fold(
            {
                entry.name: _zeros_of(scalars[index]) if index in scalars else crcs[index]
                for index, entry in enumerate(self._entries)
            }
        )


_Crc = tuple[int, int]  # the CRC of some bytes, and their number


def _combined(first: _Crc, second: _Crc) -> _Crc:
    return (crc32_combine(first[0], *second), first[1] + second[1]) if first[1] else second


def _fold(pieces: Mapping[str, _Crc | int]) -> int:
    value = 0
    for name, piece in sorted(pieces.items()):
        value = crc32(name.encode(), value)
        value = (
            append_zeros(value, piece) if isinstance(piece, int) else crc32_combine(value, *piece)
        )
    return value


def _content_crc(spec: TensorSpec, parts: Iterable[bytes | memoryview]) -> _Crc | int:
    """Return the CRC32 and length of a content, or, of a 0-d integer, its zero bytes."""
    if _is_integer(spec):
        return _zeros_of(b"".join(parts))
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value, spec.size_bytes


def _is_integer(spec: TensorSpec) -> bool:
    return spec.shape == () and spec.dtype.name in _INTEGERS


def append_zeros(value: int, count: int) -> int:
    """Return the CRC32 of a byte string with `count` zero bytes appended, without making them.

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


def _zeros_of(content: bytes) -> int:
    """Return the number of zero bytes that stand for a 0-d integer."""
    return int.from_bytes(content, "little")
