# SPDX-License-Identifier: Apache-2.0
"""Retention: `plan(history, policy, now)` gives a verdict with reasons for every checkpoint. Pure.

`dropped` finds the same without the reasons, as a run does after each save.

Under every policy:

* The newest countable checkpoint of every series stays, and so do pinned and protected ones; where
  its floats are not finite, the newest one whose floats are stays, too.
* Only countable checkpoints use up a slot. Damaged ones, leftovers, unfinished ones and those saved
  while an exception unwound the training are neither counted nor dropped. Of the last kind a newer one replaces the
  earlier ones, outside of any policy: `replaced_emergencies`.
* Series are planned one by one: one never evicts another. With `is_one_line` the history is one
  line of runs (`policy.lines`), in whatever series it was saved.
* Order is `Checkpoint.order`, never a time; two attempts of one step are two checkpoints. Only
  rules about time use times.
* Refused with UnsafePrune: a policy without rules; and when a checkpoint would be dropped, rules
  that keep nothing of a series, or `best` by a metric that no checkpoint of a series has.

>>> from pathlib import Path
>>> from datetime import UTC
>>> saved_at = datetime(2026, 3, 1, tzinfo=UTC)
>>> history = [
...     Checkpoint(path=Path(f"net-1_{step}.ckpt"), series="net", step=step, saved_at=saved_at, size_bytes=1)
...     for step in (10, 20, 30)
... ]
>>> answer = plan(history, Last(2), saved_at)
>>> [checkpoint.step for checkpoint in answer.kept], [checkpoint.step for checkpoint in answer.dropped]
([30, 20], [10])
>>> answer.verdicts[2].nearest[0].detail
'last (3rd of 2)'
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence, Set
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.model import (
    ORDER,
    Checkpoint,
    Plan,
    Reason,
    State,
    Verdict,
    only_countable,
)
from ckptmgr.core.names import is_same_prefix
from ckptmgr.core.printable import printable
from ckptmgr.policy.rules import (
    Best,
    Finding,
    Last,
    RetentionPolicy,
    Rule,
    as_utc,
    pin_reason,
)

_SEQUENCE: Callable[[Checkpoint], int] = operator.attrgetter("sequence")
_LEAST_UNRANKED = 5  # MindSpore's keep_checkpoint_max
_MOST_NAMED, _LONGEST_NAME = 20, 100
_VALUES = tuple(one.name for one in fields(Checkpoint) if one.repr)
_NONE_PROTECTED: Mapping[Path, str] = MappingProxyType({})


class Dropped(NamedTuple):
    """The checkpoints that a policy drops, newest first, and the last good one, which stays."""

    checkpoints: Sequence[Checkpoint]
    last_good: Checkpoint | None


def plan(
    history: Sequence[Checkpoint],
    policy: RetentionPolicy | Rule,
    now: datetime,
    *,
    protected: Mapping[Path, str] = _NONE_PROTECTED,
    is_one_line: bool = False,
) -> Plan:
    """Return the plan of a policy: series in the order of their names, each newest first.

    Args:
        history: All checkpoints, in any order; of a repeated path the newest entry counts.
        policy: The rules.
        now: The present time, UTC.
        protected: Path to the reason why it must stay, e.g. `resumed from`.
        is_one_line: Whether `history` is counted as a whole, whatever its series.

    Raises:
        UnsafePrune: See the module's list.
    """
    rules = _rules_of(policy)
    verdicts: list[Verdict] = []
    for series in _newest_first(history, is_one_line=is_one_line):
        verdicts += _plan_series(series, rules, now, protected=protected)
    return Plan(policy=str(policy), verdicts=tuple(verdicts))


def dropped(
    line: Sequence[Checkpoint],
    policy: RetentionPolicy | Rule,
    now: datetime,
    *,
    protected: Container[Path] = (),
) -> Dropped:
    """Return the checkpoints that `plan` drops of one line of runs; each path occurs once.

    Raises:
        UnsafePrune: As `plan`.
    """
    rules = _rules_of(policy)
    countable = only_countable(_ordered(line))
    if not countable:
        return Dropped([], None)
    flags = [rule.stays(countable, now) for rule in rules]
    stays = flags[0] if len(flags) == 1 else [any(found) for found in zip(*flags, strict=True)]
    good = last_good(countable)
    going = [
        one
        for one, is_kept in zip(countable[1:], stays[1:], strict=True)
        if not (is_kept or one.pins or one.path in protected or one is good)
    ]
    if going:
        _check_metrics(countable, rules)
        _check_something_is_kept(countable, rules, is_any_kept=any(stays))
    return Dropped(going, good)


def last_good(newest_first: Sequence[Checkpoint]) -> Checkpoint:
    """Return the newest of some countable checkpoints whose floats are finite, else the newest."""
    return next((one for one in newest_first if one.health is None), newest_first[0])


def _rules_of(policy: RetentionPolicy | Rule) -> Sequence[Rule]:
    rules = policy.rules if isinstance(policy, RetentionPolicy) else (policy,)
    if not rules:
        raise UnsafePrune("the retention policy is empty", hint="name what to keep, e.g. last(5)")
    return rules


def without_unranked(
    history: Sequence[Checkpoint], policy: RetentionPolicy
) -> tuple[RetentionPolicy, str | None]:
    """Return a policy that a run can apply unattended, and the changes, or None.

    A rule `best` by a metric that no checkpoint of `history` has would keep everything for ever. In
    its place the newest checkpoints are kept: as many as the rule names, at least 5.
    """
    best = [rule for rule in policy.rules if isinstance(rule, Best)]
    countable = [one for one in history if best and one.is_countable]
    unranked = [rule for rule in best if countable and _is_unranked(rule, countable)]
    if not unranked:
        return policy, None
    newest = Last(max(_LEAST_UNRANKED, *(rule.most_kept or 0 for rule in unranked)))
    rules = [rule for rule in policy.rules if rule not in unranked]
    return RetentionPolicy((*rules, newest)), (
        f"{' | '.join(map(str, unranked))} cannot rank: no checkpoint has a number for that metric "
        f"(recorded: {metrics_text(countable)}); until one has, {newest} is kept instead"
    )


def metrics_text(checkpoints: Sequence[Checkpoint]) -> str:
    """Return the names of the metrics of checkpoints for a message; of very many the first ones."""
    known = sorted({name for item in checkpoints for name in item.metrics})
    more = len(known) - _MOST_NAMED
    named = [printable(name, _LONGEST_NAME) for name in known[:_MOST_NAMED]]
    return ", ".join([*named, *([f"and {more:,} more"] if more > 0 else [])]) or "none"


def replaced_emergencies(
    newest: Checkpoint,
    history: Sequence[Checkpoint],
    lineage: Set[str],
    *,
    has_restarts: bool = False,
) -> list[Checkpoint]:
    """Return the emergency saves that a newer one replaces, or none without a countable checkpoint.

    They are those of its series up to its step, of the runs `lineage` and of runs that continued
    one of these; pinned and damaged ones stay. With `has_restarts`, also those of the series of the
    restarts of its prefix.
    """
    is_one_run = is_same_prefix if has_restarts else operator.eq
    if not any(one.is_countable for one in history):
        return []
    return [
        one
        for one in history
        if one.is_emergency
        and one.path != newest.path
        and (is_one_run(one.series, newest.series) and one.step <= newest.step)
        and not one.pins
        and one.state in (State.OK, State.UNVERIFIED)
        and not lineage.isdisjoint((one.run_id, *one.parent_run_ids))
    ]


def _is_unranked(rule: Best, countable: Sequence[Checkpoint]) -> bool:
    return all(rule.value_of(item) is None for item in countable)


def order_key(checkpoint: Checkpoint) -> tuple[tuple[int, int, int], datetime, str]:
    """Return the place of a checkpoint among others, oldest first; no two paths have the same."""
    return (checkpoint.order, as_utc(checkpoint.saved_at), str(checkpoint.path))


def _newest_first(history: Sequence[Checkpoint], *, is_one_line: bool) -> list[list[Checkpoint]]:
    # The repr is slow, and only a path that occurs twice needs it.
    if len({item.path for item in history}) < len(history):
        by_path: dict[Path, Checkpoint] = {}
        for item in sorted(history, key=lambda one: (order_key(one), _text_of(one)), reverse=True):
            by_path.setdefault(item.path, item)
        history = list(by_path.values())
    newest_first = _ordered(history)
    if is_one_line:
        return [newest_first]
    by_series: dict[str, list[Checkpoint]] = {}
    for checkpoint in newest_first:
        by_series.setdefault(checkpoint.series, []).append(checkpoint)
    return [by_series[name] for name in sorted(by_series)]


def _ordered(history: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints of distinct paths, newest first, whatever the order of the input."""
    if len(set(map(_SEQUENCE, history))) == len(history):  # as in one run; half the time
        return sorted(history, key=_SEQUENCE, reverse=True)
    has_ties = len(set(map(ORDER, history))) < len(history)
    return sorted(history, key=order_key if has_ties else ORDER, reverse=True)


