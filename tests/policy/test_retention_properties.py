# SPDX-License-Identifier: Apache-2.0
"""What holds for every history and every policy."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import Checkpoint, Plan, UnsafePrune, parse_policy, plan
from ckptmgr.policy.retention import dropped
from ckptmgr.policy.rules import Finding, RetentionPolicy, Rule
from tests.support.policies import NOW, checkpoint, histories, rules

_POLICIES = st.lists(rules(), min_size=1, max_size=3).map(lambda some: RetentionPolicy(tuple(some)))


def _newest_countable(history: list[Checkpoint]) -> list[Checkpoint]:
    newest: dict[str, Checkpoint] = {}
    for item in history:
        if item.is_countable and (
            item.series not in newest or item.order > newest[item.series].order
        ):
            newest[item.series] = item
    return list(newest.values())


def _paths(checkpoints: tuple[Checkpoint, ...]) -> list[Path]:
    return [item.path for item in checkpoints]


def _planned(history: list[Checkpoint], policy: RetentionPolicy) -> Plan | None:
    with contextlib.suppress(UnsafePrune):
        return plan(history, policy, NOW)
    return None


@given(histories(), _POLICIES)
def test_plan_gives_every_checkpoint_one_verdict_with_a_reason(
    history: list[Checkpoint], policy: RetentionPolicy
) -> None:
    answer = _planned(history, policy)
    if answer is not None:
        judged = [verdict.checkpoint.path for verdict in answer.verdicts]
        assert Counter(judged) == Counter(item.path for item in history)
        assert all(verdict.reasons or not verdict.is_kept for verdict in answer.verdicts)


@given(histories(), _POLICIES, st.data())
def test_plan_never_drops_the_newest_the_pinned_the_protected_or_the_uncountable(
    history: list[Checkpoint], policy: RetentionPolicy, data: st.DataObject
) -> None:
    chosen = (
        data.draw(st.sets(st.sampled_from([item.path for item in history]))) if history else set()
    )
    with contextlib.suppress(UnsafePrune):
        dropped = plan(history, policy, NOW, protected=dict.fromkeys(chosen, "chosen")).dropped
        assert not {item.path for item in _newest_countable(history)} & set(_paths(dropped))
        assert not [
            item for item in dropped if item.pins or not item.is_countable or item.path in chosen
        ]


@given(histories(), _POLICIES)
def test_plan_of_what_was_kept_drops_nothing(
    history: list[Checkpoint], policy: RetentionPolicy
) -> None:
    answer = _planned(history, policy)
    if answer is not None:
        assert plan(answer.kept, policy, NOW).dropped == ()


@given(histories(), _POLICIES, rules())
def test_plan_with_one_more_rule_drops_no_more(
    history: list[Checkpoint], policy: RetentionPolicy, rule: Rule
) -> None:
    before, after = _planned(history, policy), _planned(history, policy | rule)
    if before is not None and after is not None:
        assert set(_paths(after.dropped)) <= set(_paths(before.dropped))


@given(histories(), _POLICIES, st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_the_history(
    history: list[Checkpoint], policy: RetentionPolicy, random: Random
) -> None:
    shuffled = random.sample(history, len(history))
    assert _planned(shuffled, policy) == _planned(history, policy)


@given(histories(), _POLICIES)
def test_plan_of_one_series_does_not_depend_on_the_other(
    history: list[Checkpoint], policy: RetentionPolicy
) -> None:
    both = _planned(history, policy)
    alone = _planned([item for item in history if item.series == "net"], policy)
    if both is not None:
        assert alone is not None
        assert [v for v in both.verdicts if v.checkpoint.series == "net"] == list(alone.verdicts)


@given(histories(), _POLICIES)
def test_plan_names_a_policy_that_can_be_parsed(
    history: list[Checkpoint], policy: RetentionPolicy
) -> None:
    answer = _planned(history, policy)
    if answer is not None:
        assert parse_policy(answer.policy) == policy
        texts = {str(rule) for rule in policy.rules} | {"pinned", "newest", "not counted"}
        assert {r.rule for v in answer.verdicts for r in (*v.reasons, *v.nearest)} <= texts


@given(
    st.lists(histories(), max_size=2).map(lambda some: [item for one in some for item in one]),
    _POLICIES,
)
def test_plan_never_drops_a_path_that_it_keeps(
    history: list[Checkpoint], policy: RetentionPolicy
) -> None:
    answer = _planned(history, policy)
    if answer is not None:
        assert not set(_paths(answer.kept)) & set(_paths(answer.dropped))


@given(histories(), _POLICIES, st.data())
def test_dropped_are_those_of_a_plan_and_refused_as_it_is(
    history: list[Checkpoint], policy: RetentionPolicy, data: st.DataObject
) -> None:
    line = list({item.path: item for item in history}.values())
    safe = data.draw(st.sets(st.sampled_from(line))) if line else set()
    protected = {item.path: "saved last" for item in safe}
    answer = found = None
    refused: list[str] = []
    try:
        answer = plan(line, policy, NOW, protected=protected, is_one_line=True)
    except UnsafePrune as error:
        refused.append(str(error))
    try:
        found = dropped(line, policy, NOW, protected=protected)
    except UnsafePrune as error:
        refused.append(str(error))
    if answer is None or found is None:
        assert refused[:1] * 2 == refused
    else:
        assert list(found.checkpoints) == list(answer.dropped)
        countable = [item for item in answer.kept if item.is_countable]
        finite = [item for item in countable if item.health is None]
        assert found.last_good == next(iter([*finite, *countable]), None)


@given(histories(), rules())
def test_rule_keeps_what_it_explains_as_kept(history: list[Checkpoint], rule: Rule) -> None:
    line = sorted(history, key=lambda item: item.order, reverse=True)
    if line:
        found = [one is not None and one.is_kept for one in rule.judge(line, NOW)]
        assert list(rule.stays(line, NOW)) == found


class _OddSteps(Rule):
    def __str__(self) -> str:
        return "odd"

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding | None]:
        return [self.finding(True, "odd") if one.step % 2 else None for one in history]


def test_rule_of_a_user_that_only_judges_decides_what_is_dropped() -> None:
    line = [checkpoint(step) for step in (1, 2, 3, 4)]
    found = dropped(line, RetentionPolicy((_OddSteps(),)), NOW)
    assert [one.step for one in found.checkpoints] == [2]
