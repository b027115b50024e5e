# SPDX-License-Identifier: Apache-2.0
"""One save policy on all ranks: it is compared at the first step, before ranks wait for each other at different ones.

A rank that saves every 10 steps would wait in vain, until the timeout, for one that saves every 15.
"""

from __future__ import annotations

import logging

from ckptmgr.parallel.coordinator import RanksMissing, RanksOutOfStep
from ckptmgr.parallel.meetings import Meetings
from ckptmgr.policy.save import AnyOf, EverySteps, LastSave, Never, SaveDecision, SavePolicy

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
