# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints in the trash: an interrupted move loses none of their files to the clean-up of the next run."""

from __future__ import annotations

import pytest

from ckptmgr.maintenance.prune import undo
from ckptmgr.store.shards import RankFiles
from ckptmgr.store.trash import DirectoryTrash
from tests.faults.training import RUNS, ModelProcesses, disk_with
from tests.support import api
from tests.support.crashmodel import ModelDisk, Order, every_crash
from tests.support.damage import put
from tests.support.manifests import SAVED_AT
from tests.support.shard_sets import CONTENTS, SET, shard, sharded


def store_on(disk: ModelDisk) -> api.Place:
    return api.place(RUNS, fs=disk, processes=ModelProcesses(disk))


@pytest.mark.parametrize("action", ["throw", "undo"])
def test_collection_after_a_power_cut_loses_no_half_of_trashed_shards(action: str) -> None:
    def throw(disk: ModelDisk) -> None:
        store = store_on(disk)
        found = [c for c in store.scan() if c.name == SET]
        DirectoryTrash(store).throw_away(found, DirectoryTrash(store).new_batch_path(SAVED_AT))

    disk = disk_with(10.0)
    for rank, content in enumerate(CONTENTS):
        put(disk, RUNS / shard(rank), content)
    put(disk, RUNS / api.manifest_name(SET), api.encode_manifest(sharded()))
    if action == "undo":
        throw(disk)
    disk.settle()
    act = throw if action == "throw" else lambda disk: undo(store_on(disk))
    for crash in every_crash(disk, act, order=Order.WEAK, tears=1):
        after_expiry = api.place(
            RUNS, clock=lambda: 1e12, fs=crash.disk, processes=ModelProcesses(crash.disk)
        )
        with after_expiry.lease("net"):
            RankFiles(after_expiry).recover("net")
        if any(batch.checkpoints for batch in DirectoryTrash(after_expiry).batches()):
            undo(after_expiry)
        states = {c.name: c.state for c in after_expiry.scan()}
        assert states == {"net-1.ckpt": api.State.OK, SET: api.State.OK}, crash
