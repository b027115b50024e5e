# SPDX-License-Identifier: Apache-2.0
"""Retention rules by time, in UTC; the caller passes the present time.

>>> str(Within(timedelta(hours=36)) | Daily(7))
'within(1d12h) | daily(7)'
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import ClassVar

from ckptmgr.core.model import Checkpoint, Reason
from ckptmgr.policy.rules import DecidedRule, as_utc, check_rule_count, ordinal

_UNITS_S = {"w": 604_800, "d": 86_400, "h": 3_600, "min": 60, "s": 1}


@dataclass(frozen=True, slots=True)
class Within(DecidedRule):
    """Keep checkpoints less than `age` older than the newest one that is not dated in the future.

    Relative to the newest, so that nothing expires while a run is paused; not to one dated in the
    future, because one wrong clock would make all others look old.
    """

    age: timedelta

    def __post_init__(self) -> None:
        check_whole_seconds("within", self.age)

    def __str__(self) -> str:
        return f"within({format_duration(self.age)})"

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is young enough."""
        return [age is None or age < self.age for age in _ages(history, now)]

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return the age of each checkpoint."""
        return [self._why(age) for age in _ages(history, now)]

    def _why(self, age: timedelta | None) -> Reason:
        name = f"within {format_duration(self.age)}"
        if age is None or age < timedelta(0):
            return self.reason(f"{name} (dated in the future)")
        detail = f"{name} ({format_duration(age)} before the newest)"
        return self.reason(detail, value=age.total_seconds())


@dataclass(frozen=True, slots=True)
class PerPeriod(DecidedRule):
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

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is the newest of one of the periods, or the oldest."""
        found = [False] * len(history)
        seen: set[str] = set()
        before: tuple[int, int] | None = None
        for i, time in enumerate(_times(history)):
            hour = time.toordinal(), time.hour
            if hour == before:  # no period ends within an hour, and names are slow
                continue
            before, period = hour, self.period(time)
            if period not in seen:
                if len(seen) == self.count:
                    return found
                seen.add(period)
                found[i] = True
        found[-1] |= len(seen) < self.count
        return found

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return the period of each checkpoint, and its place in there."""
        reasons: list[Reason] = []
        ranks: dict[str, int] = {}
        sizes: Counter[str] = Counter()
        period = ""
        for checkpoint in history:
            period = self.period(as_utc(checkpoint.saved_at))
            sizes[period] += 1
            rank = ranks.setdefault(period, len(ranks) + 1)
            reasons.append(self._why(period, rank, sizes[period]))
        if stays[-1] and sizes[period] > 1:
            reasons[-1] = self.reason(f"{self.NAME} (oldest)", rank=len(ranks) + 1, of=self.count)
        return reasons

    def _why(self, period: str, rank: int, position: int) -> Reason:
        if rank > self.count:
            detail = f"{self.NAME} ({ordinal(rank)} of {self.count})"
        elif position > 1:
            detail = f"{self.NAME} ({ordinal(position)} newest of {period})"
        else:
            detail = f"{self.NAME} {rank}/{self.count} {period}"
        return self.reason(detail, rank=rank, of=self.count)


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
class Yearly(PerPeriod):
    """Keep the newest checkpoint of each of the `count` newest years (UTC) that have one."""

    NAME: ClassVar[str] = "yearly"

    def period(self, time: datetime) -> str:
        """Return e.g. `2026`."""
        return f"{time.year:04}"


@dataclass(frozen=True, slots=True)
class WithinPeriods(DecidedRule):
    """Keep the newest checkpoint of each period (UTC), of those that `within(age)` would keep.

    As in restic's `--keep-within-daily`: the oldest checkpoint of the history is kept, too, if it
    is as young.
    """

    NAME: ClassVar[str]
    PERIOD: ClassVar[PerPeriod]
    age: timedelta

    def __post_init__(self) -> None:
        check_whole_seconds(self.NAME, self.age)

    def __str__(self) -> str:
        return f"{self.NAME}({format_duration(self.age)})"

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is young, and the newest of a period or the oldest of all."""
        seen: set[str] = set()
        found: list[bool] = []
        for checkpoint, age in zip(history, _ages(history, now), strict=True):
            is_kept = age is None or age < timedelta(0)
            if age is None or age < self.age:
                period = self.PERIOD.period(as_utc(checkpoint.saved_at))
                is_kept |= period not in seen or len(found) == len(history) - 1
                seen.add(period)
            found.append(is_kept)
        return found

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> Iterator[Reason]:
        """Yield the period of each checkpoint, and its place in there, or its age."""
        sizes: Counter[str] = Counter()
        for checkpoint, age, is_kept in zip(history, _ages(history, now), stays, strict=True):
            period = self.PERIOD.period(as_utc(checkpoint.saved_at))
            sizes[period] += age is None or age < self.age
            yield self._why(period, age, sizes[period], is_kept)

    def _why(self, period: str, age: timedelta | None, position: int, is_kept: bool) -> Reason:
        if age is None or age < timedelta(0):
            return self.reason(f"{self.NAME} (dated in the future)")
        if is_kept:
            detail = f"{self.NAME} {period if position == 1 else 'oldest'}"
        elif age < self.age:
            detail = f"{self.NAME} ({ordinal(position)} newest of {period})"
        else:
            detail = f"{self.NAME} ({format_duration(age)} before the newest)"
        return self.reason(detail, value=age.total_seconds())


