# SPDX-License-Identifier: Apache-2.0
"""Saving by time on many ranks: rank 0 looks at its clock, and all save at the same steps.

Asking at every step would cost a round at every step. So at each meeting rank 0 also says at which step to meet next: the
policy is pure, and can be asked about steps to come, at the pace of those that were. They meet again before half of the
way to the next save is gone, so that steps that take twice as long are no harm: some twenty times for a save every
thousand steps.

One save policy on all ranks: it is compared at the first step, before ranks wait for each other at different ones.

A rank that saves every 10 steps would wait in vain, until the timeout, for one that saves every 15.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptmgr.parallel.coordinator import Coordinator, Json, RanksMissing, RanksOutOfStep
from ckptmgr.parallel.rounds import Meetings
from ckptmgr.policy.save import (
    AnyOf,
    EverySeconds,
    EverySteps,
    LastSave,
    Never,
    Overhead,
    SaveDecision,
    SavePolicy,
)

_LOG = logging.getLogger(__name__)


class CommonPolicy:
    """A policy that all ranks must have; all of them decide about the first step together.

    Args:
        policy: The policy of this rank.
        meetings: Where the ranks compare what they have.
        described: What this rank says that it has.
    """

    def __init__(self, policy: SavePolicy, meetings: Meetings, *, described: str) -> None:
        self._policy = policy
        self._meetings = meetings
        self._described = described
        self._is_compared = False

    @property
    def is_active(self) -> bool:
        """Whether the policy is."""
        return self._policy.is_active

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return what the policy decides.

        Raises:
            RanksOutOfStep: Another rank has another policy.
        """
        if not self._is_compared:
            self._compare()
            self._is_compared = True
        return self._policy.decide(step, now, last)

    def _compare(self) -> None:
        rounds = self._meetings.begin("policy", what="the save policies were not compared")
        try:
            said = rounds.together("compare", lambda: self._described, stop=self._meetings.stop())
        except RanksMissing as missing:  # they may come to the save, which is what counts
            _LOG.warning("the save policies were not compared: %s", missing)
            return
        for rank, other in enumerate(said):
            if other != said[0]:
                raise RanksOutOfStep(
                    f"rank {rank} saves {other}, but rank 0 saves {said[0]}",
                    hint="give all ranks the same configuration, and the same save_policy; nothing was saved yet",
                )


def described(policy: SavePolicy) -> str:
    """Return a policy in words: alike for policies that decide alike about steps."""
    if isinstance(policy, EverySteps):
        return f"every {policy.interval_steps} steps"
    if isinstance(policy, Never):
        return "never"
    if isinstance(policy, AnyOf):
        return " or ".join(map(described, policy.policies))
    return f"by {type(policy).__name__}"


_MOST_AHEAD = 1 << 16
_ABOUT, _COMPARED = ".policy", ".policies"  # no series is called so


def for_all_ranks(
    policy: SavePolicy, coordinator: Coordinator | None, *, timeout_s: float
) -> SavePolicy:
    """Return a policy that decides the same on all ranks: by the clock of rank 0, or else the one that they all have.

    Args:
        policy: What one process would do.
        coordinator: The ranks; None for one process.
        timeout_s: How long they wait for each other.
    """
    if coordinator is None:
        return policy
    meetings = Meetings(coordinator, _COMPARED, timeout_s=timeout_s, monotonic=time.monotonic)
    if not _is_by_time(policy):
        return CommonPolicy(policy, meetings, described=described(policy))
    joint = JointPolicy(policy, coordinator, timeout_s=timeout_s)
    return CommonPolicy(joint, meetings, described="by time")


def _is_by_time(policy: SavePolicy) -> bool:
    if isinstance(policy, AnyOf):
        return any(_is_by_time(one) for one in policy.policies)
    return isinstance(policy, (EverySeconds, Overhead))


class JointPolicy:
    """A policy as rank 0 sees it; all ranks decide about the same steps, in the same order.

    Args:
        policy: The policy.
        coordinator: The ranks.
        timeout_s: How long they wait for each other.
        monotonic: Seconds that never go back.
    """

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
        self._meetings = Meetings(coordinator, _ABOUT, timeout_s=timeout_s, monotonic=monotonic)
        self._seen = 0
        self._next = 0
        self._before: tuple[int, float] | None = None

    @property
    def is_active(self) -> bool:
        """Whether the policy is."""
        return self._policy.is_active

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return what rank 0 decides; between two meetings, not due.

        Raises:
            RanksOutOfStep: The ranks ended different steps.
            RanksMissing: Some ranks did not come in time.
            RankFailed: Rank 0 could not decide.
        """
        has_gone_back, self._seen = step <= self._seen, step
        if step < self._next and not has_gone_back:
            return SaveDecision(is_due=False, reason=f"rank 0 is asked again at step {self._next}")
        rounds = self._meetings.begin("when", what="not decided whether to save")
        said = rounds.together(
            "decision",
            lambda: self._answer(step, now, last).to_json(),
            stop=self._meetings.stop(),
        )
        answers = [_Answer.from_json(one) for one in said]
        for rank, answer in enumerate(answers):
            if answer.step != answers[0].step:
                raise RanksOutOfStep(
                    f"rank 0 has ended step {answers[0].step}, and rank {rank} step {answer.step}",
                    hint="count the steps alike on all ranks",
                )
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
            next_step=step + 1 if decision.is_due else self._next_meeting(before, step, now, last),
        )

    def _next_meeting(
        self, before: tuple[int, float] | None, step: int, now: float, last: LastSave
    ) -> int:
        """Return the step at which to ask again: before half of the steps are gone that the next save is away at this pace."""
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
    """What a rank says; of all but rank 0 only the step counts."""

    step: int
    is_due: bool = False
    reason: str = ""
    next_step: int = 0

    def to_json(self) -> Json:
        return {
            "step": self.step,
            "is_due": self.is_due,
            "reason": self.reason,
            "next_step": self.next_step,
        }

    @classmethod
    def from_json(cls, said: Json) -> _Answer:
        match said:
            case {
                "step": int(step),
                "is_due": bool(is_due),
                "reason": str(reason),
                "next_step": int(next_step),
            }:
                return cls(step=step, is_due=is_due, reason=reason, next_step=next_step)
        raise RanksOutOfStep(
            "another rank says something else than when to save",
            hint="all ranks need the same configuration and the same version of ckptmgr",
        )
