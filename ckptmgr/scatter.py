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
from ckptmgr.glimpses import Glimpses

_THREADS = 3
MAX_UNIT_BYTES = 16 << 20


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
    glimpses: Glimpses | None = None,
) -> int | None:
    """Fill the targets of all placements.

    Args:
        source: The file.
        placements: In ascending order, not overlapping.
        unit_bytes: What the source checks at once; at most 16 MiB. Of a unit no more is read than is wanted, unless it
            holds bytes of the CRC or of glimpses.
        crc_bytes: Also read everything up to here and return its CRC-32.
        glimpses: What was seen of the file before; compared with the checked bytes.

    Raises:
        CkptmgrError, FormatError, CryptoError, OSError: What the source raises; targets are then undefined.
    """
    if not 0 < unit_bytes <= MAX_UNIT_BYTES:
        raise ValueError(f"a unit of {unit_bytes} bytes is no unit")
    return _Reader(source, placements, unit_bytes, crc_bytes, glimpses).run()


class _Reader:
    def __init__(
        self,
        source: Source,
        placements: Sequence[Placement],
        unit_bytes: int,
        crc_bytes: int | None,
        glimpses: Glimpses | None,
    ) -> None:
        self._source = source
        self._placements = [one for one in placements if one.target.nbytes]
        self._stops = [one.stop for one in self._placements]
        self._unit_bytes = unit_bytes
        self._crc_bytes = crc_bytes
        self._glimpses = glimpses
        self._crcs: dict[int, tuple[int, int]] = {}
        self._whole_units = set(range(-(-(crc_bytes or 0) // unit_bytes)))
        if glimpses is not None:
            self._whole_units |= glimpses.units
        self._units = iter(self._wanted_units())
        self._lock = threading.Lock()
        self._failure: BaseException | None = None

    def _wanted_units(self) -> list[int]:
        units = set(self._whole_units)
        for one in self._placements:
            units.update(range(one.offset // self._unit_bytes, -(-one.stop // self._unit_bytes)))
        return sorted(units)

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
        parts = []
        while index < len(self._placements) and self._placements[index].offset < stop:
            parts.append(self._placements[index])
            index += 1
        if unit not in self._whole_units:
            start, stop = max(start, parts[0].offset), min(stop, parts[-1].stop)
        if len(parts) == 1 and parts[0].offset <= start and stop <= parts[0].stop:
            # All of it belongs to one array: no copy.
            one = parts[0]
            self._take(start, one.target[start - one.offset : stop - one.offset])
            return
        view = buffer[: stop - start]
        self._take(start, view)
        for one in parts:
            low, high = max(start, one.offset), min(stop, one.stop)
            copy_into(
                one.target[low - one.offset : high - one.offset], view[low - start : high - start]
            )

    def _take(self, start: int, view: memoryview) -> None:
        self._source.read_into(start, view)
        if self._glimpses is not None:
            self._glimpses.check(start, view)
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


_buffers = Buffers(_THREADS, MAX_UNIT_BYTES)
