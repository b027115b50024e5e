# SPDX-License-Identifier: Apache-2.0
"""One directory of checkpoints: its listing, and the only ways to change it.

Publishing, in this order: data and manifest written and synced under temporary names; directory
synced; manifest renamed; data renamed (the commit point); directory synced. Before the last rename
the checkpoint does not exist, afterwards it is whole. Data that a power cut leaves without its
manifest, because the disk reordered the two renames, is not committed: its manifest is still in the
temporary file, and recovery removes it. When a name is overwritten, the directory is also synced
between the renames. The new manifest then also describes the old data until the swap is durable, so
at every instant the name verifies.

Removing, in this order: directory synced; data unlinked; directory synced; manifest unlinked;
directory synced. Retention after a durable save leaves out the first and the last of these syncs.
A half-removed checkpoint is a manifest without data that is older than a whole
one: a leftover. A newer manifest without its data in a temporary file results from neither order:
its data is missing (see `lone_manifests`).

Calls that only read are repeated when they fail with an error that may pass (see
`io.passing_errors`).

A sharded checkpoint exists as soon as its manifest does (see `core.shard_names`): the manifest is
published last and removed first. Data files of ranks that no manifest names are leftovers.

A visible change may not be durable yet: its writer may have died between a rename and the sync. So
every function that relies on the listing (to remove, overwrite or recover) syncs the directory
first.

The decision *what* to keep is made in `policy.retention`.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import (
    CkptmgrError,
    KeyProblem,
    UnsafePrune,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import Checkpoint, Pin, State
from ckptmgr.core.place import DIRECTORY, Capabilities, Trash
from ckptmgr.core.shard_names import is_checkpoint_name
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.filesystem import (
    FileStatus,
    FileSystem,
    InputFile,
    OsFileSystem,
    OutputFile,
    unlink_if_present,
)
from ckptmgr.io.leases import Leases, Processes, ProcProcesses
from ckptmgr.io.owners import about_stranger, is_of_stranger
from ckptmgr.io.permissions import DEFAULT_FILE_MODE, directory_mode, note_mode
from ckptmgr.io.retrying_filesystem import RetryingFileSystem
from ckptmgr.io.signals import defer_signals
from ckptmgr.io.space_errors import explain_errors
from ckptmgr.store.catalogue import KeptCatalogue
from ckptmgr.store.listing import listed, listed_alone
from ckptmgr.store.manifest.cache import ManifestCache
from ckptmgr.store.manifest.codec import Manifest, files_of
from ckptmgr.store.manifest.files import ManifestFiles
from ckptmgr.store.manifest.reader import check_is_file
from ckptmgr.store.name_leases import HeldNames, check_as_listed, hold_unchanged
from ckptmgr.store.publish import Publisher
from ckptmgr.store.recovery import recover

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.store.manifest.keys import ManifestKey

# While a writer of another series works, the directory may never stop changing.
_MOST_LOOKS = 20
_MOST_NOTE_BYTES = 4096


class Store:
    """A checkpoint directory.

    Args:
        directory: The folder; created on the first save.
        fs: The disk.
        trust: Its keys authenticate, sign and prove manifests.
        processes: Distinguishes dead writers from live ones.
        clock: Seconds since the epoch by the clock of the disk; for the age of leftovers.
        file_mode: Permission bits of new data files; all others follow (see `io.permissions`).

    Attributes:
        catalogue: The listing in memory.
        leases: The leases that are held through this store.
        publisher: Creates the files of the directory.
        is_on_real_disk: Whether another process that opens the directory sees the same.
    """

    can: Capabilities = DIRECTORY

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem | None = None,
        trust: Trust = DEFAULT_TRUST,
        processes: Processes | None = None,
        clock: Callable[[], float] = time.time,
        file_mode: int = DEFAULT_FILE_MODE,
    ) -> None:
        disk = RetryingFileSystem.wrapping(OsFileSystem() if fs is None else fs)
        self.is_on_real_disk = isinstance(disk.disk, OsFileSystem)
        self.directory = directory
        self.fs: FileSystem = disk
        self.trust = trust
        self.clock = clock
        self.file_mode = file_mode
        self.processes: Processes = processes if processes is not None else ProcProcesses()
        self.manifests = ManifestFiles(directory, fs=disk, trust=trust, processes=self.processes)
        self.leases: Leases = self.manifests.leases
        self.publisher = Publisher(self.manifests)
        self._seen = ManifestCache()
        self.catalogue = KeptCatalogue(self.manifests, self.processes)

    @property
    def trash(self) -> Trash | None:
        """The trash of the directory; None where nothing can come back."""
        from ckptmgr.store.trash import DirectoryTrash

        return DirectoryTrash(self) if self.can.trash else None

    def make_directory(self) -> None:
        """Create the directory and its missing parents durably, unless it exists."""
        self.fs.make_directory(self.directory, mode=directory_mode(self.file_mode))

    def follow(self) -> None:
        """Keep the listing in memory from now on, where that pays; see `catalogue`."""
        if self.is_on_real_disk:
            self.catalogue.follow()

    def scan_near(self, step: int, sequence: int) -> list[Checkpoint]:
        """Return at least those of a step, those of commit `sequence` and later, and all not whole.

        They decide name, number and predecessor of a save whose run has committed `sequence`.
        """
        near = self.catalogue.near(step, sequence, self._seen)
        return self.scan() if near is None else near

    def scan(self) -> list[Checkpoint]:
        """Return every checkpoint of the directory, finished or not, in no particular order.

        Damage does not raise: damaged and half-written checkpoints are returned with their state
        and problem. Reads manifests only, and each again only when its file changes.
        """
        found = self.catalogue.listed(self._seen)
        if found is not None:
            return found
        return self.scan_with_entries()[0]

    def scan_with_entries(self) -> tuple[list[Checkpoint], Mapping[str, FileStatus]]:
        """Return as `scan`, and the entries of the directory, for another look at the same list."""
        return listed(self.manifests, self.processes, self._seen, now_s=self.clock())

    def scan_for(self, series: str | None) -> list[Checkpoint]:
        """As `scan`, but repeat it while the directory changes and shows no checkpoint of a series.

        None means any series. Only countable checkpoints end the repetition.

        A listing is no snapshot. Beside a run that keeps only its last checkpoint it may show
        neither the old one nor the new one.
        """
        before: frozenset[str] | None = None
        found: list[Checkpoint] = []
        for _ in range(_MOST_LOOKS):
            found = self.scan()
            is_found = any(c.is_countable and series in (None, c.series) for c in found)
            if is_found or self.fs.status(self.directory) is None:
                break
            names = frozenset(self.fs.list(self.directory))
            if names == before:
                break
            before = names
        return found

    def read_manifest(self, data_name: str, *, is_bare_taken: bool = False) -> Manifest | None:
        """Return the manifest of a data file, or None when it has none.

        After an interrupted swap, returns the side that describes the present data; with
        `is_bare_taken` None, if that had no manifest.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under
                another key.
        """
        return self.manifests.read(data_name, is_bare_taken=is_bare_taken)

    def open_data(self, path: Path) -> InputFile:
        """Open a data file that a manifest of the directory describes.

        Raises:
            CorruptCheckpoint: A link has its name.
            OSError: From the disk.
        """
        check_is_file(self.fs, path)
        return self.fs.open(path)

    @contextmanager
    def lease(self, series: str) -> Iterator[None]:
        """Be the only writer of a series, or of one file; no lease file remains.

        Raises:
            StoreLocked: Another process is the writer.
            OSError: From the disk.
        """
        if self.fs.status(self.directory) is None:  # the save makes it durable
            self.make_directory()
        with self.leases.hold(series):
            yield

    def look(self, name: str) -> Checkpoint | None:
        """Return the checkpoint that is listed under one name now, or None.

        Raises:
            OSError: From the disk.
        """
        return listed_alone(self.manifests, self.processes, name)

    @contextmanager
    def unchanged(
        self, checkpoints: Sequence[Checkpoint], *, needed: Sequence[Checkpoint] = ()
    ) -> Iterator[HeldNames]:
        """Hold the names of the checkpoints that are unchanged since their listing.

        The leases of their series must be held. `needed` are the staying ones that justify the
        removal; see `check_needed`.

        Raises:
            StoreLocked: One of those leases is lost.
            UnsafePrune: A needed checkpoint is not there as it was listed.
            OSError: From the disk.
        """
        with (
            self.fs.hold_directory(self.directory),
            hold_unchanged(self.fs, self.directory, checkpoints, self.look) as held,
        ):
            # Both last, because taking the leases of many names takes long.
            if checkpoints:
                self.check_needed(needed)
            self.leases.check(*(checkpoint.series for checkpoint in checkpoints))
            yield held

    def update_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest of a committed checkpoint durably; it keeps its mode."""
        with explain_errors(self.directory / manifest.name, self.fs):
            self.fs.sync_directory(self.directory)
            self.manifests.put(manifest, series=manifest.series, mode=None)
            self.fs.sync_directory(self.directory)

    def lost_by_rewriting(self, name: str) -> str | None:
        """Return the proof that rewriting a manifest loses: `authenticated`, `signed` or None."""
        return self.manifests.lost_by_rewriting(name)

    def reauthenticate(self, name: str, change: Callable[[ManifestKey], ManifestKey]) -> None:
        """Give the manifest of a committed checkpoint another authentication; it keeps its mode.

        The change is durable. The lease must be held.

        Raises:
            CkptmgrError: It cannot be read, or is not authenticated.
        """
        with explain_errors(self.directory / name, self.fs):
            self.fs.sync_directory(self.directory)
            self.manifests.reauthenticate(name, change)
            self.fs.sync_directory(self.directory)

    def check_proven(self, checkpoint: Checkpoint) -> None:
        """Check that the writer's own keys prove a manifest which they are about to authenticate.

        Raises:
            CkptmgrError: They do not.
        """
        self.manifests.read_proven(checkpoint.name)

    def finish_swap(self, checkpoint: Checkpoint) -> None:
        """Finish an interrupted overwrite of a checkpoint; the lease must be held.

        Call it before a change of the manifest, which would not change the proofs that the manifest
        keeps for the old data.

        Raises:
            OSError: From the disk.
        """
        self.fs.sync_directory(self.directory)
        if self.manifests.finish_swap(checkpoint.path.name, series=checkpoint.series):
            self.fs.sync_directory(self.directory)

    def change_pins(
        self, checkpoint: Checkpoint, change: Callable[[tuple[Pin, ...]], tuple[Pin, ...]]
    ) -> Manifest:
        """Replace the pins of a committed checkpoint in its manifest, durably; hold the lease.

        Raises:
            UnsupportedCheckpoint: It has no manifest that could hold pins.
            KeyProblem: The manifest is authenticated or signed, and without that key it cannot be
                rewritten.
        """
        return self.change_manifest(checkpoint, lambda one: replace(one, pins=change(one.pins)))

    def change_manifest(
        self, checkpoint: Checkpoint, change: Callable[[Manifest], Manifest]
    ) -> Manifest:
        """Replace the manifest of a committed checkpoint durably; hold the lease.

        Raises as `change_pins`.
        """
        self.finish_swap(checkpoint)
        manifest = self.read_manifest(checkpoint.name)
        if manifest is None:
            raise UnsupportedCheckpoint(
                "a file without a manifest cannot be pinned or tagged, nor given metrics",
                path=checkpoint.path,
            )
        self.check_rewritable(checkpoint)
        changed = change(manifest).changed()
        self.update_manifest(changed)
        return changed

    def check_owner(self, checkpoint: Checkpoint) -> None:
        """Raise UnsafeWrite for a checkpoint of a stranger: rewritten by this user it would count."""
        if checkpoint.state is State.OTHER_OWNER:
            raise UnsafeWrite(
                f"{checkpoint.problem}; written again it would be yours, and count",
                path=checkpoint.path,
                hint="look at what it holds; if it is right, chown it, its manifest included, to yourself",
            )

    def check_rewritable(self, checkpoint: Checkpoint) -> None:
        """Raise unless the manifest of a checkpoint, if any, can be rewritten with the same proofs.

        Raises:
            UnsafeWrite: It belongs to a stranger.
            KeyProblem: It is authenticated or signed, and the key for that is missing.
        """
        self.check_owner(checkpoint)
        lost = self.lost_by_rewriting(checkpoint.name)
        if lost is not None:
            option = "--key" if lost == "authenticated" else "--signing-key"
            raise KeyProblem(
                f"the manifest is {lost}; without its key it cannot be changed",
                path=checkpoint.path,
                hint=f"pass the key (CLI: {option})",
            )

    def remove(
        self,
        checkpoints: Sequence[Checkpoint],
        *,
        needed: Sequence[Checkpoint] = (),
        present: Sequence[Checkpoint] | None = None,
    ) -> list[Exception]:
        """Remove checkpoints durably; return the errors of those that could not be removed.

        A checkpoint under whose name another process saves, or saved since the listing, stays; that
        is one of the errors. The leases of all their series must be held.

        Args:
            checkpoints: The checkpoints to remove.
            needed: The staying ones because of which these go; they must still be there.
            present: The checkpoints of the directory, where the caller has just listed them after a
                durable save; None to list them. A power cut may then bring back the last removed one: the
                manifest, or the files of ranks, which are leftovers.

        Raises:
            StoreLocked: A lease is lost; nothing was removed.
            UnsafePrune: It would remove the last countable checkpoint of the directory, or a needed
                one is not there as it was listed.
        """
        self.check_not_all(checkpoints, self.scan() if present is None else present)
        with defer_signals(), self.unchanged(checkpoints, needed=needed) as held:
            return held.failures + self._remove(held.checkpoints, is_after_save=present is not None)

    def remove_copied(self, checkpoint: Checkpoint) -> None:
        """Remove durably a checkpoint of which another one of the directory is a proven copy.

        The lease of its name must be held since that proof.

        Raises:
            StoreLocked: The lease is lost; nothing was removed.
            OSError: From the disk.
        """
        self.leases.check(checkpoint.series, checkpoint.name)
        for error in self._remove([checkpoint]):
            raise error

    def _remove(
        self, checkpoints: Sequence[Checkpoint], *, is_after_save: bool = False
    ) -> list[Exception]:
        failures: list[Exception] = []
        removed: list[Path] = []
        if checkpoints and not is_after_save:
            # What stays may be visible, but not durable.
            self.fs.sync_directory(self.directory)
        for checkpoint in checkpoints:
            first, then = files_of(checkpoint)
            try:
                unlink_if_present(self.fs, self.directory / first)
                removed += (self.directory / name for name in then)
            except OSError as error:
                failures.append(error)
        if removed:
            # Data that comes back without its manifest would be a file that nothing vouches for.
            self.fs.sync_directory(self.directory)
        for path in removed:
            try:
                unlink_if_present(self.fs, path)
            except OSError as error:
                failures.append(error)
        if removed and not is_after_save:
            # The next save syncs the directory otherwise.
            self.fs.sync_directory(self.directory)
        return failures

    def check_not_all(
        self, checkpoints: Iterable[Checkpoint], present: Iterable[Checkpoint]
    ) -> None:
        """Raise UnsafePrune when no countable checkpoint would remain, or for another kind of name."""
        going = {checkpoint.name: checkpoint for checkpoint in checkpoints}
        for name, one in going.items():
            if one.run_id is not None and not is_checkpoint_name(name):
                raise UnsafePrune(
                    "anyone may have put its manifest there: no run saves under such a name",
                    path=one.path,
                    hint="where it is not needed, remove the file and its manifest by hand",
                )
        if going and not any(c.is_countable and c.name not in going for c in present):
            raise UnsafePrune(
                "refused: this would remove the last good checkpoint", path=self.directory
            )

    def check_needed(self, needed: Sequence[Checkpoint]) -> None:
        """Raise unless the checkpoints because of which others go are still as they were listed.

        A process that changes one later could as well have changed it after the removal.

        Raises:
            UnsafePrune: One was removed, saved again, or is no longer whole.
            OSError: From the disk.
        """
        looks = ((one.name, self.look(one.name)) for one in needed)
        check_as_listed(needed, {name: found for name, found in looks if found is not None})

    def read_note(self, name: str, *, most_bytes: int = _MOST_NOTE_BYTES) -> bytes | None:
        """Return a small file beside the checkpoints, at most `most_bytes` of it; None for none.

        A note tells something and decides nothing: one that cannot be read counts as absent.
        """
        try:
            with contextlib.closing(self.open_data(self.directory / name)) as file:
                return read_bytes(file, 0, min(file.size, most_bytes))
        except (CkptmgrError, OSError):
            return None

    def change_note(self, name: str) -> OutputFile:
        """Open a note to overwrite parts of it, or to add to it; nothing is synced.

        Raises:
            OSError: It is absent, a link or no regular file, or another user's in a sticky directory.
        """
        path = self.directory / name
        with self.fs.hold_directory(self.directory):
            found = self.fs.status(path)
            if found is not None and is_of_stranger(found, self.fs.status(self.directory)):
                raise PermissionError(errno.EPERM, about_stranger(found), str(path))
            return self.fs.change(path)

    def write_note(self, path: Path, data: bytes, *, series: str) -> None:
        """Replace a small file atomically, without a sync: a crash may lose it but not tear it."""
        self.manifests.write(
            path, data, series=series, mode=note_mode(self.file_mode), is_durable=False
        )

    def recover(self, series: str) -> list[str]:
        """Clean up after dead writers of a series, finish interrupted swaps; hold the lease.

        Returns one sentence for each repair. Errors of the disk do not raise: the next call tries
        again.
        """
        return recover(self.manifests, self.processes, series, now_s=self.clock())

    def finish_moves(self, series: str) -> list[str]:
        """Finish interrupted moves into the trash; hold the lease."""
        from ckptmgr.store.trash import DirectoryTrash

        DirectoryTrash(self).finish(series)
        return []

    def settle(self, series: str) -> list[str]:
        """Finish interrupted moves into the trash, and `recover`; hold the lease."""
        return self.finish_moves(series) + self.recover(series)

    def leftovers(self, found: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the leftovers of interrupted saves that are in no listing: none."""
        del found
        return []

    def clean_up(self) -> list[str]:
        """Do nothing: a removal leaves nothing in a directory."""
        return []
