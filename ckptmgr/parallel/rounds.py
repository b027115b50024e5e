# SPDX-License-Identifier: Apache-2.0
"""Work that all ranks do at the same time, after which each knows how all of them fared.

The meetings of one writer on many ranks: each thing that they do together has rounds of its own, with names of its own.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping

from ckptmgr.parallel.coordinator import Coordinator, Json, RanksMissing
from ckptmgr.parallel.errors import Failure, RankFailed

_OK, _FAILED = "ok", "failed"


class Rounds:
    """The rounds of one thing that the ranks do together.

    Args:
        coordinator: The ranks.
        tag: Names the thing; never the same twice in a job.
        what: Says in messages what failed.
        monotonic: Seconds that never go back.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        tag: str,
        *,
        what: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._tag = tag
        self._what = what
        self._monotonic = monotonic

    def of_attempt(self, attempt_id: str) -> Rounds:
        """Return the further rounds of one attempt: who holds the id of another one is not heard in them."""
        tag = f"{self._tag}/{attempt_id}"
        return Rounds(self._coordinator, tag, what=self._what, monotonic=self._monotonic)

    def together(self, name: str, work: Callable[[], Json], *, stop: float) -> list[Json]:
        """Do a part of the work; return what came out on every rank, by rank.

        Args:
            name: Of the round.
            work: What this rank does; an exception is told to the others.
            stop: Until when to wait for the others.

        Raises:
            RankFailed: Some ranks could not do their part; the same error on all ranks.
            RanksMissing: Some ranks did not come in time, and none of the others has failed.
        """
        own, error = self._try(work)
        missing: RanksMissing | None = None
        answers: Mapping[int, Json]
        try:
            answers = dict(enumerate(self._gather(name, own, stop)))
        except RanksMissing as raised:
            missing, answers = raised, raised.found
        failures = [
            failure
            for rank, answer in sorted(answers.items())
            if (failure := _failure(answer, rank)) is not None
        ]
        if failures:
            raise RankFailed(failures, what=self._what) from error or missing
        values = {rank: _value(answer) for rank, answer in answers.items()}
        if missing is not None:
            raise RanksMissing(
                missing.tag, ranks=missing.ranks, found=values, timeout_s=missing.timeout_s
            )
        return [values[rank] for rank in range(self._coordinator.world)]

    def compared(self, name: str, work: Callable[[], Json], *, stop: float) -> list[Json | Failure]:
        """Do something that may fail; return what came out on every rank, or why nothing did.

        Raises:
            RanksMissing: Some ranks did not come in time.
        """
        own, _ = self._try(work)
        answers = self._gather(name, own, stop)
        return [_failure(answer, rank) or _value(answer) for rank, answer in enumerate(answers)]

    def _gather(self, name: str, own: Json, stop: float) -> list[Json]:
        timeout_s = max(0.0, stop - self._monotonic())
        return self._coordinator.all_gather(f"{self._tag}/{name}", own, timeout_s=timeout_s)

    def _try(self, work: Callable[[], Json]) -> tuple[Json, Exception | None]:
        try:
            return {_OK: work()}, None
        except Exception as error:
            failure = Failure.of(error, rank=self._coordinator.rank)
            return {_FAILED: failure.to_json()}, error


def _failure(answer: Json, rank: int) -> Failure | None:
    if isinstance(answer, Mapping) and _OK in answer:
        return None
    told = answer.get(_FAILED) if isinstance(answer, Mapping) else answer
    return Failure.from_json(told, rank=rank)


def _value(answer: Json) -> Json:
    return answer[_OK] if isinstance(answer, Mapping) else None


class Meetings:
    """Begins what the ranks do together. All ranks begin the same things in the same order.

    Args:
        coordinator: The ranks.
        series: What the writer writes.
        timeout_s: How long the ranks wait for each other.
        monotonic: Seconds that never go back.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        series: str,
        *,
        timeout_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._coordinator = coordinator
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._begun: Counter[str] = Counter()
        self._given_up = 0
        number = _writers_before(coordinator)
        self._about = f"{series}.{number}" if number else series
        self._first = f"series.{number}"

    def begin(self, about: str, *, what: str) -> Rounds:
        """Return the rounds of something that all ranks begin now.

        Args:
            about: Tells it from the other things that the ranks do; the same on all.
            what: What it means when it fails, for messages.
        """
        return self._rounds(f"{self._about}/{about}", what=what)

    def begin_first(self, *, what: str) -> Rounds:
        """Return the rounds in which the ranks compare which series they write: they meet also with different ones."""
        return self._rounds(self._first, what=what)

    def stop(self) -> float:
        """Return until when to wait for the others, from now on."""
        return self._monotonic() + self._timeout_s

    def give_up(self, step: int) -> dict[int, int]:
        """Say that this rank waits no longer for the others to come to a step; return who said so before, with which step."""
        self._given_up += 1
        tag = f"{self._about}/given up/{self._given_up}"
        try:
            answers = dict(enumerate(self._coordinator.all_gather(tag, step, timeout_s=0.0)))
        except RanksMissing as missing:
            answers = dict(missing.found)
        own = self._coordinator.rank
        return {r: said for r, said in answers.items() if r != own and isinstance(said, int)}

    def _rounds(self, tag: str, *, what: str) -> Rounds:
        # Ranks that fail apart meet again: at the next step, not at the next number.
        self._begun[tag] += 1
        tag = f"{tag}/{self._begun[tag]}"
        return Rounds(self._coordinator, tag, what=what, monotonic=self._monotonic)


_writers: Counter[int] = Counter()
_kept: list[Coordinator] = []


def _writers_before(coordinator: Coordinator) -> int:
    """Return how many writers this coordinator has: the same on all ranks, which run the same program.

    Two writers of a series, in two directories or one after the other, must not take the values of one for the other's.
    """
    key = id(coordinator)
    if key not in _writers:
        try:
            weakref.finalize(coordinator, _writers.pop, key, None)
        except TypeError:  # it has __slots__: it stays, so that no other coordinator gets its id
            _kept.append(coordinator)
    _writers[key] += 1
    return _writers[key] - 1
