# SPDX-License-Identifier: Apache-2.0
"""Retention rules, joined into a policy: `Last(3) | Best(2, "loss", "min") | Every(1000)`.

A rule gets the countable checkpoints of one series, newest first, and says of each whether it
stays, and why, or how near it came. A checkpoint stays when any rule keeps it. `str` of a rule is
its policy text.

>>> str(Last(3) | Best(2, "val loss", "min"))
'last(3) | best(2, "val loss", min)'
"""

from __future__ import annotations

import heapq
import json
import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, NamedTuple

from ckptmgr.core.model import Checkpoint, Reason

MAX_COUNT = 2**63 - 1
MAX_POLICY_CHARACTERS = 4096
_BARE_METRIC = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")


class Finding(NamedTuple):
    """A rule's finding about a checkpoint; if it is not kept, the reason is its nearest miss."""

    is_kept: bool
    reason: Reason


@dataclass(frozen=True, slots=True)
class Rule(ABC):
    """One reason to keep checkpoints."""

    @property
    def most_kept(self) -> int | None:
        """The most checkpoints that it keeps, pinned ones aside; None for any number."""
        return None

    @abstractmethod
    def judge(self, history: Sequence[Checkpoint], now: datetime) -> Sequence[Finding | None]:
        """Return a finding for each checkpoint of a series, or None where the rule does not apply.

        `history` has the countable checkpoints, newest first; at least one.
        """

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> Sequence[bool]:
        """Return whether the rule keeps each checkpoint: what `judge` finds, without the reasons.

        A run asks this after every save.
        """
        return [one is not None and one.is_kept for one in self.judge(history, now)]

    @abstractmethod
    def __str__(self) -> str: ...

    def __or__(self, other: Rule | RetentionPolicy) -> RetentionPolicy:
        return RetentionPolicy((self,)) | other

    def finding(
        self,
        is_kept: bool,
        detail: str,
        *,
        rank: int | None = None,
        of: int | None = None,
        value: float | None = None,
    ) -> Finding:
        """Return a finding of this rule; see Reason for the meaning of the arguments."""
        reason = Reason(rule=str(self), detail=detail, rank=rank, of=of, value=value)
        return Finding(is_kept=is_kept, reason=reason)


