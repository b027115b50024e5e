# SPDX-License-Identifier: Apache-2.0
"""Save policies of many ranks: compared at the first step; by time with the clock of rank 0.

Ranks with different policies would wait in vain for each other, until the timeout.

For policies by time, an exchange at every step would be dear. So in each exchange rank 0 also sends
the step of the next one: the policy is pure and can be evaluated for later steps, at the pace of
the steps so far. The next exchange comes before half of the way to the next save, so that steps
which take twice as long do no harm: about twenty exchanges for a save every thousand steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ckptmgr.formats.strict_json import Json
from ckptmgr.parallel.coordinator import Coordinator, RanksMissing, RanksOutOfStep
from ckptmgr.parallel.rounds import Barriers, check_same_step
from ckptmgr.policy.save import (
    AnyOf,
    AtSteps,
    EverySeconds,
    EverySteps,
    LastSave,
    Never,
    Overhead,
    SaveDecision,
    SavePolicy,
)

_LOG = logging.getLogger(__name__)
_MOST_AHEAD = 1 << 16
_ABOUT, _COMPARED, _KEPT = ".policy", ".policies", ".kept"  # names that no series has


class ComparedPolicy:
    """A policy that must be equal on all ranks, which first compare its `description`."""

    def __init__(self, policy: SavePolicy, barriers: Barriers, *, description: str) -> None:
        self._policy = policy
        self._barriers = barriers
        self._described = description
        self._is_compared = False

    @property
    def is_active(self) -> bool:
        """Whether the policy is."""
        return self._policy.is_active

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return its decision; raise RanksOutOfStep if another rank has another policy."""
        if not self._is_compared:
            self._compare()
            self._is_compared = True
        return self._policy.decide(step, now, last)

    def _compare(self) -> None:
        rounds = self._barriers.begin("policy", what="the save policies were not compared")
        try:
            answers = rounds.together(
                "compare", lambda: self._described, stop=self._barriers.stop()
            )
        except RanksMissing as missing:  # they may still come to the save
            _LOG.warning("the save policies were not compared: %s", missing)
            return
        for rank, other in enumerate(answers):
            if other != answers[0]:
                raise RanksOutOfStep(
                    f"rank {rank} saves {other}, but rank 0 saves {answers[0]}",
                    hint="give all ranks the same configuration, and the same save_policy; nothing was saved yet",
                )


def describe_policy(policy: SavePolicy) -> str:
    """Return a policy in words: equal for policies that decide equally about steps."""
    if isinstance(policy, EverySteps):
        since = " since the last save" if policy.since == "save" else ""
        offset = f", offset {policy.offset}" if policy.offset else ""
        return f"every {policy.interval_steps} steps{since}{offset}"
    if isinstance(policy, AtSteps):
        return f"steps {', '.join(map(str, policy.steps))}"
    if isinstance(policy, AnyOf):
        return ", or ".join(map(describe_policy, policy.policies))
    if isinstance(policy, Never):
        return "never"
    return f"by {type(policy).__name__}"


def for_all_ranks(
    policy: SavePolicy, coordinator: Coordinator, *, timeout_s: float, beside: str = ""
) -> SavePolicy:
    """Return a policy that decides equally on all ranks.

    Policies by time decide by the clock of rank 0; others must be equal on all ranks, and so must
    `beside`, which says in words what else makes a step due.
    """
    barriers = Barriers(coordinator, _COMPARED, timeout_s=timeout_s, monotonic=time.monotonic)
    if not _is_by_time(policy):
        return ComparedPolicy(policy, barriers, description=describe_policy(policy) + beside)
    joint = RankZeroPolicy(policy, coordinator, timeout_s=timeout_s)
    return ComparedPolicy(joint, barriers, description="by time" + beside)


def _is_by_time(policy: SavePolicy) -> bool:
    if isinstance(policy, AnyOf):
        return any(map(_is_by_time, policy.policies))
    return isinstance(policy, EverySeconds | Overhead)


