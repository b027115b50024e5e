# SPDX-License-Identifier: Apache-2.0
"""Frozen values of a watch: the state of a directory at one time, alarms, and reports. No I/O.

| alarm | stands while |
|---|---|
| `damaged` | the last check of a checkpoint found damage, or a part of it is missing |
| `unreadable` | a checkpoint cannot be read now: permission, disk, unknown format |
| `unproven` | the given keys do not open a checkpoint, or do not prove it |
| `stopped` | no checkpoint was saved for longer than expected |
| `failed` | a save was given up or interrupted, or its run died; until the series saves again |
| `slow` | the last save wrote slower than the saves before it |
| `disk` | the next save does not fit the disk, or the disk will be full soon |
| `directory` | the directory is gone, or cannot be listed |
| `retention` | retention could not be applied |
| `mirror` | the mirror is behind, does not answer, or refuses a checkpoint |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from ckptmgr.core.model import Checkpoint

EventName = Literal[
    "watching",
    "saved",
    "removed",
    "verified",
    "pruned",
    "quarantined",
    "mirrored",
    "alarm",
    "cleared",
    "note",
    "stopped",
]
AlarmKind = Literal[
    "damaged",
    "unreadable",
    "unproven",
    "stopped",
    "failed",
    "slow",
    "disk",
    "directory",
    "retention",
    "mirror",
]
HolderState = Literal["live", "dead", "unknown"]
_NO_FIGURES: Mapping[str, float] = MappingProxyType({})


class SeriesHolder(NamedTuple):
    """The process that a lease file names. `unknown`: on another host, or the file is unreadable."""

    state: HolderState
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One entry of a listing.

    Attributes:
        checkpoint: As listed.
        fingerprint: Changes when a data file or the facts about it change.
        changed_at: The latest change of its files, in seconds since the epoch.
        duration_s: How long the save wrote, by its manifest; None when unknown.
    """

    checkpoint: Checkpoint
    fingerprint: str
    changed_at: float
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """State of a directory at one time.

    Attributes:
        at: Seconds since the epoch.
        seen: All entries, finished or not.
        holders: Series to the holder of its lease; a series without a lease file is left out.
        free_bytes: Of the disk; None when unknown.
        given_up: Data names of temporary files that live processes removed since the last listing.
    """

    at: float
    seen: tuple[Seen, ...] = ()
    holders: Mapping[str, SeriesHolder] = field(default_factory=dict)
    free_bytes: int | None = None
    given_up: tuple[str, ...] = ()


class AlarmKey(NamedTuple):
    """Identity of an alarm; `subject` is a series, a file name, or empty for the directory."""

    kind: AlarmKind
    subject: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Something that happened.

    Attributes:
        event: Its kind.
        at: Seconds since the epoch.
        directory: The directory that it is about; None for the whole watch.
        message: One sentence.
        series: The series, or None.
        checkpoint: The checkpoint, or None.
        alarm: For `alarm` and `cleared`: the kind.
        status: For `verified`: the status of the check.
        figures: Further numbers; units are in the names.
    """

    event: EventName
    at: float
    directory: Path | None
    message: str
    series: str | None = None
    checkpoint: Checkpoint | None = None
    alarm: AlarmKind | None = None
    status: str | None = None
    figures: Mapping[str, float] = field(default_factory=lambda: _NO_FIGURES, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to raise an alarm.

    Attributes:
        expect_every_s: A checkpoint is expected as often; None for the interval that the history of a run gives.
        slow_factor: A save is slow when it writes this many times slower than the median before.
        full_within_s: The disk is short when it will be full in less, at the present rate.
        settle_s: Damage of files that changed less long ago counts only when it stays.
        retry_s: When to read again what could not be read.
        mirror_within_s: The mirror is behind when a checkpoint waits longer for its upload.
    """

    expect_every_s: float | None = None
    slow_factor: float = 3.0
    full_within_s: float = 3600.0
    settle_s: float = 10.0
    retry_s: float = 30.0
    mirror_within_s: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesRow:
    """Row of the table: one series, or a directory without any.

    Attributes:
        every_s: Median interval between its saves; None when unknown.
        bytes_per_s: Rate at which its last save was written; None when unknown.
        full_in_s: When the disk is full at the present rate; None when it does not fill.
        holder: The holder of its lease, or None.
        unverified: How many of its checkpoints wait for their check.
        alarms: The kinds of the alarms that stand for it or for its directory.
    """

    directory: Path
    series: str | None
    newest: Checkpoint | None = None
    every_s: float | None = None
    bytes_per_s: float | None = None
    free_bytes: int | None = None
    full_in_s: float | None = None
    holder: SeriesHolder | None = None
    unverified: int = 0
    alarms: tuple[AlarmKind, ...] = ()
