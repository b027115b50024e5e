# SPDX-License-Identifier: Apache-2.0
"""Decide where each tensor of a state is staged: pure, before any memory is allocated.

Tensors are packed into slabs, the largest first, each into the slab with the most room. So a tensor
never straddles two slabs (its content is one view), and small tensors fill the rest of a slab with
a large one. Tensors beyond the host budget are laid out in one spill file.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ckptmgr.config.memory import Allocation

PAGE_BYTES = 4096
SPILLED = -1
_ALIGNMENT = 64
_MOST_SLABS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingLayout:
    """The places of the tensors of one state.

    Attributes:
        places: For each tensor its slab (an index into `slabs_bytes`, or `SPILLED`) and its offset
            there.
        slabs_bytes: Sizes of the slabs to allocate.
        spill_bytes: Size of the spill file; 0 when there is none.
    """

    places: list[tuple[int, int]]
    slabs_bytes: list[int]
    spill_bytes: int

    @property
    def host_bytes(self) -> int:
        """Sum of the slabs."""
        return sum(self.slabs_bytes)


def lay_out(
    sizes: Sequence[int], *, allocation: Allocation, slab_bytes: int, room_bytes: int | None
) -> StagingLayout:
    """Place tensors of the given sizes in bytes.

    `slab_bytes` is the quantum; a state that would need many slabs gets larger ones, of several
    quanta. The slabs never add up to more than `room_bytes`, the free host memory.

    >>> lay_out([3000, 100], allocation="slabs", slab_bytes=4096, room_bytes=None)
    StagingLayout(places=[(0, 0), (0, 3008)], slabs_bytes=[4096], spill_bytes=0)
    """
    padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
    room = sys.maxsize if room_bytes is None else room_bytes
    unit = slab_bytes if allocation in ("slabs", "arena_and_slabs") else PAGE_BYTES
    unit = max(PAGE_BYTES, _down(min(unit, room), PAGE_BYTES))
    whole = _up(sum(padded), unit)
    quantum = _up(-(-whole // _MOST_SLABS), unit) if allocation == "slabs" else whole
    if quantum > room:  # the region fills the free room, and the rest spills
        quantum = _down(room, unit)
    return _pack(padded, quantum=quantum, unit=unit, room=room)


def _pack(padded: Sequence[int], *, quantum: int, unit: int, room: int) -> StagingLayout:
    places = [(SPILLED, 0)] * len(padded)
    slabs: list[int] = []
    # Slabs by their free bytes, the most first.
    free: list[tuple[int, int]] = []
    spill_bytes = 0
    for index in sorted(range(len(padded)), key=padded.__getitem__, reverse=True):
        size = padded[index]
        if free and -free[0][0] >= size:
            slab = free[0][1]
            left = -free[0][0] - size
            heapq.heapreplace(free, (-left, slab))
        elif size and (capacity := _capacity(size, quantum=quantum, unit=unit, room=room)):
            slab, left = len(slabs), capacity - size
            room -= capacity
            slabs.append(capacity)
            heapq.heappush(free, (-left, slab))
        else:
            places[index] = (SPILLED, spill_bytes)
            spill_bytes += size
            continue
        places[index] = (slab, slabs[slab] - left - size)
    return StagingLayout(places=places, slabs_bytes=slabs, spill_bytes=spill_bytes)


def _capacity(size: int, *, quantum: int, unit: int, room: int) -> int:
    """Return the size of a new slab for `size` bytes, or 0 when there is no room for it."""
    wanted = max(quantum, _up(size, unit))
    if wanted > room:
        # A last slab of less than a whole quantum is better than a spill.
        wanted = _down(room, PAGE_BYTES)
    return wanted if wanted >= size else 0


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _down(value: int, step: int) -> int:
    return value // step * step
