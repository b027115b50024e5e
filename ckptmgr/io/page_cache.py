# SPDX-License-Identifier: Apache-2.0
"""Files that are read once: from the page cache what it holds, past it what it does not.

Reading through the page cache fills memory that is then used for one copy. Where memory is fresh (a virtual machine that gives
free pages back, a training job that left none) that costs more than the disk. So large reads of what is not cached go
into a few kept buffers with direct I/O. What somebody else put into the cache is used, and nobody's pages are evicted.

Where small reads of a file will go, if they go on as they did.

Each description of a tensor, or head of a cipher block, tells only where the next one is: so each read would wait for the
one before. But layers of a model are alike, and so are the steps from one description to the next.

>>> trail = ReadAheadPredictor()
>>> [trail.note(offset << 20) for offset in (0, 1, 2)][-1]
(3145728, 4194304, 5242880, 6291456)
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

from ckptmgr.io.buffers import Buffers, copy_into
from ckptmgr.io.byte_counters import count_bytes
from ckptmgr.io.files import DIRECT_IO_ALIGNMENT, CachedFile
from ckptmgr.io.filesystem import InputFile
from ckptmgr.io.retrying_filesystem import RetryingFile

_MAX_PERIOD = 32
_MAX_AHEAD = 64
_AHEAD_PER_STEP = 4  # of those that were as foreseen: one repetition says little
_LIKE_BYTES = 256  # names and heads differ in length from layer to layer
_SPARSE_BYTES = 64 << 10  # what is closer is read together, or was read ahead by the kernel


class ReadAheadPredictor:
    """Offsets of reads, and what they foretell. Safe to use from several threads, whose reads it then mixes up."""

    def __init__(self) -> None:
        self._last = 0
        self._steps: tuple[int, ...] = ()
        self._expected: tuple[int, ...] = ()

    def note(self, offset: int) -> tuple[int, ...]:
        """Take the offset of a read; return those of reads that will probably follow and were not returned before."""
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
    """Return after how many steps they repeat themselves, and how many of the last ones did: 0, or a period or more."""
    best = (1, 0)
    step = steps[-1]
    for period, before in enumerate(steps[-2 : -2 - _MAX_PERIOD : -1], start=1):
        is_known = best[1] >= period and period % best[0] == 0  # the same, taken several times
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
# One page of each MiB is looked at, and not at its start, where heads of cipher blocks are read through the page cache.
_STRETCH_BYTES = 16 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLE_OFFSET = 84 * _PAGE_BYTES
_TOLERATED = 6  # one odd page of so many says nothing: the description of a tensor
# Buffers for unaligned memory; a chunk and its ends, rounded to whole sectors.
_bounces = Buffers(4, _CHUNK_BYTES + 2 * DIRECT_IO_ALIGNMENT)
# Not CDLL, which gives the GIL away: getting it back takes longer than the call.
_LIBC = ctypes.PyDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_LOWEST_BIT = bytes(value & 1 for value in range(256))  # the others are reserved
_WORLD_SIZES = ("WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def bypass_page_cache(file: InputFile) -> InputFile:
    """Return a file that is read past the page cache where that is faster; close this one instead of `file`.

    A file that is read twice, or by several processes, is better left in the page cache.
    """
    if isinstance(file, RetryingFile):
        return file.around(bypass_page_cache(file.file))
    return _ColdFile(file) if isinstance(file, CachedFile) else file


def bypass_page_cache_unless_shared(file: InputFile) -> InputFile:
    """Return what `bypass_page_cache` does, unless other processes may be about to read the same file."""
    return file if is_one_of_many() else bypass_page_cache(file)


def is_one_of_many() -> bool:
    """Return whether a launcher started this process together with others, which may read the same files."""
    return any(os.environ.get(name, "1") not in ("", "0", "1") for name in _WORLD_SIZES)


class _ColdFile:
    """A regular file. Safe to read from several threads."""

    def __init__(self, file: CachedFile) -> None:
        self._file = file
        self._direct = -1
        self._memory: mmap.mmap | None = None
        self._address = 0
        self._trails: dict[int, ReadAheadPredictor] = {}
        self._stretches: dict[int, bool | None] = {}
        self.size = file.size
        if self.size >= _MIN_DIRECT_BYTES:
            # A file system without direct I/O or mappings, or a file that became shorter: whoever reads will see.
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
        """Have the disk look up what small reads will probably want next, those of each size by themselves."""
        trail = self._trails.setdefault(length.bit_length(), ReadAheadPredictor())
        for ahead in trail.note(offset):
            if 0 <= ahead < self.size:
                with contextlib.suppress(OSError):  # the read itself will say so
                    self._file.will_need(ahead, length)

    def _read_directly(self, offset: int, buffer: memoryview) -> int:
        """Read the start of `buffer` past the page cache; return how many bytes, 0 where that does not work."""
        try:
            count = max(0, self._read_once(offset, buffer))
        except OSError:
            return (
                0  # some file systems accept the flag but not the read; a broken disk says so again
            )
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
        """Return whether the page cache holds a range, or half of it or more, as far as the kernel tells.

        A few pages of a longer stretch are looked at, once; only where they differ, the kernel walks through the range.
        """
        stretch = offset // _STRETCH_BYTES
        if stretch not in self._stretches:
            self._stretches[stretch] = self._sample(stretch * _STRETCH_BYTES)
        answer = self._stretches[stretch]
        return self._is_half_cached(offset, length) if answer is None else answer

    def _sample(self, start: int) -> bool | None:
        """Return what is true of nearly all pages that are looked at: they are cached, or they are not; else None."""
        stop = min(start + _STRETCH_BYTES, self.size)
        offsets = range(start + _SAMPLE_OFFSET, stop, _SAMPLE_BYTES)
        page, cached = ctypes.c_ubyte(), 0
        for offset in offsets:
            is_told = _LIBC.mincore(self._address + offset, _PAGE_BYTES, ctypes.byref(page)) == 0
            cached += not is_told or page.value & 1
        is_mostly = cached * 2 > len(offsets)
        odd = len(offsets) - cached if is_mostly else cached
        return is_mostly if odd * _TOLERATED < len(offsets) else None

    def _is_half_cached(self, offset: int, length: int) -> bool:
        first = offset // _PAGE_BYTES * _PAGE_BYTES
        count = max(0, -(-(min(offset + length, self.size) - first) // _PAGE_BYTES))
        pages = (ctypes.c_ubyte * count)()
        is_told = _LIBC.mincore(self._address + first, count * _PAGE_BYTES, pages) == 0
        return not is_told or bytes(pages).translate(_LOWEST_BIT).count(1) * 2 >= count

    def close(self) -> None:
        """Release the descriptors."""
        self._memory = None
        descriptor, self._direct = self._direct, -1
        try:
            self._file.close()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
