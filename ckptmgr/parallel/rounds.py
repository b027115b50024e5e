# SPDX-License-Identifier: Apache-2.0
"""Collective work: all ranks do a part at the same time, then each knows the results of all.

`CollectiveRounds` are the exchanges of one operation; `Barriers` begins the operations of one
writer, with tags that no other operation has.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.coordinator import Coordinator, RanksMissing, RanksOutOfStep
from ckptmgr.parallel.errors import Failure, RankFailed

_OK, _FAILED = "ok", "failed"


class CollectiveRounds:
    """The exchanges of one collective operation.

    The `tag` is never the same twice in a job; `what` starts the message of a failure.
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

    def of_attempt(self, attempt_id: str) -> CollectiveRounds:
        """Return further rounds of one attempt, without the ranks that have another attempt id."""
        tag = f"{self._tag}/{attempt_id}"
        return CollectiveRounds(self._coordinator, tag, what=self._what, monotonic=self._monotonic)

    def together(self, name: str, work: Callable[[], Json], *, stop: float) -> list[Json]:
        """Do a part of the work; return the results of all ranks, by rank.

        An exception of `work` is sent to the others. `stop` is the deadline of the others.

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
        """Do work that may fail; return the result or failure of each rank. Raises RanksMissing."""
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
    failure = answer.get(_FAILED) if isinstance(answer, Mapping) else answer
    return Failure.from_json(failure, rank=rank)


def _value(answer: Json) -> Json:
    return answer[_OK] if isinstance(answer, Mapping) else None


def check_same_step(ended: Sequence[int]) -> None:
    """Raise RanksOutOfStep unless all ranks ended the same step; `ended` has one for each rank."""
    for rank, step in enumerate(ended):
        if step != ended[0]:
            raise RanksOutOfStep(
                f"rank 0 has ended step {ended[0]}, and rank {rank} step {step}",
                hint="count the steps alike on all ranks",
            )


class Barriers:
    """Begins the collective operations of a writer, in the same order on all ranks."""

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

    def begin(self, about: str, *, what: str) -> CollectiveRounds:
        """Return the rounds of an operation that all ranks begin now.

        `about` names the operation, the same on all ranks; `what` starts the message of a failure.
        """
        return self._rounds(f"{self._about}/{about}", what=what)

    def begin_first(self, *, what: str) -> CollectiveRounds:
        """Return the rounds in which the ranks compare their series, which may differ."""
        return self._rounds(self._first, what=what)

    def stop(self) -> float:
        """Return the deadline of a round that begins now."""
        return self._monotonic() + self._timeout_s

    def give_up(self, step: int) -> dict[int, int]:
        """Send that this rank gives up waiting at a step; return earlier ones, rank to step."""
        self._given_up += 1
        tag = f"{self._about}/given up/{self._given_up}"
        try:
            answers = dict(enumerate(self._coordinator.all_gather(tag, step, timeout_s=0.0)))
        except RanksMissing as missing:
            answers = dict(missing.found)
        own = self._coordinator.rank
        return {r: at for r, at in answers.items() if r != own and isinstance(at, int)}

    def _rounds(self, tag: str, *, what: str) -> CollectiveRounds:
        # Ranks that fail apart come together again at the next step, not at the next number.
        self._begun[tag] += 1
        tag = f"{tag}/{self._begun[tag]}"
        return CollectiveRounds(self._coordinator, tag, what=what, monotonic=self._monotonic)


_writers: Counter[int] = Counter()
_kept: list[Coordinator] = []


def _writers_before(coordinator: Coordinator) -> int:
    """Return how many writers this coordinator has; the ranks run the same program, so all agree.

    Two writers of a series, in two directories or one after the other, must not take the values of
    one for the other's.
    """
    key = id(coordinator)
    if key not in _writers:
        try:
            weakref.finalize(coordinator, _writers.pop, key, None)
        except TypeError:  # it has __slots__: kept, so that no other coordinator gets its id
            _kept.append(coordinator)
    _writers[key] += 1
    return _writers[key] - 1
