# SPDX-License-Identifier: Apache-2.0
"""One directory of checkpoints: what is in it, and the only ways to change it.

Publishing, in this order: data written and synced under a temporary name; manifest published; directory synced; data renamed
(the commit point); directory synced. Before the rename the checkpoint does not exist, after it it is whole. When a name is
overwritten, the new manifest also describes the old data until the swap is durable, so at every instant the name verifies.

Removing, in this order: directory synced; data unlinked; directory synced; manifest unlinked; directory synced. A half-removed
checkpoint is a manifest without data, which is listed as a leftover and never as a checkpoint.

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

from ckptmgr import manifest as manifests
from ckptmgr.bare_files import bare_file, entry_of, number_bare_steps
from ckptmgr.crypto.key import Key
from ckptmgr.digest import FileDigest, digest_of
from ckptmgr.disk_errors import explained, not_enough_space
from ckptmgr.errors import CkptmgrError, KeyProblem, UnsafePrune, UnsupportedCheckpoint
from ckptmgr.formats.source import read_bytes
from ckptmgr.fsio import FileStatus, FileSystem, OsFileSystem, OutputFile
from ckptmgr.lease import Processes, ProcProcesses, hold_lease, series_tag
from ckptmgr.manifest import FileEntry, Manifest, manifest_name
from ckptmgr.model import Checkpoint, Pin, State
from ckptmgr.naming import parse_name
from ckptmgr.temp_names import final_name, parse_temp, temp_name

_LOG = logging.getLogger(__name__)
_DATA_SUFFIXES = (".ckpt", ".safetensors")
# Room for the manifest and the directory blocks beside the data.
_SPACE_MARGIN_BYTES = 1 << 20


class Store:
    """A checkpoint directory.

    Args:
        directory: Where the checkpoints lie; created on the first save.
        fs: The disk.
        key: Authenticates manifests.
        processes: Tells dead writers from live ones.
        must_authenticate: With a key, treat manifests without authentication as a problem.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem | None = None,
        key: Key | None = None,
        processes: Processes | None = None,
        must_authenticate: bool = False,
    ) -> None:
        self.directory = directory
        self.fs: FileSystem = fs if fs is not None else OsFileSystem()
        self._key = key
        self._processes: Processes = processes if processes is not None else ProcProcesses()
        self.must_authenticate = must_authenticate

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
            elif self._is_data_name(name) and manifest_name(name) not in entries and status.is_file:
                found.append(bare_file(self.directory / name, status))
            elif parse_temp(name) is not None:
                found.append(self._from_temp(name, status))
        return number_bare_steps(found)

    def read_manifest(self, data_name: str) -> Manifest | None:
        """Return the manifest of a data file, or None when it has none.

        Where a swap was interrupted, returns the half that describes the data that is there.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under another key.
        """
        manifest = self._load_manifest(manifest_name(data_name))
        if manifest is None or manifest.replaces is None:
            return manifest
        return self._half_that_matches(manifest)

    def _load_manifest(
        self, name: str, *, with_key: bool = True, must_authenticate: bool | None = None
    ) -> Manifest | None:
        path = self.directory / name
        try:
            file = self.fs.open(path)
        except FileNotFoundError:
            return None
        with contextlib.closing(file):
            data = read_bytes(file, 0, min(file.size, manifests.MAX_MANIFEST_BYTES))
        if must_authenticate is None:
            must_authenticate = self.must_authenticate
        key = self._key if with_key else None
        return manifests.decode(data, path=path, key=key, must_authenticate=must_authenticate)

    def _would_lose_authentication(self, data_name: str) -> bool:
        """Tell whether this store has no key although the manifest was authenticated with one."""
        if self._key is not None:
            return False
        path = self.directory / manifest_name(data_name)
        with contextlib.closing(self.fs.open(path)) as file:
            data = read_bytes(file, 0, min(file.size, manifests.MAX_MANIFEST_BYTES))
        return manifests.is_authenticated(data, path=path)

    def _half_that_matches(self, manifest: Manifest) -> Manifest:
        old = manifest.replaces
        if old is None:
            return manifest
        with contextlib.closing(self.fs.open(self.directory / manifest.file.name)) as file:
            digest = digest_of(file)
        return old if digest.total == old.file.digest.total else manifest.without_replaced()

    def _from_manifest(
        self, name: str, status: FileStatus, entries: dict[str, FileStatus]
    ) -> Checkpoint:
        data_name = name.removesuffix(manifests.SUFFIX)
        data = entries.get(data_name)
        path = self.directory / data_name
        if data is not None and not data.is_file:
            problem = "the data file is a link or no regular file; put the file itself here"
            return entry_of(path, data, State.CORRUPT, problem)
        if data is None:
            return entry_of(path, status, State.LEFTOVER, "a manifest without its data file")
        try:
            manifest = self.read_manifest(data_name)
        except KeyProblem as error:
            manifest = self._load_manifest(name, with_key=False)
            if manifest is not None:
                return manifest.to_checkpoint(
                    self.directory, state=State.UNVERIFIED, problem=error.message
                )
        except (CkptmgrError, OSError) as error:
            problem = error.message if isinstance(error, CkptmgrError) else str(error)
            return entry_of(path, data, State.CORRUPT, problem)
        if manifest is None:  # removed while we were looking
            return entry_of(path, data, State.LEFTOVER, "vanished while the directory was listed")
        expected = manifest.file.digest.size_bytes
        if data.size_bytes != expected:
            problem = f"{data.size_bytes} bytes, but the manifest says {expected}"
            return manifest.to_checkpoint(self.directory, state=State.CORRUPT, problem=problem)
        return manifest.to_checkpoint(self.directory)

    def _from_temp(self, name: str, status: FileStatus) -> Checkpoint:
        token = parse_temp(name)
        is_live = token is not None and self._processes.is_dead(token[0]) is False
        state = State.WRITING if is_live else State.LEFTOVER
        problem = "being written by a live process" if is_live else "left by an interrupted save"
        data_name = final_name(name).removesuffix(manifests.SUFFIX)
        parsed = parse_name(data_name)
        found = entry_of(self.directory / name, status, state, problem)
        return replace(found, series=data_name if parsed is None else parsed.prefix)

    @staticmethod
    def _is_data_name(name: str) -> bool:
        return name.endswith(_DATA_SUFFIXES) and not name.startswith(".")

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
    ) -> Manifest:
        """Make a new checkpoint durable under `name`, replacing what has that name.

        Args:
            name: Base name of the data file.
            series: Series it belongs to, for reaping leftovers.
            size_bytes: Size the file will have, to check and reserve space.
            write: Writes the content into the new file and returns its digests.
            describe: Makes the manifest from the digests.
            mode: Permission bits of data and manifest.

        Raises:
            StoreFull: Not enough space; nothing was changed.
            OSError: From the disk; before the commit point nothing was changed and no temporary file is left (as far as
                the disk still lets us remove it).
        """
        temp = self._temp_path(name, series)
        try:
            self.fs.make_directory(self.directory, mode=0o700)
            self.check_space(size_bytes)
            old = self._manifest_of_current(name)
            manifest = self._write_temp(temp, size_bytes, write, describe, mode=mode)
            self._commit(name, temp, manifest, old, series=series, mode=mode)
        except OSError as error:
            raise explained(error, self.directory / name, size_bytes, self.fs) from error
        return manifest

    def _write_temp(
        self,
        temp: Path,
        size_bytes: int,
        write: Callable[[OutputFile], FileDigest],
        describe: Callable[[FileDigest], Manifest],
        *,
        mode: int,
    ) -> Manifest:
        file = self.fs.create(temp, mode=mode)
        try:
            try:
                file.reserve(size_bytes)
                digest = write(file)
                file.sync()
            finally:
                file.close()
            return describe(digest)
        except BaseException:
            self._discard(temp)
            raise

    def _commit(
        self,
        name: str,
        temp: Path,
        manifest: Manifest,
        old: Manifest | None,
        *,
        series: str,
        mode: int,
    ) -> None:
        try:
            self._put_manifest(replace(manifest, replaces=old), series=series, mode=mode)
            self.fs.sync_directory(self.directory)
            self.fs.replace(temp, self.directory / name)
        except BaseException:
            # Ctrl-C, and an answer lost on the way from a file server, also come after the rename was done. The manifest
            # that describes old and new must then stay: it is the only one that is true.
            if self._is_there(temp):
                self._discard(temp)
                self._undo_manifest(name, old, series=series, mode=mode)
            raise
        # From here on the checkpoint exists. If this sync fails the caller must hear of it, but the published file stays:
        # removing it could remove the only good one.
        self.fs.sync_directory(self.directory)
        if old is not None:
            self._put_manifest(manifest, series=series, mode=mode)
            self.fs.sync_directory(self.directory)

    def update_manifest(self, manifest: Manifest, *, mode: int = 0o400) -> None:
        """Replace the manifest of a committed checkpoint (pins, late metrics), durably."""
        self.fs.sync_directory(self.directory)
        self._put_manifest(manifest, series=manifest.series, mode=mode)
        self.fs.sync_directory(self.directory)

    def change_pins(
        self, checkpoint: Checkpoint, change: Callable[[tuple[Pin, ...]], tuple[Pin, ...]]
    ) -> Manifest:
        """Replace the pins in the manifest of a committed checkpoint, durably; the lease must be held.

        Raises:
            UnsupportedCheckpoint: It has no manifest to note pins in.
            KeyProblem: The manifest is authenticated, and without its key it cannot be written again.
        """
        manifest = self.read_manifest(checkpoint.name)
        if manifest is None:
            raise UnsupportedCheckpoint(
                "a file without a manifest cannot be pinned", path=checkpoint.path
            )
        if self._would_lose_authentication(checkpoint.name):
            raise KeyProblem(
                "the manifest is authenticated; without its key it cannot be changed",
                path=checkpoint.path,
                hint="pass the key (CLI: --key)",
            )
        changed = replace(manifest, pins=change(manifest.pins))
        self.update_manifest(changed)
        return changed

    def write_note(self, path: Path, data: bytes, *, series: str) -> None:
        """Replace a small file atomically, but without waiting for the disk: it may be lost, never torn."""
        temp = self._temp_path(path.name, series)
        file = self.fs.create(temp, mode=0o600)
        try:
            try:
                file.write_at(0, data)
            finally:
                file.close()
            self.fs.replace(temp, path)
        except BaseException:
            self._discard(temp)
            raise

    def _put_manifest(self, manifest: Manifest, *, series: str, mode: int) -> None:
        data = manifests.encode(manifest, key=self._key)
        target = self.directory / manifest_name(manifest.file.name)
        temp = self._temp_path(target.name, series)
        file = self.fs.create(temp, mode=mode)
        try:
            try:
                file.write_at(0, data)
                file.sync()
            finally:
                file.close()
            self.fs.replace(temp, target)
        except BaseException:
            self._discard(temp)
            raise

    def _undo_manifest(self, name: str, old: Manifest | None, *, series: str, mode: int) -> None:
        # Best effort: an orphan manifest is a leftover, and one that still `replaces` the old data verifies as it.
        with contextlib.suppress(OSError):
            if old is not None:
                self._put_manifest(old, series=series, mode=mode)
            elif self.fs.status(self.directory / name) is None:
                self.fs.unlink(self.directory / manifest_name(name))

    def _manifest_of_current(self, name: str) -> Manifest | None:
        """Return a manifest for what has this name now, making one for a bare file; None when the name is free."""
        status = self.fs.status(self.directory / name)
        if status is None:
            return None
        self.fs.sync_directory(self.directory)
        try:
            manifest = self.read_manifest(name)
        except CkptmgrError:
            manifest = None
        if manifest is not None:
            return manifest
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
            why="foreign",
        )

    def _temp_path(self, name: str, series: str) -> Path:
        return self.directory / temp_name(name, token=self._processes.token(), series=series)

    def _is_there(self, temp: Path) -> bool:
        with contextlib.suppress(OSError):
            return self.fs.status(temp) is not None
        return False

    def _discard(self, temp: Path) -> None:
        with contextlib.suppress(OSError):
            self.fs.unlink(temp)

    def remove(self, checkpoints: Sequence[Checkpoint]) -> list[OSError]:
        """Remove checkpoints durably; return what could not be removed, and go on with the others.

        Raises:
            UnsafePrune: It would remove the last countable checkpoint of the directory.
        """
        self.check_not_all(checkpoints)
        failures = []
        removed = []
        if checkpoints:
            self.fs.sync_directory(self.directory)
        for checkpoint in checkpoints:
            try:
                self._unlink(checkpoint.path)
                removed.append(checkpoint)
            except OSError as error:
                failures.append(error)
        if removed:
            self.fs.sync_directory(self.directory)
        for checkpoint in removed:
            try:
                self._unlink(checkpoint.path.with_name(manifest_name(checkpoint.name)))
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

    def _unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.unlink(path)

    def recover(self, series: str) -> list[str]:
        """Clean up after dead writers of a series and finish interrupted swaps; the lease must be held.

        Never raises because of what it finds: what cannot be cleaned up stays, and is tried again next time.

        Returns:
            What was done, one sentence each.
        """
        if self.fs.status(self.directory) is None:
            return []
        entries = self.fs.list(self.directory)
        repairs = [r for name in sorted(entries) for r in self._repairs(name, series, entries)]
        if not repairs:
            return []
        self.fs.sync_directory(self.directory)
        done = [self._attempted(repair, sentence) for repair, sentence in repairs]
        self.fs.sync_directory(self.directory)
        return done

    def _repairs(
        self, name: str, series: str, entries: dict[str, FileStatus]
    ) -> Iterator[tuple[Callable[[], None], str]]:
        """Yield what to do about one name, and what to say afterwards."""
        path = self.directory / name
        if self._is_dead_temp(name, series):
            yield lambda: self._unlink(path), f"removed {name}, left by an interrupted save"
        if not name.endswith(manifests.SUFFIX) or name.startswith("."):
            return
        try:
            # A manifest that is not authenticated must not become so by being written again.
            manifest = self._load_manifest(name, must_authenticate=True)
        except (CkptmgrError, OSError):
            return  # unreadable: shown by scan, removed only by a person
        if manifest is None or manifest.series != series:
            return
        if manifest.file.name not in entries:
            yield lambda: self._unlink(path), f"removed {name}, whose data file is gone"
        elif manifest.replaces is not None and not self._would_lose_authentication(
            manifest.file.name
        ):
            sentence = f"finished the interrupted overwrite of {manifest.file.name}"
            yield lambda: self._finish_swap(manifest, series), sentence

    def _finish_swap(self, manifest: Manifest, series: str) -> None:
        self._put_manifest(self._half_that_matches(manifest), series=series, mode=0o400)

    @staticmethod
    def _attempted(repair: Callable[[], None], sentence: str) -> str:
        try:
            repair()
        except OSError as error:
            return f"could not clean up: {error}"
        return sentence

    def _is_dead_temp(self, name: str, series: str) -> bool:
        parts = parse_temp(name)
        if parts is None:
            return False
        token, tag = parts
        is_dead = self._processes.is_dead(token)
        # Of other hosts nothing is known, but with the lease held nobody else writes this series.
        return is_dead is True or (is_dead is None and tag == series_tag(series))
