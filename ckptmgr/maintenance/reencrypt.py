# SPDX-License-Identifier: Apache-2.0
"""Encrypt files anew, under a new data key, as a stream: constant memory, no plaintext on the disk, swapped like a save.

At every instant the file is the old or the new one, and its manifest can be checked by the old and the new keys until the new
one is durable. Whoever opened the old file and kept its data key has nothing of the new one. Compressed frames stay as they
are. For the files of many ranks see `reencrypt_set`.

Encrypt the files of many ranks anew, each under a new data key, as streams, with one commit for all of them.

Until the one manifest that names all new files is durable, the old ones are untouched, and the old keys open them; from then
on the new keys open the new ones. What an interruption leaves, old files included, opens for whoever opened it before, so it
counts as work that is not done: `stale_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import OPAQUE
from ckptmgr.core.shard_names import new_attempt_id, parse_shard_name, with_attempt
from ckptmgr.core.trust import Trust
from ckptmgr.crypto.container.header import Content
from ckptmgr.crypto.container.writer import ContainerSealer
from ckptmgr.crypto.keys.ring import KeyRing, Keys, block_key
from ckptmgr.crypto.mindspore.blocks import BlockSealer
from ckptmgr.files.load.container import format_in, kind_of, open_container_file
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.save.pipeline import write_image
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.image import Image
from ckptmgr.formats.source import Source
from ckptmgr.io.digest import FileDigest, VerifyingSource
from ckptmgr.io.filesystem import OutputFile, unlink_if_present
from ckptmgr.io.source_image import SourceImage
from ckptmgr.maintenance.encrypt import CheckingSealer
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.keys import ManifestKey, manifest_key_of
from ckptmgr.store.shards import ShardFiles, swap_shards
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import may_be_in_trash


@dataclass(frozen=True, slots=True, kw_only=True)
class Sealing:
    """What is written instead of a file.

    Attributes:
        image: The same content, read from the old file as it is written.
        sealer: Made for it.
        format: `ckpt` or `safetensors`.
        mode: The cipher mode.
    """

    image: Image
    sealer: BlockSealer | ContainerSealer
    format: str
    mode: str

    def write(self, file: OutputFile) -> FileDigest:
        """Write it into a new file, and return the digests of that."""
        return write_image(self.image, file, sealer=self.sealer).digest

    def entry(self, name: str, digest: FileDigest, *, new: KeyRing) -> FileEntry:
        """Return what a manifest says of the new file."""
        return FileEntry(
            name=name, digest=digest, format=self.format, cipher=self.mode, key_id=new.key_id
        )


def reencrypt_file(
    store: Store,
    checkpoint: Checkpoint,
    *,
    old: Keys,
    new: KeyRing,
    manifest: Manifest | None,
    auth: Callable[[ManifestKey | None], ManifestKey],
) -> None:
    """Replace an encrypted file by one with the same content and another data key, durably; the lease must be held.

    Args:
        store: Reads what old and new keys authenticate.
        checkpoint: Of one file.
        old: Opens it.
        new: Who opens it then.
        manifest: That of the file, or None; what is no checkpoint does not get one.
        auth: Given what authenticates the manifest, returns what old and new keys can check.

    Raises:
        KeyProblem: It does not open, or cannot have such keys.
        CorruptCheckpoint: It is damaged; nothing was changed.
        StoreFull, OSError: From the disk; the old file is intact, or the new one is there.
    """
    path = checkpoint.path
    with (
        translated_errors(str(path)),
        contextlib.closing(store.fs.open(path)) as raw,
    ):
        sealing = reencryption_of(raw, path, old=old, new=new, manifest=manifest)
        mode = mode_of(store, path.name) or 0o400
        if sealing.format == OPAQUE and manifest is None:
            store.place(
                path.name,
                size_bytes=sealing.sealer.sealed_size,
                write=sealing.write,
                mode=mode,
            )
            return
        draft = _draft(checkpoint, manifest, sealing, new)
        key = auth(None if manifest is None else manifest.auth)

        def describe(digest: FileDigest) -> Manifest:
            return replace(draft, file=replace(draft.file, digest=digest), auth=key)

        store.publish(
            path.name,
            series=draft.series,
            size_bytes=sealing.sealer.sealed_size,
            write=sealing.write,
            describe=describe,
            mode=mode,
            manifest_mode=mode_of(store, manifest_name(path.name)),
        )


def mode_of(store: Store, name: str) -> int | None:
    """Return the permission bits of a file, or None where there is none."""
    status = store.fs.status(store.directory / name)
    return None if status is None else status.mode


def reencryption_of(
    raw: Source, path: Path, *, old: Keys, new: KeyRing, manifest: Manifest | None
) -> Sealing:
    """Return what is written instead of an encrypted file; arguments and errors as of `reencrypt_file`."""
    if kind_of(raw, name=path.name) is Kind.MINDSPORE_ENCRYPTED:
        options = ReadOptions(trust=Trust(keys=old))
        opened = open_source(raw, path=str(path), options=options, manifest=manifest)
        mode = str(opened.cipher)
        blocks = CheckingSealer(opened, block_key(new), mode)
        image = SourceImage(opened.source, blocks.body_bytes, has_crc_trailer=blocks.has_crc)
        return Sealing(image=image, sealer=blocks, format="ckpt", mode=mode)
    checked: Source = raw
    if manifest is not None:
        checked = VerifyingSource(raw, manifest.file.digest, path=str(path))
    container = open_container_file(raw, checked, path=str(path), key=old, mode=None)
    is_framed = container.content is Content.FRAMES
    sealer = ContainerSealer(
        new.recipients,
        container.mode,
        plaintext_size=container.size,
        content=container.content,
        raw_size=container.unlocked.header.fixed.plaintext_size if is_framed else None,
    )
    image = SourceImage(container, container.size, window_bytes=container.block_bytes)
    return Sealing(image=image, sealer=sealer, format=format_in(container), mode=container.mode)


def _draft(
    checkpoint: Checkpoint, manifest: Manifest | None, sealing: Sealing, new: KeyRing
) -> Manifest:
    """Return the manifest of the new file but for its digest: the same save, with other keys."""
    entry = sealing.entry(checkpoint.path.name, FileDigest(size_bytes=0, ranges=()), new=new)
    if manifest is not None:
        return replace(manifest, file=entry, replaces=None)
    return Manifest(
        file=entry,
        series=checkpoint.series,
        run_id="",
        step=max(checkpoint.step, 0),
        epoch=checkpoint.epoch,
        sequence=0,
        saved_at=checkpoint.saved_at,
        why=checkpoint.why,
    )


def reencrypt_set(
    store: Store, manifest: Manifest, *, old: Keys, new: KeyRing, clock: Callable[[], float]
) -> None:
    """Replace the encrypted files of many ranks by ones with the same content and other data keys, durably.

    The lease of the series must be held.

    Args:
        store: Reads what the old keys authenticate, and writes what the new ones do.
        manifest: Of all files.
        old: Opens them.
        new: Who opens them then.
        clock: Seconds since 1970; names the new files.

    Raises:
        KeyProblem: They do not open, or cannot have such keys.
        CorruptCheckpoint: One is damaged; nothing was changed.
        StoreFull: There is no room for all of them once more; nothing was changed.
        OSError: From the disk. The old files are intact, or the new ones are there.
    """
    attempt_id = new_attempt_id(clock())
    names = [with_attempt(entry.name, attempt_id) for entry in manifest.shards]
    store.check_space(sum(entry.digest.size_bytes for entry in manifest.shards))

    def write(files: ShardFiles) -> Manifest:
        entries = [
            _written(store, files, manifest.of_shard(rank), name, old=old, new=new)
            for rank, name in enumerate(names)
        ]
        return replace(manifest, file=entries[0], shards=tuple(entries), auth=manifest_key_of(new))

    swap_shards(store, manifest, write, names=names)


def _written(
    store: Store, files: ShardFiles, own: Manifest, name: str, *, old: Keys, new: KeyRing
) -> FileEntry:
    """Publish what one rank saved once more, and return what the manifest says of it."""
    path = store.directory / own.file.name
    with (
        translated_errors(str(path)),
        contextlib.closing(store.fs.open(path)) as raw,
    ):
        sealing = reencryption_of(raw, path, old=old, new=new, manifest=own)
        published = files.publish(
            name,
            series=own.series,
            size_bytes=sealing.sealer.sealed_size,
            write=sealing.write,
            describe=lambda digest: replace(own, file=sealing.entry(name, digest, new=new)),
            mode=mode_of(store, path.name) or 0o400,
        )
    return published.file


def stale_files(store: Store, checkpoint: Checkpoint, *, now: float) -> list[str]:
    """Return the files beside a checkpoint of many ranks that were its own, or were to be, and never will be again.

    None where nobody here can prove the manifest, which says what belongs to it.

    Args:
        store: The directory.
        checkpoint: As listed by it.
        now: Seconds since 1970.
    """
    with contextlib.suppress(CkptmgrError):
        store.check_proven(checkpoint)
        return _stale_files(store, checkpoint.name, now)
    return []


def _stale_files(store: Store, set_name: str, now: float) -> list[str]:
    if may_be_in_trash(store.fs, store.directory, manifest_name(set_name)):
        return []
    leftovers = [found.name for found in store.scan() if found.state is State.LEFTOVER]
    parsed = [(name, parse_shard_name(name)) for name in leftovers]
    return sorted(
        name
        for name, shard in parsed
        if shard is not None and shard.set_name == set_name and shard.has_expired(now)
    )


def remove_stale_files(store: Store, names: Sequence[str]) -> None:
    """Remove such files durably; the lease of the series must be held.

    Raises:
        OSError: From the disk.
    """
    if not names:
        return
    store.fs.sync_directory(store.directory)
    for name in names:
        unlink_if_present(store.fs, store.directory / name)
    store.fs.sync_directory(store.directory)
