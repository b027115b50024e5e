# SPDX-License-Identifier: Apache-2.0
"""Compress or expand checkpoints in place.

* The bytes inside stay the same: expanding gives the safetensors file that was compressed, byte for
  byte. Step, metrics, pins and history stay, and so do key and cipher of an encrypted file.
* The new file is read back past the page cache, expanded and compared with the old one before it is
  published; only then is the old one replaced (encrypted, the name is the same) or removed.
* After a crash both may be in the directory, each intact. Doing the same again finishes it.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import (
    CheckpointNotFound,
    KeyProblem,
    SaveFailed,
    UnsafeWrite,
    UnsupportedCheckpoint,
)
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.names import extension_of, without_envelope
from ckptmgr.crypto.container.header import HeaderCopy
from ckptmgr.crypto.container.unlock import find_copies
from ckptmgr.crypto.keys.ring import Keys
from ckptmgr.files.load.bulk import read_through
from ckptmgr.files.load.open import OpenCheckpoint, open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.compressed import FrameFigures, frames_sealer, read_once, write_frames
from ckptmgr.files.save.pipeline import container_for, write_image
from ckptmgr.files.save.saver import check_written
from ckptmgr.formats.compressed.plan import plan_frames, runs_of
from ckptmgr.formats.safetensors_file import SafetensorsIndex
from ckptmgr.io.digest import FileDigest, digest_of
from ckptmgr.io.filesystem import InputFile, OutputFile
from ckptmgr.io.source_image import SourceImage
from ckptmgr.io.threads import PIECE_BYTES
from ckptmgr.maintenance.rekey_change import check_same_recipients
from ckptmgr.maintenance.rewriting import (
    check_proofs,
    held_for_change,
    manifest_of_bare,
    mode_like,
    opened_raw,
    write_beside,
)
from ckptmgr.store.manifest.codec import FileEntry, Manifest
from ckptmgr.store.manifest.keys import manifest_key_of
from ckptmgr.store.store import Store


class RecompressOutcome(enum.Enum):
    """Change that was made to a checkpoint."""

    COMPRESSED = "compressed"
    EXPANDED = "expanded"
    FINISHED = "finished"
    """It had been done before; the old file was still there."""
    NOTHING = "nothing"
    """It is compressed, or expanded, already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecompressResult:
    """Change of one checkpoint.

    Attributes:
        source: As listed before.
        target: As listed afterwards.
        raw_bytes: Size of the safetensors file inside.
        elapsed_s: Time of the whole change.
        by_dtype: Sizes and speed per element type; empty where nothing was compressed.
    """

    source: Checkpoint
    target: Checkpoint
    outcome: RecompressOutcome
    raw_bytes: int
    elapsed_s: float
    by_dtype: Mapping[str, FrameFigures] = field(default_factory=dict)


