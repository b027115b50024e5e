# SPDX-License-Identifier: Apache-2.0
"""What was read of manifests, for as long as their files do not change: a run lists its directory at every save.

A file counts as unchanged while the directory says the same of it: inode, size, mode, and when it was modified and changed.
The time of change is the kernel's: whoever may write here can set all other times, but that one only with the clock of the
machine. And who has that gains nothing. What is kept was proven when it was read; it decides what a run counts, numbers and
keeps, as if the file had been swapped right after a look at it. Whatever is loaded or written again is read and proven anew.

Kept is neither what changed just now, as a second change could carry the same time, nor what could not be read or proven,
nor anything on disks that tell no time of change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ckptmgr.core.model import Checkpoint
from ckptmgr.io.filesystem import FileStatus

# The coarsest clock among file systems in use ticks every two seconds.
_TICK_S = 2


class _Seen(NamedTuple):
    files: Mapping[str, FileStatus]
    checkpoint: Checkpoint


class ManifestCache:
    """Checkpoints by the names of their manifests, as the last listing found them."""

    def __init__(self) -> None:
        self._seen: Mapping[str, _Seen] = {}

    def listing(self, entries: Mapping[str, FileStatus], *, now_s: float) -> CachedListing:
        """Return what is still true of a directory with these entries."""
        return CachedListing(self._seen, entries, before_ns=int((now_s - _TICK_S) * 1e9))

    def keep(self, listing: CachedListing) -> None:
        """Keep what a listing found, in place of all before."""
        self._seen = listing.found


class CachedListing:
    """What is known while a directory is being listed."""

    def __init__(
        self, seen: Mapping[str, _Seen], entries: Mapping[str, FileStatus], *, before_ns: int
    ) -> None:
        self._seen = seen
        self._entries = entries
        self._before_ns = before_ns
        self.found: dict[str, _Seen] = {}

    def get(self, name: str) -> Checkpoint | None:
        """Return the checkpoint of a manifest unless one of its files changed."""
        seen = self._seen.get(name)
        if seen is None or any(self._entries.get(file) != was for file, was in seen.files.items()):
            return None
        self.found[name] = seen
        return seen.checkpoint

    def note(self, name: str, checkpoint: Checkpoint, data_names: Sequence[str]) -> None:
        """Note what was read of a manifest, and the files that it depends on."""
        files = {}
        for file in (name, *data_names):
            status = self._entries.get(file)
            if status is None or status.changed_ns is None or status.changed_ns > self._before_ns:
                return
            files[file] = status
        self.found[name] = _Seen(files, checkpoint)
