# SPDX-License-Identifier: Apache-2.0
"""Read some bytes of an open checkpoint into memory, verified, for every kind of file."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.files.load.compressed import read_frames
from ckptmgr.files.load.open import OpenCheckpoint
from ckptmgr.formats.compressed.source import FramesSource
from ckptmgr.io.scatter import Placement, read_scattered


def read_parts(
    opened: OpenCheckpoint, placements: Sequence[Placement], *, is_confirmed: bool
) -> None:
    """Fill the targets of `placements`, in order of their offsets.

    Frames are verified by their table, cipher blocks by their tags, plain files by the digests of
    their ranges. Unless `is_confirmed`, the unverified reads of the index are checked, too.

    Raises:
        CorruptCheckpoint: The bytes or the index are damaged; the targets are then undefined.
        OSError: From the disk.
    """
    if isinstance(opened.source, FramesSource):
        read_frames(opened.source, placements)
        return
    if not opened.unit_bytes:
        for one in placements:
            opened.source.read_into(one.offset, one.target)
        return
    unverified = None if is_confirmed else opened.unverified
    read_scattered(
        opened.source,
        placements,
        unit_bytes=opened.unit_bytes,
        unverified=unverified,
        also_units=() if unverified is None else unverified.units(opened.unit_bytes),
    )
