# SPDX-License-Identifier: Apache-2.0
"""Loop of a watch: list what changed, verify, apply retention; one thing at a time, the newest first.

```
with Watcher([Path("runs/net")], settings) as watcher:
    for report in watcher.run():
        ...
```
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Self

from ckptmgr.core.errors import CkptmgrError, StoreLocked
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.trust import DEFAULT_TRUST, Trust
from ckptmgr.maintenance.prune_plan import PolicyOf, nothing_spared
from ckptmgr.maintenance.verdict import Level
from ckptmgr.maintenance.watch.alarms import span
from ckptmgr.maintenance.watch.changes import Changes, ReportedChanges
from ckptmgr.maintenance.watch.decisions import WatchDecisions
from ckptmgr.maintenance.watch.directory import WatchedDirectory, problem_of
from ckptmgr.maintenance.watch.memory import Memory
from ckptmgr.maintenance.watch.mirroring import Uploads
from ckptmgr.maintenance.watch.model import AlarmKey, Limits, Report, SeriesRow
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.store.store import Store
from ckptmgr.store.trash_folder import DEFAULT_GRACE

_LOST_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a watch.

    Attributes:
        trust: The keys.
        level: How thoroughly to verify.
        limits: When to alarm.
        poll_s: How often to list all directories, also without an event.
        is_polling: Do not ask the kernel for changes.
        quarantines: Whether damaged checkpoints are moved into the quarantine.
        policy_of: Returns the retention policy of a directory, or of each run; None applies none.
        grace: How long the trash keeps what retention removed.
        memory: Remembers the verified checkpoints, or None.
        uploads: Mirrors the verified checkpoints, or None.
        is_once: Do everything once, and end.
    """

    trust: Trust = DEFAULT_TRUST
    level: Level = Level.FULL
    limits: Limits = field(default_factory=Limits)
    poll_s: float = 30.0
    is_polling: bool = False
    quarantines: bool = False
    policy_of: Callable[[Store], RetentionPolicy | PolicyOf] | None = None
    grace: timedelta = DEFAULT_GRACE
    memory: Memory | None = None
    uploads: Uploads | None = None
    is_once: bool = False


