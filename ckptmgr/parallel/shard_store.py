# SPDX-License-Identifier: Apache-2.0
"""A directory of checkpoints that many ranks write together: rank files, and one manifest per set.

1. Every rank publishes its file: data written and synced under a temporary name; renamed; directory
   synced. Its name has the id of the attempt, so no other process writes it; as no manifest names
   it yet, it is a leftover.
2. One rank creates the manifest of all files, exclusively: content synced under a temporary name;
   linked (the commit point); directory synced. A second attempt at the same checkpoint finds the
   name taken.

The name of an attempt has the time until which it may be committed. Files that no manifest names
are removed after that, never before; nor while their manifest is in the trash; nor, where the files
of all ranks are there, until a newer checkpoint is whole.
"""

from __future__ import annotations

import contextlib

from ckptmgr.core.errors import SaveFailed
from ckptmgr.core.model import State
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.io.filesystem import unlink_if_present
from ckptmgr.store.listing import lone_sets, problem_of_shards
from ckptmgr.store.manifest.codec import Manifest, manifest_name
from ckptmgr.store.shards import ShardFiles
from ckptmgr.store.trash_folder import may_be_in_trash


class ShardStore(ShardFiles):
    """A checkpoint directory as one of many ranks sees it."""

    def commit(self, manifest: Manifest, *, mode: int = 0o400) -> OSError | None:
        """Make a checkpoint of the files of all ranks, unless its name is taken.

        Return None once it is durable, or the error after which it may exist without being durable.

        Raises:
            SaveFailed: Files are missing, or another attempt was committed before. It does not
                exist.
            OSError: From the disk. It does not exist.
        """
        problem = problem_of_shards(manifest, self.fs.list(self.directory))
        if problem is not None:
            raise SaveFailed(
                f"cannot be committed: {problem}",
                path=self.directory / manifest.name,
                hint="all ranks must see the same directory",
            )
        try:
            self._manifests.create(manifest, series=manifest.series, mode=mode)
        except FileExistsError as error:
            raise SaveFailed(
                "another attempt at this checkpoint was committed before",
                path=self.directory / manifest.name,
            ) from error
        except OSError as error:
            if self._is_absent(manifest_name(manifest.name)):
                raise
            return error
        try:
            self.fs.sync_directory(self.directory)
        except OSError as error:
            return error
        return None

    def _is_absent(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return self.fs.status(self.directory / name) is None
        return False

    def recover(self, series: str) -> list[str]:
        """Clean up after dead writers of a series and remove expired rank files."""
        return super().recover(series) + self.collect(series)

    def collect(self, series: str) -> list[str]:
        """Remove rank files that no checkpoint will have; return a sentence for each.

        Raises:
            StoreLocked: The lease is lost; nothing was removed.
            OSError: From the disk.
        """
        if series not in self.garbage():
            return []
        self.leases.check(series)
        self.fs.sync_directory(self.directory)
        # Only now is it sure that no manifest comes back that was seen to be gone.
        sentences = [self._collected(name) for name in self.garbage().get(series, ())]
        self.fs.sync_directory(self.directory)
        return sentences

    def garbage(self) -> dict[str, list[str]]:
        """Return the names of rank files that no checkpoint will have, by their series.

        A full set of files stays until a newer checkpoint is whole: its manifest may have been
            lost, or may
        be copied later.
        """
        names: dict[str, list[str]] = {}
        now = self._clock()
        present = self.scan()
        lone = {name for one in lone_sets(present) for name in one.shards}
        for found in present:
            shard = parse_shard_name(found.name)
            if shard is None or found.state is not State.LEFTOVER or found.name in lone:
                continue
            if shard.has_expired(now) and not self._is_half_in_trash(shard.set_name):
                names.setdefault(shard.series, []).append(found.name)
        return {series: sorted(names[series]) for series in sorted(names)}

    def _is_half_in_trash(self, set_name: str) -> bool:
        return may_be_in_trash(self.fs, self.directory, manifest_name(set_name))

    def _collected(self, name: str) -> str:
        try:
            unlink_if_present(self.fs, self.directory / name)
        except OSError as error:
            return f"could not clean up: {error}"
        return f"removed {name}, which was never committed"
