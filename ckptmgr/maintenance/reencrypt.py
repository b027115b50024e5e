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
from functools import partial

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import OPAQUE
from ckptmgr.core.shard_names import new_attempt_id, parse_shard_name, with_attempt
from ckptmgr.crypto.keys.ring import KeyRing, Keys
from ckptmgr.files.save.saver import check_written
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.filesystem import unlink_if_present
from ckptmgr.maintenance.contents import reencrypted_content
from ckptmgr.maintenance.rewriting import (
    manifest_of_bare,
    mode_like,
    opened_raw,
    permission_bits_of,
    write_beside,
)
from ckptmgr.store.manifest.codec import FileEntry, Manifest, manifest_name
from ckptmgr.store.manifest.keys import ManifestKey, manifest_key_of
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
    with opened_raw(store, path) as raw:
        content = reencrypted_content(raw, path, old=old, new=new, manifest=manifest)
        write = partial(
            write_beside,
            store,
            path.name,
            content.write,
            size_bytes=content.size_bytes,
            mode=mode_like(store, path.name),
            read_back=partial(check_written, path=str(path)),
        )
        if content.format == OPAQUE and manifest is None:
            write()
            return
        key = auth(None if manifest is None else manifest.auth)

        def described(digest: FileDigest) -> Manifest:
            """Return the manifest of the new file: the same save, with other keys."""
            entry = content.entry(path.name, digest)
            if manifest is None:
                return replace(manifest_of_bare(checkpoint, entry), auth=key)
            return replace(manifest.changed(file=entry, replaces=None), auth=key)

        write(
            series=checkpoint.series if manifest is None else manifest.series,
            describe=described,
            manifest_mode=permission_bits_of(store, manifest_name(path.name)),
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
    with opened_raw(store, path) as raw:
        content = reencrypted_content(raw, path, old=old, new=new, manifest=own)
        digest = write_beside(
            store,
            name,
            content.write,
            series=own.series,
            size_bytes=content.size_bytes,
            mode=mode_like(store, path.name),
            read_back=partial(check_written, path=str(store.directory / name)),
            describe=lambda digest: replace(own, file=content.entry(name, digest)),
            is_rank_file=True,
        )
        return content.entry(name, digest)


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
