# SPDX-License-Identifier: Apache-2.0
"""Clean up after writers that died: remove what they left, finish the overwrites they had committed.

A manifest without data is what an interrupted save or removal leaves, but also what a directory holds that is being copied
here, small files first. It is removed when the data that it describes is beside it in the unfinished file of a dead writer,
or when it has been here for a day, by a time that no copy brings along.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ckptmgr import manifest as manifests
from ckptmgr.errors import CkptmgrError, StoreLocked
from ckptmgr.fsio import FileStatus, FileSystem, discard, remove_name
from ckptmgr.lease import Processes, hold_lease, lease_path, series_tag
from ckptmgr.manifest import Manifest, manifest_name
from ckptmgr.manifest_files import ManifestFiles
from ckptmgr.temp_names import is_temp_of, parse_temp
from ckptmgr.trash_folder import DEFAULT_GRACE, may_be_in_trash

_GRACE_S = DEFAULT_GRACE.total_seconds()

Repair = Callable[[], str | None]
"""Does what is to be done, and says so; None where there was nothing to do."""


def recover(files: ManifestFiles, processes: Processes, series: str, *, now_s: float) -> list[str]:
    """Clean up after dead writers of a series and finish interrupted swaps; see `Store.recover`."""
    return _Recovery(files, processes, series, now_s).run()


def remove_dead_temps(fs: FileSystem, directory: Path, processes: Processes) -> list[str]:
    """Remove the unfinished files of writers that are known to be dead; needs no lease.

    Returns:
        What was done, one sentence each.
    """
    done = []
    for name in sorted(fs.list(directory)):
        parts = parse_temp(name)
        if parts is not None and processes.is_dead(parts[0]) is True:
            remove_name(fs, directory / name)
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

    def run(self) -> list[str]:
        if self._fs.status(self._directory) is None:
            return []
        entries = self._fs.list(self._directory)
        # Unfinished files go last: without them nothing would show that their manifests are leftovers.
        names = sorted(entries, key=lambda name: (name.startswith("."), name))
        repairs = [repair for name in names for repair in self._repairs(name, entries)]
        if not repairs:
            return []
        self._fs.sync_directory(self._directory)
        done = [_attempted(repair) for repair in repairs]
        self._fs.sync_directory(self._directory)
        return [sentence for sentence in done if sentence is not None]

    def _repairs(self, name: str, entries: dict[str, FileStatus]) -> Iterator[Repair]:
        """Yield what to do about one name."""
        if self._is_dead_temp(name):
            yield lambda: self._remove(name, "left by an interrupted save")
        if not name.endswith(manifests.SUFFIX) or name.startswith("."):
            return
        data_name = name.removesuffix(manifests.SUFFIX)
        try:
            # What is only claimed decides nothing here but whether to look closer.
            claimed = self._files.load(name, with_key=False)
            if claimed is None or claimed.series != self._series or claimed.shards:
                return  # a sharded checkpoint has no half that could be finished
            if data_name not in entries:
                self._files.load(name, must_authenticate=True)
                if not self._is_leftover(claimed, entries):
                    return
        except (CkptmgrError, OSError):
            return  # unreadable: shown by scan, removed only by a person
        if data_name not in entries:
            if not may_be_in_trash(self._fs, self._directory, data_name):
                yield lambda: self._remove(name, "whose data file is gone")
        elif claimed.replaces is not None:
            yield lambda: self._settle(data_name)

    def _is_leftover(self, manifest: Manifest, entries: dict[str, FileStatus]) -> bool:
        """Return whether a manifest without data is of a dead writer, not of a checkpoint whose data is still to come."""
        changed_ns = entries[manifest_name(manifest.name)].changed_ns
        if changed_ns is not None and changed_ns / 1e9 + _GRACE_S <= self._now_s:
            return True
        if manifest.replaces is not None:
            return False  # there was data when it was published
        return any(
            is_temp_of(temp, manifest.name)
            and self._is_dead_temp(temp)
            and self._files.is_described(self._directory / temp, manifest.file)
            for temp in entries
            if temp.startswith(".")
        )

    def _remove(self, name: str, why: str) -> str:
        remove_name(self._fs, self._directory / name)
        return f"removed {name}, {why}"

    def _settle(self, data_name: str) -> str | None:
        with contextlib.ExitStack() as leases:
            # Who writes a single file holds the lease of its name alone; the overwrite may be going on.
            lease = lease_path(self._directory, data_name)
            if data_name != self._series and self._fs.status(lease) is not None:
                try:
                    leases.enter_context(hold_lease(self._fs, self._directory, data_name))
                except StoreLocked:
                    return None
                leases.callback(discard, self._fs, lease)
            is_settled = self._files.settle(data_name, series=self._series)
        return f"finished the interrupted overwrite of {data_name}" if is_settled else None

    def _is_dead_temp(self, name: str) -> bool:
        parts = parse_temp(name)
        if parts is None:
            return False
        token, tag = parts
        is_dead = self._processes.is_dead(token)
        # Of other hosts nothing is known, but with the lease held nobody else writes this series.
        return is_dead is True or (is_dead is None and tag == series_tag(self._series))


def _attempted(repair: Repair) -> str | None:
    try:
        return repair()
    except OSError as error:
        return f"could not clean up: {error}"