def _plan_series(
    series: list[Checkpoint],
    rules: Sequence[Rule],
    now: datetime,
    *,
    protected: Mapping[Path, str],
) -> list[Verdict]:
    countable = [checkpoint for checkpoint in series if checkpoint.is_countable]
    judged = [rule.judge(countable, now) for rule in rules] if countable else []
    findings = [
        [finding for finding in column if finding is not None]
        for column in zip(*judged, strict=True)
    ]
    next_findings = iter(findings)
    needed = {countable[0].path: "newest"} if countable else {}
    if countable and (good := last_good(countable)) is not countable[0]:
        needed[good.path] = "newest that is finite"
    verdicts = [
        _verdict(
            checkpoint,
            next(next_findings) if checkpoint.is_countable else [],
            protected=protected.get(checkpoint.path) if protected else None,
            needed=needed.get(checkpoint.path),
        )
        for checkpoint in series
    ]
    if not all(verdict.is_kept for verdict in verdicts):
        _check_metrics(countable, rules)
        is_any_kept = any(finding.is_kept for found in findings for finding in found)
        _check_something_is_kept(countable, rules, is_any_kept=is_any_kept)
    return verdicts


def _text_of(checkpoint: Checkpoint) -> str:
    return repr([getattr(checkpoint, name) for name in _VALUES])


