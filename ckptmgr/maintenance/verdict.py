# SPDX-License-Identifier: Apache-2.0
"""What a check of a checkpoint says: how thorough it was, the verdict, and what it rests on."""

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
)
"""The names of all checks, in the order in which they are told."""
_NONE: Mapping[str, tuple[int, int]] = MappingProxyType({})


class Level(enum.Enum):
    """How thoroughly to look."""

    QUICK = "quick"
    FULL = "full"
    DEEP = "deep"


class Status(enum.Enum):
    """What came out."""

    OK = "ok"
    """Everything the level promises was checked and is right."""
    UNVERIFIED = "unverified"
    """Well-formed, but it has no checksum: nothing vouches for its contents."""
    PARTIAL = "partial"
    """Right as far as it could be checked; without the key or a signature, that is not all."""
    UNSEALED = "unsealed"
    """A key was given, but the file is not authenticated as a whole."""
    UNPROVEN = "unproven"
    """Keys were given, but none of them proves which checkpoint it is."""
    WRONG_KEY = "wrong key"
    """It does not open with this key."""
    UNREADABLE = "unreadable"
    """The disk failed, or this version does not know such files."""
    MISSING = "missing"
    """Its manifest is here, and a data file that it names is not."""
    DAMAGED = "damaged"
    """It is not what was saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What is known about a checkpoint after a check.

    Attributes:
        checkpoint: The checkpoint.
        level: How thoroughly it was checked.
        status: The verdict.
        problems: What is wrong, one sentence each; of many ranks' files each that failed, after its name.
        checked: What was checked and is right, a word or two each.
        unchecked: What could not be checked, and why.
        nonfinite: With `Level.DEEP`: tensor to (number of NaN, number of Inf), where there are any.
        hint: What to do next, or None.
        obstacle: What kept it from being read although it may be whole; or None.
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
