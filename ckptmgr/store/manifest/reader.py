# SPDX-License-Identifier: Apache-2.0
"""Manifests on the disk, read: told apart while a name is being overwritten, and taken at no more than they prove."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError, CorruptCheckpoint, KeyProblem, UnprovenCheckpoint
from ckptmgr.core.trust import Trust
from ckptmgr.formats.source import read_bytes
from ckptmgr.io.digest import differing_ranges
from ckptmgr.io.filesystem import FileSystem
from ckptmgr.io.passing_errors import with_one_retry
from ckptmgr.store.manifest import codec as manifests
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.real_files import no_regular_file

# Escaped twice, it must still fit into a manifest.
_MAX_KEPT_BYTES = manifests.MAX_MANIFEST_BYTES // 8
# So many writers in a row, each with other keys, may lose power over one file.
_MAX_KEPT_DEPTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestContent:
    """A manifest file as it is: what is put back when an overwrite fails."""

    data: bytes
    mode: int

    @property
    def text(self) -> str | None:
        """What another manifest can keep of it; None where it is no text, or too much."""
        if len(self.data) > _MAX_KEPT_BYTES:
            return None
        try:
            return self.data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            return None


def check_is_file(fs: FileSystem, path: Path) -> None:
    """Raise unless a data file that a manifest describes is a regular file, or absent.

    Raises:
        CorruptCheckpoint: It is a link, a directory, or another thing.
    """
    status = fs.status(path)
    if status is not None and not status.is_file:
        raise no_regular_file(path)


class ManifestReader:
    """The manifests of a directory, to be read."""

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

    def read(self, data_name: str) -> Manifest | None:
        """Return the manifest of a data file, or None when it has none.

        Where a swap was interrupted, returns the half that describes the data that is there. Where others began it, their
        keys are not needed for the old half: the manifest of that is kept, and counts as it did before they came.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under another key; or a link has the
                name of the data file.
        """
        half = self._read(data_name, self.trust)
        if half is not None:
            check_is_file(self.fs, self.directory / data_name)
        if half is not None and half.is_placeholder and self.trust.is_strict:
            raise UnprovenCheckpoint(
                "nothing proves who wrote this file: it was here when a save that was to replace it failed",
                path=self.directory / data_name,
            )
        return half

    def read_proven(self, data_name: str) -> Manifest | None:
        """As `read`, but refuse what this writer's own keys do not prove: it is about to be written again under them.

        What was made up already stays so.
        """
        return self._read(data_name, self.trust.strict)

    def read_unproven(self, data_name: str) -> Manifest | None:
        """As `read`, but check no proofs; for people."""
        manifest = self.load(manifest_name(data_name), trust=Trust())
        return None if manifest is None else self.matching_side(manifest)

    def _read(self, data_name: str, trust: Trust) -> Manifest | None:
        path = self.directory / manifest_name(data_name)
        try:
            data = self._content(path)
        except FileNotFoundError:
            return None
        return self._half_in(data, path, trust, _MAX_KEPT_DEPTH)

    def _half_in(self, data: bytes, path: Path, trust: Trust, depth: int) -> Manifest:
        """Return the half of a manifest file that describes the data, or that of one kept in it that these keys prove."""
        try:
            half = self.matching_side(manifests.decode(data, path=path, trust=trust))
        except KeyProblem:
            kept = self._kept_in(data, path, trust, depth)
            if kept is None:
                raise
            return kept
        if half.is_placeholder:
            return self._kept_in(data, path, trust, depth) or half
        return half

    def _kept_in(self, data: bytes, path: Path, trust: Trust, depth: int) -> Manifest | None:
        """Return what is kept in a manifest of others, where it describes the data and would be accepted in its place.

        Nothing that the others say counts, so nobody gains more by this than by putting the kept manifest into the directory.
        """
        old = manifests.decode(data, path=path).replaces
        if old is None or old.kept is None or depth == 0:
            return None
        kept = old.kept.encode("utf-8", "surrogatepass")
        if len(kept) > _MAX_KEPT_BYTES:
            return None
        try:
            half = self._half_in(kept, path, trust, depth - 1)
        except CkptmgrError:
            return None
        if half.shards or not self._describes_data(half.file):
            return None
        return half if half.kept is not None else replace(half, kept=old.kept)

    def content(self, data_name: str) -> ManifestContent | None:
        """Return the manifest file of a data file that is there as it is, or None when there is none."""
        path = self.directory / manifest_name(data_name)
        status = self.fs.status(path)
        if status is None or self.fs.status(self.directory / data_name) is None:
            return None
        return ManifestContent(data=self._content(path), mode=status.mode)

    def load(self, name: str, *, trust: Trust) -> Manifest | None:
        """Return what a manifest file says, both halves of an interrupted swap; None when there is no such file.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under another key.
        """
        path = self.directory / name
        try:
            data = self._content(path)
        except FileNotFoundError:
            return None
        return manifests.decode(data, path=path, trust=trust)

    def _content(self, path: Path) -> bytes:
        return with_one_retry(lambda: self._read_whole(path), self.fs)

    def _read_whole(self, path: Path) -> bytes:
        with contextlib.closing(self.fs.open(path)) as file:
            if file.size > manifests.MAX_MANIFEST_BYTES:
                raise CorruptCheckpoint(
                    f"has {file.size} bytes, a manifest at most {manifests.MAX_MANIFEST_BYTES}",
                    path=path,
                    hint="it is something else; move it away",
                )
            return read_bytes(file, 0, file.size)

    def matching_side(self, manifest: Manifest) -> Manifest:
        """Return the half of a manifest of two files that describes the data that is there; reads the data."""
        old = manifest.replaces
        if old is None:
            return manifest
        if not self._describes_data(old.file):
            return manifest.without_replaced()
        return replace(old, auth=manifest.auth, opened_by=manifest.opened_by)

    def _describes_data(self, entry: FileEntry) -> bool:
        return self.is_described(self.directory / entry.name, entry)

    def is_described(self, path: Path, entry: FileEntry) -> bool:
        """Return whether a file has the content that a manifest describes; reads it."""
        with contextlib.closing(self.fs.open(path)) as file:
            is_right_size = file.size == entry.digest.size_bytes
            return is_right_size and not differing_ranges(file, entry.digest)
