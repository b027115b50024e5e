# SPDX-License-Identifier: Apache-2.0
"""Catalogue of a directory in memory: the listing, kept up to date name by name.

A run that keeps n checkpoints would list n files before and after each save. While it holds its
lease, a `DirectoryWatch` names what changed instead, and only those names are looked at again.

* *Settled* are the checkpoints in state OK: they depend on their own files alone. A change of one of
  these files unsettles them.
* *Loose* are all other names. They are listed again each time, because they also depend on other
  files, on processes and on the trash.

So the catalogue equals a listing. It decides nothing that a listing would not decide:
each checkpoint to remove or load is read again under its lease.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.leases import Processes
from ckptmgr.io.temp_names import parse_temp
from ckptmgr.store.listing import list_entries
from ckptmgr.store.manifest.cache import CachedListing, ManifestCache
from ckptmgr.store.manifest.codec import SUFFIX, manifest_name
from ckptmgr.store.manifest.reader import ManifestReader

if TYPE_CHECKING:  # a run that keeps few checkpoints needs none of it
    from ckptmgr.io.directory_watch import DirectoryWatch

LEAST_SAVED = 4
"""Checkpoints from which on a catalogue costs less than two listings for each save."""


class KeptCatalogue:
    """The catalogue of a directory while it is followed, or none. Safe to use from several threads.

    Where there is none, or it is of no use any more, the answers are None: the directory must be
    listed. `seen` has what earlier listings read.
    """

    def __init__(self, files: ManifestReader, processes: Processes) -> None:
        self._files = files
        self._processes = processes
        self.forget_parent()

    def forget_parent(self) -> None:
        """Follow no longer, in a forked child: the parent gets the reports."""
        self._mutex = threading.RLock()
        self._is_followed = False
        self._catalogue: Catalogue | None = None

    def follow(self) -> None:
        """Make a catalogue once the directory is large enough."""
        self._is_followed = True

    def stop(self) -> None:
        """Drop the catalogue, and make no other."""
        with self._mutex:
            self._is_followed = False
            self._drop()

    def _drop(self) -> None:
        if self._catalogue is not None:
            self._catalogue.close()
            self._catalogue = None

    def listed(self, seen: ManifestCache) -> list[Checkpoint] | None:
        """Return the listing. Raises OSError as a listing."""
        with self._mutex:
            catalogue = self._updated(seen)
            return None if catalogue is None else catalogue.checkpoints()

    def near(self, step: int, sequence: int, seen: ManifestCache) -> list[Checkpoint] | None:
        """Return the checkpoints of a step, those from a commit sequence on, and all not settled."""
        with self._mutex:
            catalogue = self._updated(seen)
            return None if catalogue is None else catalogue.near(step, sequence)

    def _updated(self, seen: ManifestCache) -> Catalogue | None:
        if self._catalogue is None and self._is_followed and seen.listed >= LEAST_SAVED:
            from ckptmgr.io.directory_watch import DirectoryWatch

            watch = DirectoryWatch.of(self._files.directory)
            self._is_followed = watch is not None  # else it would be tried at each save
            if watch is not None:
                self._catalogue = Catalogue(self._files, self._processes, watch)
        if self._catalogue is not None and not self._catalogue.update(seen):
            self._drop()
        return self._catalogue


class Catalogue:
    """The checkpoints of a watched directory."""

    def __init__(self, files: ManifestReader, processes: Processes, watch: DirectoryWatch) -> None:
        self._files = files
        self._processes = processes
        self._watch = watch
        self._is_whole = False
        self._reset()

    def _reset(self) -> None:
        self._entries: dict[str, FileStatus] = {}
        self._settled: dict[str, Checkpoint] = {}
        self._settled_by_file: dict[str, str] = {}
        self._by_step: dict[int, set[str]] = {}
        self._sequences: list[tuple[int, str]] = []
        self._loose: set[str] = set()
        self._others: tuple[Checkpoint, ...] = ()

    def close(self) -> None:
        """Stop watching the directory."""
        self._watch.close()

    def checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints as of the last update."""
        return [*self._settled.values(), *self._others]

    def near(self, step: int, sequence: int) -> list[Checkpoint]:
        """Return the checkpoints of a step, those from a commit sequence on, and all not settled."""
        later = bisect.bisect_left(self._sequences, (sequence, ""))
        names = {name for _, name in self._sequences[later:]} | self._by_step.get(step, set())
        return [*(self._settled[name] for name in names), *self._others]

    def update(self, seen: ManifestCache) -> bool:
        """Look at the names that changed; return False if the directory is watched no longer.

        Raises OSError as a listing.
        """
        changed = self._watch.changed_names()
        if changed is None:
            return False
        was_whole, self._is_whole = self._is_whole, False  # until the end, without an error
        if was_whole:
            known = self._noted(changed)
        else:
            self._reset()
            self._entries = self._files.fs.list(self._files.directory)
            self._loose = {name for name in self._entries if _matters(name)}
            known = seen.listing(self._entries, now_s=0).without_age()
        missing: set[str] = set()
        while True:
            found = self._list_loose(known)
            # As in `listing.listed`: data that a save renames meanwhile may have had neither name.
            before, missing = missing, {c.name for c in found if c.state is State.MISSING}
            if missing == before:
                break
            again = self._watch.changed_names()
            if again is None:
                return False
            known = self._noted(again)
        self._others = tuple(found)
        self._is_whole = True
        return True

    def _noted(self, changed: Iterable[str]) -> CachedListing:
        """Unsettle the checkpoints of the changed names; return an empty cache for the next listing."""
        for name in filter(_matters, changed):
            status = self._files.fs.status(self._files.directory / name)
            self._unsettle(name)
            if status is None:
                self._entries.pop(name, None)
                self._loose.discard(name)
            else:
                self._entries[name] = status
                self._loose.add(name)
        return CachedListing({}, self._entries, before_ns=None)

    def _list_loose(self, known: CachedListing) -> list[Checkpoint]:
        """Settle what can be settled; return all other checkpoints."""
        if not self._loose:
            return []
        entries = {name: self._entries[name] for name in self._loose}
        found = list_entries(
            self._files, self._processes, entries, known, others=self._settled.values()
        )
        new = known.found
        for name, one in new.items():
            self._settle(name, one.checkpoint, one.files)
        return [c for c in found if c.state is not State.OK or manifest_name(c.name) not in new]

    def _settle(self, name: str, checkpoint: Checkpoint, files: Iterable[str]) -> None:
        self._settled[name] = checkpoint
        for file in (name, name.removesuffix(SUFFIX), *files):
            self._settled_by_file[file] = name
            self._loose.discard(file)
        self._by_step.setdefault(checkpoint.step, set()).add(name)
        bisect.insort(self._sequences, (checkpoint.sequence, name))

    def _unsettle(self, file: str) -> None:
        name = self._settled_by_file.get(file)
        if name is None:
            return
        checkpoint = self._settled.pop(name)
        for one in (name, name.removesuffix(SUFFIX), *checkpoint.shards):
            self._settled_by_file.pop(one, None)
            if one in self._entries:
                self._loose.add(one)
        same_step = self._by_step[checkpoint.step]
        same_step.discard(name)
        if not same_step:
            del self._by_step[checkpoint.step]
        del self._sequences[bisect.bisect_left(self._sequences, (checkpoint.sequence, name))]


def _matters(name: str) -> bool:
    """Return whether a name can be that of a file of a checkpoint."""
    return not name.startswith(".") or parse_temp(name) is not None
