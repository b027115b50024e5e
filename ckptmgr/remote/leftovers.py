# SPDX-License-Identifier: Apache-2.0
"""Data in an object store that no manifest names: left by an upload or a removal that was cut off."""

from __future__ import annotations

from collections.abc import Sequence

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.objects.directory import DATA, LEFTOVER_AGE, RemoteDirectory, id_in
from ckptmgr.store.listing import entry_of

_PROBLEM = (
    "no manifest names this data: an upload goes on or was cut off, or a removal was; prune removes it "
    f"{LEFTOVER_AGE.days} days after it was written"
)


def leftovers(directory: RemoteDirectory, found: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the data that none of the listed checkpoints has, one entry for each file."""
    named = {one.id for one in found}
    left = []
    for one in directory.objects.list(DATA):
        id = id_in(one.key)
        if id is not None and id not in named:
            status = FileStatus(
                one.size_bytes,
                one.modified_at.timestamp(),
                is_file=True,
                is_directory=False,
                identity=(0, 0),
            )
            left.append(entry_of(directory.path / one.key, status, State.LEFTOVER, _PROBLEM))
    return left
