# SPDX-License-Identifier: Apache-2.0
"""Re-encrypt files under new data keys, as streams: constant memory, no plaintext on the disk.

A single file is swapped like a save. At every instant it is the old or the new one, and old and new
keys can check its manifest until the new file is durable. The files of several ranks get one
commit: until the manifest that names all new files is durable, the old ones are untouched.

Compressed frames stay as they are. A new file is read back before the old one goes. Old files that
an interruption leaves still open with the old keys, so they count as unfinished work:
`stale_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from ckptmgr.files.load.container import format_in, open_container_file
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import kind_of
from ckptmgr.files.save.saver import check_written
from ckptmgr.formats.detect import Kind
from ckptmgr.formats.source import Source
from ckptmgr.io.digest import FileDigest, VerifyingSource
from ckptmgr.io.filesystem import unlink_if_present
from ckptmgr.io.source_image import SourceImage
from ckptmgr.maintenance.convert_target import ConversionOutput, permission_bits_of, place
from ckptmgr.maintenance.encrypt import CheckingSealer
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.keys import ManifestKey, manifest_key_of
from ckptmgr.store.publish import NewDataFile
from ckptmgr.store.shards import swap_shards, withdrawn_on_error
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import may_be_in_trash


def reencrypt_file(
    store: Store,
    checkpoint: Checkpoint,
    *,
    old: Keys,
    new: KeyRing,
    manifest: Manifest | None,
    auth: Callable[[ManifestKey | None], ManifestKey],
) -> None:
    """Replace an encrypted file by one with the same content and another data key, durably.

    The lease must be held. A non-checkpoint file has no manifest and gets none. `auth` returns the
    authentication of the manifest that old and new keys can check.

    Raises:
        KeyProblem: It does not open, or cannot have such keys.
        CorruptCheckpoint: It is damaged; nothing was changed.
        SaveFailed: The disk lost the write; nothing was changed.
        StoreFull, OSError: From the disk; the old file is intact, or the new one is there.
    """
    path = checkpoint.path
    with (
        translated_errors(str(path)),
        contextlib.closing(store.fs.open(path)) as raw,
    ):
        output = _reencrypted(raw, path, old=old, new=new, manifest=manifest)
        mode = permission_bits_of(store, path.name) or 0o400
        if output.format == OPAQUE and manifest is None:
            place(store, path.name, output, mode=mode)
            return
        draft = _draft(checkpoint, manifest, output)
        key = auth(None if manifest is None else manifest.auth)
        manifest_mode = permission_bits_of(store, manifest_name(path.name))
        with store.publisher.new_file(
            path.name, series=draft.series, size_bytes=output.size_bytes, mode=mode
        ) as new_file:
            digest = _write_checked(new_file, output, path=str(path))
            described = replace(draft, file=replace(draft.file, digest=digest), auth=key)
            new_file.publish(described, mode=manifest_mode)


def _write_checked(new_file: NewDataFile, output: ConversionOutput, *, path: str) -> FileDigest:
    """Write a file and compare the disk with it; return its digest."""
    with new_file.writing() as file:
        digest = output.write(file)
    with new_file.reading() as stored:
        check_written(stored, digest, path=path)
    return digest


def _reencrypted(
    raw: Source, path: Path, *, old: Keys, new: KeyRing, manifest: Manifest | None
) -> ConversionOutput:
    """Return the content of an encrypted file, to be encrypted with new keys."""
    if kind_of(raw, name=path.name) is Kind.MINDSPORE_ENCRYPTED:
        options = ReadOptions(trust=Trust(keys=old))
        opened = open_source(raw, path=str(path), options=options, manifest=manifest)
        mode = str(opened.cipher)
        blocks = CheckingSealer(opened, block_key(new), mode)
        image = SourceImage(opened.source, blocks.body_bytes, has_crc_trailer=blocks.has_crc)
        return ConversionOutput(image=image, format="ckpt", mode=mode, key=new, sealer=blocks)
    checked: Source = raw
    if manifest is not None:
        checked = VerifyingSource(raw, manifest.file.digest, path=str(path))
    container = open_container_file(raw, checked, path=str(path), key=old, mode=None)
    is_framed = container.content is Content.FRAMES
    return ConversionOutput(
        image=SourceImage(container, container.size, window_bytes=container.block_bytes),
        format=format_in(container),
        mode=container.mode,
        key=new,
        sealer=ContainerSealer(
            new.recipients,
            container.mode,
            plaintext_size=container.size,
            content=container.content,
            raw_size=container.unlocked.header.fixed.plaintext_size if is_framed else None,
        ),
    )


def _draft(checkpoint: Checkpoint, manifest: Manifest | None, output: ConversionOutput) -> Manifest:
    """Return the manifest of the new file without its digest: the same save, with other keys."""
    entry = output.entry(checkpoint.path.name, FileDigest(size_bytes=0, ranges=()))
    if manifest is not None:
        return manifest.changed(file=entry, replaces=None)
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
    """Replace the encrypted files of several ranks by ones with other data keys, durably.

    The lease of the series must be held. `clock` (seconds since 1970) names the new files.

    Raises:
        KeyProblem: They do not open, or cannot have such keys.
        CorruptCheckpoint: One is damaged; nothing was changed.
        SaveFailed: The disk lost the write; nothing was changed.
        StoreFull: There is no room for all of them once more; nothing was changed.
        OSError: From the disk. The old files are intact, or the new ones are there.
    """
    attempt_id = new_attempt_id(clock())
    names = [with_attempt(entry.name, attempt_id) for entry in manifest.shards]
    store.publisher.check_space(sum(entry.digest.size_bytes for entry in manifest.shards))
    with withdrawn_on_error(store, manifest.name, names):
        entries = tuple(
            _write_shard(store, manifest.of_shard(rank), name, old=old, new=new)
            for rank, name in enumerate(names)
        )
        auth = manifest_key_of(new)
        swap_shards(store, manifest, manifest.changed(file=entries[0], shards=entries, auth=auth))


def _write_shard(store: Store, own: Manifest, name: str, *, old: Keys, new: KeyRing) -> FileEntry:
    """Write the file of one rank under a new name, and return its entry in the manifest."""
    path = store.directory / own.file.name
    with (
        translated_errors(str(path)),
        contextlib.closing(store.fs.open(path)) as raw,
    ):
        output = _reencrypted(raw, path, old=old, new=new, manifest=own)
        with store.publisher.new_file(
            name,
            series=own.series,
            size_bytes=output.size_bytes,
            mode=permission_bits_of(store, path.name) or 0o400,
            is_rank_file=True,
        ) as new_file:
            digest = _write_checked(new_file, output, path=str(store.directory / name))
            entry = output.entry(name, digest)
            new_file.publish(replace(own, file=entry))
    return entry


def stale_files(store: Store, checkpoint: Checkpoint, *, now: float) -> list[str]:
    """Return old or unfinished files of a checkpoint of several ranks that no commit will name.

    None where no key proves the manifest, which says what belongs to it. `now`: seconds since 1970.
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
    """Remove such files durably; the lease of the series must be held."""
    if not names:
        return
    store.fs.sync_directory(store.directory)
    for name in names:
        unlink_if_present(store.fs, store.directory / name)
    store.fs.sync_directory(store.directory)
