# SPDX-License-Identifier: Apache-2.0
"""Save policies: from a step, a time and the last save to a decision with a reason. Pure.

* A step is never saved twice.
* Intervals in steps are multiples: a save in between, such as that of a stop, shifts no later one,
  and those that coincide with a validation stay there. Where steps are skipped (sink mode), the
  first step after a multiple is due in its place. `since="save"` counts as MindSpore does.
* Step 0 is due when it is the first step that ends, whether a loop counts from 0 or 1.
* Only a successful save advances `LastSave`. So after a failure every step is due until one
  succeeds: losing an interval is worse than trying often; `on_error` allows fewer attempts.
  (MindSpore marks the step as saved before it writes, and silently skips it, even at the end of
  training.)
* After a rollback that gave up saves, the next step is due under every active policy: until it is
  saved, the newest checkpoint is of the abandoned future, and a crash would resume there.
* The time comes from the caller, in seconds on any clock.

>>> policy = EverySteps(100)
>>> policy.decide(200, 0.0, LastSave(step=130, at=0.0))
SaveDecision(is_due=True, reason='step 200 has come, every 100 steps')
>>> policy.decide(199, 0.0, LastSave(step=130, at=0.0)).is_due
False
>>> EverySteps(100, since="save").decide(200, 0.0, LastSave(step=130, at=0.0)).is_due
False
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast, get_args

Since = Literal["zero", "save"]
"""What an interval in steps counts from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSave:
    """The last save that succeeded.

    Attributes:
        step: Its global step; 0 before the first save.
        at: When it was due, on the caller's clock; before the first save, the manager's start.
        cost_s: Seconds for which it held up the training; 0 before the first save.
        is_given_up: Whether a rollback gave it up; `step` and `at` are then those of the rollback.
            With `is_start`: whether step 0 was due, and no save has succeeded since.
        is_start: Whether nothing is saved yet, so that step 0 may be due. A loop that counts from 1
            (a callback of MindSpore) leaves it False.
    """

    step: int = 0
    at: float
    cost_s: float = 0.0
    is_given_up: bool = False
    is_start: bool = False


class SaveDecision(NamedTuple):
    """Whether to save at this step, and why."""

    is_due: bool
    reason: str


class SavePolicy(Protocol):
    """Decide whether a step is saved."""

    @property
    def is_active(self) -> bool:
        """Whether it ever requests a save; an inactive one does not save at the end of training."""
        ...

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return the decision for a step that just ended; `now` is on the clock of `last.at`."""
        ...


def checked_save_policy(policy: object) -> SavePolicy:
    """Return a save policy; raise TypeError for what cannot decide, or for a class of policies."""
    if isinstance(policy, type) or not callable(getattr(policy, "decide", None)):
        raise TypeError(
            f"a save policy is an object such as EverySteps(1000) or AtSteps(10, 100), but got {policy!r}"
        )
    return cast(SavePolicy, policy)


class _Active:
    __slots__ = ()

    @property
    def is_active(self) -> bool:
        """Always true."""
        return True

    def __or__(self, other: SavePolicy) -> AnyOf:
        """Return the policy that saves when this one or the other asks for it."""
        return AnyOf((cast(SavePolicy, self), other))


@dataclass(frozen=True, slots=True)
class EverySteps(_Active):
    """Save at the multiples of `interval_steps`, or at the first step after one that was skipped.

    A step before the last save (a second training with the same callback) is due at once; MindSpore
    waits until the old step is passed.

    Attributes:
        interval_steps: Steps from one save to the next, at least 1.
        since: "zero" counts from step 0, so that a save in between shifts no later one. "save"
            counts from the last save, whichever policy asked for it, as MindSpore does: a run that
            was stopped and saved at step 130 saves 230 next.
        offset: Steps from each multiple to its save: -1 for the last step of each interval in a
            loop that counts from 0 (99, 199, ...). Only with `since="zero"`.
    """

    interval_steps: int
    since: Since = "zero"
    offset: int = 0

    def __post_init__(self) -> None:
        if self.interval_steps < 1:
            raise ValueError(f"interval_steps must be at least 1, but got {self.interval_steps}")
        if self.since not in get_args(Since):
            raise ValueError(f"since must be one of {get_args(Since)}, but got {self.since!r}")
        if self.offset and self.since == "save":
            raise ValueError("offset= has no effect with since='save': the last save is the origin")

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return due when an interval has ended since the last save; the time has no effect."""
        if step == 0 and last.is_start:
            return SaveDecision(is_due=True, reason="step 0 begins the first interval")
        if step == last.step:
            return _same_step(step)
        if step < last.step:
            return SaveDecision(
                is_due=True, reason=f"the step went back from {last.step} to {step}"
            )
        every, passed = self.interval_steps, step - last.step
        if self.since == "save":
            reason = f"{passed} steps since the last save, every {every}"
            return SaveDecision(is_due=passed >= every, reason=reason)
        multiple = step - (step - self.offset) % every
        reason = f"every {every} steps, and {last.step} is saved"
        if multiple > last.step:
            reason = f"step {multiple} has come, every {every} steps"
        return SaveDecision(is_due=multiple > last.step, reason=reason)


