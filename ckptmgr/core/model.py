# SPDX-License-Identifier: Apache-2.0
"""Frozen values: checkpoints, and the plan of a retention policy. No I/O.

A checkpoint is identified by (series, step, attempt); a step can repeat after a rollback. The order
is that of commits, which manifests number; files without manifest come first, by step. Modification
times decide nothing.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from ckptmgr.core.short_repr import short_repr

_NO_METRICS: Mapping[str, float] = MappingProxyType({})


class Figures(dict[str, float]):
    """Names and numbers in which NaN equals NaN, so that two readings of one file are equal."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.keys() == other.keys() and all(
            value == other[name] or (math.isnan(value) and math.isnan(other[name]))
            for name, value in self.items()
        )

    def __ne__(self, other: object) -> bool:  # dict has one of its own
        return not self == other

    __hash__ = None


class State(enum.Enum):
    """State of a checkpoint in a directory."""

    OK = "ok"
    """Committed: data and manifest are in place and agree on the size."""
    UNVERIFIED = "unverified"
    """A bare file without a manifest (MindSpore's own, or a copy): loadable, but not verifiable."""
    UNPROVEN = "unproven"
    """No given key proves it: no manifest, or one without authentication or signature."""
    OTHER_KEY = "other-key"
    """Its manifest is authenticated or signed under another key than those given."""
    OTHER_OWNER = "other-owner"
    """In a directory where users cannot remove each other's files, it is of an untrusted user."""
    PLAIN = "plain"
    """As shown without the key of the environment, where nothing is encrypted; in no listing."""
    CORRUPT = "corrupt"
    """The bytes do not match the manifest, or do not parse."""
    UNREADABLE = "unreadable"
    """Its manifest may not be read by this user; the checkpoint may be whole."""
    MISSING = "missing"
    """Its manifest exists without its data, and no checkpoint of its series as new is whole."""
    LEFTOVER = "leftover"
    """The remains of an interrupted save or removal."""
    WRITING = "writing"
    """Being written by a live process."""
    COMPLETE = "complete"
    """Of another tool, whose save ended as far as its files tell."""
    INCOMPLETE = "incomplete"
    """Of another tool, whose save did not end, or of which files are missing."""