@dataclass(frozen=True, slots=True)
class DecidedRule(Rule):
    """A rule that decides without reasons, which are slow to make, and explains the decision."""

    @abstractmethod
    def stays(self, history: Sequence[Checkpoint], now: datetime) -> Sequence[bool]:
        """Return whether the rule keeps each checkpoint."""

    @abstractmethod
    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> Iterable[Reason | None]:
        """Return the reason of each flag of `stays`, or None where the rule does not apply."""

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding | None]:
        """Return the findings, newest first."""
        stays = self.stays(history, now)
        return [
            None if reason is None else Finding(is_kept, reason)
            for is_kept, reason in zip(stays, self.why(history, now, stays), strict=True)
        ]

    def reason(
        self,
        detail: str,
        *,
        rank: int | None = None,
        of: int | None = None,
        value: float | None = None,
    ) -> Reason:
        """Return a reason of this rule; see Reason for the meaning of the arguments."""
        return Reason(rule=str(self), detail=detail, rank=rank, of=of, value=value)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A union of rules. Without any rule it is refused by `plan`."""

    rules: tuple[Rule, ...]

    def __post_init__(self) -> None:
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(
                    f"a retention policy joins rules such as Last(3) | Best(1, 'loss', 'min'), but got {rule!r}; "
                    "a text is one as a whole: 'last(3) | every(1000)'"
                )

    def __or__(self, other: Rule | RetentionPolicy) -> RetentionPolicy:
        added = other.rules if isinstance(other, RetentionPolicy) else (other,)
        return RetentionPolicy(self.rules + added)

    def __str__(self) -> str:
        return " | ".join(map(str, self.rules))


def text_of(policy: RetentionPolicy | None) -> str | None:
    """Return the text of a policy that `parse_policy` reads; None for rules of other packages."""
    if policy is None:
        return None
    own = __name__.rpartition(".")[0]
    text = str(policy)
    has_text = all(type(rule).__module__.rpartition(".")[0] == own for rule in policy.rules)
    return text if has_text and len(text) <= MAX_POLICY_CHARACTERS else None


@dataclass(frozen=True, slots=True)
class Last(DecidedRule):
    """Keep the `count` newest checkpoints."""

    count: int

    def __post_init__(self) -> None:
        check_rule_count("last", self.count)

    def __str__(self) -> str:
        return f"last({self.count})"

    @property
    def most_kept(self) -> int | None:
        """The most checkpoints that it keeps, pinned ones aside; None for any number."""
        return self.count

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is one of the newest."""
        return [rank < self.count for rank in range(len(history))]

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return the rank of each checkpoint."""
        rule, count = str(self), self.count
        kept = [f"last {rank}/{count}" for rank in range(1, min(count, len(history)) + 1)]
        others = [
            f"last ({ordinal(rank)} of {count})" for rank in range(count + 1, len(history) + 1)
        ]
        return [
            Reason(rule=rule, detail=detail, rank=rank, of=count)
            for rank, detail in enumerate([*kept, *others], start=1)
        ]


@dataclass(frozen=True, slots=True)
class Best(DecidedRule):
    """Keep the `count` best checkpoints by a metric. Of equal values the newer one is better.

    A missing, NaN or infinite value never ranks: one diverged step must not freeze the list. For the
    same reason checkpoints whose floats are not finite come after all that are.
    """

    count: int
    metric: str
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        check_rule_count("best", self.count)
        if not self.metric:
            raise ValueError("best needs the name of a metric")
        if self.mode not in ("min", "max"):
            raise ValueError(f"best needs the mode 'min' or 'max', but got {self.mode!r}")

    def __str__(self) -> str:
        is_bare = _BARE_METRIC.fullmatch(self.metric)
        metric = self.metric if is_bare else json.dumps(self.metric, ensure_ascii=False)
        return f"best({self.count}, {metric}, {self.mode})"

    def value_of(self, checkpoint: Checkpoint) -> float | None:
        """Return the value of the metric, or None when it is missing or does not rank."""
        value = checkpoint.metrics.get(self.metric)
        try:
            return None if value is None or not math.isfinite(value) else float(value)
        except OverflowError:
            return None

    @property
    def most_kept(self) -> int | None:
        """The most checkpoints that it keeps, pinned ones aside; None for any number."""
        return self.count

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is one of the best."""
        found = [False] * len(history)
        for _, i in heapq.nsmallest(self.count, self._ranked(history)):
            found[i] = True
        return found

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return the rank and the value of each checkpoint."""
        ranks = {i: rank for rank, (_, i) in enumerate(sorted(self._ranked(history)))}
        return [self._why(ranks.get(i), self.value_of(one)) for i, one in enumerate(history)]

    def _ranked(self, history: Sequence[Checkpoint]) -> list[tuple[tuple[bool, float], int]]:
        """Return the values of the checkpoints that rank, lower ones better, and their indices."""
        sign = 1 if self.mode == "min" else -1
        return [
            ((one.health is not None, sign * value), i)
            for i, one in enumerate(history)
            if (value := self.value_of(one)) is not None
        ]

    def _why(self, rank: int | None, value: float | None) -> Reason:
        if rank is None or value is None:
            return self.reason(f"best ({self.metric} n/a)", of=self.count)
        detail = (
            f"best {rank + 1}/{self.count} {self.metric}={value:.4g}"
            if rank < self.count
            else f"best ({ordinal(rank + 1)} of {self.count})"
        )
        return self.reason(detail, rank=rank + 1, of=self.count, value=value)


@dataclass(frozen=True, slots=True)
class Every(DecidedRule):
    """Keep the first step at or after each multiple of `interval_steps`: the `last` ones, or all.

    Where saves do not fall on the multiples (saves by time, odd epoch lengths), each interval still
    keeps one checkpoint.
    """

    interval_steps: int
    last: int | None = None

    def __post_init__(self) -> None:
        check_rule_count("every", self.interval_steps)
        check_last(self.last)

    def __str__(self) -> str:
        return f"every({self.interval_steps}{last_text(self.last)})"

    @property
    def most_kept(self) -> int | None:
        """The most checkpoints that it keeps, pinned ones aside; None for any number."""
        return self.last

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is the first of its interval."""
        interval, first = self.interval_steps, self._first_steps(history)
        found = [
            one.step % interval == 0
            or (one.step > interval and first[one.step // interval] == one.step)
            for one in history
        ]
        if self.last is not None:
            positions = [i for i, is_kept in enumerate(found) if is_kept]
            for i in positions[self.last :]:
                found[i] = False
        return found

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> Iterator[Reason]:
        """Yield how far each checkpoint is behind the beginning of its interval."""
        first, rank = self._first_steps(history), 0
        for one, is_kept in zip(history, stays, strict=True):
            number, past = divmod(one.step, self.interval_steps)
            is_first = past == 0 or (number > 0 and first[number] == one.step)
            rank += is_first
            yield self._why(one.step, rank if is_first and not is_kept else None, is_first)

    def _first_steps(self, history: Sequence[Checkpoint]) -> dict[int, int]:
        """Return the smallest step of each interval."""
        steps = sorted([one.step for one in history], reverse=True)
        return {step // self.interval_steps: step for step in steps}

    def _why(self, step: int, rank: int | None, is_first: bool) -> Reason:
        number, past = divmod(step, self.interval_steps)
        name = f"every {_short(self.interval_steps)}"
        multiple = _short(number * self.interval_steps)
        if rank is not None:
            return self.reason(f"{name} ({ordinal(rank)} of {self.last})", rank=rank, of=self.last)
        if past == 0:
            return self.reason(name)
        detail = f"first after {multiple}" if is_first else f"{past} past {multiple}"
        return self.reason(f"{name} ({detail})", value=past)


@dataclass(frozen=True, slots=True)
class Epochs(DecidedRule):
    """Keep the newest checkpoint of each epoch that is a multiple of `interval_epochs`.

    It says nothing about checkpoints whose epoch is not recorded.
    """

    interval_epochs: int

    def __post_init__(self) -> None:
        check_rule_count("epochs", self.interval_epochs)

    def __str__(self) -> str:
        return f"epochs({self.interval_epochs})"

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is the newest of such an epoch."""
        seen: set[int | None] = {None}
        found = []
        for one in history:
            is_newest = one.epoch not in seen
            seen.add(one.epoch)
            found.append(
                is_newest and one.epoch is not None and one.epoch % self.interval_epochs == 0
            )
        return found

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason | None]:
        """Return the place of each checkpoint in its epoch."""
        seen: Counter[int] = Counter()
        return [None if one.epoch is None else self._why(one.epoch, seen) for one in history]

    def _why(self, epoch: int, seen: Counter[int]) -> Reason:
        seen[epoch] += 1
        past = epoch % self.interval_epochs
        name = f"epochs {self.interval_epochs}"
        if past:
            return self.reason(f"{name} ({past} past {epoch - past})")
        if seen[epoch] > 1:
            return self.reason(f"{name} ({ordinal(seen[epoch])} newest of {epoch})")
        return self.reason(f"{name} (epoch {epoch})", value=epoch)


@dataclass(frozen=True, slots=True)
class Pinned(DecidedRule):
    """Keep the pinned checkpoints, as every policy does; the rule expresses "and no others"."""

    def __str__(self) -> str:
        return "pinned"

    @property
    def most_kept(self) -> int | None:
        """The most checkpoints that it keeps, pinned ones aside; None for any number."""
        return 0

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return whether each checkpoint is pinned."""
        return [bool(one.pins) for one in history]

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason | None]:
        """Return the names of the pins."""
        return [pin_reason(one) if one.pins else None for one in history]


@dataclass(frozen=True, slots=True)
class All(DecidedRule):
    """Keep everything."""

    def __str__(self) -> str:
        return "all"

    def stays(self, history: Sequence[Checkpoint], now: datetime) -> list[bool]:
        """Return True for each checkpoint."""
        return [True] * len(history)

    def why(
        self, history: Sequence[Checkpoint], now: datetime, stays: Sequence[bool]
    ) -> list[Reason]:
        """Return the name of the rule."""
        return [self.reason("all")] * len(history)


def pin_reason(checkpoint: Checkpoint) -> Reason:
    """Return the reason that names all pins of a checkpoint."""
    said = [pin.reason or pin.name for pin in checkpoint.pins if pin.reason or pin.name != "pinned"]
    return Reason(rule="pinned", detail=f"pinned: {', '.join(said)}" if said else "pinned")


def check_last(last: int | None) -> None:
    """Raise TypeError or ValueError unless `last` is None or a count."""
    if last is not None:
        check_rule_count("last=", last)


def last_text(last: int | None) -> str:
    """Return `last=` as the text of a rule has it."""
    return "" if last is None else f", last={last}"


def ordinal(number: int) -> str:
    """Return e.g. `1st`, `12th`, `23rd`."""
    is_teen = number // 10 % 10 == 1
    suffix = "th" if is_teen else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


def _short(steps: int) -> str:
    return f"{steps // 1000}k" if steps and steps % 1000 == 0 else str(steps)


def check_rule_count(rule: str, count: object) -> None:
    """Raise TypeError or ValueError unless a count is a whole number from 1 to 2**63 - 1."""
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"{rule} needs a whole number, but got {type(count).__name__}")
    if not 1 <= count <= MAX_COUNT:
        given = count if -MAX_COUNT <= count < 1 else f"one of {count.bit_length()} bits"
        raise ValueError(f"{rule} needs a number from 1 to 2**63 - 1, but got {given}")


def as_utc(time: datetime) -> datetime:
    """Return a time in UTC; one without a zone is taken as UTC."""
    if time.tzinfo is None:
        return time.replace(tzinfo=UTC)
    try:
        return time.astimezone(UTC)
    except OverflowError:  # within hours of year 1 or 9999
        return time.replace(tzinfo=UTC)
