# SPDX-License-Identifier: Apache-2.0
"""Read a file into many arrays at once: the mirror of `pipeline`.

The file is taken in units (digest ranges of 16 MiB, or cipher blocks of 4 MiB). A few threads each read a unit, straight
into the array where it lies in one, else into a recycled buffer from which its parts are copied. So reads are large
whatever the sizes of the tensors, several are in flight, and the only fresh pages that are touched are those of the
arrays. (Direct I/O was no faster than three buffered reads in flight, and ten times slower for files in the page cache.)
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ckptmgr.aligned import Buffers, copy_into
from ckptmgr.formats.source import Source
from ckptmgr.formats.trailer import crc32, crc32_combine

_THREADS = 3
_MAX_UNIT_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a run of the file's bytes goes.

    Attributes:
        offset: First byte in the file.
        target: The memory, flat and writable.
    """

    offset: int
    target: memoryview

    @property
    def stop(self) -> int:
        """One past the last byte in the file."""
        return self.offset + self.target.nbytes


def read_scattered(
    source: Source,
    placements: Sequence[Placement],
    *,
    unit_bytes: int,
    crc_bytes: int | None = None,
) -> int | None:
    """Fill the targets of all placements.

    Args:
        source: The file.
        placements: In ascending order, not overlapping.
        unit_bytes: What the source checks at once; at most 16 MiB.
        crc_bytes: Also read everything up to here and return its CRC-32.

    Raises:
        CkptmgrError, FormatError, CryptoError, OSError: What the source raises; targets are then undefined.
    """
    if not 0 < unit_bytes <= _MAX_UNIT_BYTES:
        raise ValueError(f"a unit of {unit_bytes} bytes is no unit")
    return _Reader(source, placements, unit_bytes, crc_bytes).run()


class _Reader:
    def __init__(
        self,
        source: Source,
        placements: Sequence[Placement],
        unit_bytes: int,
        crc_bytes: int | None,
    ) -> None:
        self._source = source
        self._placements = [one for one in placements if one.target.nbytes]
        self._stops = [one.stop for one in self._placements]
        self._unit_bytes = unit_bytes
        self._crc_bytes = crc_bytes
        self._crcs: dict[int, tuple[int, int]] = {}
        self._units = iter(self._wanted_units())
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def _wanted_units(self) -> Sequence[int]:
        if self._crc_bytes is not None:
            end = max(self._crc_bytes, self._stops[-1] if self._stops else 0)
            return range(-(-end // self._unit_bytes))
        units = dict.fromkeys(
            unit
            for one in self._placements
            for unit in range(one.offset // self._unit_bytes, -(-one.stop // self._unit_bytes))
        )
        return list(units)

    def run(self) -> int | None:
        count = self._source.size // self._unit_bytes
        threads = [threading.Thread(target=self._guard) for _ in range(min(_THREADS, count) - 1)]
        try:
            for thread in threads:
                thread.daemon = True
                thread.start()
            self._guard()
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._failure is not None:
            raise self._failure
        return self._crc()

    def _guard(self) -> None:
        try:
            with _buffers.lent() as buffer:
                while (unit := self._next()) is not None:
                    self._read(unit, buffer)
        except BaseException as error:  # raised by run(), in the caller's thread
            with self._lock:
                self._failure = self._failure or error

    def _next(self) -> int | None:
        with self._lock:
            return None if self._failure is not None else next(self._units, None)

    def _read(self, unit: int, buffer: memoryview) -> None:
        start = unit * self._unit_bytes
        stop = min(start + self._unit_bytes, self._source.size)
        index = bisect_right(self._stops, start)
        first = self._placements[index] if index < len(self._placements) else None
        if first is not None and first.offset <= start and stop <= first.stop:
            # The whole unit belongs to one array: no copy.
            view = first.target[start - first.offset : stop - first.offset]
            self._source.read_into(start, view)
            self._add_crc(start, view)
            return
        view = buffer[: stop - start]
        self._source.read_into(start, view)
        self._add_crc(start, view)
        while index < len(self._placements) and self._placements[index].offset < stop:
            one = self._placements[index]
            low, high = max(start, one.offset), min(stop, one.stop)
            copy_into(
                one.target[low - one.offset : high - one.offset], view[low - start : high - start]
            )
            index += 1

    def _add_crc(self, start: int, view: memoryview) -> None:
        if self._crc_bytes is not None and start < self._crc_bytes:
            covered = view[: self._crc_bytes - start]
            self._crcs[start] = (crc32(covered), covered.nbytes)

    def _crc(self) -> int | None:
        if self._crc_bytes is None:
            return None
        total = 0
        for start in sorted(self._crcs):
            piece, length = self._crcs[start]
            total = crc32_combine(total, piece, length)
        return total


_buffers = Buffers(_THREADS, _MAX_UNIT_BYTES)
