# SPDX-License-Identifier: Apache-2.0
r"""Checkpoints in object stores: a source that asks for ranges of bytes.

>>> stored = bytes(range(256))
>>> source = RangeSource(lambda start, length: stored[start : start + length], size_bytes=256)
>>> buffer = bytearray(3)
>>> source.read_into(10, memoryview(buffer))
>>> bytes(buffer)
b'\n\x0b\x0c'
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from ckptmgr.formats.errors import TruncatedError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_HEAD_BYTES = 128 * 1024


class RangeSource:
    """A source for `open_checkpoint` over ranges of bytes: an object store, HTTP, a database.

    The first 128 KiB are asked for once and kept, because the headers of all formats are there; the
    rest is asked for as it is needed, large tensors in pieces of 4 MiB.

    Args:
        read: Given an offset and a length, returns these bytes, and never fewer; called by several
            threads at once. Its errors pass through.
        size_bytes: Size of the object.
        name: For messages; best the address of the object.

    Raises:
        ValueError: The size is negative.
    """

    is_remote = True  # ciphers then read whole blocks

    def __init__(
        self,
        read: Callable[[int, int], ReadableBuffer],
        *,
        size_bytes: int,
        name: str = "<source>",
    ) -> None:
        if size_bytes < 0:
            raise ValueError(f"a size of {size_bytes} bytes is none")
        self._read = read
        self._size = size_bytes
        self._head: bytes | None = None
        self._lock = threading.Lock()
        self.name = name

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self._size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises:
            TruncatedError: The range reaches past the end, or fewer bytes were given than asked
                for.
        """
        end = offset + buffer.nbytes
        if offset < 0 or end > self._size:
            raise TruncatedError(
                f"{buffer.nbytes} bytes wanted, but the data ends at {self._size}", offset=offset
            )
        if end <= _HEAD_BYTES:
            buffer[:] = self._first_bytes()[offset:end]
        else:
            buffer[:] = self._fetch(offset, buffer.nbytes)

    def _first_bytes(self) -> bytes:
        with self._lock:
            if self._head is None:
                # A copy: `read` may use the memory again for the next range.
                self._head = bytes(self._fetch(0, min(_HEAD_BYTES, self._size)))
            return self._head

    def _fetch(self, offset: int, length: int) -> memoryview:
        if not length:
            return memoryview(b"")
        view = memoryview(self._read(offset, length)).cast("B")
        if view.nbytes != length:
            raise TruncatedError(
                f"{length} bytes asked for, {view.nbytes} given: the object is another one now, or its size is wrong",
                offset=offset,
            )
        return view
