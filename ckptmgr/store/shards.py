# SPDX-License-Identifier: Apache-2.0
"""Files of ranks in a directory, and the one manifest that makes a checkpoint of them.

1. Every rank publishes its file: data written and synced under a temporary name; renamed; directory
   synced. Its name has the id of the attempt, so no other process writes it; as no manifest names
   it yet, it is a leftover.
2. One rank creates the manifest of all files, exclusively: content synced under a temporary name;
   linked (the commit point); directory synced. A second attempt at the same checkpoint finds the
   name taken.

The name of an attempt has the time until which it may be committed. Files that no manifest names
are removed after that, never before; nor while their manifest is in the trash; nor, where the files
of all ranks are there, until a newer checkpoint is whole.

Files of a checkpoint are replaced in this order: the new ones become durable under names of a new
attempt; the manifest is replaced by one that names them (the commit point), durably; the old files
are removed. Recovery removes the remains of an interruption, as for any other attempt.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError, SaveFailed
from ckptmgr.core.model import State
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.io.filesystem import discard, unlink_if_present
from ckptmgr.io.permissions import DEFAULT_FILE_MODE
from ckptmgr.store.listing import lone_sets, problem_of_shards
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import may_be_in_trash


class RankFiles:
    """The files of ranks in the directory of a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._fs = store.fs
        self._directory = store.directory

    def commit(self, manifest: Manifest, *, mode: int = DEFAULT_FILE_MODE) -> OSError | None:
        """Make a checkpoint of the files of all ranks, unless its name is taken.

        Return None once it is durable, or the error after which it may exist without being durable.

        Raises:
            SaveFailed: Files are missing, or another attempt was committed before. It does not
                exist.
            OSError: From the disk. It does not exist.
        """
        problem = problem_of_shards(manifest, self._fs.list(self._directory))
        if problem is not None:
            raise SaveFailed(
                f"cannot be committed: {problem}",
                path=self._directory / manifest.name,
                hint="all ranks must see the same directory",
            )
        try:
            self._store.manifests.create(manifest, series=manifest.series, mode=mode)
        except FileExistsError as error:
            raise SaveFailed(
                "another attempt at this checkpoint was committed before",
                path=self._directory / manifest.name,
            ) from error
        except OSError as error:
            if self._is_absent(manifest_name(manifest.name)):
                raise
            return error
        try:
            self._fs.sync_directory(self._directory)
        except OSError as error:
            return error
        return None

    def _is_absent(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return self._fs.status(self._directory / name) is None
        return False

    def withdraw(self, name: str) -> None:
        """Remove the file of a rank that no checkpoint will name; ignore errors of the disk."""
        discard(self._fs, self._directory / name)

    def recover(self, series: str) -> list[str]:
        """Clean up after dead writers, see `Store.recover`, and remove expired rank files."""
        return self._store.recover(series) + self.collect(series)

    def collect(self, series: str) -> list[str]:
        """Remove rank files that no checkpoint will have; return a sentence for each.

        Raises:
            StoreLocked: The lease is lost; nothing was removed.
            OSError: From the disk.
        """
        if series not in self.garbage():
            return []
        self._store.leases.check(series)
        self._fs.sync_directory(self._directory)
        # Only now is it sure that no manifest comes back that was seen to be gone.
        sentences = [self._collected(name) for name in self.garbage().get(series, ())]
        self._fs.sync_directory(self._directory)
        return sentences

    def garbage(self) -> dict[str, list[str]]:
        """Return the names of rank files that no checkpoint will have, by their series.

        A full set of files stays until a newer checkpoint is whole: its manifest may have been
        lost, or may be copied later.
        """
        names: dict[str, list[str]] = {}
        now = self._store.clock()
        present = self._store.scan()
        lone = {name for one in lone_sets(present) for name in one.shards}
        for found in present:
            shard = parse_shard_name(found.name)
            if shard is None or found.state is not State.LEFTOVER or found.name in lone:
                continue
            if shard.has_expired(now) and not self._is_half_in_trash(shard.set_name):
                names.setdefault(shard.series, []).append(found.name)
        return {series: sorted(names[series]) for series in sorted(names)}

    def _is_half_in_trash(self, set_name: str) -> bool:
        return may_be_in_trash(self._fs, self._directory, manifest_name(set_name))

    def _collected(self, name: str) -> str:
        try:
            unlink_if_present(self._fs, self._directory / name)
        except OSError as error:
            return f"could not clean up: {error}"
        return f"removed {name}, which was never committed"


@contextmanager
def withdrawn_on_error(store: Store, set_name: str, names: Sequence[str]) -> Iterator[None]:
    """Write new files of a checkpoint in the `with` block; after an error remove them again.

    Files that the manifest names then stay; if it cannot be read, all do.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(CkptmgrError, OSError):
            present = store.read_manifest(set_name)
            if present is not None:
                for name in sorted(set(names) - {one.name for one in present.shards}):
                    discard(store.fs, store.directory / name)
        raise


def swap_shards(store: Store, old: Manifest, new: Manifest) -> None:
    """Replace the manifest of a set durably, then remove files that only the old one names.

    The lease of the series must be held, and the new files must be durable.

    Raises:
        SaveFailed: A new file is missing; nothing was changed.
        OSError: From the disk. The checkpoint is the old or the new one; other files of it are
            leftovers.
    """
    before, after = ({one.name for one in manifest.shards} for manifest in (old, new))
    added = replace(new, shards=tuple(one for one in new.shards if one.name not in before))
    problem = problem_of_shards(added, store.fs.list(store.directory))
    if problem is not None:
        raise SaveFailed(f"cannot be committed: {problem}", path=store.directory / old.name)
    store.update_manifest(new)
    for one in old.shards:
        if one.name not in after:
            unlink_if_present(store.fs, store.directory / one.name)
    store.fs.sync_directory(store.directory)
