# SPDX-License-Identifier: Apache-2.0
"""Work that all ranks do at the same time, after which each knows how all of them fared."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from ckptmgr.parallel.coordinator import Coordinator, Json, RanksMissing
from ckptmgr.parallel.rank_errors import Failure, RankFailed

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