class Watcher(contextlib.AbstractContextManager["Watcher"]):
    """Watches directories; `clock` returns seconds since the epoch."""

    def __init__(
        self,
        directories: Sequence[Path],
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._changes = Changes(is_polling=settings.is_polling)
        remembered = {} if settings.memory is None else settings.memory.read()
        self._places = {path: WatchedDirectory(path, trust=settings.trust) for path in directories}
        self._watches = {
            path: WatchDecisions(
                path,
                started_at=clock(),
                limits=settings.limits,
                remembered=remembered.get(str(path)),
            )
            for path in directories
        }
        self._wanted: dict[Path, list[Checkpoint]] = {}
        self._poll_at = 0.0
        self._deaf: dict[Path, str | None] = {}
        self._is_forgetful = False
        self._is_ending = False
        self._is_interruptible = False

    def __enter__(self) -> Self:
        self._changes.__enter__()
        if self._settings.uploads is not None:
            self._settings.uploads.start(self._changes.wake)
        return self

    def __exit__(self, *_: object) -> None:
        if self._settings.uploads is not None:
            self._settings.uploads.stop()
        self._changes.__exit__(*_)

    def end(self) -> None:
        """End `run` with KeyboardInterrupt; for signal handlers.

        A long wait or verification ends at once, other work when it is done.
        """
        self._is_ending = True
        if self._is_interruptible:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let `end` interrupt the block."""
        self._is_interruptible = True
        try:
            if self._is_ending:  # since the last block
                raise KeyboardInterrupt
            yield
        finally:
            self._is_interruptible = False

    @property
    def standing(self) -> list[tuple[Path, AlarmKey, str]]:
        """The alarms that stand, with their directories and texts."""
        return [
            (path, key, text)
            for path, watch in self._watches.items()
            for key, text in watch.standing.items()
        ]

    def rows(self) -> list[SeriesRow]:
        """Return the rows of the table."""
        return [row for watch in self._watches.values() for row in watch.rows()]

    def run(self, *, tick_s: float | None = None) -> Generator[Report | None, None, None]:
        """Yield reports as they come, and None at least every `tick_s` while nothing happens."""
        try:
            yield from self._run(tick_s)
        finally:
            with contextlib.suppress(OSError):
                self._write_memory()

    def _run(self, tick_s: float | None) -> Iterator[Report | None]:
        while True:
            at = self._clock()
            if not self._poll_at - self._settings.poll_s <= at < self._poll_at:
                self._poll_at = at + self._settings.poll_s
                yield from self._list(list(self._places), ReportedChanges(), is_poll=True)
                yield from self._remember()
            reports = self._verify_next()
            yield from reports or ()
            if self._settings.quarantines:
                yield from self._isolate()
            yield from self._mirror()
            if reports is None:
                yield from self._remember()
                if self._settings.is_once and self._is_mirrored:
                    yield from self._mirror()
                    return
            yield None
            yield from self._hear(self._pause(tick_s) if reports is None else 0.0)
            yield from self._list(self._lost, ReportedChanges(), is_poll=False)
            for watch in self._watches.values():
                yield from watch.ticked(self._clock())

    @property
    def _lost(self) -> list[Path]:
        """The directories that could not be listed, of whose return the kernel does not report."""
        return [path for path in self._places if path not in self._deaf]

    def _pause(self, tick_s: float | None) -> float:
        """Return how long to wait for changes."""
        at = self._clock()
        times = [watch.next_at(at) for watch in self._watches.values()]
        soonest = min([self._poll_at, *(one for one in times if one is not None)])
        pause_s = max(0.0, soonest - at)
        if self._lost:
            pause_s = min(pause_s, _LOST_S)
        return pause_s if tick_s is None else min(pause_s, tick_s)

    def _hear(self, timeout_s: float) -> Iterator[Report]:
        with self.interruptible():
            batch = self._changes.wait(timeout_s)
        if batch.has_losses:
            text = "events were lost: all directories are listed again"
            yield Report(event="note", at=self._clock(), directory=None, message=text)
            batch.changed.update(self._places)
        yield from self._list(sorted(batch.changed), batch, is_poll=False)

    def _list(
        self, paths: Sequence[Path], batch: ReportedChanges, *, is_poll: bool
    ) -> Iterator[Report]:
        for path in paths:
            place, watch, at = self._places[path], self._watches[path], self._clock()
            if path in batch.vanished:  # one that was made again may have the same identity
                self._deaf.pop(path, None)
            notes: list[Report] = []
            try:
                listing = place.look(at=at, removed_temps=batch.removed_temps.get(path, ()))
                is_deaf = place.is_replaced or path not in self._deaf
                if is_deaf and not self._settings.is_once:
                    notes = self._follow(path)
                    # What changed before the kernel was asked for changes.
                    listing = replace(place.look(at=at), given_up=listing.given_up)
            except (CkptmgrError, OSError) as error:
                self._deaf.pop(path, None)
                yield from watch.failed(at, problem_of(error))
                continue
            yield from [*notes, *watch.listed(listing)]
            if self._settings.policy_of is not None:
                yield from self._retain(path, is_poll=is_poll)

    def _follow(self, path: Path) -> list[Report]:
        """Ask the kernel for changes; return a note where it does not report all."""
        before, why = self._deaf.get(path), self._changes.follow(path)
        self._deaf[path] = why
        if why is None or why == before:
            return []
        text = f"listed every {span(self._settings.poll_s)}, without events: {why}"
        return [Report(event="note", at=self._clock(), directory=path, message=text)]

    def _verify_next(self) -> list[Report] | None:
        """Verify the newest checkpoint that waits for it; None if none does."""
        at = self._clock()
        waiting = [(seen, p) for p, watch in self._watches.items() if (seen := watch.due(at))]
        if not waiting:
            return None
        seen, path = max(waiting, key=lambda one: one[0].checkpoint.saved_at)
        started = time.perf_counter()
        try:
            with self.interruptible():
                answer = self._places[path].verify(seen, self._settings.level)
        except (CkptmgrError, OSError) as error:
            return self._watches[path].failed(self._clock(), problem_of(error))
        if answer is None:
            self._watches[path].gone(at, seen)
            return []
        seconds = time.perf_counter() - started
        return self._watches[path].verified(self._clock(), seen, answer, seconds=seconds)

    @property
    def _is_mirrored(self) -> bool:
        return self._settings.uploads is None or self._settings.uploads.is_settled

    def _mirror(self) -> Iterator[Report]:
        """Hand on verified checkpoints, and take the ends of uploads."""
        at, uploads = self._clock(), self._settings.uploads
        if uploads is None:
            return
        ended = uploads.ended()
        for one in ended:
            yield from self._watches[one.directory].mirrored(at, one)
        for path, watch in self._watches.items():
            wanted = watch.mirror.want(watch.whole, at)
            if wanted != self._wanted.get(path):
                self._wanted[path] = wanted
                uploads.want(path, wanted)
        for path in dict.fromkeys(one.directory for one in ended if one.outcome != "failed"):
            yield from self._retain(path, is_poll=True)  # what waited for its upload may go

    def _retain(self, path: Path, *, is_poll: bool) -> Iterator[Report]:
        policy_of, watch, at = self._settings.policy_of, self._watches[path], self._clock()
        if policy_of is None:
            return
        stays = nothing_spared if self._settings.uploads is None else watch.mirror.stays
        names, reports = watch.to_prune(at, is_poll=is_poll)
        yield from reports
        for series in names:
            try:
                place = self._places[path]
                policy = policy_of(place.store)
                done = place.prune(series, policy, at=at, grace=self._settings.grace, stays=stays)
            except (CkptmgrError, OSError) as error:
                yield from watch.retained(at, series, problem_of(error))
                continue
            locked = [one for one in done.failures if isinstance(one, StoreLocked)]
            others = [one for one in done.failures if one not in locked]
            for one in locked:
                yield from watch.held(at, series, one.message)
            for checkpoint in done.removed:
                yield Report(
                    event="pruned",
                    at=at,
                    directory=path,
                    message=f"{checkpoint.name} to the trash",
                    series=series,
                    checkpoint=checkpoint,
                )
            problem = "; ".join(map(str, others)).partition("\n")[0] or None
            yield from watch.retained(at, series, problem)

    def _isolate(self) -> Iterator[Report]:
        for path, watch in self._watches.items():
            at = self._clock()
            chosen, reports = watch.to_quarantine(at)
            yield from reports
            for seen in chosen:
                one = seen.checkpoint
                try:
                    into = self._places[path].quarantine(seen, at=at)
                except StoreLocked as error:
                    yield from watch.held(at, one.series, error.message)
                    continue
                except (CkptmgrError, OSError) as error:
                    text = f"{one.name} stays: {problem_of(error)}"
                    yield Report(event="note", at=at, directory=path, message=text, checkpoint=one)
                    continue
                yield Report(
                    event="quarantined",
                    at=at,
                    directory=path,
                    message=f"{one.name} to {into.relative_to(path)}",
                    series=one.series,
                    checkpoint=one,
                )
                yield from self._list([path], ReportedChanges(), is_poll=False)

    def _remember(self) -> Iterator[Report]:
        try:
            self._write_memory()
            self._is_forgetful = False
        except OSError as error:
            if not self._is_forgetful:
                text = f"a restart will verify everything again: {problem_of(error)}"
                yield Report(event="note", at=self._clock(), directory=None, message=text)
            self._is_forgetful = True

    def _write_memory(self) -> None:
        if self._settings.memory is not None:
            passed = {str(path): watch.passed for path, watch in self._watches.items()}
            self._settings.memory.write(passed)