_WHOLE = (State.OK, State.UNVERIFIED, State.COMPLETE)
_BARE = (State.UNVERIFIED, State.UNPROVEN, State.OTHER_OWNER)
_EMERGENCY = "exception"
UNUSABLE = (State.CORRUPT, State.UNREADABLE, State.MISSING)
"""States of checkpoints that cannot be loaded as they are."""
UNFINISHED = (State.LEFTOVER, State.WRITING)
"""States of files that are no checkpoint, or not yet one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """A promise that retention never removes this checkpoint."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Reference to the predecessor: the newest checkpoint of the series at the time of the save.

    Attributes:
        name: Its name in the directory.
        sequence: Its place in the order of commits.
        run_id: The run that wrote it.
        id: Its id, see `Checkpoint`.
    """

    name: str
    sequence: int
    run_id: str
    id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One checkpoint in a directory.

    Attributes:
        path: The data file; for a sharded checkpoint, the manifest's path without its suffix.
        series: Name of the series (the prefix of the file names).
        run_id: The run that wrote it; None for bare files.
        step: Global training step.
        attempt: 0 for the first save of this step in the series, 1 for the one after a rollback,
            ...
        sequence: Order of commits in the directory, from 1; 0 for bare files.
        epoch: Epoch number, or None.
        why: Trigger of the save: `policy`, `end`, `preempted`, `manual`, or `exception:NAME` (perhaps
            mid-step).
        saved_at: When the save was acknowledged, UTC.
        size_bytes: Size of the data file or files.
        metrics: Name to value; NaN means "measured, not a number" and never ranks.
        pins: Why retention must keep it.
        tags: Names that people gave it.
        state: Its state in the directory.
        format: `ckpt` or `safetensors`; `opaque` for a container with another file (never listed);
            for checkpoints of other tools the name of the tool.
        cipher: `AES-GCM`, `AES-CBC`, `SM4-CBC`, or None for a plain file.
        key_id: Short identifier of the key, or None.
        opened_by: Keys of its manifest: `key 0011223344556677`, `passphrase (argon2id, of a run)`.
        problem: Why the state is not OK, or None.
        obstacle: Why its manifest could not be read although it may be whole (permission, disk,
            version, a file that may come back); None otherwise.
        shards: Base names of the data files by rank; empty unless many ranks saved together.
        id: Hash of its files, its place in the series and the predecessor's id; None without
            manifest.
        previous: Its predecessor in the series, or None.
        parent_run_ids: The runs that its run was resumed from, newest first.
        starts_anew: Whether its run asked to begin beside the checkpoints that were there, or
            asked to resume and found none.
        health: `not finite: NAME` of the first tensor with NaN or infinite floats, `not finite` where
            names are secret; None for one that is finite, or was not looked at.
        has_step: Whether the step is known; a checkpoint of another tool may not name it.
    """

    path: Path
    series: str
    step: int
    saved_at: datetime
    size_bytes: int
    run_id: str | None = None
    attempt: int = 0
    sequence: int = 0
    epoch: int | None = None
    why: str = "manual"
    metrics: Mapping[str, float] = field(default_factory=lambda: _NO_METRICS, hash=False)
    pins: tuple[Pin, ...] = ()
    state: State = State.OK
    format: str = "ckpt"
    cipher: str | None = None
    key_id: str | None = None
    opened_by: tuple[str, ...] = field(default=(), compare=False)
    problem: str | None = None
    obstacle: Exception | None = field(default=None, compare=False, repr=False)
    shards: tuple[str, ...] = ()
    id: str | None = None
    previous: Link | None = None
    parent_run_ids: tuple[str, ...] = field(default=(), compare=False, repr=False)
    starts_anew: bool = field(default=False, compare=False, repr=False)
    tags: tuple[str, ...] = ()
    health: str | None = None
    has_step: bool = field(default=True, compare=False, repr=False)

    def __repr__(self) -> str:
        """Return the fields that identify it; `dataclasses.asdict` has everything."""
        return short_repr(
            self,
            path=str(self.path),
            step=self.step,
            saved_at=self.saved_at.isoformat(),
            size_bytes=self.size_bytes,
            state=self.state.value,
            metrics=self.metrics,
        )

    @property
    def name(self) -> str:
        """The file name."""
        return self.path.name

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key, oldest first: by commit, or by step where no manifest records the commit.

        Not the step alone: after a rollback from step 100 to 50, the save of step 60 is newer than
        that of step 100.
        """
        return ORDER(self)

    @property
    def is_countable(self) -> bool:
        """Whether retention counts it: whole as far as known, and saved between two steps."""
        return self.state in _WHOLE and not self.why.startswith(_EMERGENCY)

    @property
    def is_bare(self) -> bool:
        """Whether it is a file without a manifest."""
        return self.run_id is None and self.state in _BARE

    @property
    def is_attested(self) -> bool:
        """Whether its manifest counts: the given keys prove it, or no keys were given."""
        return self.state in (State.OK, State.CORRUPT, State.UNREADABLE, State.MISSING)

    @property
    def is_unproven(self) -> bool:
        """Whether neither the given keys nor its owner vouch for it: it decides nothing."""
        return self.state in (State.UNPROVEN, State.OTHER_KEY, State.OTHER_OWNER)

    @property
    def is_unreadable(self) -> bool:
        """Whether its manifest could not be read at all."""
        return self.state in (State.CORRUPT, State.UNREADABLE) and self.run_id is None

    @property
    def is_emergency(self) -> bool:
        """Whether it was saved while an exception unwound the training loop."""
        return self.why.startswith(_EMERGENCY)


def only_countable(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return those that count (`Checkpoint.is_countable`), without a call for each: of many, after each save."""
    return [c for c in checkpoints if c.state in _WHOLE and not c.why.startswith(_EMERGENCY)]


ORDER: Callable[[Checkpoint], tuple[int, int, int]] = operator.attrgetter(
    "sequence", "step", "attempt"
)
"""`Checkpoint.order` as a key for large sorts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a rule keeps a checkpoint, or how near it came.

    Attributes:
        rule: The rule as written in the policy text, e.g. `best(2, loss, min)`.
        detail: One short phrase, e.g. `best 2/2 loss=0.299`.
        rank: Position the checkpoint takes under the rule, from 1, or None.
        of: How many the rule keeps, or None.
        value: The metric or age in seconds that decided, or None.
    """

    rule: str
    detail: str
    rank: int | None = None
    of: int | None = None
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about one checkpoint.

    Attributes:
        checkpoint: The checkpoint.
        is_kept: Whether it stays.
        reasons: Every rule or protection that keeps it; empty when dropped.
        nearest: For a dropped one, how close each rule came.
    """

    checkpoint: Checkpoint
    is_kept: bool
    reasons: tuple[Reason, ...] = ()
    nearest: tuple[Reason, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The verdicts of a retention policy about a history; newest first."""

    policy: str
    verdicts: tuple[Verdict, ...]

    def __repr__(self) -> str:
        """Return the policy, and the steps that stay and go."""
        kept, dropped = ([one.step for one in those] for those in (self.kept, self.dropped))
        return short_repr(self, policy=self.policy, kept=kept, dropped=dropped)

    @property
    def kept(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that stay, newest first."""
        return tuple(v.checkpoint for v in self.verdicts if v.is_kept)

    @property
    def dropped(self) -> tuple[Checkpoint, ...]:
        """The checkpoints that go, newest first."""
        return tuple(v.checkpoint for v in self.verdicts if not v.is_kept)

    @property
    def freed_bytes(self) -> int:
        """Bytes that removing the dropped ones would free."""
        return sum(checkpoint.size_bytes for checkpoint in self.dropped)
