# SPDX-License-Identifier: Apache-2.0
"""Retention rules by time, in UTC; the caller passes the present time.

>>> str(Within(timedelta(hours=36)) | Daily(7))
'within(1d12h) | daily(7)'
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import ClassVar

from ckptmgr.core.model import Checkpoint
from ckptmgr.policy.rules import Finding, Rule, as_utc, check_rule_count, ordinal

_UNITS_S = {"w": 604_800, "d": 86_400, "h": 3_600, "m": 60, "s": 1}


@dataclass(frozen=True, slots=True)
class Within(Rule):
    """Keep checkpoints less than `age` older than the newest one that is not dated in the future.

    Relative to the newest, so that nothing expires while a run is paused; not to one dated in the
    future, because one wrong clock would make all others look old.
    """

    age: timedelta

    def __post_init__(self) -> None:
        if self.age < timedelta(seconds=1) or self.age.microseconds:
            raise ValueError(f"within needs a positive number of whole seconds, but got {self.age}")

    def __str__(self) -> str:
        return f"within({format_duration(self.age)})"

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding]:
        """Return the findings, newest first."""
        times = [as_utc(checkpoint.saved_at) for checkpoint in history]
        reference = max((time for time in times if time <= as_utc(now)), default=None)
        return [self._find(None if reference is None else reference - time) for time in times]

    def _find(self, age: timedelta | None) -> Finding:
        name = f"within {format_duration(self.age)}"
        if age is None or age < timedelta(0):
            return self.finding(True, f"{name} (dated in the future)")
        is_kept = age < self.age
        detail = f"{name} ({format_duration(age)} before the newest)"
        return self.finding(is_kept, detail, value=age.total_seconds())


@dataclass(frozen=True, slots=True)
class PerPeriod(Rule):
    """Keep the newest checkpoint of each of the `count` newest periods (UTC) that have one.

    As in restic, periods without a checkpoint do not count, and when the history has fewer periods
    than `count`, its oldest checkpoint is kept too.
    """

    NAME: ClassVar[str]
    count: int

    def __post_init__(self) -> None:
        check_rule_count(self.NAME, self.count)

    def __str__(self) -> str:
        return f"{self.NAME}({self.count})"

    @property
    def most_kept(self) -> int | None:
        """The most checkpoints that it keeps, pinned ones aside; None for any number."""
        return self.count

    @abstractmethod
    def period(self, time: datetime) -> str:
        """Return the name of the period that a UTC time falls in."""

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding]:
        """Return the findings, newest first."""
        findings: list[Finding] = []
        ranks: dict[str, int] = {}
        sizes: Counter[str] = Counter()
        for checkpoint in history:
            period = self.period(as_utc(checkpoint.saved_at))
            sizes[period] += 1
            rank = ranks.setdefault(period, len(ranks) + 1)
            findings.append(self._find(period, rank, sizes[period]))
        if len(ranks) < self.count and not findings[-1].is_kept:
            findings[-1] = self.finding(
                True, f"{self.NAME} (oldest)", rank=len(ranks) + 1, of=self.count
            )
        return findings

    def _find(self, period: str, rank: int, position: int) -> Finding:
        if rank > self.count:
            detail = f"{self.NAME} ({ordinal(rank)} of {self.count})"
        elif position > 1:
            detail = f"{self.NAME} ({ordinal(position)} newest of {period})"
        else:
            return self.finding(
                True, f"{self.NAME} {rank}/{self.count} {period}", rank=rank, of=self.count
            )
        return self.finding(False, detail, rank=rank, of=self.count)


@dataclass(frozen=True, slots=True)
class Hourly(PerPeriod):
    """Keep the newest checkpoint of each of the `count` newest hours (UTC) that have one."""

    NAME: ClassVar[str] = "hourly"

    def period(self, time: datetime) -> str:
        """Return e.g. `2026-03-01 14h`."""
        return f"{time.date().isoformat()} {time.hour:02}h"


@dataclass(frozen=True, slots=True)
class Daily(PerPeriod):
    """Keep the newest checkpoint of each of the `count` newest days (UTC) that have one."""

    NAME: ClassVar[str] = "daily"

    def period(self, time: datetime) -> str:
        """Return e.g. `2026-03-01`."""
        return time.date().isoformat()


@dataclass(frozen=True, slots=True)
class Weekly(PerPeriod):
    """Keep the newest checkpoint of each of the `count` newest ISO weeks (UTC) that have one."""

    NAME: ClassVar[str] = "weekly"

    def period(self, time: datetime) -> str:
        """Return e.g. `2026-W09`; around New Year the ISO year may differ from the calendar's."""
        year, week, _ = time.isocalendar()
        return f"{year:04}-W{week:02}"


@dataclass(frozen=True, slots=True)
class Monthly(PerPeriod):
    """Keep the newest checkpoint of each of the `count` newest months (UTC) that have one."""

    NAME: ClassVar[str] = "monthly"

    def period(self, time: datetime) -> str:
        """Return e.g. `2026-03`."""
        return f"{time.year:04}-{time.month:02}"


@dataclass(frozen=True, slots=True)
class PerMinutes(Rule):
    """Thin out as MindSpore's `keep_checkpoint_per_n_minutes` does.

    Of the checkpoints less than `minutes` older than the newest, keep the oldest; keep the newest
    and all older ones. Applied at each save, that leaves about one checkpoint for each `minutes`,
    and the newest. Checkpoints dated after the newest are kept, too (the clock has gone back).
    """

    minutes: int

    def __post_init__(self) -> None:
        check_rule_count("per_minutes", self.minutes)

    def __str__(self) -> str:
        return f"per_minutes({self.minutes})"

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding]:
        """Return the findings, newest first."""
        newest = as_utc(history[0].saved_at)
        ages_s = [(newest - as_utc(item.saved_at)).total_seconds() for item in history]
        window = [i for i, age_s in enumerate(ages_s) if i > 0 and 0 <= age_s < 60 * self.minutes]
        oldest = max(window, key=lambda i: (ages_s[i], i), default=0)
        dropped = set(window) - {oldest}
        name = f"per_minutes {self.minutes}"
        return [
            self.finding(False, f"{name} (one of the window is older)", value=age_s)
            if i in dropped
            else self.finding(True, name, value=age_s)
            for i, age_s in enumerate(ages_s)
        ]


def format_duration(duration: timedelta) -> str:
    """Return e.g. `1d12h`, in whole seconds; a fraction of a second is cut off."""
    rest_s = duration // timedelta(seconds=1)
    parts = []
    for unit, size_s in _UNITS_S.items():
        number, rest_s = divmod(rest_s, size_s)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"
