# SPDX-License-Identifier: Apache-2.0
"""Write manifests to the disk: replace them atomically, and finish interrupted swaps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.core.errors import CkptmgrError, KeyProblem, StoreLocked
from ckptmgr.core.trust import Trust
from ckptmgr.io.filesystem import FileSystem, discard, rename_temp
from ckptmgr.io.leases import Leases, Processes
from ckptmgr.io.signals import defer_signals
from ckptmgr.io.temp_names import temp_name
from ckptmgr.store.manifest import codec as manifests
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.manifest.reader import ManifestContent, ManifestReader

if TYPE_CHECKING:  # slow to import, and needed with keys only
    from ckptmgr.store.manifest.keys import ManifestKey


class ManifestFiles(ManifestReader):
    """Reads and writes the manifests of a directory; checks its `leases` before each commit."""

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem,
        trust: Trust,
        processes: Processes,
    ) -> None:
        super().__init__(directory, fs=fs, trust=trust)
        self.leases = Leases(fs, directory)
        self._processes = processes

    def lost_by_rewriting(self, data_name: str) -> str | None:
        """Return the proof of a manifest that cannot be made without its key: `authenticated`, `signed`, or None."""
        signing_key, can_authenticate = self.trust.signing_key, self.trust.can_authenticate
        if can_authenticate and signing_key is not None:
            return None
        path = self.directory / manifest_name(data_name)
        has_mac, has_signature = manifests.proofs_in(self._content(path.name), path=path)
        if has_mac and not can_authenticate:
            return "authenticated"
        return "signed" if has_signature and signing_key is None else None

    def put(
        self, manifest: Manifest, *, series: str, mode: int | None, syncs_names: bool = False
    ) -> None:
        """Replace a manifest atomically; sync the directory to make its name durable.

        With `mode=None` it keeps its permission bits. With `syncs_names` the directory is synced
        before the manifest gets its name.
        """
        data = manifests.encode(manifest, trust=self.trust)
        target = self.directory / manifest_name(manifest.name)
        mode = self._mode_of(target) if mode is None else mode
        with defer_signals():
            temp = self._write_temp(target, data, series=series, mode=mode, is_durable=True)
            try:
                if syncs_names:
                    self.fs.sync_directory(self.directory)
            except BaseException:
                discard(self.fs, temp)
                raise
            self.rename_leased(temp, target, series, manifest.name)

    def reauthenticate(self, data_name: str, change: Callable[[ManifestKey], ManifestKey]) -> None:
        """Replace the authentication of a manifest; sync the directory to make it durable.

        Raises:
            CkptmgrError: It cannot be read, or is not authenticated.
        """
        if self.trust.keys is None:
            raise KeyProblem("a key is needed", path=self.directory / data_name)
        path = self.directory / manifest_name(data_name)
        old = self._content(path.name)
        manifest, new = manifests.reauthenticated(
            old, path=path, key=self.trust.keys, change=change
        )
        self.write(path, new, series=manifest.series, mode=self._mode_of(path), is_durable=True)

    def create(self, manifest: Manifest, *, series: str, mode: int) -> None:
        """Publish a manifest unless its name is taken; sync the directory to make it durable.

        Raises:
            FileExistsError: The name is taken.
            StoreLocked: The lease is lost. Nothing was changed.
            OSError: From the disk. Nothing was changed, unless the status cannot be read either.
        """
        data = manifests.encode(manifest, trust=self.trust)
        target = self.directory / manifest_name(manifest.name)
        with defer_signals():
            temp = self._write_temp(target, data, series=series, mode=mode, is_durable=True)
            try:
                self.leases.check(series, manifest.name)
                self.fs.link(temp, target)
            except OSError:
                # A file server may have made the link, and its answer was lost.
                if not self._are_one_file(temp, target):
                    raise
            finally:
                discard(self.fs, temp)

    def _are_one_file(self, temp: Path, target: Path) -> bool:
        one, other = self.fs.status(temp), self.fs.status(target)
        return one is not None and other is not None and one.identity == other.identity

    def undo(self, name: str, before: ManifestContent | None, *, series: str) -> None:
        """Restore the manifest file that `name` had before, byte for byte; None for none."""
        path = self.directory / manifest_name(name)
        # Best effort: an orphan manifest is a leftover, and one that still `replaces` the old data
        # verifies it. Without the lease the file may already be that of another process.
        with contextlib.suppress(OSError, StoreLocked):
            self.leases.check(series, name)
            if before is None:
                self.fs.unlink(path)
            else:
                self.write(path, before.data, series=series, mode=before.mode, is_durable=True)

    def finish_swap(self, data_name: str, *, series: str) -> bool:
        """Reduce the manifest of an interrupted swap to the side of the data; return if it was one.

        A manifest that this writer's keys do not prove, or could not prove again, stays as it is.

        Raises:
            OSError: From the disk.
        """
        try:
            claimed = self.load(manifest_name(data_name), trust=Trust())
            if claimed is None or claimed.replaces is None or claimed.shards:
                return False
            side = self.read_proven(data_name)
            if side is None or (side.preserved is None and self.lost_by_rewriting(data_name)):
                return False
        except CkptmgrError:
            return False  # the next read raises it
        if side.preserved is None:
            self.put(side, series=series, mode=self._mode_of(self.directory / data_name))
        else:
            path = self.directory / manifest_name(data_name)
            # With its proofs and its mode, which stays while a name is overwritten.
            data = side.preserved.encode("utf-8", "surrogatepass")
            self.write(path, data, series=series, mode=self._mode_of(path), is_durable=True)
        return True

    def _mode_of(self, path: Path) -> int:
        status = self.fs.status(path)
        return 0o400 if status is None else status.mode

    def write(self, path: Path, data: bytes, *, series: str, mode: int, is_durable: bool) -> None:
        """Replace a small file atomically; if `is_durable`, sync it before it gets its name.

        Raises:
            StoreLocked: The lease is lost; nothing was changed.
            OSError: From the disk.
        """
        with defer_signals():
            temp = self._write_temp(path, data, series=series, mode=mode, is_durable=is_durable)
            self.rename_leased(temp, path, series, path.name.removesuffix(manifests.SUFFIX))

    def rename_leased(self, temp: Path, path: Path, *leased: str) -> None:
        """Rename a temporary file to its name if the leases on these names are held, or remove it.

        Raises:
            StoreLocked: A lease is lost.
            OSError: From the disk.
        """
        try:
            self.leases.check(*leased)
        except BaseException:
            discard(self.fs, temp)
            raise
        rename_temp(self.fs, temp, path)

    def _write_temp(
        self, path: Path, data: bytes, *, series: str, mode: int, is_durable: bool
    ) -> Path:
        temp = self.temp_path(path.name, series)
        file = self.fs.create(temp, mode=mode, owner_of=path)
        try:
            try:
                file.write_at(0, data)
                if is_durable:
                    file.sync()
            finally:
                file.close()
        except BaseException:
            discard(self.fs, temp)
            raise
        return temp

    def temp_path(self, name: str, series: str) -> Path:
        """Return a unique temporary path for a file that will be called `name`."""
        return self.directory / temp_name(name, token=self._processes.token(), series=series)
