# SPDX-License-Identifier: Apache-2.0
"""The CRC32 of a file, computed while the file is read or written: in any order, in any thread.

MindSpore appends it to a `.ckpt` as a trailer: `crc_num` and the CRC as 10 big-endian bytes.

Source: MindSpore 2.10 `save_checkpoint(crc_check=True)`; the CRC is zlib's CRC-32 of every byte
before the trailer.
"""

from __future__ import annotations

from typing import Protocol

from isal import isal_zlib

TRAILER_MARKER = b"crc_num"
TRAILER_BYTES = len(TRAILER_MARKER) + 10


def crc32(data: bytes | memoryview, value: int = 0) -> int:
    """Return the CRC-32 of `data`, continued from `value`."""
    return int(isal_zlib.crc32(data, value))


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two joined byte strings from their CRCs and the length of the second."""
    return int(isal_zlib.crc32_combine(first, second, second_bytes))


def encode_trailer(crc: int) -> bytes:
    """Return the 17 trailer bytes for a CRC."""
    return TRAILER_MARKER + crc.to_bytes(10, "big")


def decode_trailer(last_bytes: bytes) -> int | None:
    """Return the CRC stored in the last 17 bytes of a file, or None if they are no trailer."""
    if len(last_bytes) != TRAILER_BYTES or not last_bytes.startswith(TRAILER_MARKER):
        return None
    return int.from_bytes(last_bytes[len(TRAILER_MARKER) :], "big")


class FileCrc(Protocol):
    """Computes the CRC32 over a part of a file."""

    @property
    def stop(self) -> int:
        """Offset behind the last covered byte."""
        ...

    def add(self, offset: int, view: memoryview) -> None:
        """Add bytes of the file, each once; bytes that the CRC does not cover are skipped."""
        ...

    def value(self) -> int:
        """Return the CRC32 after all covered bytes were added."""
        ...


class BodyCrc:
    """Computes the CRC32 of the first `stop` bytes of a file, as a `.ckpt` states it."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self._pieces: dict[int, tuple[int, int]] = {}

    def add(self, offset: int, view: memoryview) -> None:
        """Add bytes of the file, each once; bytes from `stop` on are skipped."""
        covered = view[: max(0, self.stop - offset)]
        if covered.nbytes:
            self._pieces[offset] = (crc32(covered), covered.nbytes)

    def value(self) -> int:
        """Return the CRC32 after all covered bytes were added."""
        total = 0
        for offset in sorted(self._pieces):
            total = crc32_combine(total, *self._pieces[offset])
        return total