@dataclass(frozen=True, slots=True)
class WithinHourly(WithinPeriods):
    """Keep the newest checkpoint of each hour, up to an age."""

    NAME: ClassVar[str] = "within_hourly"
    PERIOD: ClassVar[PerPeriod] = Hourly(1)


@dataclass(frozen=True, slots=True)
class WithinDaily(WithinPeriods):
    """Keep the newest checkpoint of each day, up to an age."""

    NAME: ClassVar[str] = "within_daily"
    PERIOD: ClassVar[PerPeriod] = Daily(1)


@dataclass(frozen=True, slots=True)
class WithinWeekly(WithinPeriods):
    """Keep the newest checkpoint of each ISO week, up to an age."""

    NAME: ClassVar[str] = "within_weekly"
    PERIOD: ClassVar[PerPeriod] = Weekly(1)


@dataclass(frozen=True, slots=True)
class WithinMonthly(WithinPeriods):
    """Keep the newest checkpoint of each month, up to an age."""

    NAME: ClassVar[str] = "within_monthly"
    PERIOD: ClassVar[PerPeriod] = Monthly(1)


@dataclass(frozen=True, slots=True)
class WithinYearly(WithinPeriods):
    """Keep the newest checkpoint of each year, up to an age."""

    NAME: ClassVar[str] = "within_yearly"
    PERIOD: ClassVar[PerPeriod] = Yearly(1)


@dataclass(frozen=True, slots=True)
class EveryTime(DecidedRule):
    """Keep the oldest checkpoint, and each one saved at least `interval` after the one kept before.

    As Orbax's policies of intervals count. Those dated in the future are kept and end no interval.
    It keeps all of them: without the oldest one, all intervals would begin elsewhere.
    """

    interval: timedelta

    def __post_init__(self) -> None:
        check_whole_seconds("every", self.interval)

    def __str__(self) -> str:
        return f"every({format_duration(self.interval)})"

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint ends an interval, or is dated in the future."""
        latest = as_utc(now)
        found = []
        kept: datetime | None = None
        for checkpoint in reversed(history):
            time = as_utc(checkpoint.saved_at)
            is_kept = time > latest or kept is None or time - kept >= self.interval
            if is_kept and time <= latest:
                kept = time
            found.append(is_kept)
        return found[::-1]

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return how long after the one kept before it each checkpoint was saved."""
        reasons: list[Reason] = []
        kept: datetime | None = None
        for checkpoint, is_kept in zip(reversed(history), reversed(stays), strict=True):
            time = as_utc(checkpoint.saved_at)
            reasons.append(self._why(time, kept, is_kept, is_future=time > as_utc(now)))
            if is_kept and time <= as_utc(now):
                kept = time
        return reasons[::-1]

    def _why(
        self, time: datetime, kept: datetime | None, is_kept: bool, *, is_future: bool
    ) -> Reason:
        name = f"every {format_duration(self.interval)}"
        if is_future:
            return self.reason(f"{name} (dated in the future)")
        if kept is None:
            return self.reason(f"{name} (oldest)")
        if is_kept:
            return self.reason(name)
        past = time - kept
        detail = f"{name} ({format_duration(max(past, timedelta(0)))} after the one kept)"
        return self.reason(detail, value=past.total_seconds())


@dataclass(frozen=True, slots=True)
class PerMinutes(DecidedRule):
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

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return False for each checkpoint of the window but its oldest."""
        ages_s = self._ages_s(history)
        window = [i for i, age_s in enumerate(ages_s) if i > 0 and 0 <= age_s < 60 * self.minutes]
        oldest = max(window, key=lambda i: (ages_s[i], i), default=0)
        dropped = set(window) - {oldest}
        return [i not in dropped for i in range(len(history))]

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return the age of each checkpoint."""
        name = f"per_minutes {self.minutes}"
        return [
            self.reason(name if is_kept else f"{name} (one of the window is older)", value=age_s)
            for age_s, is_kept in zip(self._ages_s(history), stays, strict=True)
        ]

    def _ages_s(self, history: Sequence[Checkpoint]) -> list[float]:
        newest = as_utc(history[0].saved_at)
        return [(newest - as_utc(one.saved_at)).total_seconds() for one in history]


def _times(history: Sequence[Checkpoint]) -> list[datetime]:
    """Return when each one was saved, in UTC."""
    return [time if (time := one.saved_at).tzinfo is UTC else as_utc(time) for one in history]


def _ages(history: Sequence[Checkpoint], now: datetime) -> list[timedelta | None]:
    """Return how much older each one is than the newest not dated in the future; None without one."""
    times, latest = _times(history), as_utc(now)
    reference = max([time for time in times if time <= latest], default=None)
    return [None if reference is None else reference - time for time in times]


def check_whole_seconds(rule: str, duration: timedelta) -> None:
    """Raise ValueError unless a duration is a positive number of whole seconds."""
    if duration < timedelta(seconds=1) or duration.microseconds:
        raise ValueError(f"{rule} needs a positive number of whole seconds, but got {duration}")


def format_duration(duration: timedelta) -> str:
    """Return e.g. `1d12h30min`, in whole seconds; a fraction of a second is cut off."""
    rest_s = duration // timedelta(seconds=1)
    parts = []
    for unit, size_s in _UNITS_S.items():
        number, rest_s = divmod(rest_s, size_s)
        if number:
            parts.append(f"{number}{unit}")
    return "".join(parts) or "0s"
