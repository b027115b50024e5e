# SPDX-License-Identifier: Apache-2.0
"""Encrypt the files of many ranks anew, each under a new data key, as streams, with one commit for all of them.

Until the one manifest that names all new files is durable, the old ones are untouched, and the old keys open them; from then
on the new keys open the new ones. What an interruption leaves, old files included, opens for whoever opened it before, so it
counts as work that is not done: `stale_files`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptmgr.core.error_translation import translated_errors
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.shard_names import new_attempt_id, parse_shard_name, with_attempt
from ckptmgr.crypto.keys.ring import KeyRing, Keys
from ckptmgr.io.filesystem import remove_name
from ckptmgr.maintenance.reencrypt import mode_of, sealing_anew
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.keys import manifest_key_of
from ckptmgr.store.shard_swap import swap_shards
from ckptmgr.store.shards import ShardFiles
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import may_be_in_trash


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
        sealing = sealing_anew(raw, path, old=old, new=new, manifest=own)
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
        remove_name(store.fs, store.directory / name)
    store.fs.sync_directory(store.directory)
