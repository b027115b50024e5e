# SPDX-License-Identifier: Apache-2.0
"""Memory of the arrays that a load makes: stretches of the file, in huge pages.

* The first touch of memory in 4 KiB pages takes five times the processor time of huge pages: more
  than to read and digest the bytes.
* An arena lies in memory as its stretch does in the file, from page to page. So one large read
  fills any number of arrays with direct I/O, without a copy.
* An array that is dropped gives its pages back, whatever becomes of the others in its arena.
* Small arrays have memory of NumPy: they would keep a page each.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable
from math import prod
from typing import cast

import numpy as np

from ckptmgr.crypto.buffers import new_pages
from ckptmgr.formats.index import TensorEntry

_PAGE_BYTES = mmap.PAGESIZE
_LEAST_BYTES = 2 << 20  # a huge page
_ENOUGH_BYTES = 64 << 20  # longer ones bring nothing; the ends of each are copied, up to 4 MiB
_MOST_BETWEEN_BYTES = 256 << 10  # small tensors between large ones are read into the arena, too


class Arena:
    """Memory for bytes `[start, stop)` of a file, whose ends are rounded to whole pages.

    Raises:
        OSError: There is no memory, or there are too many mappings.
    """

    def __init__(self, start: int, stop: int) -> None:
        self.wanted = range(start, stop)
        self.start = start // _PAGE_BYTES * _PAGE_BYTES
        self.stop = -(-stop // _PAGE_BYTES) * _PAGE_BYTES
        self._memory = new_pages(self.stop - self.start)
        self._address = _address_of(self._memory)

    def view(self, start: int, stop: int) -> memoryview:
        """Return the memory for the bytes `[start, stop)` of the file."""
        return self._memory[start - self.start : stop - self.start]

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array of the tensor at `offset` of the file, with undefined content."""
        size_bytes = prod(shape) * dtype.itemsize
        memory = np.asarray(_Part(self, self._address + offset - self.start, size_bytes))
        return memory.view(dtype).reshape(shape)

    def release(self, address: int, size_bytes: int) -> None:
        """Give the whole pages within a part of the memory back to the system."""
        mapping = cast("mmap.mmap", self._memory.obj)
        start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
        length = (address + size_bytes) // _PAGE_BYTES * _PAGE_BYTES - start
        if length > 0:
            with contextlib.suppress(OSError):  # locked by mlock()
                mapping.madvise(mmap.MADV_DONTNEED, start - _address_of(mapping), length)


class _Part:
    """The memory of one array: the base of it and of all views of it."""

    def __init__(self, arena: Arena, address: int, size_bytes: int) -> None:
        self._arena = arena
        self._place = (address, size_bytes)
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (size_bytes,),
            "data": (address, False),
        }

    def __del__(self) -> None:
        self._arena.release(*self._place)


def owns_memory(array: np.ndarray) -> bool:
    """Return whether an array is the only owner of its memory: its own, or a part of an arena."""
    return array.flags.owndata or isinstance(array.base, _Part)


def new_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array with undefined content, a large one in huge pages."""
    size_bytes = prod(shape) * dtype.itemsize
    if size_bytes >= _LEAST_BYTES:
        with contextlib.suppress(OSError):
            return Arena(0, size_bytes).array(0, shape, dtype)
    return np.empty(shape, dtype)


def make_arrays(entries: Iterable[TensorEntry], arrays: dict[int, np.ndarray]) -> list[Arena]:
    """Make the arrays of tensors that fill an arena; return the arenas, in file order.

    `entries` are in file order. `arrays` gets the arrays by the `id` of their entries; those of
    other entries are missing.
    """
    found: list[Arena] = []
    run: list[TensorEntry] = []
    for entry in entries:
        if len(entry.pieces) != 1 or entry.pieces[0].offset % entry.spec.dtype.to_numpy().alignment:
            continue
        if run and not _belongs(entry, run):
            found += _arena_of(run, arrays)
            run = []
        run.append(entry)
    return [*found, *_arena_of(run, arrays)]


def _belongs(entry: TensorEntry, run: list[TensorEntry]) -> bool:
    start, stop = run[0].pieces[0].offset, sum(run[-1].pieces[0])
    is_near = stop <= entry.pieces[0].offset <= stop + _MOST_BETWEEN_BYTES
    return is_near and stop - start < _ENOUGH_BYTES


def _arena_of(run: list[TensorEntry], arrays: dict[int, np.ndarray]) -> list[Arena]:
    start, stop = (run[0].pieces[0].offset, sum(run[-1].pieces[0])) if run else (0, 0)
    if stop - start < _LEAST_BYTES:
        return []
    try:
        arena = Arena(start, stop)
    except OSError:  # a process may have only some 65,000 mappings
        return []
    for entry in run:
        dtype = entry.spec.dtype.to_numpy()
        arrays[id(entry)] = arena.array(entry.pieces[0].offset, entry.spec.shape, dtype)
    return [arena]


def _address_of(memory: memoryview | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
