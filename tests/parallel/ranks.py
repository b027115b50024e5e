# SPDX-License-Identifier: Apache-2.0
"""Ranks that are threads: they meet in memory, on a clock that only tests move, and write to one model disk."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from ckptmgr import Checkpoint, RanksMissing, Trust
from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.rank_commit import Together, together
from ckptmgr.series.writer import SeriesWriter
from ckptmgr.state import tree
from tests.faults.training import RUNS, SERIES, ModelProcesses
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk

T = TypeVar("T")
WORLD = 3
TIMEOUT_S = 100.0
START = 1_700_000_000.0
_HANG_S = 60.0


class RankDied(BaseException):
    """The process of a rank is gone."""


@dataclass
class Clock:
    """Seconds, as calendars and as stopwatches count them."""

    now: float = START

    def __call__(self) -> float:
        return self.now


class Meeting:
    """Where the ranks meet. A wait times out when those it waits for are gone, or wait for something else."""

    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self.tags: list[str] = []
        self._said: dict[str, dict[int, Json]] = {}
        self._waiting: dict[int, str] = {}
        self._gone: set[int] = set()
        self._changed = threading.Condition()

    def gone(self, rank: int) -> None:
        """Let nobody wait for a rank any more: it died, hangs, or has returned."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()

    def back(self, rank: int) -> None:
        """Let a rank that hung go on."""
        with self._changed:
            self._gone.discard(rank)

    def meet(self, rank: int, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        """Say something and return what all say, by rank."""
        with self._changed:
            self.tags.append(tag)
            said = self._said.setdefault(tag, {})
            said[rank] = value
            self._waiting[rank] = tag
            self._changed.notify_all()
            is_over = self._changed.wait_for(lambda: self._is_over(tag), _HANG_S)
            assert is_over, f"rank {rank} hangs at {tag}: {self._said}"
            del self._waiting[rank]
            missing = [other for other in range(self.world) if other not in said]
            if missing:
                raise RanksMissing(tag, ranks=missing, found=dict(said), timeout_s=timeout_s)
            return [said[other] for other in range(self.world)]

    def _is_over(self, tag: str) -> bool:
        missing = set(range(self.world)) - self._said[tag].keys()
        return all(rank in self._gone or self._is_stuck(rank) for rank in missing)

    def _is_stuck(self, rank: int) -> bool:
        tag = self._waiting.get(rank)
        return tag is not None and len(self._said[tag]) < self.world


@dataclass(frozen=True)
class Seat:
    """A rank's place in a meeting: its coordinator."""

    meeting: Meeting
    rank: int

    @property
    def world(self) -> int:
        return self.meeting.world

    def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
        return self.meeting.meet(self.rank, tag, value, timeout_s=timeout_s)


class RankDisk(FailingDisk):
    """The model disk as one rank sees it.

    Args:
        disk: The disk of all.
        call: The call at which something happens, from 1, or None.
        happens: What; an exception from it comes out of this call and all later ones.
    """

    def __init__(
        self, disk: ModelDisk, *, call: int | None = None, happens: Callable[[], None] | None = None
    ) -> None:
        super().__init__(disk)
        self._at = call
        self._happens = happens
        self._is_dead = False

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if self._is_dead:
            raise RankDied
        if self._happens is not None and len(self.calls) == self._at:
            try:
                self._happens()
            except RankDied:
                self._is_dead = True
                raise


@dataclass
class Job:
    """A job of some ranks on one disk.

    Attributes:
        disk: The disk.
        clock: Moves only when told to.
        meeting: Where the ranks meet.
        key: Encrypts.
    """

    disk: ModelDisk
    clock: Clock = field(default_factory=Clock)
    meeting: Meeting = field(default_factory=Meeting)
    key: bytes | None = None
    run_ids: itertools.count[int] = field(default_factory=itertools.count)

    def store(self, fs: api.FileSystem | None = None) -> api.Place:
        """Return the run directory as a rank with this disk sees it."""
        return api.place(
            RUNS,
            clock=self.clock,
            fs=fs or self.disk,
            trust=Trust(
                keys=None if self.key is None else api.Key(self.key),
                allow_unencrypted=not (self.key is not None),
            ),
            processes=ModelProcesses(self.disk),
        )

    def writer(
        self, rank: int, fs: api.FileSystem | None = None, *, seat: Seat | None = None
    ) -> SeriesWriter:
        """Return the writer of a rank, which may have a seat of its own kind."""
        return SeriesWriter(
            self.store(fs),
            SERIES,
            commit=together(seat or Seat(self.meeting, rank), timeout_s=TIMEOUT_S),
            options=api.SaveOptions(key=None if self.key is None else api.Key(self.key)),
            clock=self.clock,
            run_id=f"run{next(self.run_ids)}",
            monotonic=self.clock,
        )

    def save(self, rank: int, step: int, fs: api.FileSystem | None = None) -> Checkpoint:
        """Save a step as one rank, and end."""
        writer = self.writer(rank, fs)
        try:
            return save_step(writer, step)
        finally:
            writer.close()

    def save_all(self, step: int) -> list[Outcome[Checkpoint]]:
        """Start the job anew, and save a step with all ranks."""
        self.meeting = Meeting(self.meeting.world)
        return run_ranks(self.meeting, lambda rank: self.save(rank, step))


def save_step(writer: SeriesWriter, step: int) -> Checkpoint:
    """Save the state of a rank at a step."""
    assert isinstance(writer.commit, Together)
    flat = tree.flatten(state_of(writer.commit.coordinator.rank, step))
    metadata = {**flat.aliases, "ckptmgr.tree": flat.skeleton}
    name = f"{SERIES}-{step}.shards"
    return writer.save(name, [*flat.tensors], api.SaveFacts(step=step), metadata=metadata)


def state_of(rank: int, step: int) -> dict[str, object]:
    """Return the state of a rank at a step."""
    return {"weights": np.full(3, 100 * step + rank, np.float32)}


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """End of a rank: its result, or its error."""

    result: T | None = None
    raised: BaseException | None = None

    def must(self) -> T:
        """Return the result; raise the error of the rank."""
        if self.raised is not None:
            raise self.raised
        assert self.result is not None
        return self.result


def run_ranks(meeting: Meeting, work: Callable[[int], T]) -> list[Outcome[T]]:
    """Run something as every rank at the same time; return what came of each."""
    outcomes: list[Outcome[T]] = [Outcome() for _ in range(meeting.world)]

    def run(rank: int) -> None:
        try:
            outcomes[rank] = Outcome(result=work(rank))
        except BaseException as error:
            outcomes[rank] = Outcome(raised=error)
        finally:
            meeting.gone(rank)

    for rank in range(meeting.world):
        meeting.back(rank)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(meeting.world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_HANG_S)
    return outcomes
