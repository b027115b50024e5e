# SPDX-License-Identifier: Apache-2.0
"""Read manifests from the disk; of an interrupted swap choose the side that describes the data."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, KeyProblem, UnprovenCheckpoint
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.trust import Trust
from ckptmgr.io.digest import differing_ranges
from ckptmgr.io.files import NoRegularFile
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.owners import is_of_stranger
from ckptmgr.io.temp_names import is_temp_of
from ckptmgr.store.manifest import codec as manifests
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.fast_reader import checkpoint_in
from ckptmgr.store.real_files import no_regular_file

# Escaped twice, it must still fit into a manifest.
_MAX_PRESERVED_BYTES = manifests.MAX_MANIFEST_BYTES // 8


class ManifestContent(NamedTuple):
    """The bytes and permission bits of a manifest file, to be restored if an overwrite fails."""

    data: bytes
    mode: int

    @property
    def text(self) -> str | None:
        """The text to be preserved in another manifest; None if it is no text, or too long."""
        if len(self.data) > _MAX_PRESERVED_BYTES:
            return None
        try:
            return self.data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None


def check_is_file(fs: FileSystem, path: Path) -> None:
    """Raise CorruptCheckpoint if a data file exists and is no regular file."""
    status = fs.status(path)
    if status is not None and not status.is_file:
        raise no_regular_file(path)


class ManifestReader:
    """Reads the manifests of a directory."""

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem,
        trust: Trust,
    ) -> None:
        self.directory = directory
        self.fs = fs
        self.trust = trust

    def read(self, data_name: str, *, is_bare_taken: bool = False) -> Manifest | None:
        """Return the manifest of a data file, or None if it has none.

        Of an interrupted swap, returns the side that describes the data. If a writer with other
        keys began it, those are not needed for the old side: its original manifest is preserved.
        With `is_bare_taken`, a file that had none before the swap has none: the caller proves such
        files by their seal.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under
                another key; or the data file is a link.
        """
        if self._is_of_stranger_alone(data_name):
            return None
        return self._proven(data_name, self._content_of(data_name), is_bare_taken=is_bare_taken)

    def _is_of_stranger_alone(self, data_name: str) -> bool:
        """Return whether a stranger put a manifest, which no key proves, beside data of others."""
        if self.trust.can_prove:
            return False
        manifest = self.fs.status(self.directory / manifest_name(data_name))
        if manifest is None or manifest.owner is None:
            return False
        at = self.fs.status(self.directory)
        data = self.fs.status(self.directory / data_name)
        is_alone = data is not None and not is_of_stranger(data, at)
        return is_alone and is_of_stranger(manifest, at)

    def read_listed(self, path: Path) -> Manifest | Checkpoint | None:
        """As `read` for the data file `path`, but return the checkpoint of a plain manifest at once.

        The caller knows that the data file is a regular file.
        """
        data = self._content_of(path.name)
        if data is not None and self.trust.keys is None and not self.trust.trusted_keys:
            found = checkpoint_in(data, path)
            if found is not None:
                return found
        return self._proven(path.name, data)

    def _proven(
        self, data_name: str, data: bytes | None, *, is_bare_taken: bool = False
    ) -> Manifest | None:
        try:
            side = self._side_in(data_name, data, self.trust)
        except KeyProblem:
            # A writer with other keys, or without one, was to replace the file.
            if is_bare_taken and self._is_placeholder(self.read_unproven(data_name)):
                return None
            raise
        if side is not None:
            check_is_file(self.fs, self.directory / data_name)
        if side is not None and side.is_placeholder and self.trust.is_strict:
            if is_bare_taken and self._is_placeholder(side):
                return None  # as before the save that was to replace the file
            raise UnprovenCheckpoint(
                "nothing proves who wrote this file: it was here when a save that was to replace it failed",
                path=self.directory / data_name,
            )
        return side

    def read_proven(self, data_name: str) -> Manifest | None:
        """As `read`, but accept only proofs by the keys of this writer, which will rewrite it.

        A placeholder is returned as such.
        """
        return self._side_in(data_name, self._content_of(data_name), self.trust.strict)

    def read_unproven(self, data_name: str) -> Manifest | None:
        """As `read`, but check no proofs; for display."""
        manifest = self.load(manifest_name(data_name), trust=Trust())
        return None if manifest is None else self.matching_side(manifest)

    def _is_placeholder(self, side: Manifest | None) -> bool:
        """Return whether a manifest is the placeholder of the present data; needs no proof.

        An attacker who forges one could as well remove the manifest.
        """
        return side is not None and side.is_placeholder and self._describes_data(side.file)

    def _content_of(self, data_name: str) -> bytes | None:
        try:
            return self._content(manifest_name(data_name))
        except FileNotFoundError:
            return None

    def _side_in(self, data_name: str, data: bytes | None, trust: Trust) -> Manifest | None:
        if data is None:
            return None
        path = self.directory / manifest_name(data_name)
        try:
            side = self.matching_side(manifests.decode(data, path=path, trust=trust))
        except KeyProblem:
            preserved = self._preserved_in(data, path, trust)
            if preserved is None:
                raise
            return preserved
        return (self._preserved_in(data, path, trust) or side) if side.is_placeholder else side

    def _preserved_in(self, data: bytes, path: Path, trust: Trust) -> Manifest | None:
        """Return the preserved original, if it describes the data and these keys prove it.

        The manifest around it need not be proven: an attacker who forges that could as well put the
        preserved one into the directory.
        """
        old = manifests.decode(data, path=path).replaces
        if old is None or old.preserved is None:
            return None
        original = old.preserved.encode("utf-8", "surrogatepass")
        if len(original) > _MAX_PRESERVED_BYTES:
            return None
        try:
            side = self.matching_side(manifests.decode(original, path=path, trust=trust))
        except CkptmgrError:
            return None
        if side.shards or not self._describes_data(side.file):
            return None
        return replace(side, preserved=old.preserved)

    def text_to_preserve(self, before: ManifestContent, data_name: str) -> str | None:
        """Return the original manifest of the data; an interrupted swap may have preserved it."""
        try:
            path = self.directory / manifest_name(data_name)
            side = self.matching_side(manifests.decode(before.data, path=path))
        except CkptmgrError:
            return before.text
        return side.preserved or before.text

    def content(self, data_name: str) -> ManifestContent | None:
        """Return the manifest file of an existing data file, or None if there is none."""
        path = self.directory / manifest_name(data_name)
        status = self.fs.status(path)
        if status is None or self.fs.status(self.directory / data_name) is None:
            return None
        return ManifestContent(data=self._content(path.name), mode=status.mode)

    def load(self, name: str, *, trust: Trust) -> Manifest | None:
        """Return a manifest with both sides of a swap, or None; `Trust()` checks no proof.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under
                another key.
        """
        path = self.directory / name
        try:
            data = self._content(path.name)
        except FileNotFoundError:
            return None
        return manifests.decode(data, path=path, trust=trust)

    def in_temp(self, temp: str, data_name: str, *, trust: Trust) -> Manifest | None:
        """Return the manifest in a temporary file if it describes data that has its name; reads it.

        A power cut leaves such data where the disk reorders renames: the save got no further. None
        for a manifest that is not proven; `Trust()` checks no proof.
        """
        path = self.directory / manifest_name(data_name)
        if not is_temp_of(temp, path.name):
            return None
        try:
            data = self._content(temp)
            manifest = manifests.decode(data, path=path, trust=trust)
            is_new = manifest.replaces is None and not manifest.shards
            return manifest if is_new and self._describes_data(manifest.file) else None
        except (CkptmgrError, OSError):
            return None

    def _content(self, name: str) -> bytes:
        most_bytes = manifests.MAX_MANIFEST_BYTES
        try:
            data, size_bytes, _ = self.fs.read_head(self.directory, name, most_bytes=most_bytes)
        except NoRegularFile:
            raise CorruptCheckpoint(
                "the manifest is a link or no regular file",
                path=self.directory / name,
                hint="put the file itself here, in place of the link",
            ) from None
        if size_bytes > most_bytes:
            raise CorruptCheckpoint(
                f"has {size_bytes} bytes, a manifest at most {most_bytes}",
                path=self.directory / name,
                hint="it is something else; move it away",
            )
        return data

    def matching_side(self, manifest: Manifest) -> Manifest:
        """Return the manifest, or the replaced one if that describes the data; reads the data."""
        old = manifest.replaces
        if old is None:
            return manifest
        if not self._describes_data(old.file):
            return manifest.without_replaced()
        return replace(old, auth=manifest.auth, opened_by=manifest.opened_by)

    def _describes_data(self, entry: FileEntry) -> bool:
        return self.is_described(self.directory / entry.name, entry)

    def is_described(self, path: Path, entry: FileEntry) -> bool:
        """Return whether the content of a file matches an entry; reads it."""
        with contextlib.closing(self.fs.open(path)) as file:
            is_right_size = file.size == entry.digest.size_bytes
            return is_right_size and not differing_ranges(file, entry.digest)
