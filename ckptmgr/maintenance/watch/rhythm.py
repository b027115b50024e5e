# SPDX-License-Identifier: Apache-2.0
"""Rhythm of a series (intervals and write rates of its saves), and trend of the free disk space. Pure.

>>> rhythm = Rhythm()
>>> for at in (0.0, 60.0, 125.0, 180.0):
...     rhythm.note(Save(run_id="r", at=at, size_bytes=10**6, duration_s=0.5))
>>> rhythm.every_s, rhythm.patience_s
(60.0, 195.0)
"""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_WINDOW = 9
_LEAST_INTERVALS = 2
_LEAST_RATES = 3
_PATIENCE = 3.0
_LEAST_PATIENCE_S = 60.0
_LEAST_SLOW_S = 1.0
_LEAST_SAMPLES = 6
_LEAST_SPAN_S = 120.0
_MOST_SPAN_S = 3600.0
_SPACING_S = 5.0


class Save(NamedTuple):
    """One save: its run, its time in seconds since the epoch, its bytes, and how long it wrote."""

    run_id: str | None
    at: float
    size_bytes: int
    duration_s: float | None


class Rhythm:
    """The last saves of a series, oldest first."""

    def __init__(self) -> None:
        self._saves: deque[Save] = deque(maxlen=_WINDOW)

    def note(self, save: Save) -> None:
        """Add a save; one that is not newer than the last is left out."""
        if not self._saves or save.at > self._saves[-1].at:
            self._saves.append(save)

    @property
    def last(self) -> Save | None:
        """The newest save."""
        return self._saves[-1] if self._saves else None

    @property
    def _intervals(self) -> list[float]:
        """Intervals within one run; the pause between two runs is no interval."""
        pairs = pairwise(self._saves)
        return [new.at - old.at for old, new in pairs if old.run_id == new.run_id]

    @property
    def every_s(self) -> float | None:
        """The median interval; None before two intervals."""
        intervals = self._intervals
        return median(intervals) if len(intervals) >= _LEAST_INTERVALS else None

    @property
    def patience_s(self) -> float | None:
        """After how many seconds without a save the series counts as stopped, or None."""
        intervals = self._intervals
        if len(intervals) < _LEAST_INTERVALS:
            return None
        return max(_LEAST_PATIENCE_S, _PATIENCE * max(intervals))

    @property
    def bytes_per_s(self) -> float | None:
        """The rate at which the newest save was written, or None."""
        return _rate(self._saves[-1]) if self._saves else None

    def usual_rate_if_slow(self, factor: float) -> float | None:
        """Return the median rate of the saves before, if the newest was `factor` times slower."""
        known = [rate for rate in map(_rate, self._saves) if rate is not None]
        newest = self.last
        if newest is None or newest.duration_s is None or len(known) <= _LEAST_RATES:
            return None
        usual = median(known[:-1])
        is_slow = newest.duration_s >= _LEAST_SLOW_S and known[-1] * factor < usual
        return usual if is_slow else None


def _rate(save: Save) -> float | None:
    return save.size_bytes / save.duration_s if save.duration_s else None


class DiskTrend:
    """Free bytes over the last hour.

    A save takes space before retention frees it. So the most free bytes of the newest third are
    compared with those of the oldest third.
    """

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, at: float, free_bytes: int) -> None:
        """Add a sample."""
        samples = self._samples
        if samples and at < samples[-1][0] + _SPACING_S:
            return
        samples.append((at, free_bytes))
        while samples[0][0] < at - _MOST_SPAN_S:
            samples.popleft()

    @property
    def full_in_s(self) -> float | None:
        """Seconds after the newest sample until the disk is full at this rate, or None."""
        samples = list(self._samples)
        if len(samples) < _LEAST_SAMPLES or samples[-1][0] - samples[0][0] < _LEAST_SPAN_S:
            return None
        third = len(samples) // 3
        old_at, old_bytes = max(samples[:third], key=lambda one: one[1])
        new_at, new_bytes = max(samples[-third:], key=lambda one: one[1])
        taken_bytes = old_bytes - new_bytes
        if taken_bytes <= 0:
            return None
        return new_bytes / (taken_bytes / (new_at - old_at))
