# SPDX-License-Identifier: Apache-2.0
"""Retention of a history that changes by a few checkpoints at a time. Pure.

`plan` judges the whole history. `GrowingHistory` finds the same dropped checkpoints from what
changed: a removal lets no rule drop another checkpoint, and a new checkpoint takes the place of few
(`_Index.add` returns them). Only these *suspects*, and those whose protection ended, are judged.

It follows `last`, `best`, `every(n)`, `within`, the periods, `pinned`, `tagged` and `all`. It does not
follow the other rules and those of users, nor cases in which `plan` may refuse: then the answer is None,
and `plan` must decide.
"""

from __future__ import annotations

import bisect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from ckptmgr.core.model import Checkpoint
from ckptmgr.policy.retention import order_key
from ckptmgr.policy.rules import All, Best, Every, Last, Pinned, Rule, as_utc
from ckptmgr.policy.tag_rules import Tagged
from ckptmgr.policy.time_rules import Daily, Hourly, Monthly, PerPeriod, Weekly, Within, Yearly

_Key = tuple[tuple[int, int, int], datetime, str]
_One = TypeVar("_One")


class GrowingHistory:
    """The checkpoints of one run, and which of them a policy drops after each change.

    The series of the checkpoints is ignored: they are planned as one.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        history: Iterable[Checkpoint],
        *,
        dropped: Iterable[Checkpoint],
        protected: Mapping[Path, str],
    ) -> None:
        """Begin with a history; `plan` dropped some of it, the paths in `protected` aside."""
        self._indexes = [_index_of(rule) for rule in rules]
        self._by_path: dict[str, Checkpoint] = {}
        self._keys: list[_Key] = []  # of the countable ones, oldest first
        self._suspects: set[str] = set()
        for one in sorted(history, key=order_key):
            self.put(one)
        self._protected = {str(path) for path in protected}
        self._suspects = {str(one.path) for one in dropped}

    def __len__(self) -> int:
        return len(self._by_path)

    @property
    def is_followed(self) -> bool:
        """Whether all rules are followed, so that `plan` is seldom needed."""
        return None not in self._indexes

    @property
    def newest(self) -> Checkpoint | None:
        """The newest countable checkpoint, which stays."""
        return self._by_path[self._keys[-1][2]] if self._keys else None

    def put(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, or replace the one of its path."""
        self.discard(checkpoint.path)
        key = order_key(checkpoint)
        self._by_path[key[2]] = checkpoint
        if not checkpoint.is_countable:
            return
        if self._keys:
            self._suspects.add(self._keys[-1][2])  # it stayed as the newest, perhaps
        bisect.insort(self._keys, key)
        self._suspects.add(key[2])
        for index in self._indexes:
            if index is not None:
                self._suspects.update(index.add(key, checkpoint))

    def discard(self, path: Path) -> None:
        """Remove a checkpoint, if it is there."""
        checkpoint = self._by_path.pop(str(path), None)
        if checkpoint is None or not checkpoint.is_countable:
            return
        key = order_key(checkpoint)
        del self._keys[bisect.bisect_left(self._keys, key)]
        for index in self._indexes:
            if index is not None:
                index.remove(key, checkpoint)

    def dropped(self, now: datetime, *, protected: Mapping[Path, str]) -> list[Checkpoint] | None:
        """Return what `plan` drops, newest first, or None if only `plan` can decide.

        A dropped checkpoint is dropped again at the next call while it is there.
        """
        indexes = [index for index in self._indexes if index is not None]
        is_followed = len(indexes) == len(self._indexes) and all(
            one.is_sure(now) for one in indexes
        )
        if not self._keys or not is_followed:
            return None
        self._suspects |= self._protected
        self._protected = {str(path) for path in protected}
        staying = {*self._protected, self._keys[-1][2]}
        going: list[tuple[_Key, Checkpoint]] = []
        for path in self._suspects - staying:
            one = self._by_path.get(path)
            if one is not None and one.is_countable and not one.pins:
                key = order_key(one)
                if not any(index.keeps(key, one) for index in indexes):
                    going.append((key, one))
        if going and not any(index.keeps_some for index in indexes):
            return None
        self._suspects = {key[2] for key, _ in going}
        return [one for _, one in sorted(going, key=lambda pair: pair[0], reverse=True)]


