# SPDX-License-Identifier: Apache-2.0
"""One directory of checkpoints: what is in it, and the only ways to change it.

Publishing, in this order: data written and synced under a temporary name; manifest published; directory synced; data renamed
(the commit point); directory synced. Before the rename the checkpoint does not exist, after it it is whole. When a name is
overwritten, the new manifest also describes the old data until the swap is durable, so at every instant the name verifies.

Removing, in this order: directory synced; data unlinked; directory synced; manifest unlinked; directory synced. A half-removed
checkpoint is a manifest without data, which is listed as a leftover and never as a checkpoint.

A sharded checkpoint is what its manifest says, and is there when that is (see `shard_names`): the manifest comes last and
goes first. Data files of ranks that no manifest names are leftovers.

What is seen may not be durable yet: a writer may have died between a rename and the sync. So whatever acts on what it sees
(removing, overwriting, recovering) syncs the directory first.

Nothing here decides *what* to keep; see `retention`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ckptmgr import manifest as manifests
from ckptmgr.bare_files import bare_file, entry_of, number_bare_steps
from ckptmgr.crypto.keyring import Keys
from ckptmgr.crypto.signing import PublicKey, SigningKey
from ckptmgr.digest import FileDigest, digest_of
from ckptmgr.disk_errors import explained, not_enough_space
from ckptmgr.errors import (
    CkptmgrError,
    CorruptCheckpoint,
    KeyProblem,
    UnsafePrune,
    UnsupportedCheckpoint,
)
from ckptmgr.fsio import (
    FileStatus,
    FileSystem,
    InputFile,
    OsFileSystem,
    OutputFile,
    discard,
    remove_name,
)
from ckptmgr.lease import Processes, ProcProcesses, hold_lease
from ckptmgr.manifest import FileEntry, Manifest, files_of, manifest_name
from ckptmgr.manifest_files import ManifestFiles
from ckptmgr.manifest_keys import ManifestKey
from ckptmgr.manifest_reader import ManifestContent
from ckptmgr.model import Checkpoint, Pin, State
from ckptmgr.naming import DATA_SUFFIXES, parse_name
from ckptmgr.recovery import recover
from ckptmgr.shard_listing import problem_of_shards, unnamed_shards
from ckptmgr.shard_names import is_set_name, parse_shard_name
from ckptmgr.temp_names import final_name, parse_temp

_LOG = logging.getLogger(__name__)
# Room for the manifest and the directory blocks beside the data.
_SPACE_MARGIN_BYTES = 1 << 20

_Written = TypeVar("_Written")
_Described = TypeVar("_Described")


class Store:
    """A checkpoint directory.

    Args:
        directory: Where the checkpoints lie; created on the first save.
        fs: The disk.
        key: Authenticates manifests.
        processes: Tells dead writers from live ones.
        must_authenticate: With a key, treat manifests without authentication as a problem; with trusted keys, those
            without signature.
        signing_key: Signs manifests.
        trusted_keys: Whose signatures count.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem | None = None,
        key: Keys | None = None,
        processes: Processes | None = None,
        must_authenticate: bool = False,
        signing_key: SigningKey | None = None,
        trusted_keys: Sequence[PublicKey] = (),
    ) -> None:
        self.directory = directory
        self.fs: FileSystem = fs if fs is not None else OsFileSystem()
        self._key = key
        self.processes: Processes = processes if processes is not None else ProcProcesses()
        self.must_authenticate = must_authenticate
        self.signing_key = signing_key
        self.trusted_keys = tuple(trusted_keys)
        self._manifests = ManifestFiles(
            directory,
            fs=self.fs,
            key=key,
            processes=self.processes,
            must_authenticate=must_authenticate,
            signing_key=signing_key,
            trusted_keys=trusted_keys,
        )

    def scan(self) -> list[Checkpoint]:
        """Return everything in the directory that is, was or will be a checkpoint, in no particular order.

        Never raises because of what it finds: damaged and half-written ones are returned with their state and problem.
        Reads manifests, not data.
        """
        if self.fs.status(self.directory) is None:
            return []
        entries = self.fs.list(self.directory)
        found = []
        for name, status in entries.items():
            if name.endswith(manifests.SUFFIX) and not name.startswith("."):
                found.append(self._from_manifest(name, status, entries))
            elif parse_shard_name(name) is not None:
                continue
            elif self._is_data_name(name) and manifest_name(name) not in entries and status.is_file:
                found.append(bare_file(self.directory / name, status))
            elif parse_temp(name) is not None:
                found.append(self._from_temp(name, status))
        return [*number_bare_steps(found), *unnamed_shards(self.directory, entries, found)]

    def read_manifest(self, data_name: str) -> Manifest | None:
        """Return the manifest of a data file, or None when it has none.

        Where a swap was interrupted, returns the half that describes the data that is there.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under another key.
        """
        return self._manifests.read(data_name)

    def _from_manifest(
        self, name: str, status: FileStatus, entries: dict[str, FileStatus]
    ) -> Checkpoint:
        data_name = name.removesuffix(manifests.SUFFIX)
        data = entries.get(data_name)
        path = self.directory / data_name
        if data is not None and not data.is_file:
            problem = "the data file is a link or no regular file; put the file itself here"
            return entry_of(path, data, State.CORRUPT, problem)
        if data is None and not is_set_name(data_name):
            return entry_of(path, status, State.LEFTOVER, "a manifest without its data file")
        key_problem = None
        try:
            try:
                manifest = self.read_manifest(data_name)
            except KeyProblem as error:
                key_problem = error.message
                manifest = self._manifests.read_unproven(data_name)
        except (CkptmgrError, OSError) as error:
            problem = error.message if isinstance(error, CkptmgrError) else str(error)
            # Damage is final; of anything else whoever wants this checkpoint must hear.
            obstacle = None if isinstance(error, CorruptCheckpoint) else error.with_traceback(None)
            unread = entry_of(path, data or status, State.CORRUPT, problem)
            return replace(unread, obstacle=obstacle)
        if manifest is None:  # removed while we were looking
            problem = "vanished while the directory was listed"
            return entry_of(path, data or status, State.LEFTOVER, problem)
        if key_problem is not None:
            return manifest.to_checkpoint(
                self.directory, state=State.UNVERIFIED, problem=key_problem
            )
        if data is None:
            problem_found = problem_of_shards(manifest, entries)
            state = State.OK if problem_found is None else State.CORRUPT
            return manifest.to_checkpoint(self.directory, state=state, problem=problem_found)
        expected = manifest.file.digest.size_bytes
        if data.size_bytes != expected:
            problem = f"{data.size_bytes} bytes, but the manifest says {expected}"
            return manifest.to_checkpoint(self.directory, state=State.CORRUPT, problem=problem)
        return manifest.to_checkpoint(self.directory)

    def _from_temp(self, name: str, status: FileStatus) -> Checkpoint:
        token = parse_temp(name)
        is_live = token is not None and self.processes.is_dead(token[0]) is False
        state = State.WRITING if is_live else State.LEFTOVER
        problem = "being written by a live process" if is_live else "left by an interrupted save"
        data_name = final_name(name).removesuffix(manifests.SUFFIX)
        parsed = parse_name(data_name)
        found = entry_of(self.directory / name, status, state, problem)
        return replace(found, series=data_name if parsed is None else parsed.prefix)

    @staticmethod
    def _is_data_name(name: str) -> bool:
        return name.endswith(DATA_SUFFIXES) and not name.startswith(".")

    @contextlib.contextmanager
    def lease(self, series: str) -> Iterator[None]:
        """Be the only writer of a series; StoreLocked when somebody else is."""
        self.fs.make_directory(self.directory, mode=0o700)
        with hold_lease(self.fs, self.directory, series):
            yield

    def check_space(self, size_bytes: int) -> None:
        """Raise StoreFull unless the disk has room for a file of `size_bytes`."""
        free = self.fs.free_bytes(self.directory)
        needed = size_bytes + _SPACE_MARGIN_BYTES
        if free is not None and free < needed:
            raise not_enough_space(self.directory, needed, free)

    def publish(
        self,
        name: str,
        *,
        series: str,
        size_bytes: int,
        write: Callable[[OutputFile], FileDigest],
        describe: Callable[[FileDigest], Manifest],
        mode: int = 0o400,
        manifest_mode: int | None = None,
        read_back: Callable[[InputFile, FileDigest], None] | None = None,
    ) -> Manifest:
        """Make a new checkpoint durable under `name`, replacing what has that name.

        Args:
            name: Base name of the data file.
            series: Series it belongs to, for reaping leftovers.
            size_bytes: Size the file will have, to check and reserve space.
            write: Writes the content into the new file and returns its digests.
            describe: Makes the manifest from the digests.
            mode: Permission bits of data and manifest.
            manifest_mode: Those of the manifest, where they differ.
            read_back: Compares what the disk holds with the digests, after the sync and before anything is published.

        Raises:
            StoreFull: Not enough space; nothing was changed.
            OSError: From the disk; before the commit point nothing was changed and no temporary file is left (as far as
                the disk still lets us remove it).
        """
        temp = self._manifests.temp_path(name, series)
        try:
            self.fs.make_directory(self.directory, mode=0o700)
            self.check_space(size_bytes)
            before = self._manifests.content(name)
            old = self._manifest_of_current(name, before)
            manifest = self._write_temp(
                temp, size_bytes, write, describe, mode=mode, read_back=read_back
            )
            if manifest_mode is None:
                manifest_mode = mode
            self._commit(name, temp, manifest, old, before, series=series, mode=manifest_mode)
        except OSError as error:
            raise explained(error, self.directory / name, size_bytes, self.fs) from error
        return manifest

    def place(
        self, name: str, *, size_bytes: int, write: Callable[[OutputFile], object], mode: int
    ) -> None:
        """Make a file that is no checkpoint durable under `name`, replacing what has that name; it gets no manifest.

        Args:
            name: Base name; the lease on it must be held.
            size_bytes: Size the file will have, to check and reserve space.
            write: Writes the content into the new file.
            mode: Permission bits.

        Raises:
            StoreFull: Not enough space; nothing was changed.
            OSError: From the disk; the old file is intact, or the new one is there.
        """
        temp = self._manifests.temp_path(name, name)
        try:
            self.check_space(size_bytes)
            self._write_temp(temp, size_bytes, write, lambda _: None, mode=mode, read_back=None)
            try:
                self.fs.replace(temp, self.directory / name)
            except BaseException:
                discard(self.fs, temp)
                raise
            self.fs.sync_directory(self.directory)
        except OSError as error:
            raise explained(error, self.directory / name, size_bytes, self.fs) from error

    def _write_temp(
        self,
        temp: Path,
        size_bytes: int,
        write: Callable[[OutputFile], _Written],
        describe: Callable[[_Written], _Described],
        *,
        mode: int,
        read_back: Callable[[InputFile, _Written], None] | None,
    ) -> _Described:
        file = self.fs.create(temp, mode=mode)
        try:
            try:
                file.reserve(size_bytes)
                digest = write(file)
                file.sync()
            finally:
                file.close()
            if read_back is not None:
                with contextlib.closing(self.fs.open(temp, is_uncached=True)) as stored:
                    read_back(stored, digest)
            return describe(digest)
        except BaseException:
            discard(self.fs, temp)
            raise

    def _commit(
        self,
        name: str,
        temp: Path,
        manifest: Manifest,
        old: Manifest | None,
        before: ManifestContent | None,
        *,
        series: str,
        mode: int,
    ) -> None:
        # Whoever could read the manifest can do so until the swap, and afterwards if that is undone.
        during = mode if before is None else before.mode
        try:
            self._manifests.put(replace(manifest, replaces=old), series=series, mode=during)
            self.fs.sync_directory(self.directory)
            self.fs.replace(temp, self.directory / name)
        except BaseException:
            # Ctrl-C, and an answer lost on the way from a file server, also come after the rename was done. The manifest
            # that describes old and new must then stay: it is the only one that is true.
            if self._is_there(temp):
                discard(self.fs, temp)
                self._manifests.undo(name, before, series=series)
            raise
        # From here on the checkpoint exists. If this sync fails the caller must hear of it, but the published file stays:
        # removing it could remove the only good one.
        self.fs.sync_directory(self.directory)
        if old is not None:
            self._manifests.put(manifest, series=series, mode=mode)
            self.fs.sync_directory(self.directory)

    def update_manifest(self, manifest: Manifest, *, mode: int | None = None) -> None:
        """Replace the manifest of a committed checkpoint (pins, late metrics), durably; None keeps its mode."""
        self.fs.sync_directory(self.directory)
        self._manifests.put(manifest, series=manifest.series, mode=mode)
        self.fs.sync_directory(self.directory)

    def lost_by_rewriting(self, name: str) -> str | None:
        """Return what the manifest of a checkpoint has that cannot be made here, `authenticated` or `signed`; else None."""
        return self._manifests.lost_by_rewriting(name)

    def reauthenticate(
        self, name: str, change: Callable[[ManifestKey], ManifestKey], *, mode: int | None = None
    ) -> None:
        """Give the manifest of a committed checkpoint another authentication, durably; the lease must be held.

        It keeps its mode where none is given.

        Raises:
            CkptmgrError: It cannot be read, or is not authenticated.
        """
        self.fs.sync_directory(self.directory)
        self._manifests.reauthenticate(name, change, mode=mode)
        self.fs.sync_directory(self.directory)

    def check_proven(self, checkpoint: Checkpoint) -> None:
        """Raise unless this writer's own keys prove the manifest of a checkpoint: it is about to be written under them.

        Raises:
            CkptmgrError: They do not.
        """
        self._manifests.read_proven(checkpoint.name)

    def settle(self, checkpoint: Checkpoint) -> None:
        """Finish with an overwrite of a checkpoint that was interrupted; the lease must be held.

        Before a manifest is changed: the proofs that it keeps for the data that was to be replaced would not change with it.

        Raises:
            OSError: From the disk.
        """
        self.fs.sync_directory(self.directory)
        if self._manifests.settle(checkpoint.path.name, series=checkpoint.series):
            self.fs.sync_directory(self.directory)

    def change_pins(
        self, checkpoint: Checkpoint, change: Callable[[tuple[Pin, ...]], tuple[Pin, ...]]
    ) -> Manifest:
        """Replace the pins in the manifest of a committed checkpoint, durably; the lease must be held.

        Raises:
            UnsupportedCheckpoint: It has no manifest to note pins in.
            KeyProblem: The manifest is authenticated or signed, and without the key for that it cannot be written again.
        """
        self.settle(checkpoint)
        manifest = self.read_manifest(checkpoint.name)
        if manifest is None:
            raise UnsupportedCheckpoint(
                "a file without a manifest cannot be pinned", path=checkpoint.path
            )
        self.check_rewritable(checkpoint)
        changed = replace(manifest, pins=change(manifest.pins))
        self.update_manifest(changed)
        return changed

    def check_rewritable(self, checkpoint: Checkpoint) -> None:
        """Raise unless the manifest of a checkpoint, if it has one, can be written again as trustworthy as it is.

        Raises:
            KeyProblem: It is authenticated or signed, and the key for that is missing.
        """
        lost = self.lost_by_rewriting(checkpoint.name)
        if lost is not None:
            option = "--key" if lost == "authenticated" else "--signing-key"
            raise KeyProblem(
                f"the manifest is {lost}; without its key it cannot be changed",
                path=checkpoint.path,
                hint=f"pass the key (CLI: {option})",
            )

    def _manifest_of_current(self, name: str, before: ManifestContent | None) -> Manifest | None:
        """Return a manifest for what has this name now; None when the name is free.

        It gets the proofs of this writer. So one is made up for a bare file, and where the manifest is not proven to this
        writer; the manifest itself is kept in it.
        """
        status = self.fs.status(self.directory / name)
        if status is None:
            return None
        self.fs.sync_directory(self.directory)
        try:
            manifest = self._manifests.read_proven(name)
        except CkptmgrError:
            manifest = None
        manifest = manifest or self._made_up(name, status)
        if manifest.kept is None and before is not None:
            return replace(manifest, kept=before.text)
        return manifest

    def _made_up(self, name: str, status: FileStatus) -> Manifest:
        bare = bare_file(self.directory / name, status)
        with contextlib.closing(self.fs.open(self.directory / name)) as file:
            digest = digest_of(file)
        return Manifest(
            file=FileEntry(name=name, digest=digest, format=bare.format),
            series=bare.series,
            run_id="",
            step=max(bare.step, 0),
            sequence=0,
            saved_at=bare.saved_at,
            why=manifests.FOREIGN,
        )

    def _is_there(self, temp: Path) -> bool:
        with contextlib.suppress(OSError):
            return self.fs.status(temp) is not None
        return False

    def remove(self, checkpoints: Sequence[Checkpoint]) -> list[OSError]:
        """Remove checkpoints durably; return what could not be removed, and go on with the others.

        Raises:
            UnsafePrune: It would remove the last countable checkpoint of the directory.
        """
        self.check_not_all(checkpoints)
        return self._remove(checkpoints)

    def remove_copied(self, checkpoint: Checkpoint) -> None:
        """Remove durably a checkpoint of which another one of the directory was proven to be a copy.

        Raises:
            OSError: From the disk.
        """
        for error in self._remove([checkpoint]):
            raise error

    def _remove(self, checkpoints: Sequence[Checkpoint]) -> list[OSError]:
        failures = []
        removed: list[Path] = []
        if checkpoints:
            self.fs.sync_directory(self.directory)
        for checkpoint in checkpoints:
            first, then = files_of(checkpoint)
            try:
                remove_name(self.fs, self.directory / first)
                removed += (self.directory / name for name in then)
            except OSError as error:
                failures.append(error)
        if removed:
            self.fs.sync_directory(self.directory)
        for path in removed:
            try:
                remove_name(self.fs, path)
            except OSError as error:
                failures.append(error)
        if removed:
            self.fs.sync_directory(self.directory)
        return failures

    def check_not_all(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Raise UnsafePrune when no countable checkpoint would stay without these."""
        going = {checkpoint.name for checkpoint in checkpoints}
        staying = [c for c in self.scan() if c.is_countable and c.name not in going]
        if going and not staying:
            raise UnsafePrune(
                "refused: this would remove the last good checkpoint", path=self.directory
            )

    def write_note(self, path: Path, data: bytes, *, series: str) -> None:
        """Replace a small file atomically, but without waiting for the disk: it may be lost, never torn."""
        self._manifests.write(path, data, series=series, mode=0o600, is_durable=False)

    def recover(self, series: str) -> list[str]:
        """Clean up after dead writers of a series and finish interrupted swaps; the lease must be held.

        Never raises because of what it finds: what cannot be cleaned up stays, and is tried again next time.

        Returns:
            What was done, one sentence each.
        """
        return recover(self._manifests, self.processes, series)

    def recover_from_worker(self, series: str) -> list[str]:
        """Clean up after a worker process of ours that died in a save; see `recover`."""
        return self.recover(series)
