# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as far as names and directory entries tell: files without a manifest, leftovers, and what cannot be read."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core import shard_names
from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import parse_name, parse_step_name, stem_of, without_envelope
from ckptmgr.io.filesystem import FileStatus


def entry_of(path: Path, status: FileStatus, state: State, problem: str) -> Checkpoint:
    """Return a checkpoint of which nothing but its directory entry is known."""
    # The name of a set says what those of its files say.
    stem = shard_names.stem_of(path.name)
    name = f"{stem}.ckpt" if shard_names.is_set_name(path.name) else path.name
    parsed = parse_name(name)
    numbered = parse_step_name(name) if parsed is None else None
    named = parsed or numbered
    return Checkpoint(
        path=path,
        series=named.prefix if named is not None else stem,
        step=0 if numbered is None else numbered.step,
        attempt=0 if numbered is None else numbered.attempt,
        saved_at=_modified_at(status),
        size_bytes=status.size_bytes,
        state=state,
        format=_format_of(path.name),
        problem=problem,
    )


def _format_of(name: str) -> str:
    is_safetensors = without_envelope(name).endswith(".safetensors")
    return "safetensors" if is_safetensors else "ckpt"


def _modified_at(status: FileStatus) -> datetime:
    # Some file systems keep times that no calendar has.
    try:
        return datetime.fromtimestamp(status.modified_at, UTC)
    except (ValueError, OverflowError, OSError):
        return datetime.fromtimestamp(0, UTC)


def bare_file(path: Path, status: FileStatus, *, is_strict: bool = False) -> Checkpoint:
    """Return a checkpoint for a file without manifest; its step is filled in when the whole series is known.

    Args:
        path: The file.
        status: Its directory entry.
        is_strict: Whether keys were given that must prove it.
    """
    parsed = parse_name(path.name)
    state = State.UNPROVEN if is_strict else State.UNVERIFIED
    checkpoint = entry_of(path, status, state, "no manifest: nothing vouches for this file")
    if parsed is None:
        # `net-2023.ckpt` may be anybody's: without a manifest it belongs to no series of ours.
        return replace(checkpoint, series=stem_of(path.name), step=0, attempt=0)
    why = "exception: breakpoint file" if parsed.is_breakpoint else "manual"
    return replace(checkpoint, epoch=parsed.epoch, step=parsed.step_in_epoch, why=why)


def number_bare_steps(found: list[Checkpoint]) -> list[Checkpoint]:
    """Turn (epoch, step in epoch) of bare files into a step that grows with both.

    The number of steps in an epoch is taken to be the largest seen in the series: exact once a file from the end of an epoch
    is there, in the right order always.
    """
    longest: dict[str, int] = {}
    for checkpoint in found:
        if checkpoint.is_bare and checkpoint.epoch is not None:
            longest[checkpoint.series] = max(longest.get(checkpoint.series, 1), checkpoint.step)
    return [
        replace(c, step=max(0, c.epoch - 1) * longest[c.series] + c.step)
        if c.is_bare and c.epoch is not None
        else c
        for c in found
    ]
