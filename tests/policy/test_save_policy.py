# SPDX-License-Identifier: Apache-2.0
"""When a step is saved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    AtSteps,
    CheckpointConfig,
    CheckpointManager,
    EverySeconds,
    EverySteps,
    Never,
    Overhead,
)
from ckptmgr.policy.save import LastSave, SavePolicy, Since, decide_at_end
from ckptmgr.store.store import Store

_POLICIES: st.SearchStrategy[SavePolicy] = st.one_of(
    st.builds(EverySteps, st.integers(1, 50), offset=st.integers(-60, 60)),
    st.builds(EverySteps, st.integers(1, 50), st.just("save")),
    st.builds(EverySeconds, st.floats(0.1, 100)),
    st.builds(Overhead, st.floats(0.001, 0.999)),
    st.just(Never()),
    st.builds(lambda steps: AtSteps(*steps), st.sets(st.integers(0, 1000), min_size=1)),
    st.builds(
        lambda one, other: one | other,
        st.builds(EverySteps, st.integers(1, 50)),
        st.just(AtSteps(7)),
    ),
)


@pytest.mark.parametrize(("step", "is_due"), [(19, False), (20, True), (21, True), (47, True)])
def test_every_steps_is_due_at_or_after_the_next_multiple(step: int, is_due: bool) -> None:
    assert EverySteps(10).decide(step, 0.0, LastSave(step=13, at=0.0)).is_due is is_due


@pytest.mark.parametrize(("step", "is_due"), [(12, False), (13, True), (40, True)])
def test_every_steps_is_due_at_or_after_the_interval(step: int, is_due: bool) -> None:
    policy = EverySteps(3, since="save")
    assert policy.decide(step, 0.0, LastSave(step=10, at=0.0)).is_due is is_due


@pytest.mark.parametrize("since", ["zero", "save"])
def test_every_steps_before_the_first_save_counts_from_zero(since: Since) -> None:
    assert EverySteps(3, since).decide(3, 0.0, LastSave(at=0.0)).is_due
    assert not EverySteps(3, since).decide(2, 0.0, LastSave(at=0.0)).is_due


@given(st.integers(1, 50), st.integers(0, 500), st.integers(1, 200), st.integers(-60, 60))
def test_every_steps_is_due_once_a_multiple_has_come_since_the_last_save(
    every: int, last: int, ahead: int, offset: int
) -> None:
    come = [one for one in range(last + 1, last + ahead + 1) if (one - offset) % every == 0]
    decision = EverySteps(every, offset=offset).decide(last + ahead, 0.0, LastSave(step=last, at=0))
    assert decision.is_due is bool(come)


def test_every_steps_with_an_offset_saves_the_last_step_of_each_interval(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, EverySteps(10, offset=-1), range(40)) == [0, 9, 19, 29, 39]


def test_every_steps_where_steps_are_skipped_saves_the_first_after_each_multiple(
    tmp_path: Path,
) -> None:
    assert saved_steps(tmp_path, EverySteps(10), range(4, 60, 7)) == [11, 25, 32, 46, 53]


def test_every_steps_after_a_save_in_between_stays_at_the_multiples(tmp_path: Path) -> None:
    saved = []
    with CheckpointManager(tmp_path, CheckpointConfig(10, keep="all")) as manager:
        for step in range(1, 41):
            if manager.step_end(step, {"w": np.ones(1)}) is not None:
                saved.append(step)
            elif step in (13, 29):
                manager.save(step, {"w": np.ones(1)})
    assert saved == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"since": "start"}, "since must be one of"),
        ({"since": "save", "offset": -1}, "offset= has no effect with since='save'"),
    ],
)
def test_every_steps_with_contradicting_options_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EverySteps(10, **options)


def test_every_steps_when_the_step_goes_back_is_due() -> None:
    decision = EverySteps(100).decide(301, 0.0, LastSave(step=900, at=0.0))
    assert decision.is_due
    assert decision.reason == "the step went back from 900 to 301"


@pytest.mark.parametrize(("now", "is_due"), [(19.9, False), (20.0, False), (20.1, True)])
def test_every_seconds_is_due_strictly_after_the_interval(now: float, is_due: bool) -> None:
    assert EverySeconds(10).decide(7, now, LastSave(step=1, at=10.0)).is_due is is_due


def test_every_seconds_when_the_clock_goes_back_is_due() -> None:
    decision = EverySeconds(10).decide(7, 5.0, LastSave(step=1, at=3605.0))
    assert decision.is_due
    assert decision.reason == "the clock went back by 3600 s"


@pytest.mark.parametrize(("now", "is_due"), [(109.9, False), (110.0, True), (500.0, True)])
def test_overhead_is_due_once_the_last_save_costs_no_more_than_its_share(
    now: float, is_due: bool
) -> None:
    last = LastSave(step=1, at=10.0, cost_s=3.0)
    assert Overhead(0.03).decide(7, now, last).is_due is is_due


def test_overhead_before_the_first_save_is_due_to_learn_the_cost() -> None:
    assert Overhead(0.03).decide(1, 0.0, LastSave(at=0.0)).is_due


def test_overhead_when_the_clock_goes_back_is_due() -> None:
    assert Overhead(0.03).decide(7, 5.0, LastSave(step=1, at=9.0, cost_s=3.0)).is_due


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, math.nan])
def test_overhead_of_an_impossible_share_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Overhead(share)


def test_never_is_never_due() -> None:
    assert not Never().decide(10**6, 1e9, LastSave(at=0.0)).is_due


@pytest.mark.parametrize(
    ("policy", "is_active"),
    [
        (EverySteps(1), True),
        (EverySeconds(1), True),
        (Never(), False),
        (AtSteps(1), True),
        (EverySteps(5) | AtSteps(1), True),
    ],
)
def test_policy_that_can_save_is_active(policy: SavePolicy, is_active: bool) -> None:
    assert policy.is_active is is_active


@given(_POLICIES, st.integers(0, 1000), st.floats(0, 1e6))
def test_policy_never_saves_a_step_twice(policy: SavePolicy, step: int, now: float) -> None:
    assert not policy.decide(step, now, LastSave(step=step, at=0.0)).is_due


@given(_POLICIES, st.integers(1, 1000), st.floats(0, 1e6))
def test_policy_after_a_failed_save_is_due_again_at_the_next_step(
    policy: SavePolicy, step: int, now: float
) -> None:
    last = LastSave(at=0.0)
    if policy.decide(step, now, last).is_due:
        assert policy.decide(step + 1, now, last).is_due


@given(_POLICIES, st.integers(1, 1000), st.integers(0, 1000))
def test_decide_at_end_forces_a_save_unless_done_or_inactive(
    policy: SavePolicy, step: int, last_step: int
) -> None:
    decision = decide_at_end(policy, step, last=LastSave(step=last_step, at=0.0))
    assert decision.is_due is (policy.is_active and step != last_step)


@pytest.mark.parametrize("interval_steps", [0, -1])
def test_every_steps_with_an_interval_below_one_is_refused(interval_steps: int) -> None:
    with pytest.raises(ValueError, match="interval_steps must be at least 1"):
        EverySteps(interval_steps)


@pytest.mark.parametrize("interval_s", [0, -1.0, math.nan, math.inf])
def test_every_seconds_with_a_useless_interval_is_refused(interval_s: float) -> None:
    with pytest.raises(ValueError, match="interval_s must be positive and finite"):
        EverySeconds(interval_s)


def saved_steps(
    directory: Path, policy: SavePolicy, ends: Iterable[int], *, resumes: bool = False
) -> list[int]:
    """Train over these steps; return the steps that the policy saved."""
    manager = CheckpointManager(directory, CheckpointConfig(keep="all"), save_policy=policy)
    with manager:
        if resumes:
            manager.resume()
        saved = [step for step in ends if manager.step_end(step, {"w": np.ones(1)}) is not None]
    return saved


def test_at_steps_saves_the_steps_of_the_list_and_the_end(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, AtSteps(20, 3, 10), range(1, 26)) == [3, 10, 20]
    assert sorted(one.step for one in Store(tmp_path).scan()) == [3, 10, 20, 25]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EverySteps(100), [200]),
        (EverySteps(100, since="save"), [230]),
        (AtSteps(*range(100, 301, 100)), [200]),
    ],
)
def test_after_a_stop_between_two_intervals_the_multiples_stay(
    tmp_path: Path, policy: SavePolicy, expected: list[int]
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(130, {"w": np.ones(1)})
    assert saved_steps(tmp_path, policy, range(131, 240), resumes=True) == expected


def test_at_steps_where_steps_are_skipped_saves_the_first_after_each(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, AtSteps(5, 10, 12, 31), range(0, 40, 8)) == [8, 16, 32]


def test_at_steps_of_zero_saves_the_first_step_only_where_it_is_zero(tmp_path: Path) -> None:
    assert saved_steps(tmp_path / "zero", AtSteps(0), range(4)) == [0]


def test_at_steps_of_a_resumed_run_does_not_make_up_for_steps_before_it(tmp_path: Path) -> None:
    assert saved_steps(tmp_path, EverySteps(50), range(1, 51)) == [50]
    assert saved_steps(tmp_path, AtSteps(20, 60), range(51, 71), resumes=True) == [60]


@pytest.mark.parametrize(("step", "is_due"), [(9, False), (10, True), (11, False), (99, False)])
def test_at_steps_when_the_step_went_back_is_due_at_the_steps_of_the_list(
    step: int, is_due: bool
) -> None:
    assert AtSteps(5, 10).decide(step, 0.0, LastSave(step=100, at=0.0)).is_due is is_due


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        ((), ValueError, "at least one step"),
        ((-1,), ValueError, "at least 0, but got -1"),
        ((1.5,), TypeError, "takes integers, but got <class 'float'>"),
        ((True,), TypeError, "takes integers"),
        (([1, 2],), TypeError, "takes integers, but got <class 'list'>"),
    ],
)
def test_at_steps_of_what_are_no_steps_is_refused(
    steps: tuple[object, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        AtSteps(*steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("since", "expected"), [("zero", [10, 70, 100, 200]), ("save", [10, 70, 170])]
)
def test_joined_policies_save_when_one_asks(
    since: Since, expected: list[int], tmp_path: Path
) -> None:
    policy = EverySteps(100, since) | AtSteps(10, 70) | Never()
    assert saved_steps(tmp_path, policy, range(1, 212)) == expected


@pytest.mark.parametrize("other", [None, 5, EverySteps])
def test_what_is_no_save_policy_is_refused_before_the_first_step(
    other: object, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"such as EverySteps\(1000\)"):
        EverySteps(2) | other  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"such as EverySteps\(1000\)"):
        CheckpointManager(tmp_path, save_policy=other or "steps")  # type: ignore[arg-type]
