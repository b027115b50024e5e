# SPDX-License-Identifier: Apache-2.0
"""Which tensors are the same on which ranks, from what the ranks say and from digests."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from blake3 import blake3

from ckptmgr.core.regions import Region
from ckptmgr.formats.tensor import Tensor
from ckptmgr.parallel.coordinator import Json, RanksOutOfStep
from ckptmgr.parallel.errors import LayoutError
from ckptmgr.parallel.tensor_notes import Note

_LOG = logging.getLogger(__name__)
_DIGEST_BYTES = 16
_SHOWN = 3

Parts = Mapping[str, list[tuple[Note, tuple[int, ...]]]]
"""Name to the parts of a tensor, each with the ranks that have the same bytes for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A tensor, or a part of one, that some ranks have alike.

    Attributes:
        note: What it is.
        holders: The ranks that have it.
        is_for_all: Whether it is the one tensor of this name; otherwise it is that of its holders only.
    """

    note: Note
    holders: tuple[int, ...]
    is_for_all: bool

    @property
    def ranks(self) -> tuple[int, ...] | None:
        """The ranks whose tensor it is, where ranks differ; None when all have the same one."""
        return None if self.is_for_all else self.holders


def held(told: Sequence[Sequence[Note]]) -> dict[Note, list[int]]:
    """Return who says to have the same, in the same order on all ranks."""
    holders: dict[Note, list[int]] = {}
    for rank, notes in enumerate(told):
        for note in notes:
            holders.setdefault(note, []).append(rank)
    return holders


def digest_of_tensor(tensor: Tensor) -> str:
    """Return the digest of the content of a tensor."""
    return blake3(tensor.content(), max_threads=blake3.AUTO).hexdigest(_DIGEST_BYTES)


def digests_by_part(
    doubtful: Sequence[tuple[Note, list[int]]], said: Sequence[Json]
) -> dict[tuple[Note, int], str]:
    """Return the digest of every part on every rank that has it.

    Args:
        doubtful: What several ranks say to have.
        said: The digests of each rank, one after the other, in the same order.

    Raises:
        RanksOutOfStep: They are not as many.
    """
    found: dict[tuple[Note, int], str] = {}
    length = 2 * _DIGEST_BYTES
    keys_of: dict[int, list[Note]] = {}
    for key, holders in doubtful:
        for rank in holders:
            keys_of.setdefault(rank, []).append(key)
    for rank, text in enumerate(said):
        keys = keys_of.get(rank, [])
        if not isinstance(text, str) or len(text) != length * len(keys):
            raise RanksOutOfStep(f"rank {rank} runs another version: its digests are not as many")
        for number, key in enumerate(keys):
            found[key, rank] = text[number * length : (number + 1) * length]
    return found


def alike(holders_of: Mapping[Note, list[int]], digests: Mapping[tuple[Note, int], str]) -> Parts:
    """Return, for each name, the parts and the ranks that have the same bytes for them."""
    found: dict[str, list[tuple[Note, tuple[int, ...]]]] = {}
    for note, holders in holders_of.items():
        groups: dict[str, list[int]] = {}
        for rank in holders:
            groups.setdefault(digests.get((note, rank), ""), []).append(rank)
        found.setdefault(note.name, []).extend((note, tuple(ranks)) for ranks in groups.values())
    return found


def agreed(parts: Parts, *, world: int) -> Iterator[Shared]:
    """Yield what the ranks have, each once for those that have it alike.

    Raises:
        LayoutError: The parts of a tensor do not make up the whole, or the ranks contradict each other.
    """
    for name, groups in parts.items():
        declared = [note.is_declared for note, _ in groups]
        if any(declared) and not all(declared):
            raise LayoutError(f"{name!r} has a layout on some ranks and none on others")
        if not any(declared):
            is_for_all = len(groups) == 1 and len(groups[0][1]) == world
        else:
            _check_alike(name, [note for note, _ in groups])
            groups = _with_elements(groups)
            _check_grid(name, [note for note, _ in groups])
            is_for_all = len({note.region for note, _ in groups}) == len(groups)
            if not is_for_all:
                _warn_of_difference(name, groups)
        for note, holders in groups:
            yield Shared(note=note, holders=holders, is_for_all=is_for_all)


def _with_elements(
    groups: list[tuple[Note, tuple[int, ...]]],
) -> list[tuple[Note, tuple[int, ...]]]:
    """Leave out empty parts, unless the whole is empty."""
    return [one for one in groups if prod(one[0].lengths)] or groups[:1]


def _check_alike(name: str, notes: Sequence[Note]) -> None:
    first = notes[0]
    if any((note.shape, note.dtype) != (first.shape, first.dtype) for note in notes):
        raise LayoutError(f"the ranks say different shapes or types of {name!r}")


def _check_grid(name: str, notes: Sequence[Note]) -> None:
    """Check that the parts of a tensor are those of a grid over all of it.

    Raises:
        LayoutError: They are not; rows would be lost, or nobody could tell whose count.
    """
    first = notes[0]
    if not prod(first.shape):
        return
    regions = {note.region for note in notes}
    cells = 1
    for dimension, length in enumerate(first.shape):
        edges = sorted({region[dimension] for region in regions})
        stops = [0, *(edge.stop for edge in edges)]
        if [edge.start for edge in edges] != stops[:-1] or stops[-1] != length:
            raise _no_whole(name, first)
        cells *= len(edges)
    if cells != len(regions):
        raise _no_whole(name, first)


def _no_whole(name: str, note: Note) -> LayoutError:
    return LayoutError(
        f"the parts of {name!r} that the ranks have do not make up its shape {list(note.shape)}",
        hint="check its layout, and that all ranks that hold a part of it are saving",
    )


def _warn_of_difference(name: str, groups: Sequence[tuple[Note, tuple[int, ...]]]) -> None:
    by_region: dict[Region, list[tuple[int, ...]]] = {}
    for note, holders in groups:
        by_region.setdefault(note.region, []).append(holders)
    one, other = next(found for found in by_region.values() if len(found) > 1)[:2]
    _LOG.warning(
        "%r is declared to be the same on the ranks %s and %s, but it differs; each keeps its own",
        name,
        list(one[:_SHOWN]),
        list(other[:_SHOWN]),
    )
