# SPDX-License-Identifier: Apache-2.0
"""Clean up after dead writers: remove their leftovers, finish the overwrites they had committed.

A manifest without data has several causes: an interrupted save or removal, a copy of a directory in
progress that brings small files first, or lost data. It is removed in two cases. Either a dead
writer left the described data in its temporary file. Or a checkpoint of its series that is as new
is whole, and it was saved after the manifest came here, or the manifest came here a day ago (by the
change time, which no copy preserves). Otherwise its data is missing, and the manifest stays to show
that.

Every process that begins to save cleans up for all series. It touches another series or name only
while no process holds its lease. Whether a process of another host still lives is unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError, StoreLocked
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.shard_names import is_checkpoint_name
from ckptmgr.core.trust import Trust
from ckptmgr.io.filesystem import FileStatus, FileSystem, unlink_if_present
from ckptmgr.io.leases import Processes, hold_lease, holders_in, lease_path, read_text, series_tag
from ckptmgr.io.owners import is_of_stranger
from ckptmgr.io.temp_names import is_temp_of, parse_temp
from ckptmgr.store.listing import listed
from ckptmgr.store.lone_manifests import LoneManifest
from ckptmgr.store.manifest import codec as manifests
from ckptmgr.store.manifest.cache import ManifestCache
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.manifest.files import ManifestFiles
from ckptmgr.store.name_leases import leased_name
from ckptmgr.store.trash_folder import DEFAULT_GRACE, may_be_in_trash

_GRACE_S = DEFAULT_GRACE.total_seconds()

Repair = Callable[[], str | None]
"""Makes one repair and describes it; returns None if nothing was to be done."""


def recover(files: ManifestFiles, processes: Processes, series: str, *, now_s: float) -> list[str]:
    """Clean up after dead writers of a series and finish interrupted swaps; see `Store.recover`."""
    return _Recovery(files, processes, series, now_s).run()


def remove_dead_temps(fs: FileSystem, directory: Path, processes: Processes) -> list[str]:
    """Remove the temporary files of dead writers; needs no lease. Return one sentence per removal.

    Those whose manifest is published stay for `recover`, which removes that manifest first.
    """
    done = []
    with fs.hold_directory(directory):
        names = set(fs.names(directory))
        # Also those of the manifests that published files lack.
        kept = [
            one.removesuffix(manifests.SUFFIX)
            if one.endswith(manifests.SUFFIX)
            else manifest_name(one)
            for one in names
        ]
        kept = [one for one in kept if one not in names]
        for name in sorted(names):
            parts = parse_temp(name)
            if parts is None or any(is_temp_of(name, one) for one in kept):
                continue
            if processes.is_dead(parts[0]) is True:
                with contextlib.suppress(PermissionError):  # of a stranger, in a sticky directory
                    unlink_if_present(fs, directory / name)
                    done.append(f"removed {name}, left by an interrupted save")
    return done


class _Recovery:
    def __init__(
        self, files: ManifestFiles, processes: Processes, series: str, now_s: float
    ) -> None:
        self._files = files
        self._fs = files.fs
        self._directory = files.directory
        self._processes = processes
        self._series = series
        self._now_s = now_s
        self._found: list[Checkpoint] | None = None
        self._dead_temps: list[str] = []

    def run(self) -> list[str]:
        at = self._fs.status(self._directory)
        if at is None:
            return []
        entries = self._fs.list(self._directory)
        self._remove_leases(entries)
        ours = sorted(name for name, one in entries.items() if not is_of_stranger(one, at))
        self._dead_temps = [name for name in ours if self._is_dead_temp(name)]
        # Temporary files are removed last, when the removal of their manifests is durable: they
        # show that the manifests are leftovers.
        visible = [name for name in ours if not name.startswith(".")]
        hidden = [name for name in ours if name.startswith(".")]
        steps = [
            [repair for name in names for repair in self._repairs(name, entries)]
            for names in (visible, hidden)
        ]
        if not any(steps):
            return []
        done: list[str | None] = []
        try:
            self._fs.sync_directory(self._directory)
            for repairs in filter(None, steps):
                done += [_attempted(repair) for repair in repairs]
                self._fs.sync_directory(self._directory)
        except OSError as error:
            done.append(f"could not clean up: {error}")
        return [sentence for sentence in done if sentence is not None]

    def _repairs(self, name: str, entries: dict[str, FileStatus]) -> Iterator[Repair]:
        """Yield the repairs that one name needs."""
        if is_checkpoint_name(name) and manifest_name(name) not in entries:
            for temp in self._dead_temps:
                new = self._files.in_temp(temp, name, trust=self._files.trust.strict)
                if new is not None:
                    yield partial(self._remove_uncommitted, new)
        if name in self._dead_temps:
            yield lambda: self._remove_temp(name, entries)
        if not name.endswith(manifests.SUFFIX) or name.startswith("."):
            return
        data_name = name.removesuffix(manifests.SUFFIX)
        try:
            # The unproven content decides only whether to check further.
            claimed = self._files.load(name, trust=Trust())
            if claimed is None or claimed.shards:
                return  # a sharded checkpoint has no swap that could be finished
            if data_name not in entries:
                self._files.load(name, trust=self._files.trust.strict)
                if not self._is_leftover(claimed, entries):
                    return
        except (CkptmgrError, OSError):
            return  # unreadable: the listing shows it, and only the user removes it
        if data_name not in entries:
            if not may_be_in_trash(self._fs, self._directory, data_name):
                yield lambda: self._remove_alone(claimed, entries[name])
        elif claimed.replaces is not None:
            yield lambda: self._settle(claimed)

    def _is_leftover(self, manifest: Manifest, entries: dict[str, FileStatus]) -> bool:
        """Return whether a dead writer left a manifest without data.

        False where the data is missing or may still come.
        """
        lone = LoneManifest(manifest)
        temps = (temp for temp in self._dead_temps if is_temp_of(temp, manifest.name))
        if any(lone.is_completed_by(self._files, temp) for temp in temps):
            return True
        changed_ns = entries[manifest_name(manifest.name)].changed_ns
        newer = lone.newer_in(self._present())
        if newer is None or changed_ns is None:
            return False
        # The change time of a copied file is later than the time of the save in it.
        changed_s = changed_ns / 1e9
        return changed_s <= newer.saved_at.timestamp() or changed_s + _GRACE_S <= self._now_s

    def _present(self) -> list[Checkpoint]:
        if self._found is None:
            seen = ManifestCache()
            self._found, _ = listed(self._files, self._processes, seen, now_s=self._now_s)
        return self._found

    def _remove_temp(self, name: str, entries: dict[str, FileStatus]) -> str | None:
        """Remove a temporary file, but not where the data or manifest beside it would mislead.

        Without it that manifest would look like one whose data is missing, or that data like a file
        without a manifest.
        """
        for one in entries:
            is_bare = is_checkpoint_name(one) and manifest_name(one) not in entries
            if is_bare and self._files.in_temp(name, one, trust=Trust()):
                return None
            data_name = one.removesuffix(manifests.SUFFIX)
            if one != data_name and data_name not in entries and is_temp_of(name, data_name):
                with contextlib.suppress(CkptmgrError):
                    claimed = self._files.load(one, trust=Trust())
                    if claimed and LoneManifest(claimed).is_completed_by(self._files, name):
                        return None
        return self._remove(name, "left by an interrupted save")

    def _remove_uncommitted(self, manifest: Manifest) -> str | None:
        """Remove data whose manifest has no name yet, unless it was saved meanwhile."""
        with self._leases_of(manifest) as is_held:
            path = self._directory / manifest_name(manifest.name)
            if not is_held or self._fs.status(path) is not None:
                return None
            return self._remove(manifest.name, "left by an interrupted save")

    def _remove(self, name: str, why: str) -> str:
        unlink_if_present(self._fs, self._directory / name)
        return f"removed {name}, {why}"

    def _remove_alone(self, claimed: Manifest, listed: FileStatus) -> str | None:
        """Remove a manifest without data, unless another process saved under its name meanwhile."""
        name = manifest_name(claimed.name)
        with self._leases_of(claimed) as is_held:
            status = self._fs.status(self._directory / name)
            if not is_held or status is None or status.identity != listed.identity:
                return None
            if self._fs.status(self._directory / claimed.name) is not None:
                return None
            return self._remove(name, "whose data file is gone")

    def _settle(self, claimed: Manifest) -> str | None:
        with self._leases_of(claimed) as is_held:
            is_settled = is_held and self._files.finish_swap(claimed.name, series=claimed.series)
        return f"finished the interrupted overwrite of {claimed.name}" if is_settled else None

    @contextmanager
    def _leases_of(self, claimed: Manifest) -> Iterator[bool]:
        """Hold the leases of a checkpoint; yield False if another process writes it.

        A run holds the lease of its series, other writers that of the name.
        """
        with contextlib.ExitStack() as leases:
            is_held = True
            try:
                for name in {claimed.series, claimed.name} - {self._series}:
                    leases.enter_context(self._lease(name))
            except StoreLocked:
                is_held = False
            yield is_held

    @contextmanager
    def _lease(self, name: str) -> Iterator[None]:
        """Hold a lease that no live process has.

        Raises:
            StoreLocked: A process has it, or one of another host may: not every file system locks
                files across hosts.
        """
        with contextlib.suppress(FileNotFoundError):
            owner, _ = holders_in(read_text(self._fs, lease_path(self._directory, name)))
            if owner.token and self._processes.is_dead(owner.token) is None:
                raise StoreLocked(
                    f"{name!r} may be in use: {owner.description}", path=self._directory
                )
        with hold_lease(self._fs, self._directory, name, is_cleaning=True):
            yield

    def _remove_leases(self, names: Iterable[str]) -> None:
        """Remove the lease files of killed processes; without a sync, as they are harmless."""
        leased = {found for name in names if (found := leased_name(name)) is not None}
        for name in leased - {self._series}:
            with contextlib.suppress(StoreLocked, OSError):
                if self._is_left(name):
                    with self._lease(name):
                        pass

    def _is_left(self, name: str) -> bool:
        """Return whether no live process is named by a lease file.

        Raises:
            OSError: The file is gone, or cannot be read.
        """
        owner, _ = holders_in(read_text(self._fs, lease_path(self._directory, name)))
        return not owner.token or self._processes.is_dead(owner.token) is not False

    def _is_dead_temp(self, name: str) -> bool:
        parts = parse_temp(name)
        if parts is None:
            return False
        token, tag = parts
        is_dead = self._processes.is_dead(token)
        # Processes of other hosts are unknown, but with the lease held no other writes this series.
        return is_dead is True or (is_dead is None and tag == series_tag(self._series))


def _attempted(repair: Repair) -> str | None:
    try:
        return repair()
    except OSError as error:
        return f"could not clean up: {error}"
