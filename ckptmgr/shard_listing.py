# SPDX-License-Identifier: Apache-2.0
"""Which data files of ranks a directory holds, and whether they are what their manifests say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.bare_files import entry_of
from ckptmgr.fsio import FileStatus
from ckptmgr.manifest import Manifest
from ckptmgr.model import Checkpoint, State
from ckptmgr.passing_errors import no_such_file
from ckptmgr.shard_names import parse_shard_name


def problem_of_shards(manifest: Manifest, entries: Mapping[str, FileStatus]) -> str | None:
    """Return what a directory lacks of a sharded checkpoint, or None; looks at names and sizes only."""
    for entry in manifest.shards:
        status = entries.get(entry.name)
        if status is None:
            return f"{entry.name} is missing"
        if not status.is_file:
            return f"{entry.name} is a link or no regular file; put the file itself here"
        if status.size_bytes != entry.digest.size_bytes:
            return f"{entry.name} has {status.size_bytes} bytes, but the manifest says {entry.digest.size_bytes}"
    return None


def missing_shard(
    manifest: Manifest, directory: Path, entries: Mapping[str, FileStatus]
) -> FileNotFoundError | None:
    """Return the error of the first file of a sharded checkpoint that a directory lacks, or None."""
    missing = (entry.name for entry in manifest.shards if entry.name not in entries)
    return next((no_such_file(directory / name) for name in missing), None)


def unnamed_shards(
    directory: Path, entries: Mapping[str, FileStatus], found: Sequence[Checkpoint]
) -> Iterator[Checkpoint]:
    """Yield the data files of ranks that belong to no checkpoint.

    Where a manifest cannot be read, nobody knows which files it names, so all that it may name are left out. So they are where
    what it names is not here, or nobody proves it: it may have been put over the one that names these files.

    Args:
        directory: Where they lie.
        entries: What is in it.
        found: The checkpoints in it.
    """
    named = {name for checkpoint in found for name in checkpoint.shards}
    doubtful = {checkpoint.name for checkpoint in found if checkpoint.state is not State.OK}
    for name, status in entries.items():
        shard = parse_shard_name(name)
        if shard is None or name in named or shard.set_name in doubtful:
            continue
        problem = "what one rank saved for a checkpoint that is not there"
        leftover = entry_of(directory / name, status, State.LEFTOVER, problem)
        yield replace(leftover, series=shard.series)
