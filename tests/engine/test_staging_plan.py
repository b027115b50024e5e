# SPDX-License-Identifier: Apache-2.0
"""Layouts: nothing overlaps, nothing is lost, and the room is never exceeded."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.engine.layout import PAGE_BYTES, SPILLED, StagingLayout, lay_out
from ckptmgr.memory_config import Allocation

allocations = st.sampled_from(get_args(Allocation))
sizes = st.lists(st.integers(0, 5 * PAGE_BYTES), max_size=20)
rooms = st.one_of(st.none(), st.integers(0, 40 * PAGE_BYTES))
quanta = st.integers(1, 4 * PAGE_BYTES)


@given(sizes=sizes, allocation=allocations, slab_bytes=quanta, room_bytes=rooms)
def test_layout_places_every_tensor_without_overlap(
    sizes: list[int], allocation: Allocation, slab_bytes: int, room_bytes: int | None
) -> None:
    layout = lay_out(sizes, allocation=allocation, slab_bytes=slab_bytes, room_bytes=room_bytes)
    ranges = sorted(
        (slab, offset, offset + size)
        for (slab, offset), size in zip(layout.places, sizes, strict=True)
        if size
    )
    for slab, offset, end in ranges:
        limit = layout.spill_bytes if slab == SPILLED else layout.slabs_bytes[slab]
        assert 0 <= offset < end <= limit
        assert offset % 64 == 0
    for (slab, _, end), (next_slab, start, _) in pairwise(ranges):
        assert slab != next_slab or end <= start


@given(sizes=sizes, allocation=allocations, slab_bytes=quanta, room_bytes=rooms)
def test_layout_stays_within_the_room_and_spills_only_without_it(
    sizes: list[int], allocation: Allocation, slab_bytes: int, room_bytes: int | None
) -> None:
    layout = lay_out(sizes, allocation=allocation, slab_bytes=slab_bytes, room_bytes=room_bytes)
    if room_bytes is None:
        assert layout.spill_bytes == 0
    else:
        assert layout.host_bytes <= room_bytes
    assert all(size > 0 and size % PAGE_BYTES == 0 for size in layout.slabs_bytes)


@given(
    sizes=st.lists(st.integers(1, PAGE_BYTES), min_size=1),
    allocation=st.sampled_from(["exact", "arena", "arena_and_slabs"]),
)
def test_layout_of_one_region_has_one_slab(sizes: list[int], allocation: Allocation) -> None:
    layout = lay_out(sizes, allocation=allocation, slab_bytes=PAGE_BYTES, room_bytes=None)
    assert len(layout.slabs_bytes) == 1


def test_layout_of_an_arena_in_little_room_fills_it_and_spills_the_rest() -> None:
    layout = lay_out(
        [PAGE_BYTES] * 3, allocation="arena", slab_bytes=1, room_bytes=2 * PAGE_BYTES + 5
    )
    assert layout == StagingLayout(
        places=[(0, 0), (0, PAGE_BYTES), (SPILLED, 0)],
        slabs_bytes=[2 * PAGE_BYTES],
        spill_bytes=PAGE_BYTES,
    )


def test_layout_puts_small_tensors_into_what_large_ones_leave() -> None:
    layout = lay_out(
        [64, 3 * PAGE_BYTES, 64], allocation="slabs", slab_bytes=2 * PAGE_BYTES, room_bytes=None
    )
    assert layout.slabs_bytes == [4 * PAGE_BYTES]


def test_layout_of_nothing_needs_nothing() -> None:
    layout = lay_out([0, 0], allocation="slabs", slab_bytes=1, room_bytes=0)
    assert layout.host_bytes == layout.spill_bytes == 0
