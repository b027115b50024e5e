# SPDX-License-Identifier: Apache-2.0
"""Reads of an index before the file is verified, compared with the verified bytes afterwards.

The index of a `.ckpt` consists of small pieces all over the file. To read them through a checking
source would read the whole file once for the index and once more for the contents. Instead the
pieces are read unchecked, and a digest of each is kept. The pass over the contents, which checks
everything, compares these digests with the checked bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

from blake3 import blake3

from ckptmgr.core.errors import ChecksumMismatch

_DIGEST_BYTES = 16


class UnverifiedReads:
    """A source that records digests of its reads, split at multiples of `piece_bytes`."""

    def __init__(
        self,
        size: int,
        read_into: Callable[[int, memoryview], None],
        *,
        piece_bytes: int,
        path: str,
    ) -> None:
        self.size = size
        self._read_into = read_into
        self._piece_bytes = piece_bytes
        self._path = path
        self._seen: dict[tuple[int, int], bytes] = {}
        self._starts: list[tuple[int, int]] | None = None

    def units(self, unit_bytes: int) -> set[int]:
        """Return the numbers of the read units; `unit_bytes` is a multiple of the pieces."""
        return {start // unit_bytes for start, _ in self._seen}

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with unchecked bytes and record their digests."""
        self._read_into(offset, buffer)
        self._starts = None
        while buffer.nbytes:
            part = buffer[: self._piece_bytes - offset % self._piece_bytes]
            self._seen[offset, part.nbytes] = blake3(part).digest(_DIGEST_BYTES)
            offset += part.nbytes
            buffer = buffer[part.nbytes :]

    def check(self, start: int, view: memoryview) -> None:
        """Compare the reads in one piece with its checked bytes. Safe to call from several threads.

        Raises:
            ChecksumMismatch: They differ: the file changed while it was being read.
        """
        starts = self._starts
        if starts is None:
            starts = self._starts = sorted(self._seen)
        position = bisect_right(starts, (start, -1))
        while position < len(starts) and starts[position][0] < start + view.nbytes:
            offset, length = starts[position]
            part = view[offset - start : offset - start + length]
            if blake3(part).digest(_DIGEST_BYTES) != self._seen[offset, length]:
                raise ChecksumMismatch(
                    "the file changed while it was being read", path=self._path, offset=offset
                )
            position += 1
