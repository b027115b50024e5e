# SPDX-License-Identifier: Apache-2.0
"""Byte-balanced deduplication: which rank saves which rows of replicated tensors.

1. Every rank starts with the bytes that only it holds.
2. Large tensors are cut along dimension 0 into chunks of `min(64 MiB, total / (4 * ranks))` or
   less; `total / (50 * ranks)` where the largest load would be more than 2 % over the best possible
   one.
3. Chunks with the fewest holders come first, the largest of them first; each goes to the holder
   with the smallest load so far.

The plan depends on sizes, names and layouts only, so every rank computes the same plan without
communication. Slices of one layout are dealt out together, which keeps thousands of ranks cheap.

>>> groups = ((0, 1),)
>>> plan = balance_by_bytes([Replicated(name="w", shape=(6, 4), item_bytes=4, groups=groups)])
>>> [(share.start_row, share.stop_row) for share in plan.shares(0)]
[(0, 1), (2, 3), (4, 5)]
>>> plan.loads.tolist()
[48, 48]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from ckptmgr.parallel.redundancy import Groups

MAX_CHUNK_BYTES = 64 << 20
_CHUNKS_PER_RANK = (4, 50)
_TOLERANCE = 1.02
_FEW_SLICES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A tensor and the ranks that hold its slices.

    Attributes:
        name: The tensor.
        shape: Shape of a slice; every slice of a tensor counts as this large.
        item_bytes: Bytes of an element.
        groups: Ranks that hold the same slice, one group per slice.
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    groups: Groups

    @property
    def rows(self) -> int:
        """The length of dimension 0, along which it can be cut; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def size_bytes(self) -> int:
        """Bytes of a slice."""
        return prod(self.shape) * self.item_bytes


class Share(NamedTuple):
    """Rows of its slice of a tensor that a rank saves; a scalar is one row."""

    name: str
    start_row: int
    stop_row: int
    size_bytes: int


class Chunk(NamedTuple):
    """Rows of every slice of a tensor, and int64[slices, copies], the ranks that save them."""

    name: str
    start_row: int
    stop_row: int
    size_bytes: int
    savers: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalancedPlan:
    """The chunks, in order of tensor and row, and the bytes (int64[ranks]) that each rank saves.

    `ranks` are those that hold slices, ascending.
    """

    chunks: tuple[Chunk, ...]
    ranks: tuple[int, ...]
    loads: np.ndarray

    def shares(self, rank: int) -> list[Share]:
        """Return the shares that a rank saves; adjacent rows are joined."""
        joined: list[Share] = []
        for chunk in self.chunks:
            if not (chunk.savers == rank).any():
                continue
            share = Share(chunk.name, chunk.start_row, chunk.stop_row, chunk.size_bytes)
            last = joined[-1] if joined else None
            if last is not None and (last.name, last.stop_row) == (share.name, share.start_row):
                size_bytes = last.size_bytes + share.size_bytes
                joined[-1] = Share(last.name, last.start_row, share.stop_row, size_bytes)
            else:
                joined.append(share)
        return joined


