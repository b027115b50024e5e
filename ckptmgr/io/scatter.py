# SPDX-License-Identifier: Apache-2.0
"""Read a file into many arrays at once: the counterpart of `files.save.pipeline`.

The file is read in units (digest ranges of 16 MiB, or cipher blocks of 4 MiB) by a few threads,
ranges in pieces of 2 MiB. A piece within one array is read straight into it, others into a reused
buffer, from which their parts are copied. So reads are large for tensors of any size, several are
in flight, every byte is hashed while it is in the cache, and only the pages of the arrays are
fresh.

Small tensors that are side by side in the file are read as one batch and copied from the cache into
new arrays: a placement for each of 100,000 tensors would double the time of the load.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from ckptmgr.formats.file_crc import FileCrc
from ckptmgr.formats.index import TensorEntry
from ckptmgr.formats.source import Source, is_remote, read_bytes
from ckptmgr.io.arenas import Arena
from ckptmgr.io.buffers import GIL_FREE_COPY_BYTES, copy_into
from ckptmgr.io.digest import VerifyingSource
from ckptmgr.io.threads import HASH_STEP_BYTES, PIECE_BYTES, for_each_unit
from ckptmgr.io.unverified_reads import UnverifiedReads


class Placement(NamedTuple):
    """Bytes of the file from `offset`, read into the flat, writable memory `target`."""

    offset: int
    target: memoryview

    @property
    def stop(self) -> int:
        """One past the last byte in the file."""
        return self.offset + self.target.nbytes


class SmallTensorBatch(NamedTuple):
    """Bytes `[offset, stop)` of the file, within one piece, that are passed on as a whole.

    `take` is called once with the bytes, in any thread; they are checked only at the end of the
    read.
    """

    offset: int
    stop: int
    take: Callable[[memoryview], None]


def piece_bytes_of(unit_bytes: int) -> int:
    """Return the length, and alignment, of the pieces in which `read_scattered` reads units."""
    return unit_bytes if unit_bytes <= PIECE_BYTES else HASH_STEP_BYTES


def read_scattered(
    source: Source,
    placements: Sequence[Placement | SmallTensorBatch],
    *,
    unit_bytes: int,
    arenas: Sequence[Arena] = (),
    crc: FileCrc | None = None,
    unverified: UnverifiedReads | None = None,
    also_units: Iterable[int] = (),
    units_at_once: int = 1,
) -> None:
    """Fill the targets of all placements, and all arenas.

    Args:
        source: The file.
        placements: In ascending order, not overlapping.
        unit_bytes: Length of the digest ranges of the source; of other sources at most 4 MiB. A
            unit is read whole only if the source has digests or the CRC covers it.
        arenas: In ascending order, not overlapping; nothing in them needs a placement.
        crc: Also read everything that it covers, and pass it every byte.
        unverified: Earlier reads of the file; compared with the bytes that are read now.
        also_units: Units to read as a whole in any case, to have them checked.
        units_at_once: How many units in a row one thread reads one after the other.

    Raises:
        CkptmgrError, FormatError, CryptoError, OSError: From the source; targets are then
            undefined.
    """
    if not 0 < unit_bytes <= PIECE_BYTES and not isinstance(source, VerifyingSource):
        raise ValueError(f"a unit of {unit_bytes} bytes is no unit")
    reader = _Reader(source, placements, arenas, unit_bytes, crc, unverified)
    reader.run(also_units, units_at_once)


def read_checked(source: Source, offset: int, length: int) -> bytes:
    """Return checked bytes of a file without keeping a whole digest range in memory."""
    if not isinstance(source, VerifyingSource):
        return read_bytes(source, offset, length)
    content = bytearray(length)
    wanted = Placement(offset, memoryview(content))
    read_scattered(source, [wanted], unit_bytes=source.range_bytes)
    return bytes(content)


class _Reader:
    def __init__(
        self,
        source: Source,
        placements: Sequence[Placement | SmallTensorBatch],
        arenas: Sequence[Arena],
        unit_bytes: int,
        crc: FileCrc | None,
        unverified: UnverifiedReads | None,
    ) -> None:
        self._source = source
        self._targets: list[memoryview | Callable[[memoryview], None]] = []
        self._starts: list[int] = []
        self._stops: list[int] = []
        for one in placements:
            if one.stop > one.offset:
                self._targets.append(one.target if isinstance(one, Placement) else one.take)
                self._starts.append(one.offset)
                self._stops.append(one.stop)
        self._arenas = arenas
        self._arena_starts = [one.start for one in arenas]
        self._arena_stops = [one.stop for one in arenas]
        self._unit_bytes = unit_bytes
        self._crc = crc
        self._unverified = unverified
        self._whole_units = set(range(-(-(0 if crc is None else crc.stop) // unit_bytes)))

    def _wanted_units(self) -> list[int]:
        units = set(self._whole_units)
        size = self._unit_bytes
        after = 0  # all units before it are in the set
        for start, stop in zip(self._starts, self._stops, strict=True):
            if stop > after:
                units.update(range(start // size, (stop - 1) // size + 1))
                after = -(-stop // size) * size
        for one in self._arenas:
            units.update(range(one.wanted.start // size, (one.wanted.stop - 1) // size + 1))
        return sorted(units)

    def run(self, also_units: Iterable[int], units_at_once: int) -> None:
        self._whole_units.update(also_units)
        runs: dict[int, list[int]] = {}
        for unit in self._wanted_units():
            runs.setdefault(unit // units_at_once, []).append(unit)

        def read(run: int, buffer: memoryview) -> None:
            for unit in runs[run]:
                self._read(unit, buffer)

        # A digest range is read in several requests at once.
        has_latency = is_remote(self._source) and not isinstance(self._source, VerifyingSource)
        for_each_unit(runs, read, has_latency=has_latency)

    def _read(self, unit: int, buffer: memoryview) -> None:
        start = unit * self._unit_bytes
        stop = min(start + self._unit_bytes, self._source.size)
        if isinstance(self._source, VerifyingSource):
            reader = self._source.open_range(unit)
            for first in range(start, stop, HASH_STEP_BYTES):
                last = min(first + HASH_STEP_BYTES, stop)
                self._scatter(first, last, self._parts(first, last), buffer, reader.read_into)
            reader.finish()
            return
        parts = self._parts(start, stop)
        if unit not in self._whole_units:
            start, stop = self._wanted(start, stop, parts)
        self._scatter(start, stop, parts, buffer, partial(self._source.read_into, start))

    def _parts(self, start: int, stop: int) -> range:
        """Return the indices of the placements with bytes of `[start, stop)`."""
        first = bisect_right(self._stops, start)
        return range(first, bisect_left(self._starts, stop, lo=first))

    def _arenas_at(self, start: int, stop: int) -> Sequence[Arena]:
        first = bisect_right(self._arena_stops, start)
        return self._arenas[first : bisect_left(self._arena_starts, stop, lo=first)]

    def _wanted(self, start: int, stop: int, parts: range) -> tuple[int, int]:
        """Return the range of the bytes in `[start, stop)` that anything is to be filled with."""
        wanted = [(self._starts[index], self._stops[index]) for index in (*parts[:1], *parts[-1:])]
        wanted += [(one.wanted.start, one.wanted.stop) for one in self._arenas_at(start, stop)]
        return max(start, min(wanted)[0]), min(stop, max(last for _, last in wanted))

    def _scatter(
        self,
        start: int,
        stop: int,
        parts: range,
        buffer: memoryview,
        read_into: Callable[[memoryview], None],
    ) -> None:
        """Read `[start, stop)` and copy it to its targets."""
        arenas = self._arenas_at(start, stop)
        view = self._memory_for(start, stop, parts, arenas)
        if view is None:
            view = buffer[: stop - start]
            read_into(view)
            self._check(start, view)
            for arena in arenas:
                low, high = max(start, arena.start), min(stop, arena.stop)
                copy_into(arena.view(low, high), view[low - start : high - start])
        else:
            read_into(view)
            self._check(start, view)
            if not arenas:
                return
        for index in parts:
            first, last = self._starts[index], self._stops[index]
            target = self._targets[index]
            if not isinstance(target, memoryview):
                target(view[first - start : last - start])
                continue
            if first < start or last > stop:
                low, high = max(start, first), min(stop, last)
                target, first, last = target[low - first : high - first], low, high
            if last - first < GIL_FREE_COPY_BYTES:
                target[:] = view[first - start : last - start]
            else:
                copy_into(target, view[first - start : last - start])

    def _memory_for(
        self, start: int, stop: int, parts: range, arenas: Sequence[Arena]
    ) -> memoryview | None:
        """Return the final memory of all of `[start, stop)`, or None if there is none."""
        if len(arenas) == 1:
            is_within = arenas[0].start <= start and stop <= arenas[0].stop
            return arenas[0].view(start, stop) if is_within else None
        only = self._targets[parts[0]] if len(parts) == 1 and not arenas else None
        if not isinstance(only, memoryview):
            return None
        first, last = self._starts[parts[0]], self._stops[parts[0]]
        return only[start - first : stop - first] if first <= start and stop <= last else None

    def _check(self, start: int, view: memoryview) -> None:
        if self._unverified is not None:
            self._unverified.check(start, view)
        if self._crc is not None and start < self._crc.stop:
            self._crc.add(start, view)


# Above, a placement costs nothing beside the copy of the bytes.
_SMALL_BYTES = 16 << 10


class SmallTensorBatches:
    """Collects small tensors; `arrays` gets a new array for the `id` of each entry.

    The file is read in pieces that start at multiples of `grid_bytes`; a batch is within one of
    them.
    """

    def __init__(self, arrays: dict[int, np.ndarray], *, grid_bytes: int) -> None:
        self._arrays = arrays
        self._grid_bytes = grid_bytes
        self.found: list[SmallTensorBatch] = []

    def take(self, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
        """Add tensors in file order; return those that need an array before the read."""
        others: list[TensorEntry] = []
        run: list[TensorEntry] = []
        run_stop = run_limit = 0
        for entry in entries:
            spec, pieces = entry
            if len(pieces) == 1:
                start, length = pieces[0]
                stop = start + length
                # Bools are checked afterwards.
                if 0 < length <= _SMALL_BYTES and spec.dtype.name != "bool":
                    if run_stop <= start and stop <= run_limit:
                        run.append(entry)
                        run_stop = stop
                        continue
                    limit = (start // self._grid_bytes + 1) * self._grid_bytes
                    if stop <= limit:
                        self._add(run)
                        run, run_stop, run_limit = [entry], stop, limit
                        continue
            others.append(entry)
            run_limit = 0  # no other tensor may be within a batch
        self._add(run)
        return others

    def _add(self, run: list[TensorEntry]) -> None:
        if run:
            start, last = run[0].pieces[0].offset, run[-1].pieces[0]
            make = partial(_make_arrays, run, start, self._arrays)
            self.found.append(SmallTensorBatch(start, last.offset + last.length, make))


def _make_arrays(
    entries: list[TensorEntry], start: int, arrays: dict[int, np.ndarray], view: memoryview
) -> None:
    stored, dtype = None, np.dtype(np.uint8)
    for entry in entries:
        (_, row, shape), ((offset, _),) = entry
        if row is not stored:
            stored, dtype = row, row.to_numpy()
        seen: np.ndarray = np.ndarray(shape, dtype, view, offset - start)
        arrays[id(entry)] = seen.copy()
