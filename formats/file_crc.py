# SPDX-License-Identifier: Apache-2.0
"""The CRC32 that a file states of itself, put together while it is read or written: in any order, in any thread."""

from __future__ import annotations

from typing import Protocol

from .trailer import crc32, crc32_combine


class FileCrc(Protocol):
    """A CRC32 of what stands in a file."""

    @property
    def stop(self) -> int:
        """Where the last byte ends that counts."""
        ...

    def add(self, offset: int, view: memoryview) -> None:
        """Take bytes of the file, each once; those that do not count may be among them."""
        ...

    def value(self) -> int:
        """Return the CRC32, once everything was taken."""
        ...


class BodyCrc:
    """The CRC32 of the first bytes of a file, as a `.ckpt` states it.

    Attributes:
        stop: How many bytes.
    """

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self._pieces: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, view: memoryview) -> None:
        """Take bytes of the file, each once; those that do not count may be among them."""
        covered = view[: max(0, self.stop - offset)]
        if covered.nbytes:
            self._pieces[offset] = (crc32(covered), covered.nbytes)

    def value(self) -> int:
        """Return the CRC32, once everything was taken."""
        total = 0
        for offset in sorted(self._pieces):
            total = crc32_combine(total, *self._pieces[offset])
        return total