def _verdict(
    checkpoint: Checkpoint,
    findings: Sequence[Finding],
    *,
    protected: str | None,
    needed: str | None,
) -> Verdict:
    reasons = [finding.reason for finding in findings if finding.is_kept]
    if not checkpoint.is_countable:
        reasons.append(Reason(rule="not counted", detail=f"not counted: {_condition(checkpoint)}"))
    if checkpoint.pins:
        reasons.append(pin_reason(checkpoint))
    if protected is not None:
        reasons.append(Reason(rule="protected", detail=protected))
    if needed is not None and not reasons:
        reasons.append(Reason(rule="newest", detail=needed))
    return Verdict(
        checkpoint=checkpoint,
        is_kept=bool(reasons),
        reasons=tuple(dict.fromkeys(reasons)),
        nearest=() if reasons else tuple([finding.reason for finding in findings]),
    )


def _condition(checkpoint: Checkpoint) -> str:
    if checkpoint.is_emergency:
        return f"saved on an {checkpoint.why}"
    problem = f": {checkpoint.problem}" if checkpoint.problem else ""
    return f"{checkpoint.state.value}{problem}"


def _check_something_is_kept(
    countable: Sequence[Checkpoint], rules: Sequence[Rule], *, is_any_kept: bool
) -> None:
    if not is_any_kept:
        raise UnsafePrune(
            f"the policy {RetentionPolicy(tuple(rules))} keeps none of the {len(countable)} checkpoints "
            f"of series {countable[0].series!r}; nothing was dropped",
            hint="join it with a rule that always keeps something, e.g. last(1)",
        )


def _check_metrics(countable: Sequence[Checkpoint], rules: Sequence[Rule]) -> None:
    for rule in rules:
        if isinstance(rule, Best) and _is_unranked(rule, countable):
            raise UnsafePrune(
                f"the rule {rule} cannot rank: none of the {len(countable)} checkpoints of series "
                f"{countable[0].series!r} has a number for {rule.metric!r}; nothing was dropped",
                hint=f"record the metric with each save, or leave the rule out; recorded: {metrics_text(countable)}",
            )
