# SPDX-License-Identifier: Apache-2.0
"""Memory of new arrays: aligned as in the file, and given back array by array."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.index import ContentRun, TensorEntry
from ckptmgr.formats.tensor import TensorSpec
from ckptmgr.io.arenas import Arena, make_arrays, new_array, owns_memory

MIB = 1 << 20


def entry(name: str, offset: int, size_bytes: int, dtype: str = "uint8") -> TensorEntry:
    spec = TensorSpec(name, BY_NAME[dtype], (size_bytes // BY_NAME[dtype].item_bytes,))
    return TensorEntry(spec, (ContentRun(offset, size_bytes),))


def address(array: np.ndarray) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def test_arrays_lie_in_an_arena_as_in_the_file() -> None:
    entries = [entry("a", 4096 + 64, MIB), entry("b", 4096 + 64 + MIB, 2 * MIB, "float32")]
    arrays: dict[int, np.ndarray] = {}
    (arena,) = make_arrays(entries, arrays)
    first, second = (arrays[id(one)] for one in entries)
    assert address(first) % mmap.PAGESIZE == 64
    assert address(second) - address(first) == MIB
    assert second.dtype == np.float32
    assert second.shape == (MIB // 2,)
    arena.view(4096 + 64 + MIB, 4096 + 68 + MIB)[:] = np.float32(2.5).tobytes()
    assert second[0] == 2.5
    assert second.flags.writeable


def test_a_dropped_array_gives_its_pages_back_and_leaves_the_others() -> None:
    arena = Arena(0, 3 * MIB)
    kept, dropped = (
        arena.array(at, (3 * MIB // 2,), np.dtype(np.uint8)) for at in (0, 3 * MIB // 2)
    )
    kept[:] = dropped[:] = 1
    del dropped
    assert not any(arena.view(3 * MIB // 2, 3 * MIB))
    assert kept.all()


def test_a_view_of_an_array_keeps_its_memory() -> None:
    arena = Arena(0, 2 * MIB)
    array = arena.array(0, (MIB,), np.dtype(np.uint16))
    array[:] = 7
    part = array.reshape(2, -1)[1, ::2]
    del array
    assert (part == 7).all()


def test_an_array_smaller_than_a_page_gives_nothing_back() -> None:
    arena = Arena(0, 4096)
    arena.view(0, 4096)[:] = b"x" * 4096
    arena.array(8, (16,), np.dtype(np.uint8))
    assert bytes(arena.view(0, 4096)) == b"x" * 4096


def test_each_array_of_an_arena_owns_its_memory_alone() -> None:
    arena = Arena(0, 2 * MIB)
    array = arena.array(0, (8,), np.dtype(np.float32))
    assert owns_memory(array.base if isinstance(array.base, np.ndarray) else array)
    assert not owns_memory(np.frombuffer(b"12345678", np.uint8))


def test_stretches_end_at_large_gaps_and_after_enough_bytes() -> None:
    sizes = [40 * MIB, 40 * MIB, 3 * MIB]
    entries = [entry(f"w{i}", sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    far = entry("far", sum(sizes) + MIB, 3 * MIB)
    arrays: dict[int, np.ndarray] = {}
    found = make_arrays([*entries, far], arrays)
    assert [one.wanted for one in found] == [
        range(80 * MIB),
        range(80 * MIB, 83 * MIB),
        range(84 * MIB, 87 * MIB),
    ]


def test_tensors_that_fill_no_huge_page_or_are_unaligned_or_in_pieces_are_left_out() -> None:
    small = entry("small", 0, MIB)
    unaligned = entry("unaligned", 10 * MIB + 1, 4 * MIB, "float32")
    spec = TensorSpec("cut", BY_NAME["uint8"], (4 * MIB,))
    cut = TensorEntry(spec, (ContentRun(20 * MIB, 2 * MIB), ContentRun(23 * MIB, 2 * MIB)))
    arrays: dict[int, np.ndarray] = {}
    assert make_arrays([small, unaligned, cut], arrays) == []
    assert not arrays


def test_arrays_that_no_mapping_can_hold_are_left_to_numpy() -> None:
    arrays: dict[int, np.ndarray] = {}
    assert make_arrays([entry("w", 0, 1 << 60)], arrays) == []
    assert not arrays
    with pytest.raises(MemoryError):
        new_array((1 << 60,), np.dtype(np.uint8))


@pytest.mark.parametrize(("size_bytes", "is_mapped"), [(MIB, False), (4 * MIB, True)])
def test_a_large_new_array_is_mapped(size_bytes: int, is_mapped: bool) -> None:
    array = new_array((size_bytes // 8, 2), np.dtype(np.float32))
    assert array.shape == (size_bytes // 8, 2)
    assert array.flags.owndata is not is_mapped
    assert not is_mapped or address(array) % mmap.PAGESIZE == 0