class _Index(ABC):
    """The countable checkpoints as one rule orders them; checkpoints are named by their keys."""

    keeps_some = False
    """Whether the rule keeps at least one checkpoint of every history it is sure about."""

    def is_sure(self, now: datetime) -> bool:
        """Return whether the rule can be followed at present."""
        return True

    @abstractmethod
    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        """Add a checkpoint; return at least the paths of those that the rule kept until now."""

    @abstractmethod
    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint; the rule keeps all that it kept."""

    @abstractmethod
    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        """Return whether the rule keeps one of the checkpoints."""


class _EachIndex(_Index):
    """For rules that judge each checkpoint by itself."""

    def __init__(self, rule: All | Pinned) -> None:
        self.keeps_some = isinstance(rule, All)

    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        return ()

    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        return

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        return self.keeps_some  # pinned ones stay under every policy


class _TaggedIndex(_EachIndex):
    def __init__(self, rule: Tagged) -> None:
        self.keeps_some = False
        self._rule = rule

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        return bool(self._rule.tags_of(checkpoint))


class _LastIndex(_Index):
    keeps_some = True

    def __init__(self, rule: Last) -> None:
        self._count = rule.count
        self._keys: list[_Key] = []

    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        bisect.insort(self._keys, key)
        return [key[2] for key in _at_rank(self._keys, self._count + 1)]

    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        del self._keys[bisect.bisect_left(self._keys, key)]

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        return len(self._keys) - bisect.bisect_left(self._keys, key) <= self._count


class _BestIndex(_Index):
    keeps_some = True

    def __init__(self, rule: Best) -> None:
        self._rule = rule
        self._sign = -1 if rule.mode == "min" else 1
        # The best at the end; of equal values the newer one is better.
        self._ranked: list[tuple[float, _Key]] = []

    def is_sure(self, now: datetime) -> bool:
        return bool(self._ranked)  # else `plan` refuses

    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        value = self._rule.value_of(checkpoint)
        if value is None:
            return ()
        bisect.insort(self._ranked, (self._sign * value, key))
        return [key[2] for _, key in _at_rank(self._ranked, self._rule.count + 1)]

    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        value = self._rule.value_of(checkpoint)
        if value is not None:
            del self._ranked[bisect.bisect_left(self._ranked, (self._sign * value, key))]

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        value = self._rule.value_of(checkpoint)
        if value is None:
            return False
        better = len(self._ranked) - bisect.bisect_right(self._ranked, (self._sign * value, key))
        return better < self._rule.count


class _EveryIndex(_Index):
    def __init__(self, rule: Every) -> None:
        self._interval = rule.interval_steps
        self._steps: dict[int, list[tuple[int, str]]] = {}

    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        steps = self._steps.setdefault(checkpoint.step // self._interval, [])
        first = steps[0][0] if steps else checkpoint.step
        bisect.insort(steps, (checkpoint.step, key[2]))
        if checkpoint.step >= first:
            return ()
        return [path for step, path in steps if step == first]

    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        number = checkpoint.step // self._interval
        steps = self._steps[number]
        del steps[bisect.bisect_left(steps, (checkpoint.step, key[2]))]
        if not steps:
            del self._steps[number]

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        number, past = divmod(checkpoint.step, self._interval)
        return past == 0 or (number > 0 and self._steps[number][0][0] == checkpoint.step)


class _PeriodIndex(_Index):
    keeps_some = True

    def __init__(self, rule: PerPeriod) -> None:
        self._rule = rule
        self._keys: list[_Key] = []
        self._periods: dict[str, list[_Key]] = {}
        self._heads: list[_Key] = []  # the newest checkpoint of each period, oldest first

    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        oldest = self._keys[:1]
        bisect.insort(self._keys, key)
        period = self._periods.setdefault(self._period_of(key), [])
        head = period[-1:]
        bisect.insort(period, key)
        self._move_head(head, period[-1:])
        rank = _at_rank(self._heads, self._rule.count + 1)
        return [key[2] for key in (*head, *rank, *oldest)]

    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        del self._keys[bisect.bisect_left(self._keys, key)]
        name = self._period_of(key)
        period = self._periods[name]
        head = period[-1:]
        del period[bisect.bisect_left(period, key)]
        self._move_head(head, period[-1:])
        if not period:
            del self._periods[name]

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        if len(self._heads) < self._rule.count and key == self._keys[0]:
            return True
        at = bisect.bisect_left(self._heads, key)
        is_head = self._heads[at : at + 1] == [key]
        return is_head and len(self._heads) - at <= self._rule.count

    def _period_of(self, key: _Key) -> str:
        return self._rule.period(key[1])

    def _move_head(self, old: Sequence[_Key], new: Sequence[_Key]) -> None:
        for key in old:
            del self._heads[bisect.bisect_left(self._heads, key)]
        for key in new:
            bisect.insort(self._heads, key)


class _WithinIndex(_Index):
    keeps_some = True

    def __init__(self, rule: Within) -> None:
        self._age = rule.age
        self._times: list[tuple[datetime, str]] = []

    def is_sure(self, now: datetime) -> bool:
        # Those dated in the future are kept, and become the newest as time passes.
        return bool(self._times) and self._times[-1][0] <= as_utc(now)

    def add(self, key: _Key, checkpoint: Checkpoint) -> Iterable[str]:
        before = self._times[-1:]
        bisect.insort(self._times, (key[1], key[2]))
        newest = self._times[-1][0]
        if not before or newest == before[0][0]:
            return ()
        started = _first_not_older(self._times, before[0][0], self._age)
        ended = _first_not_older(self._times, newest, self._age)
        return [path for _, path in self._times[started:ended]]

    def remove(self, key: _Key, checkpoint: Checkpoint) -> None:
        del self._times[bisect.bisect_left(self._times, (key[1], key[2]))]

    def keeps(self, key: _Key, checkpoint: Checkpoint) -> bool:
        return self._times[-1][0] - key[1] < self._age


def _first_not_older(
    times: Sequence[tuple[datetime, str]], newest: datetime, age: timedelta
) -> int:
    """Return the index of the first time that is less than `age` before the newest."""
    return bisect.bisect_left(times, True, key=lambda one: newest - one[0] < age)


def _at_rank(ascending: Sequence[_One], rank: int) -> Sequence[_One]:
    """Return the element of a rank, counted from 1 at the end, or nothing."""
    return ascending[-rank : len(ascending) - rank + 1] if rank <= len(ascending) else ()


def _index_of(rule: Rule) -> _Index | None:
    kind = _INDEXES.get(type(rule))  # a subclass may judge otherwise
    if isinstance(rule, Every) and rule.last is not None:
        return None
    return None if kind is None else kind(rule)


_INDEXES: Mapping[type[Rule], Callable[[Any], _Index]] = {
    All: _EachIndex,
    Best: _BestIndex,
    Every: _EveryIndex,
    Last: _LastIndex,
    Pinned: _EachIndex,
    Tagged: _TaggedIndex,
    Within: _WithinIndex,
    **dict.fromkeys((Hourly, Daily, Weekly, Monthly, Yearly), _PeriodIndex),
}
