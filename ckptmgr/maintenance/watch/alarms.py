# SPDX-License-Identifier: Apache-2.0
"""Alarms about the saves of a directory: given up, interrupted, stopped, slow; and about the disk. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from ckptmgr.core.model import Checkpoint, State
from ckptmgr.core.names import parse_name, parse_step_name, stem_of
from ckptmgr.core.shard_names import parse_shard_name
from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.io.temp_names import parse_temp
from ckptmgr.maintenance.watch.model import AlarmKey, Limits, Listing
from ckptmgr.maintenance.watch.rhythm import DiskTrend, Rhythm
from ckptmgr.store.publish import SPACE_MARGIN_BYTES

Alarms = Iterator[tuple[AlarmKey, str]]
_LAST_TIME = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()
_INTERRUPTED = "an interrupted save left a temporary file"


class _Failure(NamedTuple):
    """Failure of a series; `after` is the time of its newest save then."""

    after: float
    text: str
    is_death: bool = False


class Failures:
    """Saves that were given up, and runs that died; each until its series goes on."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failure] = {}

    def note(self, listing: Listing, newest: Mapping[str, float]) -> None:
        """Take a listing; `newest` maps each series to the time of its newest save."""
        for series, failure in list(self._failures.items()):
            holder = listing.holders.get(series)
            has_another_run = holder is not None and holder.state != "dead"
            if newest.get(series, 0.0) > failure.after or (failure.is_death and has_another_run):
                del self._failures[series]
        for name in listing.given_up:
            series = series_of(name)
            text = f"the save of {name} was given up"
            self._failures[series] = _Failure(newest.get(series, 0.0), text)
        for series, holder in listing.holders.items():
            if holder.state == "dead":
                text = f"{holder.description} ended without closing its run"
                self._failures[series] = _Failure(newest.get(series, 0.0), text, is_death=True)

    def alarms(self, listing: Listing) -> Alarms:
        """Yield one alarm for each series with a failure, or with a file of an interrupted save."""
        texts = {series: [failure.text] for series, failure in self._failures.items()}
        for seen in listing.seen:
            one = seen.checkpoint
            if one.state is State.LEFTOVER and parse_temp(one.name) is not None:
                known = texts.setdefault(one.series, [])
                known += [] if _INTERRUPTED in known else [_INTERRUPTED]
        for series, parts in texts.items():
            yield AlarmKey("failed", series), f"{series}: {'; '.join(parts)}"


def deadlines(
    limits: Limits,
    *,
    started_at: float,
    newest: Checkpoint | None,
    listing: Listing | None,
    rhythms: Mapping[str, Rhythm],
) -> Iterator[tuple[AlarmKey, float, str]]:
    """Yield from when on the directory, or a series that a run holds, counts as stopped."""
    expected_s = limits.expect_every_s
    if expected_s is not None:
        last, since = started_at, "since the watch began"
        if newest is not None:
            last = newest.saved_at.timestamp()
            since = f"since {time_text(last)} ({newest.name})"
        text = f"no checkpoint {since}; one is expected every {span(expected_s)}"
        yield AlarmKey("stopped", ""), last + expected_s, text
        return
    for series, rhythm in rhythms.items():
        holder = None if listing is None else listing.holders.get(series)
        is_held = holder is not None and holder.state != "dead"
        every_s, patience_s, save = rhythm.every_s, rhythm.patience_s, rhythm.last
        if is_held and every_s is not None and patience_s is not None and save is not None:
            since = time_text(save.at)
            text = f"{series} saved nothing since {since}; it used to every {span(every_s)}"
            yield AlarmKey("stopped", series), save.at + patience_s, text


def slowdowns(limits: Limits, rhythms: Mapping[str, Rhythm]) -> Alarms:
    """Yield the series whose last save wrote much slower than those before."""
    for series, rhythm in rhythms.items():
        usual = rhythm.usual_rate_if_slow(limits.slow_factor)
        if usual is not None and rhythm.bytes_per_s is not None:
            rates = f"{rate_text(rhythm.bytes_per_s)}, usually {rate_text(usual)}"
            yield AlarmKey("slow", series), f"the last save of {series} wrote {rates}"


def shortages(
    limits: Limits, listing: Listing, rhythms: Mapping[str, Rhythm], trend: DiskTrend
) -> Alarms:
    """Yield an alarm when the next save of a run does not fit, or the disk will be full soon."""
    free_bytes = listing.free_bytes
    if free_bytes is None:
        return
    held = [series for series, holder in listing.holders.items() if holder.state != "dead"]
    saves = [(series, rhythms[series].last) for series in held if series in rhythms]
    needs = [(save.size_bytes + SPACE_MARGIN_BYTES, series) for series, save in saves if save]
    need_bytes, series = max(needs, default=(0, ""))
    free, full_in_s = size_text(free_bytes), trend.full_in_s
    if need_bytes > free_bytes:
        sizes = f"{size_text(need_bytes)} are needed, {free} are free"
        yield AlarmKey("disk", ""), f"the next save of {series} does not fit the disk: {sizes}"
    elif full_in_s is not None and full_in_s < limits.full_within_s:
        text = f"the disk will be full in {span(full_in_s)} at this rate: {free} are free"
        yield AlarmKey("disk", ""), text


def series_of(name: str) -> str:
    """Return the series that a data file's name says."""
    shard = parse_shard_name(name)
    if shard is not None:
        return shard.series
    parsed = parse_name(name) or parse_step_name(name)
    return stem_of(name) if parsed is None else parsed.prefix


def time_text(at: float) -> str:
    """Return a time in seconds since the epoch for people, UTC."""
    # A float of the last microseconds of year 9999, which a manifest may state, is of year 10000.
    at = min(at, _LAST_TIME)
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def span(seconds: float) -> str:
    """Return e.g. `45 s`, `12 min`, `3 h`, `2 d`."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.3g} s"