def recompress(
    store: Store,
    checkpoint: Checkpoint,
    *,
    level: int | None,
    options: ReadOptions,
) -> RecompressResult:
    """Compress a checkpoint with a level of zstd, or expand it (None), durably.

    A compressed file stays as it is, whatever its level.

    Raises:
        UnsupportedCheckpoint: It is not a safetensors file, or that of several ranks.
        StoreLocked: Another process is writing its series, or a file that has the new name.
        KeyProblem: A key is missing: its own, or the one that signed its manifest.
        UnprovenCheckpoint: It has no manifest, and would get one that vouches for its step.
        UnsafeWrite: Another file has the new name, or other keys would open it than now.
        CorruptCheckpoint: It is damaged; nothing was changed.
        SaveFailed: The disk lost the write; nothing was changed.
        OSError: From the disk.
    """
    started = time.perf_counter()
    if checkpoint.shards:
        raise UnsupportedCheckpoint(
            "was saved by several ranks; such checkpoints are compressed when they are saved",
            path=checkpoint.path,
        )
    with (
        held_for_change(store, checkpoint),
        _opened(store, checkpoint.name, options) as found,
    ):
        change = _Change(store, checkpoint, found, level, options)
        outcome = change.run()
    target = next((c for c in store.scan() if c.name == change.target), None)
    if target is None:
        raise CheckpointNotFound("vanished while it was listed", path=checkpoint.path)
    return RecompressResult(
        source=checkpoint,
        target=target,
        outcome=outcome,
        raw_bytes=found.opened.source.size,
        elapsed_s=time.perf_counter() - started,
        by_dtype=change.by_dtype,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Opened file, its manifest, and the header of a container, with its recipients."""

    opened: OpenCheckpoint
    index: SafetensorsIndex
    manifest: Manifest | None
    header: HeaderCopy | None


@contextmanager
def _opened(store: Store, name: str, options: ReadOptions) -> Iterator[_Found]:
    path = store.directory / name
    with opened_raw(store, path) as raw:
        manifest = store.read_manifest(name)
        opened = open_source(raw, path=str(path), options=options, manifest=manifest)
        if not isinstance(opened.index, SafetensorsIndex):
            raise UnsupportedCheckpoint(
                "is a .ckpt, which MindSpore could not read compressed",
                path=path,
                hint="save checkpoints with format='safetensors' to have them compressed",
            )
        header = None if opened.cipher is None else find_copies(raw)[0].header
        yield _Found(opened=opened, index=opened.index, manifest=manifest, header=header)


class _Change:
    """Compression or expansion of one checkpoint."""

    def __init__(
        self,
        store: Store,
        checkpoint: Checkpoint,
        found: _Found,
        level: int | None,
        options: ReadOptions,
    ) -> None:
        self._store = store
        self._checkpoint = checkpoint
        self._found = found
        self._level = level
        self._options = options
        self._source = found.opened.source
        self._cipher = found.opened.cipher
        self.by_dtype: Mapping[str, FrameFigures] = {}
        extension = extension_of(
            "safetensors", is_encrypted=self._cipher is not None, is_compressed=level is not None
        )
        stem = without_envelope(checkpoint.name).removesuffix(".safetensors")
        self.target = f"{stem}.{extension}"

    def run(self) -> RecompressOutcome:
        is_compressed = self._found.opened.compressed_bytes is not None
        if is_compressed == (self._level is not None):
            self.target = self._checkpoint.name
            return RecompressOutcome.NOTHING
        check_proofs(self._store, self._checkpoint, self._found.manifest, self._options.trust)
        if self._found.header is not None:
            check_same_recipients(self._found.header, self._keys, path=self._checkpoint.path)
        outcome = (
            RecompressOutcome.EXPANDED if self._level is None else RecompressOutcome.COMPRESSED
        )
        if self.target == self._checkpoint.name:
            self._publish()
            return outcome
        path = self._store.directory / self.target
        with self._store.lease(self.target):
            if self._store.fs.status(path) is None:
                self._publish()
            else:
                self._finish(path)
                outcome = RecompressOutcome.FINISHED
            self._store.remove_copied(self._checkpoint)
        return outcome

    def _finish(self, path: Path) -> None:
        """Keep the file that has the new name already, with the pins of both.

        Raises:
            UnsafeWrite: It holds something else.
        """
        with _opened(self._store, path.name, self._options) as other:
            there, mine = other.manifest, self._found.manifest
            is_same = digest_of(other.opened.source) == digest_of(self._source)
        if there is not None and mine is not None:
            is_same = is_same and _save_of(there) == _save_of(mine)
        if not is_same:
            raise UnsafeWrite(
                "exists, and holds something else",
                path=path,
                hint="move one of the two away",
            )
        if mine is None:
            return
        if there is None:
            self._publish()  # step, metrics and pins are in the manifest only
            return
        names = {pin.name for pin in there.pins}
        lost = tuple(pin for pin in mine.pins if pin.name not in names)
        if lost:
            checkpoint = there.to_checkpoint(self._store.directory)
            self._store.change_pins(checkpoint, lambda pins: (*pins, *lost))

    def _publish(self) -> None:
        if self._found.index.crc is not None:
            read_through(self._found.opened, check_crc=True)
        is_size_known = self._cipher is None and self._level is None
        write_beside(
            self._store,
            self.target,
            self._write,
            series=self._checkpoint.series,
            size_bytes=self._source.size if is_size_known else 0,
            mode=mode_like(self._store, self._checkpoint.path.name),
            read_back=self._read_back,
            describe=self._describe,
        )

    def _write(self, file: OutputFile) -> FileDigest:
        size, cipher = self._source.size, self._cipher
        image = SourceImage(
            self._source, size, window_bytes=self._found.opened.unit_bytes or PIECE_BYTES
        )
        if self._level is None:
            sealer = None if cipher is None else container_for(image, self._keys, cipher)
            return write_image(image, file, sealer=sealer).digest
        frames = plan_frames(runs_of(self._found.index, size))
        seal = None if cipher is None else frames_sealer(size, self._keys, cipher)
        written = write_frames(frames, read_once(image), file, level=self._level, sealer=seal)
        self.by_dtype = written.by_dtype
        return written.digest

    def _read_back(self, file: InputFile, digest: FileDigest) -> None:
        """Compare the file on the disk with the written digest, its content with the old file."""
        path = str(self._store.directory / self.target)
        check_written(file, digest, path=path)
        options = replace(self._options, trust=replace(self._options.trust, trusted_keys=()))
        stored = open_source(file, path=path, options=options)
        if digest_of(stored.source) != digest_of(self._source):
            raise SaveFailed("what was written holds something else than what was read", path=path)

    def _describe(self, digest: FileDigest) -> Manifest:
        is_encrypted = self._cipher is not None
        file = FileEntry(
            name=self.target,
            digest=digest,
            format="safetensors",
            cipher=self._cipher,
            key_id=self._keys.key_id if is_encrypted else None,
        )
        found = self._found.manifest
        if found is None:
            return manifest_of_bare(self._checkpoint, file)
        # Not the key of the old manifest: a key that a rekey removed may know that.
        is_new = is_encrypted and found.auth is not None
        auth = manifest_key_of(self._keys) if is_new else found.auth
        return replace(found, file=file, replaces=None, auth=auth)

    @property
    def _keys(self) -> Keys:
        if self._options.trust.keys is None:
            raise KeyProblem("a key is needed", path=self._checkpoint.path)
        return self._options.trust.keys


def _save_of(manifest: Manifest) -> tuple[str, int, datetime, str]:
    """Return the fields that identify a save and stay when its file is converted."""
    return manifest.run_id, manifest.sequence, manifest.saved_at, manifest.why
