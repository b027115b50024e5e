# SPDX-License-Identifier: Apache-2.0
"""Sharded checkpoints to test with: two ranks, a few bytes each."""

from __future__ import annotations

from dataclasses import replace

from ckptmgr.core.shard_names import shard_name
from ckptmgr.formats.source import BytesSource
from ckptmgr.io.digest import digest_of
from ckptmgr.store.manifest.codec import FileEntry, Manifest, encode, manifest_name
from tests.faults.training import RUNS
from tests.support.crashmodel import ModelDisk
from tests.support.damage import put
from tests.support.manifests import manifest

ATTEMPT = "67d2f1a41f0c9a2e"
SET = "net-1.shards"
CONTENTS = (b"rank zero", b"rank one!!")


def shard(rank: int, *, attempt_id: str = ATTEMPT, stem: str = "net-1") -> str:
    """Return the name of the file of a rank."""
    return shard_name(stem, rank, world=len(CONTENTS), attempt_id=attempt_id, format="ckpt")


def sharded(attempt_id: str = ATTEMPT) -> Manifest:
    """Return the manifest of the whole."""
    files = tuple(
        FileEntry(
            name=shard(rank, attempt_id=attempt_id),
            digest=digest_of(BytesSource(content)),
            format="ckpt",
        )
        for rank, content in enumerate(CONTENTS)
    )
    return replace(manifest(), file=files[0], shards=files, world_size=len(files))


def disk_with_shards() -> ModelDisk:
    """Return a disk with one sharded checkpoint."""
    disk = ModelDisk()
    disk.make_directory(RUNS, mode=0o700)
    for rank, content in enumerate(CONTENTS):
        put(disk, RUNS / shard(rank), content)
    put(disk, RUNS / manifest_name(SET), encode(sharded()))
    disk.settle()
    return disk
