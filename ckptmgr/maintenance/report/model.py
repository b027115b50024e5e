# SPDX-License-Identifier: Apache-2.0
"""The figures of a report, from the manifests of a directory, its trash, a policy and noted events."""

from __future__ import annotations

import enum
import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import UNFINISHED, Checkpoint, State, Verdict
from ckptmgr.maintenance.json_fields import has_known_step
from ckptmgr.maintenance.past_checks import PastCheck, recall
from ckptmgr.maintenance.prune_plan import (
    Counted,
    PolicyOf,
    counted_together,
    plan_with,
    policy_for,
)
from ckptmgr.maintenance.watch.directory import problem_of
from ckptmgr.observe.events import Event
from ckptmgr.observe.json_lines import EventLines
from ckptmgr.policy.forecast import most_kept
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.store import Store

MOST_COLUMNS = 20
"""Metrics that a table has columns for."""
MOST_ROWS = 2000
"""Rows of a table on a page."""
_MOST_REFUSED = 20
_DAMAGED = (State.CORRUPT, State.MISSING)


def usual_metrics(
    recorded: Sequence[Mapping[str, float]], most: int = MOST_COLUMNS
) -> tuple[str, ...]:
    """Return the names of at most `most` metrics, sorted: those that most checkpoints have.

    One checkpoint with very many metrics neither adds columns without end nor displaces others.
    """
    counts = Counter(name for one in recorded for name in one)
    if len(counts) <= most:
        return tuple(sorted(counts))
    fewest: dict[str, int] = {}
    for one in sorted(recorded, key=len):
        for name in one:
            fewest.setdefault(name, len(one))
    chosen = heapq.nsmallest(most, counts, key=lambda name: (-counts[name], fewest[name], name))
    return tuple(sorted(chosen))


class Fate(enum.Enum):
    """Where a checkpoint stands."""

    KEPT = "kept"
    GOES = "goes"
    """Here, but the policy would drop it."""
    DAMAGED = "damaged"
    TRASH = "trash"
    GONE = "gone"
    """Noted when it was saved, and no longer here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One checkpoint of the report.

    Attributes:
        path: Its file.
        run_id: The newest run of its line; None for files of no run, and where it is unknown.
        step: Its step; None where it is not known.
        saved_at: When the save was acknowledged, UTC.
        state: Its state in the directory; the fate for one that is not in there.
        why: What keeps it, how near each rule came, or its problem.
        verified_at: When it was verified last, as far as events and the results of `verify` say.
    """

    path: Path
    series: str
    run_id: str | None
    step: int | None
    saved_at: datetime
    size_bytes: int
    metrics: Mapping[str, float]
    state: str
    fate: Fate
    why: tuple[str, ...] = ()
    verified_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The disk, in bytes; None where the file system does not say.

    Attributes:
        kept_bytes: Checkpoints of the directory.
        trash_bytes: Checkpoints in its trash.
        free_bytes: What may still be written.
        save_bytes: Size of the newest checkpoint; None without one.
        interval_s: Median time between the last saves, in seconds; None for fewer than two.
        most_bytes: Most bytes that the policy keeps, at the size of the newest; None for any number.
    """

    kept_bytes: int
    trash_bytes: int
    free_bytes: int | None
    save_bytes: int | None
    interval_s: float | None
    most_bytes: int | None

    @property
    def full_in_s(self) -> float | None:
        """Seconds until the disk is full at the pace of the last saves, if nothing is removed."""
        if self.free_bytes is None or not self.save_bytes or self.interval_s is None:
            return None
        return self.free_bytes / self.save_bytes * self.interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything that a report shows.

    Attributes:
        directory: The directory.
        made_at: The present time, UTC.
        policy: Text of the retention policy; None where nothing says what to keep.
        entries: Checkpoints, oldest first.
        metrics: Names of their metrics.
        saves: The events `save.durable`, oldest first.
        failures: The events that failed, oldest first, and the damaged checkpoints of `entries`.
        witness: The events about steps that came again after a resumption, oldest first.
        used: Time and bytes of the directory after each noted save and prune; empty without events.
        has_events: Whether events were given; without them nothing is known about the cost of saves.
        unreadable_event_count: Lines of the file of events that are none.
        refused: Errors about the policies of single runs, or of all, whose checkpoints count as
            kept, and about the trash.
    """

    directory: Path
    made_at: datetime
    policy: str | None
    entries: tuple[Entry, ...]
    metrics: tuple[str, ...]
    saves: tuple[Event, ...]
    failures: tuple[Event, ...]
    witness: tuple[Event, ...]
    used: tuple[tuple[datetime, int], ...]
    space: Space
    has_events: bool
    unreadable_event_count: int = 0
    refused: tuple[CkptmgrError | OSError, ...] = ()

    @property
    def damaged(self) -> tuple[Entry, ...]:
        """The damaged checkpoints."""
        return tuple(one for one in self.entries if one.fate is Fate.DAMAGED)

    def usual_metrics(self, most: int = MOST_COLUMNS) -> tuple[str, ...]:
        """Return the names of the metrics that get columns or charts; see `usual_metrics`."""
        return usual_metrics([one.metrics for one in self.entries], most)

    def more_metrics(self, shown: Sequence[str]) -> str | None:
        """Return the sentence about the metrics that are not shown; None if all are."""
        left_out = len(self.metrics) - len(shown)
        return f"and {left_out:,} more metrics, which --json has" if left_out else None

    def policy_sentences(self) -> Iterator[str]:
        """Yield the policy, and the errors because of which something is left out."""
        yield "no retention policy" if self.policy is None else f"policy {self.policy}"
        for error in self.refused[:_MOST_REFUSED]:
            yield f"left out: {problem_of(error)}"
        if len(self.refused) > _MOST_REFUSED:
            yield f"left out: {len(self.refused) - _MOST_REFUSED:,} more for such reasons"

    def witness_sentences(self) -> Iterator[str]:
        """Yield the result of the steps that came again after the last resumption which had such."""
        for event in self.witness[-1:]:
            yield f"steps that came again up to {event.step}: {'; '.join(event.notes)}"

    def count(self, fate: Fate) -> int:
        """Return how many checkpoints have this fate."""
        return sum(one.fate is fate for one in self.entries)


