# SPDX-License-Identifier: Apache-2.0
"""The cost of going back to a step without its snapshot: load a checkpoint, and train from there."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckptmgr.core.handle import SaveHandle
from ckptmgr.core.model import Checkpoint

if TYPE_CHECKING:  # only a run with snapshots needs it
    from ckptmgr.engine.snapshots import RestoreCost

# Snapshots are of recent steps, so older checkpoints are not the newest before any of them.
_MOST_STARTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """A checkpoint to train from again, its training time, and the cost of its load."""

    step: int
    trained_s: float
    durable: Future[Checkpoint]
    load_s: Callable[[], float]


class _Loadable(NamedTuple):
    checkpoint: Checkpoint
    trained_s: float
    load_s: float


class RestoreCosts:
    """Measures what `of` needs; several threads may use it.

    `clock` is that of the saves; `is_there` returns whether a checkpoint still exists.
    """

    def __init__(self, clock: Callable[[], float], is_there: Callable[[Checkpoint], bool]) -> None:
        self._clock, self._is_there = clock, is_there
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._started_at = self._clock()
        self._ended: dict[int, float] = {}
        self._starts: deque[_Start] = deque(maxlen=_MOST_STARTS)

    def begin(self, resumed: Checkpoint | None = None, *, load_s: float = 0.0) -> None:
        """Begin to count at the start of a run, or at a checkpoint that took `load_s` to load."""
        with self._lock:
            self._begin()
            if resumed is not None:
                durable: Future[Checkpoint] = Future()
                durable.set_result(resumed)
                start = _Start(
                    step=resumed.step, trained_s=0.0, durable=durable, load_s=lambda: load_s
                )
                self._starts.append(start)

    def ended(self, step: int) -> None:
        """Note that a step of which there is a snapshot has ended now."""
        with self._lock:
            self._ended[step] = self._trained_s

    def saved(self, step: int, handle: SaveHandle) -> None:
        """Note the save of a step. Until it is loaded, its load is taken to last as its write."""
        stats = handle.stats
        with self._lock:
            start = _Start(
                step=step,
                trained_s=self._trained_s,
                durable=handle.durable,
                load_s=lambda: stats.write_s,
            )
            self._starts.append(start)

    def go_back(self, step: int) -> None:
        """Forget the later steps: the training time goes back, too."""
        with self._lock:
            known = {start.step: start.trained_s for start in self._starts} | self._ended
            now_s = self._trained_s
            self._started_at += now_s - known.get(step, now_s)
            self._ended = {one: at for one, at in self._ended.items() if one <= step}
            kept = [start for start in self._starts if start.step <= step]
            self._starts = deque(kept, maxlen=_MOST_STARTS)

    def of(self, step: int, *, size_bytes: int) -> RestoreCost:
        """Return the cost for a step with a snapshot of that size.

        It counts from the newest durable checkpoint at or before the step. Without one it is the
        time since the run began, and the size of the snapshot.
        """
        from ckptmgr.engine.snapshots import RestoreCost

        with self._lock:
            trained_s = self._ended.get(step, self._trained_s)
            found = self._newest(step)
        if found is None:
            return RestoreCost(seconds=max(0.0, trained_s), read_bytes=size_bytes)
        seconds = max(0.0, trained_s - found.trained_s) + found.load_s
        return RestoreCost(seconds=seconds, read_bytes=found.checkpoint.size_bytes)

    @property
    def _trained_s(self) -> float:
        return self._clock() - self._started_at

    def _newest(self, step: int) -> _Loadable | None:
        for start in sorted(self._starts, key=lambda one: one.step, reverse=True):
            is_durable = start.durable.done() and start.durable.exception() is None
            if start.step > step or not is_durable:
                continue
            checkpoint = start.durable.result()
            if self._is_there(checkpoint):
                return _Loadable(checkpoint, start.trained_s, start.load_s())
        return None
