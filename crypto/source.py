# SPDX-License-Identifier: Apache-2.0
"""What this layer asks of the bytes it decrypts: a size, and reads at any offset into memory the caller owns.

The same shape as the format layer's source, stated again because neither layer knows the other.
"""

from __future__ import annotations

from typing import Protocol


class Source(Protocol):
    """Bytes addressed by offset. `read_into` fills the whole buffer or raises; safe to use from several threads."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (flat, writable, format B) with the bytes from `offset` on."""
        ...


def is_remote(source: Source) -> bool:
    """Return whether a source says that each read takes long, however short it is: few and long ones are better then."""
    return getattr(source, "is_remote", False) is True
