# SPDX-License-Identifier: Apache-2.0
"""Decisions about one watched directory: what to verify, where to apply retention, when to alarm.

Pure: `WatchDecisions` is given listings, results of checks and the time, and returns reports. The
alarms that stand are computed from its state each time, and reported when one begins or ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ckptmgr.core.model import UNFINISHED, Checkpoint, State
from ckptmgr.core.sizes import size_text
from ckptmgr.maintenance.verdict import Status, Verification
from ckptmgr.maintenance.watch.alarms import (
    Alarms,
    Failures,
    deadlines,
    shortages,
    slowdowns,
    time_text,
)
from ckptmgr.maintenance.watch.checks import ALARM_OF, PASSED, Check, result_of
from ckptmgr.maintenance.watch.mirroring import MirrorState, UploadAttempt
from ckptmgr.maintenance.watch.model import (
    AlarmKey,
    AlarmKind,
    EventName,
    Limits,
    Listing,
    Report,
    Seen,
    SeriesHolder,
    SeriesRow,
)
from ckptmgr.maintenance.watch.rhythm import DiskTrend, Rhythm, Save


class WatchDecisions:
    """State of one directory, watched since `started_at`, in seconds since the epoch.

    `remembered` maps name to fingerprint, of the checkpoints that passed a check before a restart.
    """

    def __init__(
        self,
        directory: Path,
        *,
        started_at: float,
        limits: Limits,
        remembered: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.standing: dict[AlarmKey, str] = {}
        self._started_at = started_at
        self._limits = limits
        self._listing: Listing | None = None
        self._error: str | None = None
        self._finished: dict[str, Seen] = {}
        self._first_seen: dict[str, tuple[str, float]] = {}
        self._checks = {
            name: Check(fingerprint=fingerprint) for name, fingerprint in (remembered or {}).items()
        }
        self._rhythms: dict[str, Rhythm] = {}
        self._trend = DiskTrend()
        self._failures = Failures()
        self._noted: set[str] = set()
        self._planned: dict[str, frozenset[tuple[str, str]]] = {}
        self._retention: dict[str, str] = {}
        self._moved: set[tuple[str, str]] = set()
        self.mirror = MirrorState(directory)

    @property
    def passed(self) -> dict[str, str]:
        """Name to fingerprint of the checkpoints whose last check they passed, for a restart."""
        return {n: one.fingerprint for n, one in sorted(self._checks.items()) if one.has_passed}

    @property
    def whole(self) -> list[Seen]:
        """The checkpoints whose last check they passed, and that have a manifest."""
        return [
            one
            for name, one in self._finished.items()
            if one.checkpoint.state is State.OK
            and (check := self._checks.get(name)) is not None
            and check.fingerprint == one.fingerprint
            and check.has_passed
        ]

    @property
    def holders(self) -> Mapping[str, SeriesHolder]:
        """Series to the holder of its lease."""
        return {} if self._listing is None else self._listing.holders

    def listed(self, listing: Listing) -> list[Report]:
        """Take a new listing."""
        is_first, before, at = self._listing is None, self._finished, listing.at
        self._listing, self._error = listing, None
        finished = [one for one in listing.seen if one.checkpoint.state not in UNFINISHED]
        self._finished = {one.checkpoint.name: one for one in finished}
        known = self._first_seen
        self._first_seen = {
            name: known[name]
            if known.get(name, ("", 0.0))[0] == one.fingerprint
            else (one.fingerprint, at)
            for name, one in self._finished.items()
        }
        self._checks = {n: one for n, one in self._checks.items() if n in self._finished}
        appeared = [one.checkpoint for one in finished if _is_new(one, before)]
        durations = {one.checkpoint.name: one.duration_s for one in finished}
        for new in sorted(appeared, key=_age):
            save = Save(new.run_id, new.saved_at.timestamp(), new.size_bytes, durations[new.name])
            self._rhythms.setdefault(new.series, Rhythm()).note(save)
        if listing.free_bytes is not None:
            self._trend.note(at, listing.free_bytes)
        lasts = {series: rhythm.last for series, rhythm in self._rhythms.items()}
        self._failures.note(listing, {series: save.at for series, save in lasts.items() if save})
        if is_first:
            return [self._report("watching", at, self._summary()), *self.ticked(at)]
        gone = [one.checkpoint for name, one in before.items() if name not in self._finished]
        reports = [
            self._report("saved", at, f"{one.name} {size_text(one.size_bytes)}", about=one)
            for one in sorted(appeared, key=_age)
        ]
        reports += [self._report("removed", at, one.name, about=one) for one in gone]
        return [*reports, *self.ticked(at)]

    def failed(self, at: float, problem: str) -> list[Report]:
        """Take the failure of a listing; known checkpoints stay known."""
        self._error = problem
        return self.ticked(at)

    def verified(
        self, at: float, seen: Seen, answer: Verification, *, seconds: float
    ) -> list[Report]:
        """Take the result of a check of an entry of the listing.

        Damage of files that changed just now counts when a second check finds it again: another
        program may still be copying them.
        """
        name, limits = seen.checkpoint.name, self._limits
        before = self._checks.get(name)
        is_again = before is not None and before.fingerprint == seen.fingerprint
        has_passed = answer.status in PASSED
        is_believed = has_passed or is_again or at >= seen.changed_at + limits.settle_s
        retry_s = limits.retry_s if answer.status is Status.UNREADABLE else None
        if not is_believed:
            retry_s = limits.settle_s
        check = self._checks[name] = Check(
            fingerprint=seen.fingerprint,
            status=answer.status,
            problem="; ".join(answer.problems),
            retry_at=None if retry_s is None else at + retry_s,
            is_believed=is_believed,
        )
        is_news = before is None or not is_again or not before.is_believed
        reports = []
        if is_believed and (is_news or result_of(before) != result_of(check)):
            words = [f"{name} {answer.status.value}", check.problem]
            reports.append(
                self._report(
                    "verified",
                    at,
                    ": ".join(word for word in words if word),
                    about=seen.checkpoint,
                    status=answer.status.value,
                    figures={"seconds": seconds},
                )
            )
        return [*reports, *self.ticked(at)]

    def mirrored(self, at: float, upload: UploadAttempt) -> list[Report]:
        """Take the end of an attempt to mirror."""
        return [*self.mirror.took(at, upload), *self.ticked(at)]

    def gone(self, at: float, seen: Seen) -> None:
        """Take that a checkpoint was removed before or during its check; a listing reports it."""
        self._checks[seen.checkpoint.name] = Check(
            fingerprint=seen.fingerprint,
            status=Status.UNREADABLE,
            retry_at=at + self._limits.retry_s,
            is_believed=False,
        )

    def ticked(self, at: float) -> list[Report]:
        """Take the time: return the alarms that begin or end now."""
        alarms, before = dict(self._alarms(at)), self.standing
        self.standing = {key: before.get(key, text) for key, text in alarms.items()}
        begun = [(key, text) for key, text in alarms.items() if key not in before]
        ended = [(key, text) for key, text in before.items() if key not in alarms]
        return [self._alarm("alarm", at, *one) for one in begun] + [
            self._alarm("cleared", at, *one) for one in ended
        ]

    def due(self, at: float) -> Seen | None:
        """Return the checkpoint to verify next, the newest first, or None."""
        if self._error is not None:
            return None
        ready = [one for ready_at, one in self._waiting() if ready_at <= at]
        return max(ready, key=lambda one: _age(one.checkpoint), default=None)

    def next_at(self, at: float) -> float | None:
        """Return when, after `at`, the passing of time alone leads to a decision, or None."""
        times = [ready_at for ready_at, _ in self._waiting()]
        times += [deadline for _, deadline, _ in self._deadlines()]
        times += self.mirror.deadlines(self._limits)
        return min((one for one in times if one > at), default=None)

    def _waiting(self) -> Iterator[tuple[float, Seen]]:
        """Yield the checkpoints without a valid check, each with the time from which to check it."""
        for name, one in self._finished.items():
            check = self._checks.get(name)
            if check is not None and check.fingerprint == one.fingerprint:
                if check.retry_at is not None:
                    yield check.retry_at, one
                continue
            first_at = self._first_seen[name][1]
            is_committed = one.checkpoint.state is State.OK
            settled_at = min(one.changed_at, first_at) + self._limits.settle_s
            yield first_at if is_committed else settled_at, one

    def to_prune(self, at: float, *, is_poll: bool) -> tuple[list[str], list[Report]]:
        """Return the series to apply retention to now, and reports.

        A series that a live run holds is left to that run; this is reported once.
        """
        chosen: list[str] = []
        reports: list[Report] = []
        for series in sorted({one.checkpoint.series for one in self._finished.values()}):
            if self._is_others(series, at, reports):
                continue
            mine = [one for one in self._finished.values() if one.checkpoint.series == series]
            fingerprints = frozenset((one.checkpoint.name, one.fingerprint) for one in mine)
            if is_poll or self._planned.get(series) != fingerprints:
                self._planned[series] = fingerprints
                chosen.append(series)
        return chosen, reports

    def to_quarantine(self, at: float) -> tuple[list[Seen], list[Report]]:
        """Return the damaged checkpoints to move away now, each once, and reports; as `to_prune`."""
        chosen: list[Seen] = []
        reports: list[Report] = []
        for name, one in self._finished.items():
            check = self._checks.get(name)
            is_damaged = check is not None and check.status is Status.DAMAGED and check.is_believed
            if not is_damaged or (name, one.fingerprint) in self._moved or one.checkpoint.shards:
                continue
            if not self._is_others(one.checkpoint.series, at, reports):
                self._moved.add((name, one.fingerprint))
                chosen.append(one)
        return chosen, reports

    def _is_others(self, series: str, at: float, reports: list[Report]) -> bool:
        """Return whether a live run holds a series, or nothing is known now; add a note, once."""
        holder = self.holders.get(series)
        if self._error is not None:
            return True
        if holder is None or holder.state == "dead":
            self._noted.discard(series)
            return False
        if holder.state == "unknown" and series not in self._noted:
            return False  # trying to take the lease shows
        reports += self.held(at, series, holder.description)
        return True

    def held(self, at: float, series: str, by: str) -> list[Report]:
        """Take that a live run holds a series; return a note the first time."""
        if series in self._noted:
            return []
        self._noted.add(series)
        text = f"{by} writes {series} and applies its own retention: it is only verified here"
        return [self._report("note", at, text, series=series)]

    def retained(self, at: float, series: str, problem: str | None) -> list[Report]:
        """Take the end of an attempt at retention; `problem` is why it failed, or None."""
        self._retention.pop(series, None)
        if problem is not None:
            self._retention[series] = problem
        return self.ticked(at)

    def rows(self) -> list[SeriesRow]:
        """Return the rows of the table: one for each series, at least one."""
        names = sorted({one.checkpoint.series for one in self._finished.values()})
        return [self._row(name) for name in names] or [self._row(None)]

    def _row(self, series: str | None) -> SeriesRow:
        rhythm = self._rhythms.get(series or "", Rhythm())
        mine = [one for one in self._finished.values() if one.checkpoint.series == series]
        names = {one.checkpoint.name for one in mine}
        subjects = {"", series, *names}
        return SeriesRow(
            directory=self.directory,
            series=series,
            newest=_newest(one.checkpoint for one in mine),
            every_s=rhythm.every_s,
            bytes_per_s=rhythm.bytes_per_s,
            free_bytes=None if self._listing is None else self._listing.free_bytes,
            full_in_s=self._trend.full_in_s,
            holder=self.holders.get(series or ""),
            unverified=sum(one.checkpoint.name in names for _, one in self._waiting()),
            alarms=tuple(dict.fromkeys(k.kind for k in self.standing if k.subject in subjects)),
        )

    def _alarms(self, at: float) -> Alarms:
        for key, deadline, text in self._deadlines():
            if at >= deadline:
                yield key, text
        if self._error is not None:
            yield from ((key, text) for key, text in self.standing.items() if key.kind != "stopped")
            yield AlarmKey("directory", ""), self._error
        if self._error is not None or self._listing is None:
            return
        for name, check in self._checks.items():
            if check.is_believed and not check.has_passed:
                key = AlarmKey(ALARM_OF[check.status], name)
                yield key, f"{name}: {check.problem or check.status.value}"
        yield from self._failures.alarms(self._listing)
        yield from slowdowns(self._limits, self._rhythms)
        yield from shortages(self._limits, self._listing, self._rhythms, self._trend)
        yield from self.mirror.alarms(self._limits, at)
        for series, problem in self._retention.items():
            yield AlarmKey("retention", series), f"retention of {series} failed: {problem}"

    def _deadlines(self) -> Iterator[tuple[AlarmKey, float, str]]:
        return deadlines(
            self._limits,
            started_at=self._started_at,
            newest=_newest(one.checkpoint for one in self._finished.values()),
            listing=self._listing,
            rhythms=self._rhythms,
        )

    def _summary(self) -> str:
        newest, count = _newest(one.checkpoint for one in self._finished.values()), self._finished
        if newest is None:
            return "no checkpoints yet"
        found = f"{len(count)} checkpoint{'' if len(count) == 1 else 's'}"
        return f"{found}, the newest {newest.name} of {time_text(newest.saved_at.timestamp())}"

    def _alarm(self, event: EventName, at: float, key: AlarmKey, text: str) -> Report:
        seen = self._finished.get(key.subject)
        about = None if seen is None else seen.checkpoint
        series = key.subject if key.subject in self._rhythms else None
        return self._report(event, at, text, series=series, about=about, alarm=key.kind)

    def _report(
        self,
        event: EventName,
        at: float,
        message: str,
        *,
        series: str | None = None,
        about: Checkpoint | None = None,
        alarm: AlarmKind | None = None,
        status: str | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> Report:
        return Report(
            event=event,
            at=at,
            directory=self.directory,
            message=message,
            series=series if about is None else about.series,
            checkpoint=about,
            alarm=alarm,
            status=status,
            figures=figures or {},
        )


def _is_new(one: Seen, before: Mapping[str, Seen]) -> bool:
    """Return whether an entry is another checkpoint than the one of its name before."""
    old, new = before.get(one.checkpoint.name), one.checkpoint
    return old is None or (new.id, new.saved_at) != (old.checkpoint.id, old.checkpoint.saved_at)


def _age(one: Checkpoint) -> tuple[tuple[int, int, int], float]:
    return one.order, one.saved_at.timestamp()


def _newest(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    return max(checkpoints, key=lambda one: (one.saved_at, one.order), default=None)
