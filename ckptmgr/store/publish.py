# SPDX-License-Identifier: Apache-2.0
"""How a file gets into a directory, durably, whole or not at all; `ckptmgr.store` tells in which order.

What has the name until then verifies until the swap, and again if that fails.

Ctrl-C ends the writing at once, and nothing is left of it. While a temporary file comes or goes, and in the commit, it waits;
then the directory holds what it held before, or the new file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.io.digest import FileDigest, digest_of
from ckptmgr.io.filesystem import FileStatus, FileSystem, InputFile, OutputFile, discard
from ckptmgr.io.signals import defer_signals, deliver_signals
from ckptmgr.io.space_errors import explain_error, not_enough_space
from ckptmgr.store.listing import bare_file
from ckptmgr.store.manifest.codec import PLACEHOLDER, FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.files import ManifestFiles
from ckptmgr.store.manifest.reader import ManifestContent

# Room for the manifest and the directory blocks beside the data.
_SPACE_MARGIN_BYTES = 1 << 20

_Written = TypeVar("_Written")
_Described = TypeVar("_Described")


class Publisher:
    """A directory into which files are published.

    Args:
        manifests: Those of the directory.
    """

    def __init__(self, manifests: ManifestFiles) -> None:
        self.directory = manifests.directory
        self.fs: FileSystem = manifests.fs
        self._manifests = manifests

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
            StoreLocked: A lease on the name or the series was held and is lost; the data was not published.
            OSError: From the disk; before the commit point nothing was changed and no temporary file is left (as far as
                the disk still lets us remove it).
        """
        temp = self._manifests.temp_path(name, series)
        try:
            self.fs.make_directory(self.directory, mode=0o700)
            with self.fs.hold_directory(self.directory):
                self.check_space(size_bytes)
                before = self._manifests.content(name)
                old = self._manifest_of_current(name, before)
                if manifest_mode is None:
                    manifest_mode = mode
                with defer_signals():
                    manifest = self._write_temp(
                        name, temp, size_bytes, write, describe, mode=mode, read_back=read_back
                    )
                    self._commit(
                        name, temp, manifest, old, before, series=series, mode=manifest_mode
                    )
        except OSError as error:
            raise explain_error(error, self.directory / name, size_bytes, self.fs) from error
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
            StoreLocked: The lease is lost; nothing was changed.
            OSError: From the disk; the old file is intact, or the new one is there.
        """
        temp = self._manifests.temp_path(name, name)
        try:
            self.check_space(size_bytes)
            with defer_signals():
                self._write_temp(
                    name, temp, size_bytes, write, lambda _: None, mode=mode, read_back=None
                )
                self._manifests.rename_leased(temp, self.directory / name, name)
                self.fs.sync_directory(self.directory)
        except OSError as error:
            raise explain_error(error, self.directory / name, size_bytes, self.fs) from error

    def _write_temp(
        self,
        name: str,
        temp: Path,
        size_bytes: int,
        write: Callable[[OutputFile], _Written],
        describe: Callable[[_Written], _Described],
        *,
        mode: int,
        read_back: Callable[[InputFile, _Written], None] | None,
    ) -> _Described:
        """Write a file that nobody knows yet, or none; signals must be held, and are heard while it takes long."""
        file = self.fs.create(temp, mode=mode, owner_of=self.directory / name)
        try:
            try:
                with deliver_signals():
                    file.reserve(size_bytes)
                    digest = write(file)
                    file.sync()
            finally:
                file.close()
            if read_back is not None:
                stored = self.fs.open(temp, is_uncached=True)
                with contextlib.closing(stored), deliver_signals():
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
            # The temporary file must not be lost in a power cut that the manifest survives: it tells that manifest from one
            # whose data is missing.
            self.fs.sync_directory(self.directory)
            self._manifests.put(replace(manifest, replaces=old), series=series, mode=during)
            self.fs.sync_directory(self.directory)
            self._manifests.leases.check(series, name)
            self.fs.replace(temp, self.directory / name)
        except BaseException:
            # Ctrl-C, and an answer lost on the way from a file server, also come after the rename was done. The manifest
            # that describes old and new must then stay: it is the only one that is true.
            if self._is_there(temp):
                self._manifests.undo(name, before, series=series)
                # For the same reason the temporary file goes last, and stays where the manifest cannot be removed.
                with contextlib.suppress(OSError):
                    self.fs.sync_directory(self.directory)
                    if before is not None or not self._is_there(
                        self.directory / manifest_name(name)
                    ):
                        discard(self.fs, temp)
            raise
        # From here on the checkpoint exists. If this sync fails the caller must hear of it, but the published file stays:
        # removing it could remove the only good one.
        self.fs.sync_directory(self.directory)
        if old is not None:
            self._manifests.put(manifest, series=series, mode=mode)
            self.fs.sync_directory(self.directory)

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
        if manifest.preserved is None and before is not None:
            is_proven = not manifest.is_placeholder
            text = before.text if is_proven else self._manifests.text_to_preserve(before, name)
            return replace(manifest, preserved=text)
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
            why=PLACEHOLDER,
        )

    def _is_there(self, temp: Path) -> bool:
        with contextlib.suppress(OSError):
            return self.fs.status(temp) is not None
        return False
