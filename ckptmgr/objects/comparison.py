# SPDX-License-Identifier: Apache-2.0
"""Comparison of one checkpoint in two places, here and there. Pure; the same in both directions.

A save keeps its name, run and number while people change its keys, pins, tags or metrics. Such a
change counts: that of a manifest in its `revision`, that of a container's keys in the generation of
its header copies. So of two copies of one save the later one is known, without clocks.

| here and there | |
|---|---|
| the same bytes of the manifest | `SAME`: a change of keys writes these last, see `objects.directory` |
| the same save, more changes here | `HERE` |
| the same save, more changes there | `THERE` |
| the same save, some changes here and others there, or as many that differ | `BOTH` |
| the same save, and only its proofs differ | `HERE`: a mirror has one writer |
| the same save, as many changes, other data; another save | `OTHER` |
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.crypto.errors import CryptoError
from ckptmgr.formats.source import BytesSource
from ckptmgr.store.manifest.codec import Manifest

if TYPE_CHECKING:  # slow, and for encrypted files only
    from ckptmgr.crypto.container.unlock import FoundCopy

UNFINISHED = b"\n"
"""What follows the manifest there while the files of a change of keys are still being written."""


class Difference(enum.Enum):
    """Which of two copies of a checkpoint is the later one."""

    SAME = "same"
    HERE = "here"
    THERE = "there"
    BOTH = "both"
    OTHER = "other"


class Side(NamedTuple):
    """A manifest and its bytes, in one of two places."""

    manifest: Manifest
    data: bytes

    @property
    def is_unfinished(self) -> bool:
        """Whether a change of keys has written this manifest, and not all files yet."""
        return self.data.endswith(b"\n" + UNFINISHED)


class Headers(NamedTuple):
    """The bytes of a file that its digest leaves out, here and there; empty where the file is gone."""

    here: bytes
    there: bytes


def compare(here: Side, there: Side, headers: Iterable[Headers]) -> Difference:
    """Compare two copies; `headers` are read where they decide: of files with the same digests."""
    if here.data == there.data:
        return Difference.SAME
    if here.manifest.save != there.manifest.save:
        return Difference.OTHER
    newer = here.manifest.revision - there.manifest.revision
    changes = [newer > 0, newer < 0]
    if here.manifest.id != there.manifest.id:
        return _later(*changes, otherwise=Difference.OTHER)
    if not newer and here.manifest != there.manifest:
        return Difference.BOTH
    for one in headers:
        ours, theirs = _newest(one.here), _newest(one.there)
        if ours[0] == theirs[0] and ours != theirs:
            return Difference.BOTH
        changes[0] |= ours[0] > theirs[0]
        changes[1] |= ours[0] < theirs[0]
    return _later(*changes, otherwise=Difference.HERE)


def _later(is_here: bool, is_there: bool, *, otherwise: Difference) -> Difference:
    if is_here and is_there:
        return Difference.BOTH
    if is_here or is_there:
        return Difference.HERE if is_here else Difference.THERE
    return otherwise


def _newest(header: bytes) -> tuple[int, bytes]:
    """Return how often the keys of a container were changed, from 1, and the header copy that says so.

    0 where no header copy is whole.
    """
    copies = _copies(header)
    return (copies[0].header.generation, copies[0].data) if copies else (0, b"")


def slots_in(header: bytes) -> frozenset[bytes]:
    """Return the key slots of the header copies of a container."""
    return frozenset(slot.pack() for one in _copies(header) for slot in one.header.slots)


def copy_to_keep(header: bytes, *, is_switched: bool) -> bytes:
    """Return the header copy for whose keys the manifest is.

    An earlier change that was cut may have left two: the newer one counts once its manifest is there.
    """
    copies = _copies(header)
    return b"" if not copies else copies[0 if is_switched else -1].data


def _copies(header: bytes) -> Sequence[FoundCopy]:
    from ckptmgr.crypto.container.unlock import find_copies

    try:
        return find_copies(BytesSource(header)) if header else []
    except CryptoError:
        return []
