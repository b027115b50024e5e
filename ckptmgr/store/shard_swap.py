# SPDX-License-Identifier: Apache-2.0
"""Put new files of ranks in the place of old ones, in a checkpoint that was committed.

In this order: the new files durable, under the name of an attempt of their own; the manifest replaced by one that names them
(the commit point), durable; the old files removed. What an interruption leaves is collected like any other attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptmgr.core.errors import CkptmgrError, SaveFailed
from ckptmgr.io.filesystem import remove_name
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.shard_listing import problem_of_shards
from ckptmgr.store.shards import ShardFiles
from ckptmgr.store.store import Store


def swap_shards(
    store: Store, old: Manifest, write: Callable[[ShardFiles], Manifest], *, names: Sequence[str]
) -> Manifest:
    """Replace files of a checkpoint of many ranks, durably; the lease of its series must be held.

    Args:
        store: The directory, with the keys of the manifest.
        old: The manifest.
        write: Publishes the new files and returns the new manifest.
        names: Those of the new files.

    Raises:
        SaveFailed: A new file has gone; nothing was changed.
        OSError: From the disk. It is the old or the new checkpoint; what is left beside it is garbage.
        CkptmgrError: What `write` raises; nothing was changed.
    """
    files = ShardFiles(store.directory, fs=store.fs, processes=store.processes)
    try:
        changed = write(files)
        new = tuple(one for one in changed.shards if one.name in names)
        problem = problem_of_shards(replace(changed, shards=new), store.fs.list(store.directory))
        if problem is not None:
            raise SaveFailed(f"cannot be committed: {problem}", path=store.directory / old.name)
        store.update_manifest(changed)
    except BaseException:
        _withdraw(store, files, old.name, names)
        raise
    staying = {one.name for one in changed.shards}
    for one in old.shards:
        if one.name not in staying:
            remove_name(store.fs, store.directory / one.name)
    store.fs.sync_directory(store.directory)
    return changed


def _withdraw(store: Store, files: ShardFiles, set_name: str, names: Sequence[str]) -> None:
    """Remove new files that the manifest does not name; where that cannot be told, they stay."""
    with contextlib.suppress(CkptmgrError, OSError):
        present = store.read_manifest(set_name)
        if present is not None:
            for name in sorted(set(names) - {one.name for one in present.shards}):
                files.withdraw(name)
