# SPDX-License-Identifier: Apache-2.0
"""Which data files of ranks a directory holds, and whether they are what their manifests say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import (
    ATTEMPT,
    ParsedName,
    is_same_prefix,
    parse_name,
    parse_step_name,
    stem_of,
)
from ckptmgr.core.shard_names import ShardName, is_set_name, parse_shard_name
from ckptmgr.core.shard_names import stem_of as stem_of_set
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.passing_errors import no_such_file
from ckptmgr.store.bare_files import entry_of
from ckptmgr.store.manifest.codec import Manifest


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


def lone_sets(present: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of which the files of all ranks are here without a manifest, newest by their names.

    Either the save was killed before its commit, or the manifest was lost. A removal that was interrupted leaves the same, but
    of a checkpoint that is older than a whole one; that is left out.

    Args:
        present: What a directory holds.
    """
    files: dict[ShardName, list[Checkpoint]] = {}
    for one in present:
        shard = parse_shard_name(one.name)
        if shard is not None and one.state is State.LEFTOVER:
            files.setdefault(shard._replace(rank=0), []).append(one)
    return [
        _as_set(shard, found)
        for shard, found in files.items()
        if len(found) == shard.world and not _is_superseded(shard, present)
    ]


def _as_set(shard: ShardName, files: Sequence[Checkpoint]) -> Checkpoint:
    by_step = parse_step_name(f"{shard.stem}.ckpt")
    by_epoch = _parsed_by_epoch(shard.stem)
    names = tuple(sorted(one.name for one in files))
    return replace(
        files[0],
        path=files[0].path.with_name(shard.set_name),
        step=0 if by_step is None else by_step.step,
        epoch=None if by_epoch is None else by_epoch.epoch,
        size_bytes=sum(one.size_bytes for one in files),
        shards=names,
        problem=f"the files of all {shard.world} ranks are here, but no manifest",
    )


def _is_superseded(shard: ShardName, present: Sequence[Checkpoint]) -> bool:
    """Return whether a whole checkpoint of the run is as new, or newer, by its name."""
    place = _place(shard.stem)
    whole = [one for one in present if one.state is State.OK and one.is_countable]
    return not place or any(
        len(other) == len(place) and other >= place
        for one in whole
        if one.series == shard.series
        or (len(place) > 2 and is_same_prefix(one.series, shard.series))
        for other in [_place(stem_of_set(one.name) if is_set_name(one.name) else stem_of(one.name))]
    )


def _place(stem: str) -> tuple[int, ...]:
    """Return step and attempt, or epoch, step in it and attempt, of a name; nothing where it has none."""
    by_step = parse_step_name(f"{stem}.ckpt")
    if by_step is not None:
        return (by_step.step, by_step.attempt)
    by_epoch = _parsed_by_epoch(stem)
    if by_epoch is None:
        return ()
    attempt = ATTEMPT.search(stem)
    number = 0 if attempt is None else int(attempt[0].removeprefix("-r"))
    return (by_epoch.epoch, by_epoch.step_in_epoch, number)


def _parsed_by_epoch(stem: str) -> ParsedName | None:
    return parse_name(f"{ATTEMPT.sub('', stem)}.ckpt")
