# SPDX-License-Identifier: Apache-2.0
"""Memory for reading and writing files."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from ckptmgr.crypto.buffers import new_pages

HUGE = 2 << 20


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def flags_at(address: int) -> list[str]:
    """Return the kernel's notes on the mapping that holds an address."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        start, dash, stop = first.partition("-")
        if dash:
            is_found = int(start, 16) <= address < int(stop, 16)
        elif is_found and first == "VmFlags:":
            return rest.split()
    return []


@pytest.mark.parametrize("size", [0, 1, 4097, HUGE - 1, HUGE, 2 * HUGE + 8192])
def test_new_pages_are_zeros_of_exactly_that_size_that_can_be_written(size: int) -> None:
    view = new_pages(size)
    assert view == bytes(size)
    view[:] = bytes([1]) * size
    assert new_pages(size) == bytes(size)


@pytest.mark.parametrize(
    ("size", "alignment"), [(1, 4096), (HUGE - 1, 4096), (HUGE, HUGE), (HUGE + 1, HUGE)]
)
def test_new_pages_are_aligned(size: int, alignment: int) -> None:
    assert address_of(new_pages(size)) % alignment == 0


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_new_pages_that_fill_a_huge_page_ask_for_it() -> None:
    view = new_pages(2 * HUGE)
    assert "hg" in flags_at(address_of(view))
    assert "hg" in flags_at(address_of(view) + 2 * HUGE - 1)
