# SPDX-License-Identifier: Apache-2.0
"""One-pass verify: read a file once, for its digests and for its contents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckptmgr.crypto.buffers import SpareBuffers
from ckptmgr.crypto.container.source import ContainerSource
from ckptmgr.files.load.bulk import check_values, read_through
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.formats.source import Source
from ckptmgr.io.buffers import copy_into
from ckptmgr.io.digest import RANGE_BYTES, FileDigest, RangeDigests, VerifyingSource
from ckptmgr.io.threads import PIECE_BYTES

_MAX_GAP_BYTES = 64 << 10


def verify_in_one_pass(
    raw: Source, digest: FileDigest, *, path: str, options: ReadOptions
) -> tuple[str, ...] | None:
    """Check digests, contents and CRC32 (where there is one) of a sealed or plain file, read once.

    Returns `("CRC32",)` or `()`; None where the file cannot be read like this and was not checked.

    Raises:
        CkptmgrError, CryptoError, FormatError, OSError: It is damaged, or cannot be read.
    """
    if digest.range_bytes != RANGE_BYTES:
        return None
    source = HashingSource(raw, digest, path=path)
    opened = open_source(source, path=path, options=options, is_for_loading=True)
    checks = () if opened.index.crc is None else ("CRC32",)
    if opened.source is source:
        checked = VerifyingSource(raw, digest, path=path)
        read_through(replace(opened, source=checked, unit_bytes=RANGE_BYTES), check_crc=True)
        check_values(opened)
        return checks
    if not opened.is_sealed or not opened.unit_bytes:
        return None
    container = opened.source if isinstance(opened.source, ContainerSource) else None
    source.start(head_bytes=0 if container is None else container.head_bytes)
    # Pieces of a range in order: one that comes early is copied and waits for its turn.
    read_through(opened, check_crc=True, units_at_once=RANGE_BYTES // opened.unit_bytes)
    if not source.finish():
        return None
    check_values(opened)
    return checks


class HashingSource:
    """Source that hashes the bytes read through it between `start` and `finish`; `finish` compares.

    Reads must be pieces of at most 4 MiB, none of them twice; `finish` reads the remaining ranges.
    The digest must have ranges of 16 MiB.
    """

    def __init__(self, raw: Source, digest: FileDigest, *, path: str) -> None:
        self._raw = raw
        self._verifying = VerifyingSource(raw, digest, path=path)
        self._range_count = len(digest.ranges)
        self._digests: RangeDigests | None = None
        self._taken: list[tuple[int, int]] = []
        self._spare = SpareBuffers(PIECE_BYTES)
        self.size = raw.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; raises the errors of the file, and ChecksumMismatch."""
        self._raw.read_into(offset, buffer)
        if self._digests is not None:
            self._take(self._digests, offset, buffer)

    def start(self, *, head_bytes: int) -> None:
        """Hash from now on, beginning with the head, which no other read will fetch."""
        self._digests = RangeDigests(self._verifying)
        self._read(self._digests, 0, head_bytes)

    def finish(self) -> bool:
        """Read the remaining bytes; return whether each byte was hashed once and all digests match.

        Raises:
            ChecksumMismatch: A range does not match its digest.
        """
        digests, self._digests = self._digests, None
        if digests is None:
            return False
        end = 0
        for start, length in [*sorted(self._taken), (self.size, 0)]:
            if start < end:
                return False
            self._read(digests, end, start - end)
            end = start + length
        return digests.checked_count == self._range_count

    def _read(self, digests: RangeDigests, offset: int, length: int) -> None:
        for start in range(offset, offset + length, PIECE_BYTES):
            view = memoryview(bytearray(min(PIECE_BYTES, offset + length - start)))
            self._verifying.read_unchecked(start, view)  # the head counts as zeros
            self._take(digests, start, view)

    def _take(self, digests: RangeDigests, offset: int, view: memoryview) -> None:
        self._taken.append((offset, view.nbytes))
        for start, piece in digests.pieces(offset, view):
            self._close_gap(digests, start)
            if digests.next_in(start // RANGE_BYTES) >= start:  # no other thread moves past it
                digests.take(start, piece, _nothing)
                continue
            buffer = self._spare.take()
            copy_into(buffer[: piece.nbytes], piece)
            digests.take(start, buffer[: piece.nbytes], partial(self._spare.give_back, buffer))

    def _close_gap(self, digests: RangeDigests, start: int) -> None:
        """Hash the few bytes before a piece whose block another thread is about to read."""
        first = digests.next_in(start // RANGE_BYTES)
        if 0 < start - first <= _MAX_GAP_BYTES:
            gap = memoryview(bytearray(start - first))
            self._verifying.read_unchecked(first, gap)
            digests.take(first, gap, _nothing)


def _nothing() -> None:
    """Do nothing: the piece was hashed while its memory was valid."""
