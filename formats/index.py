# SPDX-License-Identifier: Apache-2.0
"""The index of a file: its tensors and the byte ranges of their contents; reading the contents."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from .dtypes import DType
from .errors import ChecksumError, FormatError
from .source import Source
from .tensor import TensorSpec

READ_BYTES = 4 * 1024 * 1024


class ContentRun(NamedTuple):
    """A run of content bytes in the file; the content of a tensor is its pieces joined."""

    offset: int
    length: int


class TensorEntry(NamedTuple):
    """A tensor and the pieces of its content."""

    spec: TensorSpec
    pieces: tuple[ContentRun, ...]

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.spec.name


def entries_of(
    names: Iterable[str],
    dtypes: Iterable[DType],
    shapes: Iterable[tuple[int, ...]],
    offsets: Iterable[int],
    sizes_bytes: Iterable[int],
) -> list[TensorEntry]:
    """Return the entries of tensors of one piece each, from columns."""
    # No line of Python runs for each tensor: a quarter of the time.
    specs = map(_new_spec, zip(names, dtypes, shapes, strict=True))
    pieces = map(_new_piece, zip(offsets, sizes_bytes, strict=True))
    return list(map(_new_entry, zip(specs, zip(pieces, strict=True), strict=True)))


_new_spec = partial(tuple.__new__, TensorSpec)
_new_piece = partial(tuple.__new__, ContentRun)
_new_entry = partial(tuple.__new__, TensorEntry)


def read_tensor_into(source: Source, entry: TensorEntry, buffer: memoryview) -> None:
    """Read a tensor's content into a flat, writable buffer of its size, format B.

    Raises:
        FormatError: A bool is neither 0 nor 1.
        TruncatedError: The source has become shorter.
    """
    check_buffer(entry, buffer)
    start = 0
    for piece in entry.pieces:
        view = buffer[start : start + piece.length]
        source.read_into(piece.offset, view)
        check_content(entry, view, offset=piece.offset)
        start += piece.length


def check_buffer(entry: TensorEntry, buffer: memoryview) -> None:
    """Raise ValueError unless a buffer has exactly the size of the tensor."""
    if buffer.nbytes != entry.spec.size_bytes:
        raise ValueError(
            f"the buffer has {buffer.nbytes} bytes; {entry.name!r} needs {entry.spec.size_bytes}"
        )


def check_content(entry: TensorEntry, view: memoryview, *, offset: int) -> None:
    """Check bytes of a tensor's content that were read at `offset`: a bool is 0 or 1."""
    if entry.spec.dtype.name != "bool":
        return
    for start in range(0, view.nbytes, READ_BYTES):
        part = bytes(view[start : start + READ_BYTES])
        wrong = part.translate(None, b"\x00\x01")
        if wrong:
            raise FormatError(
                f"a bool has the value {wrong[0]}",
                offset=offset + start + part.index(wrong[:1]),
                tensor=entry.name,
            )


def check_crc(stored: int | None, computed: int) -> None:
    """Raise ChecksumError unless a file states the CRC32 that was computed from its bytes."""
    if stored is None:
        raise ChecksumError("the file has no CRC32")
    if stored != computed:
        raise ChecksumError(f"the CRC32 is {computed:#010x}, but the file states {stored:#010x}")
