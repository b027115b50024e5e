# SPDX-License-Identifier: Apache-2.0
"""The part of one rank in a directory that many ranks write: its own file, published without a manifest beside it.

The saving process of a rank works here, too: it writes the file, and the vote stays with the rank.

Put new files of ranks in the place of old ones, in a checkpoint that was committed.

In this order: the new files durable, under the name of an attempt of their own; the manifest replaced by one that names them
(the commit point), durable; the old files removed. What an interruption leaves is collected like any other attempt.
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
    """A checkpoint directory as a writer of the file of one rank sees it; arguments as for `Store`."""

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
        """Make the file of one rank durable, without a manifest beside it; see `Publisher.publish`."""
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
        """Remove the file of a rank that will never be part of a checkpoint, as far as the disk lets us."""
        with contextlib.suppress(OSError):
            unlink_if_present(self.fs, self.directory / name)

    def recover_from_worker(self, series: str) -> list[str]:
        """Remove what dead processes of this host left; see `Store.recover_from_worker`.

        No more: ranks on other hosts are writing, and nobody here can tell that they live.
        """
        return remove_dead_temps(self.fs, self.directory, self.processes)


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
            unlink_if_present(store.fs, store.directory / one.name)
    store.fs.sync_directory(store.directory)
    return changed


def _withdraw(store: Store, files: ShardFiles, set_name: str, names: Sequence[str]) -> None:
    """Remove new files that the manifest does not name; where that cannot be told, they stay."""
    with contextlib.suppress(CkptmgrError, OSError):
        present = store.read_manifest(set_name)
        if present is not None:
            for name in sorted(set(names) - {one.name for one in present.shards}):
                files.withdraw(name)