class RankZeroAnswer:
    """Asks rank 0 a question that all ranks come to together; its answer counts on all."""

    def __init__(self, coordinator: Coordinator, *, timeout_s: float) -> None:
        self._rank = coordinator.rank
        self._barriers = Barriers(coordinator, _KEPT, timeout_s=timeout_s, monotonic=time.monotonic)

    def __call__(
        self, answer: Callable[[], tuple[str, bool, bool] | None]
    ) -> tuple[str, bool, bool] | None:
        """Return what `answer` returns on rank 0, where alone it is called.

        Raises:
            RanksMissing: Some ranks did not come in time.
            RankFailed: Rank 0 could not answer.
            RanksOutOfStep: Another rank has another version.
        """
        rounds = self._barriers.begin("kept", what="not decided whether to save")

        def own() -> Json:
            found = None if self._rank else answer()
            return None if found is None else list(found)

        match rounds.together("answer", own, stop=self._barriers.stop())[0]:
            case None:
                return None
            case [str(reason), bool(lacks_metric), bool(is_doubtful)]:
                return reason, lacks_metric, is_doubtful
        raise _other_version()


class RankZeroPolicy:
    """The policy of rank 0 with its clock; all ranks decide about the same steps."""

    def __init__(
        self,
        policy: SavePolicy,
        coordinator: Coordinator,
        *,
        timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy = policy
        self._rank = coordinator.rank
        self._barriers = Barriers(coordinator, _ABOUT, timeout_s=timeout_s, monotonic=monotonic)
        self._seen = 0
        self._next = 0
        self._before: tuple[int, float] | None = None

    @property
    def is_active(self) -> bool:
        """Whether the policy is."""
        return self._policy.is_active

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return the decision of rank 0; between two exchanges, not due.

        Raises:
            RanksOutOfStep: The ranks ended different steps.
            RanksMissing: Some ranks did not come in time.
            RankFailed: Rank 0 could not decide.
        """
        has_gone_back, self._seen = step <= self._seen, step
        if step < self._next and not has_gone_back:
            return SaveDecision(is_due=False, reason=f"rank 0 is asked again at step {self._next}")
        rounds = self._barriers.begin("when", what="not decided whether to save")
        values = rounds.together(
            "decision",
            lambda: self._answer(step, now, last).to_json(),
            stop=self._barriers.stop(),
        )
        answers = [_Answer.from_json(one) for one in values]
        check_same_step([one.step for one in answers])
        self._next = answers[0].next_step
        return SaveDecision(is_due=answers[0].is_due, reason=answers[0].reason)

    def _answer(self, step: int, now: float, last: LastSave) -> _Answer:
        if self._rank:
            return _Answer(step=step)
        decision = self._policy.decide(step, now, last)
        before, self._before = self._before, (step, now)
        return _Answer(
            step=step,
            is_due=decision.is_due,
            reason=decision.reason,
            # A save that fails is due again at the next step.
            next_step=step + 1 if decision.is_due else self._next_exchange(before, step, now, last),
        )

    def _next_exchange(
        self, before: tuple[int, float] | None, step: int, now: float, last: LastSave
    ) -> int:
        """Return the step of the next exchange, before half of the way to the next save."""
        if before is None or step <= before[0] or now <= before[1]:
            return step + 1
        step_s = (now - before[1]) / (step - before[0])
        ahead = 1
        while ahead < _MOST_AHEAD:
            twice_as_far = 2 * (2 * ahead)
            if self._policy.decide(step + twice_as_far, now + twice_as_far * step_s, last).is_due:
                break
            ahead *= 2
        return step + ahead


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The answer of a rank; of all but rank 0 only the step counts."""

    step: int
    is_due: bool = False
    reason: str = ""
    next_step: int = 0

    def to_json(self) -> Json:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Json) -> _Answer:
        match value:
            case {
                "step": int(step),
                "is_due": bool(is_due),
                "reason": str(reason),
                "next_step": int(next_step),
            }:
                return cls(step=step, is_due=is_due, reason=reason, next_step=next_step)
        raise _other_version()


def _other_version() -> RanksOutOfStep:
    return RanksOutOfStep(
        "another rank says something else than when to save",
        hint="all ranks need the same configuration and the same version of ckptmgr",
    )
