# SPDX-License-Identifier: Apache-2.0
"""Cache of manifests whose files did not change, because a run lists its directory at every save.

A file counts as unchanged while its inode, size, mode, modification and change time stay the same.
The change time is set by the kernel: a user with write permission can set all other times, but that
one only with the clock of the machine. Such a user gains nothing. Cached values were proven when
they were read; they decide how a run counts, numbers and retains checkpoints, as if the file had
been swapped right after it was read. Everything that is loaded or rewritten is read and proven
again.

Not cached: files that changed just now, as a second change could have the same time; manifests that
could not be read or proven; and anything on disks without change times.
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
    """Checkpoints of the last listing, by the names of their manifests.

    `listed` counts those that were whole, cached or not.
    """

    def __init__(self) -> None:
        self._seen: Mapping[str, _Seen] = {}
        self.listed = 0

    def listing(self, entries: Mapping[str, FileStatus], *, now_s: float) -> CachedListing:
        """Return the cache for a directory with these entries, listed before `now_s` (since the epoch)."""
        return CachedListing(self._seen, entries, before_ns=int((now_s - _TICK_S) * 1e9))

    def keep(self, listing: CachedListing) -> None:
        """Replace the cached values by those of a listing."""
        self._seen, self.listed = listing.found, listing.listed


class CachedListing:
    """The cache during one listing; `found` holds its values.

    Files that changed after `before_ns` are not cached; None where each change is reported.
    """

    def __init__(
        self, seen: Mapping[str, _Seen], entries: Mapping[str, FileStatus], *, before_ns: int | None
    ) -> None:
        self._seen = seen
        self._entries = entries
        self._before_ns = before_ns
        self.found: dict[str, _Seen] = {}
        self.listed = 0

    def without_age(self) -> CachedListing:
        """Return the same cache for files of which each change is reported from now on."""
        return CachedListing(self._seen, self._entries, before_ns=None)

    def get(self, name: str) -> Checkpoint | None:
        """Return the cached checkpoint of a manifest unless one of its files changed."""
        seen = self._seen.get(name)
        if seen is None or any(self._entries.get(file) != was for file, was in seen.files.items()):
            return None
        self.listed += 1
        self.found[name] = seen
        return seen.checkpoint

    def note(self, name: str, checkpoint: Checkpoint, data_names: Sequence[str]) -> None:
        """Cache the checkpoint of a manifest together with the status of its files."""
        self.listed += 1
        files = {}
        for file in (name, *data_names):
            status = self._entries.get(file)
            if status is None or status.changed_ns is None:
                return
            if self._before_ns is not None and status.changed_ns > self._before_ns:
                return
            files[file] = status
        self.found[name] = _Seen(files, checkpoint)
