# SPDX-License-Identifier: Apache-2.0
"""Events that observers receive; see `observe` for registering observers.

| event | when | figures and notes |
|---|---|---|
| `save.started` | a save was requested | why |
| `save.staged` | a background save has its copy; the training goes on | stage_s, staged_bytes |
| `save.durable` | the checkpoint survives a power cut | all of `SaveStats`; its epoch and metrics |
| `save.failed` | it did not become durable | |
| `save.skipped`, `save.superseded` | under back-pressure, by `skip` and `coalesce` | |
| `save.skipped` | no rule of `keep` would keep it (`save_only_kept`) | the reason |
| `load`, `resume`, `verify` | afterwards | resume: skipped, starts; skipped checkpoints and why |
| `prune` | checkpoints were removed, or should have been | kept, dropped, freed_bytes |
| `mirror` | an upload to the mirror ended, or the mirror did not answer, or stopped the run | its address, or why |
| `mirror.skipped` | a checkpoint is never uploaded | why |
| `mirror.pruned` | the policy of the mirror removed checkpoints there | dropped, freed_bytes |
| `mirror.unfinished` | the run ended before all uploads | left |
| `lease.taken_over` | the leftovers of a dead writer were cleaned up | actions |
| `witness.equal`, `witness.differs` | steps came again after a resumption | equal_steps, recorded_steps; the sentence |
| `forecast` | a shortage of space, time or memory is expected | hint |

Every `save.started` is followed by exactly one of `durable`, `failed`, `skipped` and `superseded`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypedDict

from ckptmgr.core.handle import SaveStats
from ckptmgr.core.model import Checkpoint

_NO_FIGURES: Mapping[str, float] = MappingProxyType({})

FIRST_OF_A_SAVE = "save.started"
"""The one event that may come before the directory of a run is made."""
MOMENTS = frozenset(
    {
        FIRST_OF_A_SAVE,
        "save.staged",
        "lease.taken_over",
        "forecast",
        "mirror.skipped",
        "mirror.pruned",
        "mirror.unfinished",
        "witness.equal",
        "witness.differs",
    }
)
"""Events that do not end an operation, so their durations must not be added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An event of checkpointing.

    Attributes:
        name: As in the table of the module.
        at: Its end, in seconds since the epoch.
        seconds: Its duration, or 0.
        size_bytes: Bytes of the file, or of the staged copy.
        path: The file or directory, or None.
        series: Name of the series, or None.
        step: Global step, or None.
        epoch: Epoch of the checkpoint that was saved, or None.
        error: The failure, as text, or None.
        error_type: Name of the exception, or of the verdict of `verify`.
        figures: Further numbers by name; units are in the names.
        metrics: Metrics of the checkpoint that was saved; those added later are not known here.
        notes: Further sentences.
    """

    name: str
    at: float
    seconds: float = 0.0
    size_bytes: int = 0
    path: Path | None = None
    series: str | None = None
    step: int | None = None
    epoch: int | None = None
    error: str | None = None
    error_type: str | None = None
    figures: Mapping[str, float] = field(default_factory=lambda: _NO_FIGURES, hash=False)
    metrics: Mapping[str, float] = field(default_factory=lambda: _NO_FIGURES, hash=False)
    notes: tuple[str, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Whether there was no failure."""
        return self.error_type is None

    @property
    def operation(self) -> str:
        """The operation: `save`, `load`, ...; the name up to the dot."""
        return self.name.partition(".")[0]

    @property
    def outcome(self) -> str:
        """The outcome: the name after the dot, else `ok` or `failed`."""
        return self.name.partition(".")[2] or ("ok" if self.is_ok else "failed")

    def to_json(self) -> dict[str, object]:
        """Return plain values for `json.dumps`; keys are never left out."""
        return {
            "event": self.name,
            "at": self.at,
            "seconds": self.seconds,
            "size_bytes": self.size_bytes,
            "path": None if self.path is None else str(self.path),
            "series": self.series,
            "step": self.step,
            "epoch": self.epoch,
            "is_ok": self.is_ok,
            "error": self.error,
            "error_type": self.error_type,
            "figures": dict(self.figures),
            "metrics": dict(self.metrics),
            "notes": list(self.notes),
        }


class Facts(TypedDict, total=False):
    """The attributes of an event besides its name and time."""

    seconds: float
    size_bytes: int
    path: Path | None
    series: str | None
    step: int | None
    epoch: int | None
    error: str | None
    error_type: str | None
    figures: Mapping[str, float]
    metrics: Mapping[str, float]
    notes: tuple[str, ...]


def direction_of(event: Event) -> Literal["read", "write"] | None:
    """Return whether an event is a successful read or write of a checkpoint, else None."""
    if event.name == "save.durable":
        return "write"
    return "read" if event.name in ("load", "resume", "verify") and event.is_ok else None


def about(checkpoint: Checkpoint) -> Facts:
    """Return the attributes of an event about a checkpoint."""
    return Facts(
        path=checkpoint.path,
        series=checkpoint.series,
        step=checkpoint.step,
        size_bytes=checkpoint.size_bytes,
    )


def figures_of(stats: SaveStats) -> dict[str, float]:
    """Return the figures of a save by name."""
    figures: dict[str, float] = dataclasses.asdict(stats)
    return {
        **figures,
        "peak_bytes": stats.peak_bytes,
        "gigabytes_per_s": stats.gigabytes_per_s,
    }
