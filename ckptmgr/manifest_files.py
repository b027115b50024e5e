# SPDX-License-Identifier: Apache-2.0
"""Manifests on the disk: read, replaced atomically, and told apart while a name is being overwritten."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmgr import manifest as manifests
from ckptmgr.crypto.keyring import Keys, ring_of
from ckptmgr.crypto.signing import PublicKey, SigningKey
from ckptmgr.digest import differing_ranges
from ckptmgr.errors import CkptmgrError, CorruptCheckpoint, KeyProblem, UnsealedCheckpoint
from ckptmgr.formats.source import read_bytes
from ckptmgr.fsio import FileSystem, discard
from ckptmgr.lease import Processes
from ckptmgr.manifest import FileEntry, Manifest, manifest_name
from ckptmgr.manifest_keys import ManifestKey
from ckptmgr.temp_names import temp_name

# Escaped twice, it must still fit into a manifest.
_MAX_KEPT_BYTES = manifests.MAX_MANIFEST_BYTES // 8
_MAX_KEPT_DEPTH = (
    4  # so many writers in a row, each with other keys, may lose power in an overwrite
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestContent:
    """A manifest file as it is: what is put back when an overwrite fails.

    Attributes:
        data: Its bytes.
        mode: Its permission bits.
    """

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


class ManifestFiles:
    """The manifests of a directory.

    Args:
        directory: Where the checkpoints lie.
        fs: The disk.
        key: Authenticates manifests.
        processes: Names this writer, so that its leftovers can be told from those of live ones.
        must_authenticate: With a key, treat manifests without authentication as a problem; with trusted keys, those
            without signature.
        signing_key: Signs manifests.
        trusted_keys: Whose signatures count.
    """

    def __init__(
        self,
        directory: Path,
        *,
        fs: FileSystem,
        key: Keys | None,
        processes: Processes,
        must_authenticate: bool,
        signing_key: SigningKey | None = None,
        trusted_keys: Sequence[PublicKey] = (),
    ) -> None:
        self.directory = directory
        self.fs = fs
        self._key = key
        self._processes = processes
        self._must_authenticate = must_authenticate
        self._signing_key = signing_key
        self._trusted_keys = tuple(trusted_keys)
        own = () if signing_key is None else (signing_key.public_key,)
        self._trusted_when_required = (*own, *self._trusted_keys)

    def read(self, data_name: str) -> Manifest | None:
        """Return the manifest of a data file, or None when it has none.

        Where a swap was interrupted, returns the half that describes the data that is there. Where others began it, their
        keys are not needed for the old half: the manifest of that is kept, and counts as it did before they came.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under another key.
        """
        half = self._read(data_name, None)
        if half is not None and half.is_made_up and self._must_authenticate:
            raise UnsealedCheckpoint(
                "nothing proves who wrote this file: it was here when a save that was to replace it failed",
                path=self.directory / data_name,
            )
        return half

    def read_proven(self, data_name: str) -> Manifest | None:
        """As `read`, but refuse what this writer's own keys do not prove: it is about to be written again under them.

        What was made up already stays so.
        """
        return self._read(data_name, True)

    def read_unproven(self, data_name: str) -> Manifest | None:
        """As `read`, but check no proofs; for people."""
        manifest = self.load(manifest_name(data_name), with_key=False)
        return None if manifest is None else self.half_that_matches(manifest)

    def _read(self, data_name: str, must_authenticate: bool | None) -> Manifest | None:
        path = self.directory / manifest_name(data_name)
        try:
            data = self._content(path)
        except FileNotFoundError:
            return None
        return self._half_in(data, path, must_authenticate, _MAX_KEPT_DEPTH)

    def _half_in(
        self, data: bytes, path: Path, must_authenticate: bool | None, depth: int
    ) -> Manifest:
        """Return the half of a manifest file that describes the data, or that of one kept in it that these keys prove."""
        try:
            half = self.half_that_matches(self._decoded(data, path, must_authenticate))
        except KeyProblem:
            kept = self._kept_in(data, path, must_authenticate, depth)
            if kept is None:
                raise
            return kept
        if half.is_made_up:
            return self._kept_in(data, path, must_authenticate, depth) or half
        return half

    def _kept_in(
        self, data: bytes, path: Path, must_authenticate: bool | None, depth: int
    ) -> Manifest | None:
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
            half = self._half_in(kept, path, must_authenticate, depth - 1)
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

    def load(
        self, name: str, *, with_key: bool = True, must_authenticate: bool | None = None
    ) -> Manifest | None:
        """Return what a manifest file says, both halves of an interrupted swap; None when there is no such file.

        Args:
            name: Of the manifest file.
            with_key: Whether to check its authentication.
            must_authenticate: As for the class, for this call; if so, a writer that signs trusts its own signatures.

        Raises:
            CorruptCheckpoint, TamperedCheckpoint, KeyProblem: It is damaged, changed, or under another key.
        """
        path = self.directory / name
        try:
            data = self._content(path)
        except FileNotFoundError:
            return None
        if not with_key:
            return manifests.decode(data, path=path)
        return self._decoded(data, path, must_authenticate)

    def _decoded(self, data: bytes, path: Path, must_authenticate: bool | None) -> Manifest:
        trusted_keys = self._trusted_when_required if must_authenticate else self._trusted_keys
        if must_authenticate is None:
            must_authenticate = self._must_authenticate
        return manifests.decode(
            data,
            path=path,
            key=self._key,
            trusted_keys=trusted_keys,
            must_authenticate=must_authenticate,
        )

    def lost_by_rewriting(self, data_name: str) -> str | None:
        """Return what a manifest has that cannot be made here, for want of a key: `authenticated`, `signed`, or None."""
        can_authenticate = self._key is not None and ring_of(self._key).can_open
        if can_authenticate and self._signing_key is not None:
            return None
        path = self.directory / manifest_name(data_name)
        has_mac, has_signature = manifests.proofs_in(self._content(path), path=path)
        if has_mac and not can_authenticate:
            return "authenticated"
        return "signed" if has_signature and self._signing_key is None else None

    def _content(self, path: Path) -> bytes:
        with contextlib.closing(self.fs.open(path)) as file:
            if file.size > manifests.MAX_MANIFEST_BYTES:
                raise CorruptCheckpoint(
                    f"has {file.size} bytes, a manifest at most {manifests.MAX_MANIFEST_BYTES}",
                    path=path,
                    hint="it is something else; move it away",
                )
            return read_bytes(file, 0, file.size)

    def half_that_matches(self, manifest: Manifest) -> Manifest:
        """Return the half of a manifest of two files that describes the data that is there; reads the data."""
        old = manifest.replaces
        if old is None:
            return manifest
        if not self._describes_data(old.file):
            return manifest.without_replaced()
        return replace(old, auth=manifest.auth, opened_by=manifest.opened_by)

    def _describes_data(self, entry: FileEntry) -> bool:
        with contextlib.closing(self.fs.open(self.directory / entry.name)) as file:
            is_right_size = file.size == entry.digest.size_bytes
            return is_right_size and not differing_ranges(file, entry.digest)

    def put(self, manifest: Manifest, *, series: str, mode: int | None) -> None:
        """Replace a manifest atomically; its content is durable, its name not before the directory is synced.

        Args:
            manifest: The new one.
            series: The series it belongs to, for reaping leftovers.
            mode: Permission bits; None for those it has.
        """
        data = manifests.encode(manifest, key=self._key, signing_key=self._signing_key)
        target = self.directory / manifest_name(manifest.name)
        mode = self._mode_of(target) if mode is None else mode
        self.write(target, data, series=series, mode=mode, is_durable=True)

    def _mode_of(self, path: Path) -> int:
        status = self.fs.status(path)
        return 0o400 if status is None else status.mode

    def reauthenticate(
        self, data_name: str, change: Callable[[ManifestKey], ManifestKey], *, mode: int | None
    ) -> None:
        """Give a manifest another authentication; its content is durable, its name not before the directory is synced.

        Raises:
            CkptmgrError: It cannot be read, or is not authenticated.
        """
        if self._key is None:
            raise KeyProblem("a key is needed", path=self.directory / data_name)
        path = self.directory / manifest_name(data_name)
        old = self._content(path)
        manifest, new = manifests.reauthenticated(old, path=path, key=self._key, change=change)
        mode = self._mode_of(path) if mode is None else mode
        self.write(path, new, series=manifest.series, mode=mode, is_durable=True)

    def create(self, manifest: Manifest, *, series: str, mode: int) -> None:
        """Publish a manifest unless its name is taken; its content is durable, its name not before the directory is synced.

        Raises:
            FileExistsError: Somebody has the name.
            OSError: From the disk. Nothing has the name because of us, unless the disk does not even tell that.
        """
        data = manifests.encode(manifest, key=self._key, signing_key=self._signing_key)
        target = self.directory / manifest_name(manifest.name)
        temp = self._write_temp(target, data, series=series, mode=mode, is_durable=True)
        try:
            self.fs.link(temp, target)
        except OSError:
            # A file server may have done it, and its answer was lost.
            if not self._are_one_file(temp, target):
                raise
        finally:
            discard(self.fs, temp)

    def _are_one_file(self, temp: Path, target: Path) -> bool:
        one, other = self.fs.status(temp), self.fs.status(target)
        return one is not None and other is not None and one.identity == other.identity

    def undo(self, name: str, before: ManifestContent | None, *, series: str) -> None:
        """Put back the manifest file that data called `name` had before, byte for byte; None for none."""
        path = self.directory / manifest_name(name)
        # Best effort: an orphan manifest is a leftover, and one that still `replaces` the old data verifies as it.
        with contextlib.suppress(OSError):
            if before is None:
                self.fs.unlink(path)
            else:
                self.write(path, before.data, series=series, mode=before.mode, is_durable=True)

    def settle(self, data_name: str, *, series: str) -> bool:
        """Make the manifest of one name that of its data alone, where an overwrite was interrupted; return whether one was.

        What is not proven by this writer's keys, or could not be written again as trustworthy, stays as it is.

        Raises:
            OSError: From the disk.
        """
        try:
            claimed = self.load(manifest_name(data_name), with_key=False)
            if claimed is None or claimed.replaces is None or claimed.shards:
                return False
            half = self.read_proven(data_name)
            if half is None or (half.kept is None and self.lost_by_rewriting(data_name)):
                return False
        except CkptmgrError:
            return False  # whoever reads it next says why
        if half.kept is None:
            self.put(half, series=series, mode=self._mode_of(self.directory / data_name))
        else:
            path = self.directory / manifest_name(data_name)
            # With the proofs and the mode that it had: while a name is overwritten, its manifest keeps the mode.
            data = half.kept.encode("utf-8", "surrogatepass")
            self.write(path, data, series=series, mode=self._mode_of(path), is_durable=True)
        return True

    def write(self, path: Path, data: bytes, *, series: str, mode: int, is_durable: bool) -> None:
        """Replace a small file atomically; durable ones are synced before they get their name."""
        temp = self._write_temp(path, data, series=series, mode=mode, is_durable=is_durable)
        try:
            self.fs.replace(temp, path)
        except BaseException:
            discard(self.fs, temp)
            raise

    def _write_temp(
        self, path: Path, data: bytes, *, series: str, mode: int, is_durable: bool
    ) -> Path:
        temp = self.temp_path(path.name, series)
        file = self.fs.create(temp, mode=mode)
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
        """Return a temporary path for a file that will be called `name`; nobody else uses it."""
        return self.directory / temp_name(name, token=self._processes.token(), series=series)
