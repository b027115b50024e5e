# SPDX-License-Identifier: Apache-2.0
"""Options of a run in one object for each subject: a stop, snapshots, and how a run resumes.

Those of proof are `core.trust.Trust`, of ranks `parallel.team.Ranks`, of a mirror
`remote.mirror.Mirror`. A new option becomes a field of one of them, not an argument.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from numbers import Real
from typing import Any, Literal

from ckptmgr.core.arguments import check_is_bool, checked_interval


@dataclass(frozen=True, slots=True)
class Stop:
    """How a run stops that a signal asks to: `CheckpointManager(..., stop=Stop(grace=90))`.

    Attributes:
        grace: Seconds between the signal that announces the end of the process and its end, for
            `should_stop`; None to stop at once.

    Raises:
        TypeError: `grace` is no number.
        ValueError: It is no positive number of seconds.
    """

    grace: float | None = None

    def __post_init__(self) -> None:
        given: Any = self.grace
        if isinstance(given, bool) or not isinstance(given, Real | None):
            raise TypeError(f"grace must be a number of seconds, but got {given!r}")
        grace = self.grace
        if grace is not None and not (grace > 0 and math.isfinite(grace)):
            raise ValueError(f"grace must be a positive number of seconds, but got {grace!r}")


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Copies of the state in memory, for `rollback`: `CheckpointManager(..., snapshots=Snapshots(10))`.

    Attributes:
        every: Interval in steps at which `step_end` copies the state; None for never.
        most: Maximum number of these copies; `memory.snapshot_budget_bytes` of the configuration
            also limits them.

    Raises:
        ValueError: One of them is less than 1.
    """

    every: int | None = None
    _: KW_ONLY
    most: int = 2

    def __post_init__(self) -> None:
        checked_interval("most of Snapshots", self.most)
        if self.every is not None:
            checked_interval("every of Snapshots", self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """How a run resumes: `manager.resume(state, Resume(start="new"))`, `resume=` of an adapter.

    Attributes:
        start: `newest`, or `new` to start at step 0 beside the present checkpoints, which stay and
            count as those of another run.
        allow_bare: Where no checkpoint loads, take the newest data file of the series without a
            manifest. Its name alone says which step it is, so it is never preferred to a checkpoint
            with a manifest. With a key `allow_unsealed` of `Trust` asks for it.

    Raises:
        ValueError: `start` is neither; `allow_bare` is no bool, or is given with `new`.
    """

    start: Literal["newest", "new"] = "newest"
    allow_bare: bool = False

    def __post_init__(self) -> None:
        if self.start not in ("newest", "new"):
            raise ValueError(f"start must be 'newest' or 'new', but got {self.start!r}")
        check_is_bool("allow_bare", self.allow_bare)
        if self.allow_bare and self.start == "new":
            raise ValueError("allow_bare has no effect with start='new', which takes no checkpoint")


NEWEST = Resume()
