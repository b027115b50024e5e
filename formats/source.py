# SPDX-License-Identifier: Apache-2.0
"""A source: bytes that can be read at any offset into memory that the caller owns.

For a parser a raw file, a verified file, a decrypted file and an `Image` in memory are the same.
"""

from __future__ import annotations

from typing import Protocol

from .errors import TruncatedError


class Source(Protocol):
    """Bytes addressed by offset.

    `read_into` fills the whole buffer or raises; it never returns short. Sources are safe to read
    from several threads.
    """

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (flat, writable, format B) with the bytes from `offset` on."""
        ...


class BytesSource:
    """A source over bytes in memory.

    >>> source = BytesSource(b"checkpoint")
    >>> read_bytes(source, 5, 5)
    b'point'
    """

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._data = memoryview(data).cast("B")

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._data.nbytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on; raise TruncatedError past the end."""
        check_range(self, offset, buffer.nbytes)
        buffer[:] = self._data[offset : offset + buffer.nbytes]


def check_range(source: Source, offset: int, length: int) -> None:
    """Raise TruncatedError unless `[offset, offset + length)` is inside the source."""
    if offset < 0 or offset + length > source.size:
        raise TruncatedError(
            f"{length} bytes wanted, but the data ends at {source.size}", offset=offset
        )


def read_bytes(source: Source, offset: int, length: int) -> bytes:
    """Return `length` bytes from `offset` on.

    Raises:
        TruncatedError: The range reaches past the end. Checked before memory is allocated, so that
            a forged length cannot request more memory than the file has bytes.
    """
    check_range(source, offset, length)
    buffer = bytearray(length)
    if length:
        source.read_into(offset, memoryview(buffer))
    return bytes(buffer)


class HeadSource:
    """A source whose first bytes are read once, for parsers that look at them several times.

    >>> read_bytes(HeadSource(BytesSource(b"checkpoint"), 4), 2, 5)
    b'eckpo'
    """

    def __init__(self, source: Source, head_bytes: int) -> None:
        self._source = source
        self._head_bytes = min(head_bytes, source.size)
        self._head: memoryview | None = None

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._source.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, from memory if it ends within the head."""
        end = offset + buffer.nbytes
        if end > self._head_bytes:
            self._source.read_into(offset, buffer)
            return
        if self._head is None:
            self._head = memoryview(read_bytes(self._source, 0, self._head_bytes))
        buffer[:] = self._head[offset:end]


def is_remote(source: Source) -> bool:
    """Return whether each read of a source has a high latency: few, long reads are better."""
    return getattr(source, "is_remote", False) is True
