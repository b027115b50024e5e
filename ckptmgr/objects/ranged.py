# SPDX-License-Identifier: Apache-2.0
"""An object as an open file: read by ranges, all of one version of it.

* The first request brings the size, the version and the first 128 KiB, where the headers are.
* Each answer names the version of the object. One of another version is an error, and its bytes are
  dropped, so the bytes of two versions are never mixed. Nothing depends on `If-Match`, which not
  every server knows.
* Short reads, of descriptions and heads of cipher blocks, get whole blocks of 16 KiB, and more of
  them while they follow each other. Where the next ones are probable they are read at the same
  time: a request takes as long as hundreds of KiB.
* Long reads are cut into requests of at most 4 MiB, of which several are in flight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable

from ckptmgr.core.errors import CheckpointFileNotFound, ChecksumMismatch
from ckptmgr.formats.errors import TruncatedError
from ckptmgr.formats.source import check_range
from ckptmgr.io.page_cache import ReadAheadPredictor
from ckptmgr.io.threads import PIECE_BYTES, REMOTE_READERS, for_each
from ckptmgr.objects.requests import Objects, StoredObject

HEAD_BYTES = 128 << 10
BLOCK_BYTES = 16 << 10
_SHORT_BYTES = 64 << 10
_MOST_IN_A_ROW = 128
_MOST_BLOCKS = 1024


class ObjectFile:
    """An object that is read by ranges. Safe to use from several threads.

    Raises:
        FileNotFoundError: There is no such object.
        OSError: From the network.
    """

    is_remote = True

    def __init__(self, objects: Objects, key: str, *, name: str) -> None:
        self.name = name
        self._objects = objects
        self._key = key
        self._version, self._head = self._opened()
        self._lock = threading.Lock()
        self._blocks: dict[int, memoryview] = {}
        self._predictors: dict[int, ReadAheadPredictor] = {}
        self._next_block = -1
        self._in_a_row = 1

    def _opened(self) -> tuple[StoredObject, memoryview]:
        try:
            found = self._objects.fetch(self._key, 0, HEAD_BYTES)
        except ConnectionError:
            # An object without bytes has no range.
            stored = self._objects.find(self._key)
            if stored is None or stored.size_bytes:
                raise
            return stored, memoryview(b"")
        return found.stored, found.data

    @property
    def size(self) -> int:
        """The number of bytes when it was opened."""
        return self._version.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises:
            TruncatedError: The range reaches past the end.
            ChecksumMismatch: The object was replaced since it was opened.
            CheckpointFileNotFound: It was removed.
            OSError: From the network.
        """
        check_range(self, offset, buffer.nbytes)
        known = self._head[offset : offset + buffer.nbytes]
        buffer[: known.nbytes] = known
        offset, buffer = offset + known.nbytes, buffer[known.nbytes :]
        if buffer.nbytes < _SHORT_BYTES:
            self._read_short(offset, buffer)
            return
        starts = range(0, buffer.nbytes, PIECE_BYTES)

        def read(start: int) -> None:
            view = buffer[start : start + PIECE_BYTES]
            view[:] = self._fetch(offset + start, view.nbytes)

        for_each(iter(starts), read, threads=min(REMOTE_READERS, len(starts)))

    def close(self) -> None:
        """Release the memory; every request stands alone."""
        self._blocks = {}

    def _read_short(self, offset: int, buffer: memoryview) -> None:
        if not buffer.nbytes:
            return
        stop = offset + buffer.nbytes
        wanted = range(offset // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
        blocks = self._with_blocks(wanted, self._probable(offset, buffer.nbytes))
        for index in wanted:
            start = index * BLOCK_BYTES
            low, high = max(offset, start), min(stop, start + BLOCK_BYTES)
            buffer[low - offset : high - offset] = blocks[index][low - start : high - start]

    def _probable(self, offset: int, length: int) -> set[int]:
        """Return the blocks of the probable next reads, predicted separately for each length."""
        predictor = self._predictors.setdefault(length.bit_length(), ReadAheadPredictor())
        ahead = [one for one in predictor.next_reads(offset) if 0 <= one < self.size - length]
        return {at // BLOCK_BYTES for one in ahead for at in (one, one + length - 1)}

    def _with_blocks(self, wanted: range, probable: set[int]) -> dict[int, memoryview]:
        """Return blocks, requested with the probable ones where they are not in memory."""
        with self._lock:
            known = {index: self._blocks[index] for index in wanted if index in self._blocks}
            ahead = set(probable)
            if len(known) < len(wanted):
                is_next = wanted.start == self._next_block
                self._in_a_row = min(2 * self._in_a_row, _MOST_IN_A_ROW) if is_next else 1
                self._next_block = max(wanted.stop, wanted.start + self._in_a_row)
                last = -(-self.size // BLOCK_BYTES)
                ahead.update(range(wanted.start, min(self._next_block, last)))
            missing = ahead - self._blocks.keys()
        if not missing:
            return known
        found: dict[int, memoryview] = {}
        runs = _runs(sorted(missing))

        def read(run: range) -> None:
            start = run.start * BLOCK_BYTES
            data = self._fetch(start, min(run.stop * BLOCK_BYTES, self.size) - start)
            for index in run:
                at = index * BLOCK_BYTES - start
                found[index] = data[at : at + BLOCK_BYTES]

        for_each(iter(runs), read, threads=min(REMOTE_READERS, len(runs)))
        with self._lock:
            self._blocks |= found
            for index in list(self._blocks)[: len(self._blocks) - _MOST_BLOCKS]:
                del self._blocks[index]
        return known | found

    def _fetch(self, offset: int, length: int) -> memoryview:
        try:
            found = self._objects.fetch(self._key, offset, length)
        except FileNotFoundError as error:
            raise self._removed() from error
        except ConnectionError as error:
            # Of an object that is shorter now the range may begin after the end.
            with contextlib.suppress(ConnectionError):
                stored = self._objects.find(self._key)
                if stored is None:
                    raise self._removed() from error
                if not stored.is_same_as(self._version):
                    raise self._replaced() from error
            raise
        if not found.stored.is_same_as(self._version):
            raise self._replaced()
        if found.data.nbytes != length:
            raise TruncatedError(
                f"{length} bytes asked for, {found.data.nbytes} given", offset=offset
            )
        return found.data

    def _replaced(self) -> ChecksumMismatch:
        return ChecksumMismatch(
            "the object was replaced while it was being read", path=self.name, hint="load it again"
        )

    def _removed(self) -> CheckpointFileNotFound:
        return CheckpointFileNotFound(
            "the object was removed while it was being read", path=self.name
        )


def _runs(indices: Iterable[int]) -> list[range]:
    """Return the runs of ascending numbers that follow each other."""
    runs: list[range] = []
    for index in indices:
        if runs and runs[-1].stop == index:
            runs[-1] = range(runs[-1].start, index + 1)
        else:
            runs.append(range(index, index + 1))
    return runs
