# SPDX-License-Identifier: Apache-2.0
"""The source that this layer decrypts: a size, and reads at any offset into the caller's memory.

The same interface as the source of the format layer, stated again because neither layer knows the
other.
"""

from __future__ import annotations

from typing import Protocol


class Ciphertext(Protocol):
    """Bytes addressed by offset.

    `read_into` fills the whole buffer or raises; it is safe to use from several threads.
    """

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (flat, writable, format B) with the bytes from `offset` on."""
        ...


def is_remote(source: Ciphertext) -> bool:
    """Return whether each read of a source has a high latency: few, long reads are better."""
    return getattr(source, "is_remote", False) is True
