# SPDX-License-Identifier: Apache-2.0
"""Repair encrypted and compressed files of several ranks: each is rewritten under a new name.

The same tensors give other bytes each time they are sealed or compressed, so no digest can prove a
repaired file. Instead the new file gets only content that the manifest proves: tensors from the
other files, or from ranges of the damaged one that match their digests. The index of tensors must
match its digest, too, or agree with the other files. A file that replaced the damaged one proves
nothing.

`shards.swap_shards` replaces the damaged file by the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ckptmgr.core.errors import CkptmgrError, KeyProblem, UnsupportedCheckpoint
from ckptmgr.core.shard_names import new_attempt_id, with_attempt
from ckptmgr.files.load.open import open_source
from ckptmgr.files.load.options import ReadOptions
from ckptmgr.files.load.plaintext import check_kind
from ckptmgr.files.load.shards import ShardedCheckpoint
from ckptmgr.files.save.job import SaveOrder
from ckptmgr.files.save.saver import save_items
from ckptmgr.formats.detect import detect
from ckptmgr.formats.source import Source
from ckptmgr.formats.tensor import Tensor
from ckptmgr.io.digest import differing_ranges
from ckptmgr.maintenance.repair_source import (
    DamagedShard,
    PaddedSource,
    RepairResult,
    open_damaged_shard,
)
from ckptmgr.maintenance.rewriting import mode_like
from ckptmgr.store.manifest.codec import FileEntry, Manifest
from ckptmgr.store.manifest.lineage import Lineage
from ckptmgr.store.shards import swap_shards, withdrawn_on_error
from ckptmgr.store.store import Store


class SealedRepair:
    """Repairs one checkpoint with a proven manifest of all files; the lease must be held.

    `clock` (seconds since 1970) names the new files.
    """

    def __init__(
        self, store: Store, manifest: Manifest, *, options: ReadOptions, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._manifest = manifest
        self._options = options
        self._clock = clock

    def _check_changeable(self) -> None:
        store, manifest = self._store, self._manifest
        checkpoint = manifest.to_checkpoint(store.directory)
        if manifest.file.cipher is not None and self._options.trust.keys is None:
            raise KeyProblem(
                "its files are encrypted; what is repaired is encrypted anew",
                path=checkpoint.path,
                hint="pass the key (CLI: --key)",
            )
        store.check_rewritable(checkpoint)
        store.check_proven(checkpoint)
        changed = replace(manifest, shards=(self._renamed(0), *manifest.shards[1:]))
        if Lineage(store.scan()).why_replaced(changed.to_checkpoint(store.directory)) is not None:
            raise UnsupportedCheckpoint(
                "a later checkpoint names it by its id, which would change",
                path=checkpoint.path,
                hint="load it, which takes the copies where they are whole, and save it again",
            )

    def repair(self, rank: int) -> RepairResult | None:
        """Repair the file of a rank if it is damaged; return the result, by its old name.

        Raises:
            KeyProblem: A key is missing: that of the files, or one that proves the manifest.
            UnsupportedCheckpoint: A later checkpoint names this one by its id, which would change.
            OSError: From the disk. Files that were repaired before stay so.
        """
        entry = self._manifest.shards[rank]
        with contextlib.ExitStack() as stack:
            try:
                raw = stack.enter_context(
                    contextlib.closing(self._store.fs.open(self._store.directory / entry.name))
                )
            except FileNotFoundError:
                return RepairResult(name=entry.name, bad_bytes=0, problem="it is gone")
            source = PaddedSource(raw, entry.digest.size_bytes)
            bad = differing_ranges(source, entry.digest)
            if not bad and raw.size == source.size:
                return self._header_damage(rank, source)
            self._check_changeable()
            found = RepairResult(
                name=entry.name, bad_bytes=sum(stop - start for start, stop in bad)
            )
            files = stack.enter_context(
                ShardedCheckpoint(self._store, self._manifest, options=self._options)
            )
            files.leave_out(rank)
            try:
                shard = open_damaged_shard(self._manifest, rank, source, files, self._options)
                shard.check()
            except CkptmgrError as error:
                return replace(found, problem=error.message)
            self._replace(rank, shard)
            sources = tuple(self._manifest.shards[other].name for other in sorted(files.used))
        return replace(found, sources=sources)

    def _header_damage(self, rank: int, source: Source) -> RepairResult | None:
        """Return the damage of a file's header, which its digest leaves out, or None."""
        entry = self._manifest.shards[rank]
        if not entry.digest.blank_bytes:
            return None
        path = str(self._store.directory / entry.name)
        try:
            check_kind(detect(source), self._manifest, path=path)
            if self._options.trust.keys is not None:
                open_source(source, path=path, options=self._options, is_for_loading=True)
        except KeyProblem:
            raise
        except CkptmgrError as error:
            return RepairResult(name=entry.name, bad_bytes=0, problem=error.message)
        return None

    def _replace(self, rank: int, shard: DamagedShard) -> None:
        """Write the new file, commit it, and remove the old one."""
        store, old = self._store, self._manifest.shards[rank]
        order = SaveOrder(
            name=self._renamed(rank).name,
            items=[
                Tensor(spec=entry.spec, content=partial(shard.content, entry))
                for entry in shard.entries
            ],
            options=replace(
                shard.save_options(),
                file_mode=mode_like(store, old.name),
            ),
            series=self._manifest.series,
            draft=self._manifest,
            metadata=shard.plain_metadata(),
            is_rank_file=True,
        )
        shards = list(self._manifest.shards)
        with withdrawn_on_error(store, self._manifest.name, [order.name]):
            shards[rank] = save_items(store, order).file
            changed = self._manifest.changed(file=shards[0], shards=tuple(shards))
            swap_shards(store, self._manifest, changed)
        self._manifest = changed

    def _renamed(self, rank: int) -> FileEntry:
        entry = self._manifest.shards[rank]
        return replace(entry, name=with_attempt(entry.name, new_attempt_id(self._clock())))