@dataclass(frozen=True, slots=True)
class EverySeconds(_Active):
    """Save once more than `interval_s` seconds have passed since the last save.

    When the clock has gone back it is due at once; MindSpore waits until the clock has caught up.
    """

    interval_s: float

    def __post_init__(self) -> None:
        if not (self.interval_s > 0 and math.isfinite(self.interval_s)):
            raise ValueError(f"interval_s must be positive and finite, but got {self.interval_s}")

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return due when more than the interval has passed."""
        passed_s = now - last.at
        if passed_s < 0 or (step == last.step and not last.is_start):
            return _without_interval(step, passed_s, last)
        return SaveDecision(
            is_due=passed_s > self.interval_s,
            reason=f"{passed_s:.6g} s since the last save, every {self.interval_s:g} s",
        )


@dataclass(frozen=True, slots=True)
class Overhead(_Active):
    """Save as often as saving holds up the training for at most a share of its time.

    The first step is saved, to learn the cost; then the interval is the cost of the last save
    divided by the share. When the clock has gone back it is due at once.

    Source: Mohan, Phanishayee, Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing",
        FAST 2021.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"the share must be between 0 and 1, but got {self.share}")

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return due when the time since the last save outweighs its cost."""
        passed_s = now - last.at
        if passed_s < 0 or (step == last.step and not last.is_start):
            return _without_interval(step, passed_s, last)
        interval_s = last.cost_s / self.share
        return SaveDecision(
            is_due=passed_s >= interval_s,
            reason=f"{passed_s:.6g} s since the last save; it cost {last.cost_s:.3g} s, "
            f"which is {self.share:.3g} of {interval_s:.6g} s",
        )


@dataclass(frozen=True, slots=True, init=False)
class AtSteps(_Active):
    """Save once at each of these steps, or at the first step after it where steps are skipped.

    Those before the last save are over: a run that resumes at step 500 does not make up for step
    100. Without another policy nothing else is saved but the end of training.
    """

    steps: tuple[int, ...]

    def __init__(self, *steps: int) -> None:
        if not steps:
            raise ValueError("AtSteps needs at least one step, such as AtSteps(100, 1000)")
        for step in steps:
            if isinstance(step, bool) or not isinstance(step, int):
                raise TypeError(f"AtSteps takes integers, but got {type(step)}")
            if step < 0:
                raise ValueError(f"a step is at least 0, but got {step}")
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return due when a step of the list has come since the last save; the time has no effect."""
        if step == last.step and not last.is_start:
            return _same_step(step)
        # Where the step went back only the present one is due, not the later ones it passes again.
        since = -1 if last.is_start else min(last.step, step - 1)
        come = [one for one in self.steps if since < one <= step]
        reason = f"step {come[-1]} is to be saved" if come else "no step of the list has come"
        return SaveDecision(is_due=bool(come), reason=reason)


@dataclass(frozen=True, slots=True)
class AnyOf(_Active):
    """Save when any of several policies asks for it: `EverySteps(1000) | AtSteps(10, 100)`.

    These two save steps 10, 100, 1000, 2000. Intervals by time, and those of `since="save"`, count
    from the last save, whichever policy asked for it.
    """

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        for policy in self.policies:
            checked_save_policy(policy)

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return the decision of the first policy for which the step is due, else of the first one."""
        decisions = [policy.decide(step, now, last) for policy in self.policies]
        return next((one for one in decisions if one.is_due), decisions[0])


@dataclass(frozen=True, slots=True)
class Never:
    """Never save, not even at the end of training."""

    @property
    def is_active(self) -> bool:
        """Always false."""
        return False

    def decide(self, step: int, now: float, last: LastSave) -> SaveDecision:
        """Return not due."""
        return SaveDecision(is_due=False, reason="no save policy is set")


def decide_at_step(policy: SavePolicy, step: int, now: float, *, last: LastSave) -> SaveDecision:
    """Return the policy's decision; due after a rollback that gave up saves, if it is active."""
    if last.is_given_up and policy.is_active:
        reason = f"a rollback to step {last.step} gave up the saves after it"
        if last.is_start:
            reason = "step 0 was due, and no save has succeeded since"
        return SaveDecision(is_due=True, reason=reason)
    return policy.decide(step, now, last)


def decide_at_end(policy: SavePolicy, step: int, *, last: LastSave) -> SaveDecision:
    """Return the decision at the end of training: due unless saved or never saving."""
    if not policy.is_active:
        return SaveDecision(is_due=False, reason="no save policy is set")
    if is_saved(step, last):
        return _same_step(step)
    return SaveDecision(is_due=True, reason="the end of training")


def is_saved(step: int, last: LastSave) -> bool:
    """Return whether the last save is of a step, and was not given up."""
    return step == last.step and not (last.is_start or last.is_given_up)


def _same_step(step: int) -> SaveDecision:
    return SaveDecision(is_due=False, reason=f"step {step} is already saved")


def _without_interval(step: int, passed_s: float, last: LastSave) -> SaveDecision:
    """Return the decision for a step that is saved already, or for a clock that went back."""
    if step == last.step and not last.is_start:
        return _same_step(step)
    return SaveDecision(is_due=True, reason=f"the clock went back by {-passed_s:.6g} s")
