# SPDX-License-Identifier: Apache-2.0
"""Retention that judges only what changed drops what a plan of the whole history drops."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.model import Checkpoint
from ckptmgr.policy.growing import GrowingHistory
from ckptmgr.policy.retention import plan
from ckptmgr.policy.rules import All, Best, Every, Last, RetentionPolicy, Rule
from ckptmgr.policy.tag_rules import Tagged
from ckptmgr.policy.text import parse_policy
from ckptmgr.policy.time_rules import PerMinutes
from tests.support.policies import NOW, checkpoint, histories, rules

_RULES = st.lists(rules(), min_size=1, max_size=3)


def as_one_series(history: list[Checkpoint]) -> list[Checkpoint]:
    return [replace(one, series="net") for one in history]


def dropped_by_plan(
    history: list[Checkpoint], some: list[Rule], protected: dict[str, Checkpoint]
) -> list[Checkpoint]:
    reasons = {one.path: name for name, one in protected.items()}
    return list(plan(history, RetentionPolicy(tuple(some)), NOW, protected=reasons).dropped)


@given(histories().map(as_one_series), _RULES, st.data())
def test_changed_history_drops_what_a_plan_of_all_of_it_drops(
    present: list[Checkpoint], some: list[Rule], data: st.DataObject
) -> None:
    by_path = {one.path: one for one in present}
    now_here = dict(list(by_path.items())[: len(by_path) // 2])
    growing = GrowingHistory(some, now_here.values(), dropped=now_here.values(), protected={})
    kept_safe: dict[str, Checkpoint] = {}
    for one in data.draw(st.permutations([*by_path.values()])):
        is_removed: bool = data.draw(st.booleans())
        if one.path in now_here and is_removed:
            del now_here[one.path]
            growing.discard(one.path)
        else:
            shown = replace(one, metrics={"loss": data.draw(st.sampled_from([0.1, 0.2, 0.3]))})
            now_here[one.path] = shown
            growing.put(shown)
        if data.draw(st.booleans()) and now_here:
            safe: Checkpoint = data.draw(st.sampled_from([*now_here.values()]))
            kept_safe = {"saved last": safe}
        answer = growing.dropped(NOW, protected={c.path: why for why, c in kept_safe.items()})
        if answer is None:
            growing = GrowingHistory(
                some, now_here.values(), dropped=now_here.values(), protected={}
            )
        else:
            assert answer == dropped_by_plan([*now_here.values()], some, kept_safe)
            if data.draw(st.booleans()):  # else their removal failed
                for gone in answer:
                    growing.discard(gone.path)
                    del now_here[gone.path]


@pytest.mark.parametrize(
    "policy",
    [
        "last(3)",
        "all",
        "last(2) | every(10)",
        "best(2, loss, min) | last(1)",
        "within(1h)",
        "daily(3) | hourly(2)",
        "pinned | last(2)",
        "tagged(release) | last(2)",
    ],
)
def test_policy_that_is_followed_needs_no_plan(policy: str) -> None:
    history = [
        checkpoint(step, age=timedelta(minutes=100 - step), metrics={"loss": step % 7})
        for step in range(100)
    ]
    growing = GrowingHistory(parse_policy(policy).rules, [], dropped=(), protected={})
    for one in history:
        growing.put(one)
        answer = growing.dropped(NOW, protected={})
        assert answer is not None
        for gone in answer:
            growing.discard(gone.path)
    assert growing.newest == history[-1]


def test_earlier_step_of_a_period_that_comes_later_replaces_the_kept_one() -> None:
    some: list[Rule] = [Every(10), Last(1)]
    history = [
        checkpoint(step, age=timedelta(minutes=age)) for step, age in ((25, 4), (40, 3), (21, 2))
    ]
    growing = GrowingHistory(some, [], dropped=(), protected={})
    for number, one in enumerate(history, 1):
        growing.put(one)
        answer = growing.dropped(NOW, protected={})
        assert answer == dropped_by_plan(history[:number], some, {})


def test_tag_that_is_given_later_keeps_and_one_that_is_taken_does_not() -> None:
    some: list[Rule] = [Tagged("rel*"), Last(1)]
    old, tagged, new = (checkpoint(step, age=timedelta(minutes=9 - step)) for step in (1, 2, 3))
    named = replace(tagged, tags=("release",))
    growing = GrowingHistory(some, [old, named, new], dropped=(), protected={})
    growing.put(old)
    assert (
        growing.dropped(NOW, protected={}) == dropped_by_plan([old, named, new], some, {}) == [old]
    )
    growing.discard(old.path)
    growing.put(tagged)
    assert (
        growing.dropped(NOW, protected={}) == dropped_by_plan([tagged, new], some, {}) == [tagged]
    )


class _OwnLast(Last):
    """A rule of a user."""


@pytest.mark.parametrize(
    "some",
    [
        [PerMinutes(5), Last(1)],
        [_OwnLast(1)],
        [Every(10)],  # it may keep nothing, which a plan refuses
        [Best(1, "loss", "min")],  # without a metric a plan refuses it
    ],
)
def test_what_only_a_plan_can_tell_is_left_to_it(some: list[Rule]) -> None:
    growing = GrowingHistory(some, [checkpoint(1)], dropped=(), protected={})
    growing.put(checkpoint(2))
    assert growing.dropped(NOW, protected={}) is None


def test_checkpoint_dated_in_the_future_is_left_to_a_plan() -> None:
    future = checkpoint(2, age=-timedelta(hours=1))
    some = parse_policy("within(1h)").rules
    growing = GrowingHistory(some, [checkpoint(1), future], dropped=(), protected={})
    assert growing.dropped(NOW, protected={}) is None
    assert growing.dropped(NOW + timedelta(hours=2), protected={}) is not None


def test_history_without_a_countable_checkpoint_is_left_to_a_plan() -> None:
    growing = GrowingHistory([All()], [], dropped=(), protected={})
    assert growing.newest is None
    assert growing.dropped(NOW, protected={}) is None
