# SPDX-License-Identifier: Apache-2.0
"""Publish a file in a directory durably, whole or not at all; see `store.store` for the order.

An older file of the same name verifies until the swap, and also after a swap that failed. An
interrupt ends the writing at once and leaves nothing behind. While a temporary file is created or
removed, and during the commit, signals are deferred; then the directory holds the old file or the
new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError, UnsupportedCheckpoint
from ckptmgr.io.digest import digest_of
from ckptmgr.io.filesystem import (
    FileStatus,
    FileSystem,
    InputFile,
    OutputFile,
    discard,
    unlink_if_present,
)
from ckptmgr.io.permissions import DEFAULT_FILE_MODE, directory_mode, is_for_others
from ckptmgr.io.signals import defer_signals, deliver_signals
from ckptmgr.io.space_errors import explain_error, not_enough_space
from ckptmgr.store.listing import bare_file
from ckptmgr.store.manifest.codec import PLACEHOLDER, FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.files import ManifestFiles
from ckptmgr.store.manifest.reader import ManifestContent

# Room for the manifest and the directory blocks, beside the data.
SPACE_MARGIN_BYTES = 1 << 20


class Replaced(NamedTuple):
    """The file that has the name of a new one: the content of its manifest, and its manifest.

    `is_described` is also true where there is a manifest without such a file.
    """

    content: ManifestContent | None
    manifest: Manifest | None
    is_described: bool


NOTHING_REPLACED = Replaced(content=None, manifest=None, is_described=False)


class NewDataFile:
    """A data file under a temporary name, to be written and published; see `Publisher.new_file`."""

    def __init__(
        self,
        manifests: ManifestFiles,
        name: str,
        temp: Path,
        file: OutputFile,
        *,
        series: str,
        size_bytes: int,
        mode: int,
        replaced: Replaced,
        is_rank_file: bool,
        has_manifest: bool,
    ) -> None:
        self._manifests = manifests
        self._fs = manifests.fs
        self._directory = manifests.directory
        self._name = name
        self._temp = temp
        self._file = file
        self._series = series
        self._size_bytes = size_bytes
        self._mode = mode
        self._replaced = replaced
        self._is_rank_file = is_rank_file
        self._has_manifest = has_manifest
        self._is_temporary = True

    @contextmanager
    def writing(self) -> Iterator[OutputFile]:
        """Open the file for writing; on exit its content is durable. A signal interrupts it."""
        try:
            with deliver_signals():
                self._file.reserve(self._size_bytes)
                yield self._file
                self._file.sync()
        finally:
            self._file.close()

    @contextmanager
    def reading(self) -> Iterator[InputFile]:
        """Open the content that the disk holds, past the page cache. A signal interrupts it."""
        stored = self._fs.open(self._temp, is_uncached=True)
        with contextlib.closing(stored), deliver_signals():
            yield stored

    def publish(self, manifest: Manifest, *, mode: int | None = None) -> None:
        """Give the file its name; with its manifest, unless it is to have none.

        `mode` has the permission bits of the manifest, where they differ from those of the data.
        """
        if self._is_rank_file:
            self._publish_alone()
        elif self._has_manifest or self._replaced.is_described:
            self._is_temporary = False
            self._commit(manifest, self._mode if mode is None else mode)
            if not self._has_manifest:
                self._remove_manifest()
        else:
            self.give_name()

    def give_name(self) -> None:
        """Give the file its name, replacing any other, without a manifest; hold the name's lease.

        Raises:
            StoreLocked: The lease is lost; nothing was changed.
            OSError: From the disk; the directory holds the intact old file or the new one.
        """
        self._is_temporary = False
        self._manifests.rename_leased(self._temp, self._directory / self._name, self._name)
        self._fs.sync_directory(self._directory)

    def close(self) -> None:
        """Remove the temporary file, if it still is one."""
        if self._is_temporary:
            self._is_temporary = False
            self._file.close()
            discard(self._fs, self._temp)

    def _publish_alone(self) -> None:
        try:
            self._fs.replace(self._temp, self._directory / self._name)
            self._is_temporary = False
            self._fs.sync_directory(self._directory)
        except BaseException:
            # The rename may have succeeded even if it failed to report so; no manifest names this
            # file.
            with contextlib.suppress(OSError):
                unlink_if_present(self._fs, self._directory / self._name)
            raise

    def _commit(self, manifest: Manifest, mode: int) -> None:
        fs, directory, manifests = self._fs, self._directory, self._manifests
        before, old = self._replaced.content, self._replaced.manifest
        # Read permissions of the old manifest hold until the swap, and after an undone swap.
        during = mode if before is None else before.mode
        try:
            # The sync of the names: a power cut that the manifest survives must lose neither the
            # temporary file, without which its data would be missing, nor the old file as it is
            # described. One that only the data survives must not lose the temporary manifest.
            manifests.put(
                replace(manifest, replaces=old), series=self._series, mode=during, syncs_names=True
            )
            if old is not None or self._replaced.is_described:
                # Beside the old manifest the new data would be damage.
                fs.sync_directory(directory)
                manifests.leases.check(self._series, self._name)
            fs.replace(self._temp, directory / self._name)
        except BaseException:
            # An interrupt, or a reply lost by a file server, also occurs after a completed rename.
            # The manifest that describes old and new data must then stay.
            if self._is_there():
                manifests.undo(self._name, before, series=self._series)
                # For the same reason the temporary file is removed last, and stays where the
                # manifest cannot be removed.
                with contextlib.suppress(OSError):
                    fs.sync_directory(directory)
                    manifest_path = directory / manifest_name(self._name)
                    if before is not None or not _may_exist(fs, manifest_path):
                        discard(fs, self._temp)
            raise
        # The checkpoint exists now. If this sync fails the caller gets the error, but the published
        # file stays: it may be the only good one.
        fs.sync_directory(directory)
        if old is not None:
            # Without a sync: until the next one the manifest of both sides describes the new data.
            manifests.put(manifest, series=self._series, mode=mode)

    def _remove_manifest(self) -> None:
        """Remove the manifest durably, which the overwritten file needed until its data was gone."""
        fs, name = self._fs, self._name
        self._manifests.leases.check(self._series, name)
        unlink_if_present(fs, self._directory / manifest_name(name))
        fs.sync_directory(self._directory)

    def _is_there(self) -> bool:
        return _may_exist(self._fs, self._temp)


def _may_exist(fs: FileSystem, path: Path) -> bool:
    with contextlib.suppress(OSError):
        return fs.status(path) is not None
    return False


class Publisher:
    """Publishes files in the directory of `manifests`."""

    def __init__(self, manifests: ManifestFiles) -> None:
        self._directory = manifests.directory
        self._fs: FileSystem = manifests.fs
        self._manifests = manifests

    def check_space(self, size_bytes: int) -> None:
        """Raise StoreFull unless the disk has room for a file of `size_bytes`."""
        free = self._fs.free_bytes(self._directory)
        needed = size_bytes + SPACE_MARGIN_BYTES
        if free is not None and free < needed:
            raise not_enough_space(self._directory, needed, free)

    @contextmanager
    def new_file(
        self,
        name: str,
        *,
        series: str,
        size_bytes: int,
        mode: int = DEFAULT_FILE_MODE,
        is_rank_file: bool = False,
        has_manifest: bool = True,
    ) -> Iterator[NewDataFile]:
        """Create a data file under a temporary name, to be written and published in a `with` block.

        On exit the temporary file is gone, published or not. Signals are deferred except while the
        file is written or read.

        Args:
            name: Base name of the data file.
            series: Series of the file; recovery removes the leftovers of a series.
            size_bytes: Size of the file, to check and reserve space; 0 where it is unknown.
            mode: Permission bits of data and manifest; those of a new directory follow.
            is_rank_file: The file belongs to a set: its name is new, and it gets no manifest.
            has_manifest: Leave a manifest beside the file, whose lease must be held otherwise. One
                that the name has is removed after the commit.

        Raises:
            StoreFull: Not enough space; nothing was changed.
            StoreLocked: A lease on the name or the series was held and is lost; the data was not
                published.
            OSError: From the disk; before the commit point nothing was changed and no temporary
                file is left (as far as the disk allows its removal).
        """
        temp = self._manifests.temp_path(name, series)
        try:
            self._fs.make_directory(self._directory, mode=directory_mode(mode))
            with self._fs.hold_directory(self._directory):
                self.check_space(size_bytes)
                replaced = NOTHING_REPLACED
                if not is_rank_file and (has_manifest or self._is_described(name)):
                    replaced = self._replaced(name)
                with defer_signals():
                    file = self._fs.create(temp, mode=mode, owner_of=self._directory / name)
                    new = NewDataFile(
                        self._manifests,
                        name,
                        temp,
                        file,
                        series=series,
                        size_bytes=size_bytes,
                        mode=mode,
                        replaced=replaced,
                        is_rank_file=is_rank_file,
                        has_manifest=has_manifest,
                    )
                    try:
                        self._check_mode(temp, mode)
                        yield new
                    finally:
                        new.close()
        except OSError as error:
            raise explain_error(error, self._directory / name, size_bytes, self._fs) from error

    def _check_mode(self, temp: Path, mode: int) -> None:
        """Raise where others are to share a file, and the file system gives it other permissions."""
        status = self._fs.status(temp) if is_for_others(mode) else None
        if status is not None and status.mode != mode:
            raise UnsupportedCheckpoint(
                f"file_mode {mode:#o} cannot be had: the file system keeps no permission bits, and gives"
                f" its files {status.mode:#o}",
                path=self._directory,
                hint="leave file_mode out, or mount it with the permissions"
                " that its files are to have (file_mode=, umask=, uid=)",
            )

    def _is_described(self, name: str) -> bool:
        """Return whether there is a manifest of this name; OSError where that is not known."""
        return self._fs.status(self._directory / manifest_name(name)) is not None

    def _replaced(self, name: str) -> Replaced:
        """Return the manifest and its content of the file that has this name now, if any.

        The manifest gets the proofs of this writer. So a placeholder replaces it for a bare file,
        and for a file whose manifest this writer cannot prove; the placeholder preserves the
        original.
        """
        status = self._fs.status(self._directory / name)
        if status is None:
            is_described = _may_exist(self._fs, self._directory / manifest_name(name))
            return NOTHING_REPLACED._replace(is_described=is_described)
        before = self._manifests.content(name)
        try:
            manifest = self._manifests.read_proven(name)
        except CkptmgrError:
            manifest = None
        manifest = manifest or self._placeholder(name, status)
        if manifest.preserved is None and before is not None:
            is_proven = not manifest.is_placeholder
            text = before.text if is_proven else self._manifests.text_to_preserve(before, name)
            manifest = replace(manifest, preserved=text)
        return Replaced(content=before, manifest=manifest, is_described=True)

    def _placeholder(self, name: str, status: FileStatus) -> Manifest:
        bare = bare_file(self._directory / name, status)
        with contextlib.closing(self._fs.open(self._directory / name)) as file:
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
