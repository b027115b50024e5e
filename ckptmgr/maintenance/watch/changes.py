# SPDX-License-Identifier: Apache-2.0
"""Changes of directories, by inotify through watchdog.

A save makes about 35 events; those that lead to a listing are of final names: renamed to, closed
after writing, removed. The name of a lease says that a run began or ended, and a temporary file
that a live writer removed was a save that it gave up.

Events can be lost: the kernel keeps `max_queued_events` of them. watchdog logs a warning then, from
version 7.1 on; older versions say nothing. So a quarter as many events count as a loss, too:
whatever was lost was lost before the last of those that were kept is read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from watchdog.events import (
    DirDeletedEvent,
    FileClosedEvent,
    FileCreatedEvent,
    FileDeletedEvent,
    FileMovedEvent,
    FileSystemEvent,
    FileSystemEventHandler,
)
from watchdog.observers.inotify import InotifyObserver

from ckptmgr.core.names import DATA_SUFFIXES
from ckptmgr.io.leases import LEASE_SUFFIX
from ckptmgr.io.mounts import is_shared, kind_of
from ckptmgr.io.signals import SLICE_S
from ckptmgr.io.temp_names import final_name, parse_temp
from ckptmgr.store.manifest.codec import SUFFIX as MANIFEST_SUFFIX

if TYPE_CHECKING:
    from watchdog.observers.api import ObservedWatch

_LOG = logging.getLogger("watchdog")
_QUEUE_LIMIT = Path("/proc/sys/fs/inotify/max_queued_events")
_USUAL_LIMIT = 16384
_EVENTS: list[type[FileSystemEvent]] = [
    FileMovedEvent,
    FileCreatedEvent,
    FileClosedEvent,
    FileDeletedEvent,
    DirDeletedEvent,
]
_QUIET_S = 0.02
_MOST_S = 0.5


@dataclass(slots=True)
class ReportedChanges:
    """Changes since the last batch.

    Attributes:
        changed: The directories to list again.
        removed_temps: By directory: the temporary files of data that were removed.
        vanished: The directories that were removed, and must be followed again.
        has_losses: Whether events were lost, so that all directories must be listed.
    """

    changed: set[Path] = field(default_factory=set)
    removed_temps: dict[Path, list[str]] = field(default_factory=dict)
    vanished: set[Path] = field(default_factory=set)
    has_losses: bool = False


class _Wake:
    """End of a wait without a change."""


class Changes(contextlib.AbstractContextManager["Changes"]):
    """Follows directories within a `with` block; `is_polling` follows none."""

    def __init__(
        self, *, is_polling: bool = False, kind_of: Callable[[Path], str | None] = kind_of
    ) -> None:
        self._queue: queue.SimpleQueue[tuple[Path, str, bool] | _Wake | None] = queue.SimpleQueue()
        self._watches: dict[Path, ObservedWatch] = {}
        self._is_polling = is_polling
        self._kind_of = kind_of
        self._heard = 0
        self._most = _queue_limit() // 4
        self._observer: InotifyObserver | None = None
        self._losses = _LossHandler(lambda: self._queue.put(None))

    def __enter__(self) -> Changes:
        _LOG.addHandler(self._losses)
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.removeHandler(self._losses)
        if self._observer is not None:
            self._observer.stop()
            self._observer.join()

    def follow(self, directory: Path) -> str | None:
        """Follow a directory, again if it was followed; return why it can only be polled, or None."""
        self._forget(directory)
        kind = self._kind_of(directory)
        if self._is_polling:
            return "as --poll-only asks"
        if is_shared(kind):
            return f"{kind} does not report what other hosts change"
        try:
            if self._observer is None:
                self._observer = InotifyObserver()
                self._observer.start()
            real = os.path.realpath(directory)  # a link itself has no changes
            handler = _Handler(directory, real, self._put)
            self._watches[directory] = self._observer.schedule(handler, real, event_filter=_EVENTS)
        except OSError as error:
            return f"inotify: {error.strerror or error} (sysctl fs.inotify)"
        return None

    def _forget(self, directory: Path) -> None:
        watch = self._watches.pop(directory, None)
        if watch is not None and self._observer is not None:
            with contextlib.suppress(KeyError):
                self._observer.unschedule(watch)

    def _put(self, directory: Path, name: str, is_removed: bool) -> None:
        """Take one event, in the thread of the observer."""
        self._heard += 1
        if self._heard >= self._most:
            self._heard = 0
            self._queue.put(None)
        if leads_to_listing(name, is_removed=is_removed):
            self._queue.put((directory, name, is_removed))

    def wake(self) -> None:
        """End the wait; for other threads."""
        self._queue.put(_Wake())

    def wait(self, timeout_s: float) -> ReportedChanges:
        """Return the changes, which may be none, after waiting for the first one at most so long.

        Those that follow within moments belong to the batch: a save renames two files.
        """
        batch = ReportedChanges()
        deadline = None
        while deadline is None or time.monotonic() < deadline:
            try:
                one = self._next(timeout_s)
            except queue.Empty:
                break
            if deadline is None:
                deadline = time.monotonic() + _MOST_S
            timeout_s = _QUIET_S
            if one is None:
                batch.has_losses = True
                continue
            if isinstance(one, _Wake):
                continue
            directory, name, is_removed = one
            batch.changed.add(directory)
            if not name:
                batch.vanished.add(directory)
            if is_removed and parse_temp(name) is not None:
                batch.removed_temps.setdefault(directory, []).append(name)
        return batch

    def _next(self, timeout_s: float) -> tuple[Path, str, bool] | _Wake | None:
        """Return the next change."""
        while timeout_s > SLICE_S:
            timeout_s -= SLICE_S
            with contextlib.suppress(queue.Empty):
                return self._queue.get(timeout=SLICE_S)
        return self._queue.get(timeout=max(0.0, timeout_s))


def leads_to_listing(name: str, *, is_removed: bool) -> bool:
    """Return whether an event of this name may change a listing.

    >>> [leads_to_listing(n, is_removed=False) for n in ("net-1.ckpt", ".net.lease", "graph.json")]
    [True, True, False]
    """
    if parse_temp(name) is not None:
        return is_removed and final_name(name).endswith(DATA_SUFFIXES)
    if name.startswith("."):
        return name.endswith(LEASE_SUFFIX)
    return not name or name.endswith((*DATA_SUFFIXES, MANIFEST_SUFFIX))


class _Handler(FileSystemEventHandler):
    """Passes on the names of the events of one directory; its own removal has an empty one."""

    def __init__(self, directory: Path, real: str, put: Callable[[Path, str, bool], None]) -> None:
        self._directory = directory
        self._real = real
        self._put = put

    def on_any_event(self, event: FileSystemEvent) -> None:
        if event.is_directory:
            if os.fsdecode(event.src_path) == self._real:
                self._put(self._directory, "", True)
            return
        is_removed = isinstance(event, FileDeletedEvent)
        for path in (event.src_path, event.dest_path):
            if path:
                self._put(self._directory, Path(os.fsdecode(path)).name, is_removed)


class _LossHandler(logging.Handler):
    """Takes the warnings of watchdog, which are about events that it lost."""

    def __init__(self, lost: Callable[[], None]) -> None:
        super().__init__(logging.WARNING)
        self._lost = lost

    def emit(self, record: logging.LogRecord) -> None:
        self._lost()


def _queue_limit() -> int:
    try:
        return max(4, int(_QUEUE_LIMIT.read_text()))
    except (OSError, ValueError):
        return _USUAL_LIMIT
