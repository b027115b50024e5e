# SPDX-License-Identifier: Apache-2.0
"""Files of ranks in a directory: publish one without a manifest, replace those of a checkpoint.

The worker process of a rank publishes its file here, too; the vote of the commit stays with the
rank. Replacing works in this order: the new files become durable under names of a new attempt; the
manifest is replaced by one that names them (the commit point), durably; the old files are removed.
Recovery removes the remains of an interruption, as for any other attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from ckptmgr.core.errors import CkptmgrError, SaveFailed
from ckptmgr.io.digest import FileDigest
from ckptmgr.io.filesystem import InputFile, OutputFile, unlink_if_present
from ckptmgr.store.listing import problem_of_shards
from ckptmgr.store.manifest.codec import Manifest
from ckptmgr.store.recovery import remove_dead_temps
from ckptmgr.store.store import Store


class ShardFiles(Store):
    """A checkpoint directory for the writer of one rank's file; arguments as for `Store`."""

    def publish(
        self,
        name: str,
        *,
        series: str,
        size_bytes: int,
        write: Callable[[OutputFile], FileDigest],
        describe: Callable[[FileDigest], Manifest],
        mode: int = 0o400,
        manifest_mode: int | None = None,
        read_back: Callable[[InputFile, FileDigest], None] | None = None,
        is_rank_file: bool = True,
    ) -> Manifest:
        """Make the file of one rank durable, without a manifest; see `Publisher.publish`."""
        return super().publish(
            name,
            series=series,
            size_bytes=size_bytes,
            write=write,
            describe=describe,
            mode=mode,
            read_back=read_back,
            is_rank_file=is_rank_file,
        )

    def withdraw(self, name: str) -> None:
        """Remove the file of a rank that no checkpoint will name; ignore errors of the disk."""
        with contextlib.suppress(OSError):
            unlink_if_present(self.fs, self.directory / name)

    def recover_from_worker(self, series: str) -> list[str]:
        """Remove temporary files of dead processes on this host; see `Store.recover_from_worker`.

        Nothing else is removed: ranks on other hosts are writing, and this host cannot check them.
        """
        return remove_dead_temps(self.fs, self.directory, self.processes)


def swap_shards(
    store: Store, old: Manifest, write: Callable[[ShardFiles], Manifest], *, names: Sequence[str]
) -> Manifest:
    """Replace files of a sharded checkpoint durably; the lease of its series must be held.

    Args:
        store: The directory, with the keys of the manifest.
        old: The manifest.
        write: Publishes the new files and returns the new manifest.
        names: Those of the new files.

    Raises:
        SaveFailed: A new file is missing; nothing was changed.
        OSError: From the disk. The checkpoint is the old or the new one; other files of it are
            leftovers.
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
            unlink_if_present(store.fs, store.directory / one.name)
    store.fs.sync_directory(store.directory)
    return changed


def _withdraw(store: Store, files: ShardFiles, set_name: str, names: Sequence[str]) -> None:
    """Remove new files that the manifest does not name; if it cannot be read, they stay."""
    with contextlib.suppress(CkptmgrError, OSError):
        present = store.read_manifest(set_name)
        if present is not None:
            for name in sorted(set(names) - {one.name for one in present.shards}):
                files.withdraw(name)
