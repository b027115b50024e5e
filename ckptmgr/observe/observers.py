# SPDX-License-Identifier: Apache-2.0
"""Observers of a manager or callback (`observe=`), or of the whole process (`register`).

An observer is a function that takes an `Event` (see `events`). It runs in the thread of the event
(not the training loop, for background saves), so it must be quick and thread-safe. The first
exception of an observer is logged; it never harms a save.

>>> names = []
>>> observers = Observers(lambda event: names.append(event.name))
>>> with observers.watch(series="net", step=7, why="manual") as save:
...     save.costs(SaveStats(size_bytes=100))
...     save.durable(Path("net-7.ckpt"))
>>> names
['save.started', 'save.durable']
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, Unpack

from ckptmgr.core.contexts import contextmanager
from ckptmgr.core.errors import CkptmgrError, SaveSuperseded
from ckptmgr.core.handle import SaveHandle, SaveStats
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.printable import error_text
from ckptmgr.observe.events import Event, Facts, about, figures_of

__all__ = [
    "REGISTERED",
    "Event",
    "Observer",
    "Observers",
    "SaveWatch",
    "about",
    "register",
    "unregister",
]

_LOG = logging.getLogger(__name__)

_NO_METRICS: Mapping[str, float] = MappingProxyType({})

Observer = Callable[[Event], object]

_registered: list[Observer] = []


def register(observer: Observer) -> None:
    """Call an observer for every event of this process, until `unregister`."""
    _registered.append(observer)


def unregister(observer: Observer) -> None:
    """Undo one `register`.

    Raises:
        ValueError: It is not registered.
    """
    _registered.remove(observer)


class Observers:
    """The observers of one manager or callback, and the registered ones.

    `clock` returns seconds since the epoch, which stamp the events.
    """

    def __init__(
        self,
        observe: Observer | Iterable[Observer] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._own = _as_tuple(observe)
        self._clock = clock
        self._failed: list[Observer] = []

    def emit(self, name: str, failure: BaseException | None = None, **facts: Unpack[Facts]) -> None:
        """Call all observers with an event; their exceptions do not leave this method."""
        observers = (*self._own, *_registered)
        if not observers:
            return
        if failure is not None:
            facts["error"], facts["error_type"] = _text(failure), type(failure).__name__
        event = Event(name=name, at=self._clock(), **facts)
        for observer in observers:
            self._notify(observer, event)

    def _notify(self, observer: Observer, event: Event) -> None:
        try:
            observer(event)
        except KeyboardInterrupt:
            raise
        except BaseException:  # not even sys.exit() of an observer may end the saving thread
            if observer not in self._failed:
                self._failed.append(observer)
                _LOG.exception(
                    "an observer failed at %s; further failures of it are not logged", event.name
                )

    @contextmanager
    def timed(self, name: str, **facts: Unpack[Facts]) -> Iterator[Facts]:
        """Emit an event at the end of a `with` block; yield its attributes, to be completed."""
        started = time.perf_counter()
        error: BaseException | None = None
        try:
            yield facts
        except BaseException as raised:
            error = raised
            raise
        finally:
            facts["seconds"] = time.perf_counter() - started
            self.emit(name, error, **facts)
            del error  # its traceback holds this frame

    def watch(self, *, series: str, step: int | None, why: str) -> SaveWatch:
        """Return the watch of a save that starts now."""
        return SaveWatch(self, series=series, step=step, why=why)


class SaveWatch:
    """Emits the events of one save; an exception that leaves its `with` block is its failure."""

    def __init__(self, observers: Observers, *, series: str, step: int | None, why: str) -> None:
        self._observers = observers
        self._about = Facts(series=series, step=step)
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._is_staged = False
        self._is_over = False
        self._stats = SaveStats()
        started = self._about | Facts(notes=(why,))
        observers.emit("save.started", **started)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.ended_with(error)

    def staged(self, stats: SaveStats) -> None:
        """Emit `save.staged`, once."""
        with self._lock:
            is_late, self._is_staged = self._is_staged or self._is_over, True
        if not is_late:
            facts = self._about | Facts(
                seconds=stats.stage_s, size_bytes=stats.staged_bytes, figures=figures_of(stats)
            )
            self._observers.emit("save.staged", **facts)

    def costs(self, stats: SaveStats) -> None:
        """Take the figures of the save, which its last event reports."""
        self._stats = stats

    def durable(
        self,
        path: Path,
        *,
        epoch: int | None = None,
        metrics: Mapping[str, float] = _NO_METRICS,
        health: str | None = None,
    ) -> None:
        """Emit `save.durable`, with the health of the checkpoint as a note."""
        stats = self._stats
        if stats.staged_bytes:
            self.staged(stats)  # the staging thread may not have emitted it yet
        self._end(
            "save.durable",
            path=path,
            epoch=epoch,
            size_bytes=stats.size_bytes,
            figures=figures_of(stats),
            metrics=metrics,
            notes=() if health is None else (health,),
        )

    def ended_with(self, error: BaseException | None) -> None:
        """Emit the end of the save, once; None stands for skipped."""
        if error is None:
            self._end("save.skipped")
        else:
            is_superseded = isinstance(error, SaveSuperseded)
            self._end("save.superseded" if is_superseded else "save.failed", error)

    def passed_over(self, reason: str) -> None:
        """Emit `save.skipped` with the reason, once."""
        self._end("save.skipped", notes=(reason,))

    def follow(self, handle: SaveHandle | None) -> None:
        """Emit the events of a background save as it proceeds; None stands for skipped."""
        if handle is None:
            self.ended_with(None)
            return
        stats = handle.stats

        def staged(future: Future[None]) -> None:
            if future.exception() is None:
                self.staged(stats)

        def ended(future: Future[Checkpoint]) -> None:
            error = future.exception()
            if error is not None:
                self.ended_with(error)

        handle.staged.add_done_callback(staged)
        handle.durable.add_done_callback(ended)

    def _end(self, name: str, failure: BaseException | None = None, **facts: Unpack[Facts]) -> None:
        with self._lock:
            is_late, self._is_over = self._is_over, True
        if not is_late:
            facts["seconds"] = time.perf_counter() - self._started
            facts |= self._about
            self._observers.emit(name, failure, **facts)


def _as_tuple(observe: Observer | Iterable[Observer] | None) -> tuple[Observer, ...]:
    if observe is None:
        return ()
    found = (observe,) if callable(observe) else tuple(observe)
    for one in found:
        if not callable(one):
            raise TypeError(
                f"observe takes functions of one Event, or a list of them, but got {type(one)}"
            )
    return found


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, CkptmgrError) else error_text(error)


REGISTERED = Observers()
"""Only the registered observers, for functions without a manager."""
