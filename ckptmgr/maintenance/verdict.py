# SPDX-License-Identifier: Apache-2.0
"""Verdict of a check of a checkpoint: its level, its status, and the checks that it is based on."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ckptmgr.core.model import Checkpoint

CHECKS = (
    "manifest",
    "signature",
    "size",
    "digests",
    "records",
    "header",
    "seal",
    "cipher blocks",
    "frames",
    "structure",
    "CRC32",
    "every tensor",
    "state tree",
)
"""The names of all checks, in the order of a report."""
_NONE: Mapping[str, tuple[int, int]] = MappingProxyType({})


class Level(enum.Enum):
    """How thoroughly to check; the table in `verify` says what each level reads."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


class Status(enum.Enum):
    """Result of a check."""

    OK = "ok"
    """Everything the level promises was checked and is right."""
    PLAIN = "plain"
    """OK or UNVERIFIED without the key of the environment, which the directory has no use for."""
    UNVERIFIED = "unverified"
    """Well-formed, but without a checksum: nothing vouches for its contents."""
    PARTIAL = "partial"
    """Right as far as it could be checked; the rest needs the key or a signature."""
    UNSEALED = "unsealed"
    """A key was given, but the file is not authenticated as a whole."""
    UNPROVEN = "unproven"
    """Keys were given, but none of them authenticates its step and series."""
    WRONG_KEY = "wrong key"
    """It does not open with this key."""
    UNREADABLE = "unreadable"
    """The disk failed, or this version does not know the file format."""
    MISSING = "missing"
    """Its manifest is in the directory, and a data file that it names is not."""
    INCOMPLETE = "incomplete"
    """Of another tool, whose save did not end, or of which files are missing."""
    DAMAGED = "damaged"
    """Its bytes are not those that were saved."""


EXIT_CODES: Mapping[Status, int] = MappingProxyType(
    {
        Status.DAMAGED: 1,
        Status.MISSING: 1,
        Status.INCOMPLETE: 1,
        Status.UNREADABLE: 2,
        Status.WRONG_KEY: 12,
        Status.UNSEALED: 13,
        Status.UNPROVEN: 13,
        Status.PARTIAL: 3,
    }
)
"""Exit codes of `verify`: the first status that occurs decides; 0 if none of them does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """Result of checking one checkpoint.

    Attributes:
        problems: The faults, one sentence each; for a file of a rank after its name.
        checked: Checks that passed, names from `CHECKS`; for other tools as `foreign.check` calls them.
        unchecked: Checks that could not be made, each with the reason.
        nonfinite: With `Level.DEEP`: tensor to (number of NaN, number of Inf), where there are any.
        hint: What to do next, or None.
        obstacle: A passing error of the disk; the checkpoint may be intact.
    """

    checkpoint: Checkpoint
    level: Level
    status: Status
    problems: tuple[str, ...] = ()
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    nonfinite: Mapping[str, tuple[int, int]] = field(default_factory=lambda: _NONE, hash=False)
    hint: str | None = None
    obstacle: Exception | None = field(default=None, compare=False, repr=False)
