# SPDX-License-Identifier: Apache-2.0
"""The stop of many ranks at one step, or a save: a signal may reach one of them, or all at different steps.

An exchange at every step would be dear. So in each exchange rank 0 also sends the step of the next
one, about `interval_s` seconds later at the pace of the steps so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.coordinator import Coordinator, RanksOutOfStep
from ckptmgr.parallel.rounds import Barriers, check_same_step

_ABOUT = ".stop"  # a name that no series has


class _Answer(NamedTuple):
    """The answer of a rank; the next exchange is that of rank 0."""

    step: int
    is_wanted: bool
    next_step: int
    saves: bool

    @classmethod
    def from_json(cls, value: Json) -> _Answer:
        match value:
            case [int(step), bool(is_wanted), int(next_step), bool(saves)]:
                return cls(step, is_wanted, next_step, saves)
        raise RanksOutOfStep(f"a rank answers {value!r} about the stop")


class JointStop:
    """Decides for all ranks whether they stop after a step, or save it (`saves`) and go on."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        timeout_s: float,
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._barriers = Barriers(coordinator, _ABOUT, timeout_s=timeout_s, monotonic=monotonic)
        self.interval_s = interval_s
        self._monotonic = monotonic
        self._next = 0
        self._seen = 0
        self._before: tuple[int, float] | None = None
        self.saves = False

    def decide(self, step: int, is_wanted: bool, *, saves: bool = False) -> bool:
        """Return whether any rank wants to stop; False between two exchanges, as is `saves`.

        Raises:
            RanksOutOfStep: The ranks ended different steps.
            RanksMissing: Some ranks did not come in time.
        """
        has_gone_back, self._seen = step <= self._seen, step
        self.saves = False
        if step < self._next and not has_gone_back:
            return False
        answer: Json = [step, is_wanted, self._next_exchange(step), saves]
        rounds = self._barriers.begin("when", what="not decided whether to stop")
        answers = rounds.together("decision", lambda: answer, stop=self._barriers.stop())
        given = [_Answer.from_json(one) for one in answers]
        check_same_step([one.step for one in given])
        self._next = given[0].next_step
        self.saves = any(one.saves for one in given)
        return any(one.is_wanted for one in given)

    def _next_exchange(self, step: int) -> int:
        now = self._monotonic()
        before, self._before = self._before, (step, now)
        if before is None or step <= before[0]:
            return step + 1
        passed = step - before[0]
        step_s = max((now - before[1]) / passed, 1e-9)
        return step + max(1, min(2 * passed, int(self.interval_s / step_s)))