def balance_by_bytes(
    tensors: Iterable[Replicated], *, keep_redundancy: int = 1, chunk_bytes: int | None = None
) -> BalancedPlan:
    """Plan which rank saves which rows of which tensor.

    Args:
        tensors: All tensors of the ranks, in any order.
        keep_redundancy: Copies to keep of every row, on different ranks; fewer where there are
            fewer.
        chunk_bytes: Largest chunk; None for 64 MiB or a quarter of an even share, whichever is
            less.

    Raises:
        ValueError: No copy is to be kept, a tensor is held by no rank, or its groups differ in size
            or share a rank.
    """
    if keep_redundancy < 1:
        raise ValueError(f"keep_redundancy is {keep_redundancy}; at least one copy must be kept")
    chosen = sorted(tensors, key=lambda one: one.name)
    if chunk_bytes is not None:
        return _plan(chosen, keep_redundancy, chunk_bytes)[0]
    ranks = len({rank for groups in {one.groups for one in chosen} for g in groups for rank in g})
    total = sum(
        one.size_bytes * len(one.groups) * len(one.groups[0][:keep_redundancy])
        for one in chosen
        if one.groups
    )
    coarse, fine = (total // (chunks * max(1, ranks)) for chunks in _CHUNKS_PER_RANK)
    plan, floor_bytes = _plan(chosen, keep_redundancy, min(MAX_CHUNK_BYTES, coarse))
    if plan.loads.max(initial=0) > _TOLERANCE * max(floor_bytes, total / max(1, ranks)):
        finer, _ = _plan(chosen, keep_redundancy, min(MAX_CHUNK_BYTES, fine))
        plan = min(plan, finer, key=lambda one: one.loads.max(initial=0))
    return plan


def _plan(tensors: Sequence[Replicated], copies: int, chunk_bytes: int) -> tuple[BalancedPlan, int]:
    """Return a plan, and the largest load that no plan can avoid."""
    dealer = _Dealer(tensors, copies)
    parts = [(one, rows) for one in tensors for rows in _cut(one, chunk_bytes, copies)]
    parts.sort(key=dealer.order)
    chunks = sorted((dealer.deal(*part) for part in parts), key=lambda chunk: chunk[:2])
    ranks = tuple(dealer.ranks.tolist())
    return BalancedPlan(chunks=tuple(chunks), ranks=ranks, loads=dealer.loads), dealer.floor_bytes


class _Dealer:
    """Gives chunks to the least loaded of their holders."""

    def __init__(self, tensors: Sequence[Replicated], copies: int) -> None:
        self._copies = copies
        self._heaps: dict[int, list[list[tuple[int, int]]]] = {}
        # Tensors of one layout share their groups; comparing thousands of tuples for each is slow.
        self._numbers: dict[int, int] = {}
        matrices: dict[Groups, np.ndarray] = {}
        known: dict[Groups, int] = {}
        for one in tensors:
            if id(one.groups) not in self._numbers:
                self._numbers[id(one.groups)] = known.setdefault(one.groups, len(known))
                if one.groups not in matrices:
                    matrices[one.groups] = _matrix(one)
        flat = [matrix.ravel() for matrix in matrices.values()]
        self.ranks = np.unique(np.concatenate([np.empty(0, np.int64), *flat]))
        self.loads = np.zeros(len(self.ranks), np.int64)
        self.floor_bytes = 0
        self._places = [np.searchsorted(self.ranks, matrix) for matrix in matrices.values()]

    def order(self, part: tuple[Replicated, tuple[int, int]]) -> tuple[int, int, str, int]:
        """Return the sort key: chunks without a choice of holders first; they fix initial loads."""
        one, rows = part
        holders = len(one.groups[0])
        choice = holders if holders > self._copies else 0
        return choice, -_row_bytes(one) * (rows[1] - rows[0]), one.name, rows[0]

    def deal(self, one: Replicated, rows: tuple[int, int]) -> Chunk:
        """Give rows of every slice of a tensor to the least loaded holders."""
        number = self._numbers[id(one.groups)]
        places = self._places[number]
        size_bytes = _row_bytes(one) * (rows[1] - rows[0])
        if places.shape[1] > self._copies:
            places = self._least_loaded(number, places, size_bytes)
        else:
            self.loads[places] += size_bytes
            self.floor_bytes = int(self.loads.max())
        return Chunk(one.name, *rows, size_bytes, self.ranks[places])

    def _least_loaded(self, number: int, places: np.ndarray, size_bytes: int) -> np.ndarray:
        """Add to the loads of the least loaded holders of each slice, and return them."""
        if len(places) <= _FEW_SLICES:
            if number not in self._heaps:
                self._heaps[number] = [[(0, place) for place in row] for row in places.tolist()]
            return np.array([self._pop(heap, size_bytes) for heap in self._heaps[number]])
        loads = self.loads[places]
        least = loads.argmin(axis=1)[:, None]
        if self._copies > 1:
            least = loads.argsort(axis=1, kind="stable")[:, : self._copies]
        places = np.take_along_axis(places, least, axis=1)
        self.loads[places] += size_bytes
        return places

    def _pop(self, heap: list[tuple[int, int]], size_bytes: int) -> list[int]:
        found: list[int] = []
        while len(found) < self._copies:
            load, place = heap[0]
            now = int(self.loads[place])
            if load < now:  # loaded through another layout since
                heapreplace(heap, (now, place))
                continue
            heappop(heap)
            found.append(place)
        for place in found:
            self.loads[place] += size_bytes
            heappush(heap, (int(self.loads[place]), place))
        return found


def _matrix(one: Replicated) -> np.ndarray:
    if not one.groups or len({len(group) for group in one.groups}) != 1 or not one.groups[0]:
        raise ValueError(f"{one.name!r} is held by no rank, or by groups of different sizes")
    matrix = np.array(one.groups, np.int64)
    if len(np.unique(matrix)) != matrix.size:
        raise ValueError(f"{one.name!r} has a rank twice in its groups")
    return matrix


def _row_bytes(one: Replicated) -> int:
    return prod(one.shape[1:]) * one.item_bytes


def _cut(one: Replicated, chunk_bytes: int, copies: int) -> Sequence[tuple[int, int]]:
    """Return the rows of each chunk, as equal as rows allow."""
    rows = one.rows
    if len(one.groups[0]) <= copies or one.size_bytes <= chunk_bytes or rows < 2:
        return [(0, rows)]
    count = min(rows, -(-one.size_bytes // max(1, chunk_bytes)))
    edges = [rows * number // count for number in range(count + 1)]
    return list(pairwise(edges))
