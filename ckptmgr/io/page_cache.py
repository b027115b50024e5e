# SPDX-License-Identifier: Apache-2.0
"""Bypass of the page cache for files that are read once, and a read-ahead predictor.

A read through the page cache fills pages that are then copied once. With fresh memory (a virtual
machine that returns free pages, a training job that left none) this costs more than the disk. So
large reads of data that is not cached use direct I/O into a few reused buffers. Cached pages are
used, and no page is evicted.

The predictor is for small reads: each description of a tensor, or head of a cipher block, contains
only the place of the next one, so each read would wait for the one before. But the layers of a
model are alike, and so are the steps between their descriptions.

>>> predictor = ReadAheadPredictor()
>>> [predictor.next_reads(offset << 20) for offset in (0, 1, 2)][-1]
(3145728, 4194304, 5242880, 6291456)
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from ckptmgr.io.buffers import BufferPool, copy_into
from ckptmgr.io.byte_counters import count_bytes
from ckptmgr.io.files import DIRECT_IO_ALIGNMENT, CachedFile
from ckptmgr.io.filesystem import InputFile
from ckptmgr.io.retrying_filesystem import RetryingFile

_MAX_PERIOD = 32
_MAX_AHEAD = 64
_AHEAD_PER_STEP = 4  # for each predicted step: one repetition proves little
_LIKE_BYTES = 256  # names and heads differ in length from layer to layer
_SPARSE_BYTES = 64 << 10  # closer data is read together, or was read ahead by the kernel


class ReadAheadPredictor:
    """Predicts the offsets of reads. Several threads may use it, but it then predicts worse."""

    def __init__(self) -> None:
        self._last = 0
        self._steps: tuple[int, ...] = ()
        self._expected: tuple[int, ...] = ()

    def next_reads(self, offset: int) -> tuple[int, ...]:
        """Record the offset of a read; return the new offsets of probable next reads."""
        step, self._last = offset - self._last, offset
        self._steps = steps = (*self._steps[-2 * _MAX_PERIOD :], step)
        expected, self._expected = self._expected, ()
        if len(expected) > 1 and abs(offset - expected[0]) <= _LIKE_BYTES:
            self._expected = expected[1:]
            return ()
        period, repeated = _period_of(steps)
        pattern = steps[-period:]
        if not repeated or sum(pattern) < _SPARSE_BYTES * period:
            return ()
        ahead = []
        for index in range(min(_AHEAD_PER_STEP * repeated, _MAX_AHEAD)):
            offset += pattern[index % period]
            ahead.append(offset)
        self._expected = tuple(ahead)
        return self._expected


def _period_of(steps: tuple[int, ...]) -> tuple[int, int]:
    """Return the period of the steps, and the number of repeated steps: 0, or >= 1 period."""
    best = (1, 0)
    step = steps[-1]
    for period, before in enumerate(steps[-2 : -2 - _MAX_PERIOD : -1], start=1):
        is_known = best[1] >= period and period % best[0] == 0  # a multiple of the best period
        if not is_known and -_LIKE_BYTES <= step - before <= _LIKE_BYTES:
            repeated = _repeated(steps, period)
            if repeated >= period and repeated > best[1]:
                best = (period, repeated)
    return best


def _repeated(steps: tuple[int, ...], period: int) -> int:
    """Return how many of the last steps are like the one a period before."""
    count = 0
    for step, before in zip(reversed(steps), reversed(steps[:-period]), strict=False):
        if abs(step - before) > _LIKE_BYTES:
            break
        count += 1
    return count


_MIN_DIRECT_BYTES = 256 << 10
_CHUNK_BYTES = 4 << 20
_PAGE_BYTES = mmap.PAGESIZE
# One page of each MiB is sampled, but not its start, where heads of cipher blocks are read through
# the cache.
_STRETCH_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLE_OFFSET = 84 * _PAGE_BYTES
_TOLERATED = 6  # one odd page among these is ignored: the description of a tensor
# For unaligned memory: a chunk and its ends, rounded to whole sectors.
_bounces = BufferPool(4, _CHUNK_BYTES + 2 * DIRECT_IO_ALIGNMENT)
# Not CDLL, which releases the GIL: to get it back takes longer than the call.
_LIBC = ctypes.PyDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the others are reserved
_WORLD_SIZES = ("WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def bypass_page_cache(file: InputFile) -> InputFile:
    """Return a file that bypasses the page cache where that is faster; close it instead of `file`.

    For a file that is read once, by one process.
    """
    if isinstance(file, RetryingFile):
        return file.wrapping(bypass_page_cache(file.file))
    return _BypassingFile(file) if isinstance(file, CachedFile) else file


def bypass_page_cache_unless_shared(file: InputFile) -> InputFile:
    """Bypass the page cache, unless other ranks may read the same file."""
    return file if is_one_of_many() else bypass_page_cache(file)


def is_one_of_many() -> bool:
    """Return whether a launcher started this process as one of several ranks."""
    return any(os.environ.get(name, "1") not in ("", "0", "1") for name in _WORLD_SIZES)


class _BypassingFile:
    """A regular file. Safe to read from several threads."""

    def __init__(self, file: CachedFile) -> None:
        self._file = file
        self._direct = -1
        self._memory: mmap.mmap | None = None
        self._address = 0
        self._predictors: dict[int, ReadAheadPredictor] = {}
        self._stretches: dict[int, bool | None] = {}
        self.size = file.size
        if self.size >= _MIN_DIRECT_BYTES:
            # A file system without direct I/O or mappings, or a file that became shorter: reads
            # show it.
            with contextlib.suppress(OSError, ValueError):
                self._open()

    def _open(self) -> None:
        import numpy as np

        self._memory = self._file.map()
        address: int = np.frombuffer(self._memory, np.uint8).ctypes.data
        self._address = address
        self._direct = self._file.reopen(os.O_DIRECT)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on, or raise TruncatedError."""
        if 0 < buffer.nbytes < _MIN_DIRECT_BYTES and self._direct >= 0:
            self._ask_ahead(offset, buffer.nbytes)
        while buffer.nbytes >= _MIN_DIRECT_BYTES and self._direct >= 0:
            if self._is_cached(offset, buffer.nbytes):
                break
            count = self._read_directly(offset, buffer)
            if not count:
                break
            offset += count
            buffer = buffer[count:]
        self._file.read_into(offset, buffer)

    def _ask_ahead(self, offset: int, length: int) -> None:
        """Start the probable next small reads, predicted separately for each size."""
        predictor = self._predictors.setdefault(length.bit_length(), ReadAheadPredictor())
        for ahead in predictor.next_reads(offset):
            if 0 <= ahead < self.size:
                with contextlib.suppress(OSError):  # the read itself will raise it
                    self._file.will_need(ahead, length)

    def _read_directly(self, offset: int, buffer: memoryview) -> int:
        """Read the start of `buffer` past the page cache; return its bytes, 0 if impossible."""
        try:
            count = max(0, self._read_once(offset, buffer))
        except OSError:  # of a file system that accepts only the flag; a broken disk fails again
            return 0
        count_bytes("read", count)
        return count

    def _read_once(self, offset: int, buffer: memoryview) -> int:
        skip = offset % DIRECT_IO_ALIGNMENT
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        if not skip and not address % DIRECT_IO_ALIGNMENT:
            whole = buffer.nbytes - buffer.nbytes % DIRECT_IO_ALIGNMENT
            return os.preadv(self._direct, [buffer[:whole]], offset)
        wanted = min(buffer.nbytes, _CHUNK_BYTES)
        with _bounces.lent() as bounce:
            length = -(-(skip + wanted) // DIRECT_IO_ALIGNMENT) * DIRECT_IO_ALIGNMENT
            found = os.preadv(self._direct, [bounce[:length]], offset - skip)
            count = min(found - skip, wanted)
            if count > 0:
                copy_into(buffer[:count], bounce[skip : skip + count])
            return count

    def _is_cached(self, offset: int, length: int) -> bool:
        """Return whether the page cache holds at least half of a range, as far as is known.

        A few pages of a longer stretch are sampled once; only if they differ, all pages are looked
        up.
        """
        stretch = offset // _STRETCH_BYTES
        if stretch not in self._stretches:
            self._stretches[stretch] = self._sample(stretch * _STRETCH_BYTES)
        answer = self._stretches[stretch]
        return self._is_half_cached(offset, length) if answer is None else answer

    def _sample(self, start: int) -> bool | None:
        """Return whether nearly all sampled pages are cached, or None if they differ."""
        stop = min(start + _STRETCH_BYTES, self.size)
        offsets = range(start + _SAMPLE_OFFSET, stop, _SAMPLE_BYTES)
        page, cached = ctypes.c_ubyte(), 0
        for offset in offsets:
            is_known = _LIBC.mincore(self._address + offset, _PAGE_BYTES, ctypes.byref(page)) == 0
            cached += not is_known or page.value & 1
        is_mostly = cached * 2 > len(offsets)
        odd = len(offsets) - cached if is_mostly else cached
        return is_mostly if odd * _TOLERATED < len(offsets) else None

    def _is_half_cached(self, offset: int, length: int) -> bool:
        first = offset // _PAGE_BYTES * _PAGE_BYTES
        count = max(0, -(-(min(offset + length, self.size) - first) // _PAGE_BYTES))
        pages = (ctypes.c_ubyte * count)()
        is_known = _LIBC.mincore(self._address + first, count * _PAGE_BYTES, pages) == 0
        return not is_known or bytes(pages).translate(_LOWEST_BIT).count(1) * 2 >= count

    def close(self) -> None:
        """Release the descriptors."""
        self._memory = None
        descriptor, self._direct = self._direct, -1
        try:
            self._file.close()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