class Checks(NamedTuple):
    """When files were verified: by events, in seconds since the epoch, and by records of `verify`."""

    noted_s: Mapping[str, float]
    remembered: Mapping[str, PastCheck]


def make_report(
    store: Store,
    *,
    policy: RetentionPolicy | PolicyOf | None,
    now: datetime,
    series: str | None = None,
    noted: EventLines | None = None,
) -> RunReport:
    """Return the report of a directory at a time `now` (UTC); nothing is verified or changed.

    An error about the policy of one run is part of the report.
    """
    events = () if noted is None else noted.events
    own = [one for one in events if _is_of(one, store.directory, series)]
    found = [one for one in store.scan() if one.state not in UNFINISHED]
    checks = Checks(_verified(own), recall(store, found))
    entries = []
    policies: list[RetentionPolicy] = []
    refused: list[CkptmgrError | OSError] = []
    for counted in counted_together(found, series=series):
        applied = None
        try:
            applied = None if policy is None else policy_for(counted, policy)
            its = _entries(counted, applied, now, checks)
        except (CkptmgrError, OSError) as error:
            refused.append(error)
            its = _entries(counted, None, now, checks)
        policies += [] if applied is None or applied in policies else [applied]
        entries += its
    if isinstance(policy, RetentionPolicy):
        policies = [policy]
    try:
        batches = () if store.trash is None else store.trash.batches()
    except (CkptmgrError, OSError) as error:
        refused.append(error)
        batches = ()
    thrown = [one for batch in batches for one in batch.checkpoints if series in (None, one.series)]
    entries += [_entry(one, one.run_id, Fate.TRASH, checks) for one in thrown]
    entries += _gone(own, {one.path.name for one in entries})
    entries.sort(key=lambda one: (one.saved_at, one.step or 0))
    return RunReport(
        directory=store.directory,
        made_at=now,
        policy="; ".join(map(str, policies)) or None,
        entries=tuple(entries),
        metrics=tuple(sorted({name for one in entries for name in one.metrics})),
        saves=tuple(one for one in own if one.name == "save.durable"),
        failures=tuple(one for one in own if not one.is_ok and one.name != "save.superseded"),
        witness=tuple(one for one in own if one.operation == "witness"),
        used=tuple(_used(own)),
        space=_space(store, entries, policies[0] if len(policies) == 1 else None),
        has_events=noted is not None,
        unreadable_event_count=0 if noted is None else noted.unreadable_count,
        refused=tuple(refused),
    )


def _is_of(event: Event, directory: Path, series: str | None) -> bool:
    """Return whether an event is about a directory; a file of events may be of several."""
    if event.series is not None and series not in (None, event.series):
        return False
    if event.path is None:
        return True
    return directory.name in (event.path.name, event.path.parent.name)


