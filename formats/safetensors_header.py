# SPDX-License-Identifier: Apache-2.0
"""Write the header of a `.safetensors` file: its length, and JSON padded with spaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .dtypes import DType
from .errors import FormatError
from .strict_json import encode_object, quoted
from .tensor import TensorSpec

MAX_HEADER_BYTES = 100_000_000
"""The bound of the stock library and of MindSpore."""
LENGTH_BYTES = 8
METADATA = "__metadata__"
CRC_KEY = "crc_num"

_CRC_DIGITS = len(str(2**32 - 1))


def spelling_of(dtype: DType) -> str | None:
    """Return the spelling of an element type in a header, or None."""
    # MindSpore stores its qint4x2 as I8 and marks the name in the metadata.
    return "I8" if dtype.name == "int4" else dtype.safetensors


class HeaderText:
    """The header of a file, `specs` in data order; its length does not depend on the CRC32.

    Without `metadata` there is no `__metadata__`. The data starts at a multiple of `alignment`.
    `sizes_bytes` are those of the tensors.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str] | None,
        *,
        alignment: int,
    ) -> None:
        self.specs = specs
        self._metadata = metadata
        self._alignment = alignment
        texts, self.sizes_bytes = _header_entries(specs)
        self._tensors = "".join(texts).encode()

    def encode(self, crc: int | None = None) -> bytes:
        """Return the length of the header, and the header."""
        stated = {} if crc is None else {CRC_KEY: str(crc)}
        missing_digits = sum(_CRC_DIGITS - len(digits) for digits in stated.values())
        if self._metadata is None:
            encoded = b"{%s}" % self._tensors[1:]  # without its first comma
        else:
            encoded = b"{%s:%s%s}" % (
                quoted(METADATA).encode(),
                encode_object({**self._metadata, **stated}, what="metadata"),
                self._tensors,
            )
        header_bytes = len(encoded) + missing_digits
        header_bytes += -(LENGTH_BYTES + header_bytes) % self._alignment
        if header_bytes > MAX_HEADER_BYTES:
            raise FormatError(f"the header has {header_bytes} bytes; {MAX_HEADER_BYTES} fit")
        return header_bytes.to_bytes(LENGTH_BYTES, "little") + encoded.ljust(header_bytes)


def _header_entries(specs: Sequence[TensorSpec]) -> tuple[list[str], list[int]]:
    """Return the JSON and the size of each tensor; types and shapes that repeat are spelled once."""
    kinds: dict[tuple[int, tuple[int, ...]], tuple[str, int]] = {}
    texts, sizes_bytes = [], []
    offset = 0
    for spec in specs:
        name, dtype, shape = spec
        key = (id(dtype), shape)  # each row is alive, and packed ones have the shape
        kind = kinds.get(key)
        if kind is None:
            stated = ",".join(map(str, spec.stated_shape))
            text = f'"dtype":"{spelling_of(dtype)}","shape":[{stated}],"data_offsets":'
            kind = kinds[key] = text, spec.size_bytes
        text, size_bytes = kind
        stop = offset + size_bytes
        texts.append(f",{quoted(name)}:{{{text}[{offset},{stop}]}}")
        sizes_bytes.append(size_bytes)
        offset = stop
    return texts, sizes_bytes