def _entries(
    counted: Counted, policy: RetentionPolicy | None, now: datetime, checks: Checks
) -> list[Entry]:
    run_of = {one.path: line.run_id for line in counted.lines for one in line.checkpoints}
    if policy is None:
        verdicts = [
            Verdict(checkpoint=one, is_kept=True)
            for line in counted.lines
            for one in line.checkpoints
        ]
    else:
        verdicts = list(plan_with(counted, {}, policy, now).verdicts)
    return [
        _entry(one.checkpoint, run_of[one.checkpoint.path], _fate(one), checks, verdict=one)
        for one in verdicts
    ]


def _fate(verdict: Verdict) -> Fate:
    if verdict.checkpoint.state in _DAMAGED:
        return Fate.DAMAGED
    return Fate.KEPT if verdict.is_kept else Fate.GOES


def _entry(
    checkpoint: Checkpoint,
    run_id: str | None,
    fate: Fate,
    checks: Checks,
    *,
    verdict: Verdict | None = None,
) -> Entry:
    past = checks.remembered.get(checkpoint.name) if fate is not Fate.TRASH else None
    reasons = () if verdict is None else verdict.reasons or verdict.nearest
    why = [reason.detail for reason in reasons]
    if checkpoint.problem is not None and not any(checkpoint.problem in one for one in why):
        why.insert(0, checkpoint.problem)
    if checkpoint.health is not None:
        why.insert(0, checkpoint.health)
    if past is not None and past.is_bad:
        fate = Fate.DAMAGED
        why.insert(0, f"verify found it {past.status}: {past.problem or 'no reason is recorded'}")
    return Entry(
        path=checkpoint.path,
        series=checkpoint.series,
        run_id=run_id,
        step=checkpoint.step if has_known_step(checkpoint) else None,
        saved_at=checkpoint.saved_at,
        size_bytes=checkpoint.size_bytes,
        metrics=checkpoint.metrics,
        state=past.status if past is not None and past.is_bad else checkpoint.state.value,
        fate=fate,
        why=tuple(why),
        verified_at=_verified_at(checkpoint, checks.noted_s.get(checkpoint.name), past),
    )


def _verified_at(
    checkpoint: Checkpoint, noted_s: float | None, past: PastCheck | None
) -> datetime | None:
    times = [] if past is None or past.is_bad else [past.at]
    # An event may be about an earlier file of this name.
    if noted_s is not None and noted_s >= checkpoint.saved_at.timestamp():
        times.append(datetime.fromtimestamp(noted_s, UTC))
    return max(times, default=None)


def _verified(noted: Sequence[Event]) -> dict[str, float]:
    """Return when the file of a name was found intact last, in seconds since the epoch."""
    return {
        one.path.name: one.at
        for one in sorted(noted, key=lambda event: event.at)
        if one.name == "verify" and one.is_ok and one.path is not None
    }


def _gone(noted: Sequence[Event], present: set[str]) -> list[Entry]:
    saved = {
        one.path.name: one for one in noted if one.name == "save.durable" and one.path is not None
    }
    return [
        Entry(
            path=one.path,
            series=one.series or "",
            run_id=None,
            step=one.step,
            saved_at=datetime.fromtimestamp(one.at, UTC),
            size_bytes=one.size_bytes,
            metrics=one.metrics,
            state=Fate.GONE.value,
            fate=Fate.GONE,
        )
        for name, one in saved.items()
        if name not in present and one.path is not None
    ]


def _used(noted: Sequence[Event]) -> list[tuple[datetime, int]]:
    used_bytes, course = 0, []
    for one in sorted(noted, key=lambda event: event.at):
        if one.name == "save.durable":
            used_bytes += one.size_bytes
        elif one.name == "prune" and one.is_ok:
            used_bytes = max(0, used_bytes - int(one.figures.get("freed_bytes", 0)))
        else:
            continue
        course.append((datetime.fromtimestamp(one.at, UTC), used_bytes))
    return course


def _space(store: Store, entries: Sequence[Entry], policy: RetentionPolicy | None) -> Space:
    saves = [one for one in entries if one.fate is not Fate.DAMAGED]
    times = [one.saved_at.timestamp() for one in saves[-21:]]
    gaps = [late - early for early, late in itertools.pairwise(times)]
    save_bytes = saves[-1].size_bytes if saves else None
    count = None if policy is None else most_kept(policy)
    return Space(
        kept_bytes=sum(
            one.size_bytes for one in entries if one.fate not in (Fate.TRASH, Fate.GONE)
        ),
        trash_bytes=sum(one.size_bytes for one in entries if one.fate is Fate.TRASH),
        free_bytes=store.fs.free_bytes(store.directory),
        save_bytes=save_bytes,
        interval_s=statistics.median(gaps) if gaps else None,
        most_bytes=None if count is None or save_bytes is None else count * save_bytes,
    )
