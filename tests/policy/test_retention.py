# SPDX-License-Identifier: Apache-2.0
"""Kept and dropped checkpoints of retention, with its reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, Plan, UnsafePrune, plan
from ckptmgr.core.model import Pin, State
from ckptmgr.policy.rules import All, Best, Epochs, Every, Last, Pinned, RetentionPolicy, Rule
from ckptmgr.policy.time_rules import (
    Daily,
    EveryTime,
    Hourly,
    Monthly,
    PerMinutes,
    Weekly,
    Within,
    WithinDaily,
    WithinHourly,
    WithinMonthly,
    WithinWeekly,
    WithinYearly,
    Yearly,
    format_duration,
)
from tests.support.policies import NOW, checkpoint


def _steps(checkpoints: Sequence[Checkpoint]) -> list[int]:
    return [item.step for item in checkpoints]


def _why(answer: Plan, step: int) -> list[str]:
    """The details given for the only checkpoint of a step: reasons when kept, nearest misses when dropped."""
    (verdict,) = [verdict for verdict in answer.verdicts if verdict.checkpoint.step == step]
    return [reason.detail for reason in (verdict.reasons if verdict.is_kept else verdict.nearest)]


def _losses(values: dict[int, float | None]) -> list[Checkpoint]:
    return [
        checkpoint(step, metrics={} if value is None else {"loss": value})
        for step, value in values.items()
    ]


def test_last_keeps_the_newest_and_ranks_the_rest() -> None:
    answer = plan([checkpoint(step) for step in range(1, 6)], Last(3), NOW)
    assert _steps(answer.kept) == [5, 4, 3]
    assert [_why(answer, step) for step in (5, 3, 2, 1)] == [
        ["last 1/3"],
        ["last 3/3"],
        ["last (4th of 3)"],
        ["last (5th of 3)"],
    ]


def test_best_min_keeps_the_smallest_beside_the_newest() -> None:
    history = _losses({10: 0.9, 20: 0.2, 30: 0.5, 40: 0.7})
    answer = plan(history, Best(2, "loss", "min"), NOW)
    assert _steps(answer.kept) == [40, 30, 20]
    assert _why(answer, 20) == ["best 1/2 loss=0.2"]
    assert _why(answer, 40) == ["newest"]
    assert _why(answer, 10) == ["best (4th of 2)"]


def test_best_max_keeps_the_largest() -> None:
    answer = plan(_losses({10: 0.9, 20: 0.2, 30: 0.5}), Best(1, "loss", "max"), NOW)
    assert _steps(answer.dropped) == [20]


def test_best_of_equal_values_is_the_newer() -> None:
    answer = plan(_losses({10: 0.5, 20: 0.5, 30: 0.9}), Best(1, "loss", "min"), NOW)
    assert _steps(answer.kept) == [30, 20]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, 10**400])
def test_best_with_a_value_that_is_no_number_does_not_rank_it(value: float | None) -> None:
    answer = plan(_losses({10: value, 20: 0.5, 30: 0.9}), Best(3, "loss", "min"), NOW)
    assert _steps(answer.kept) == [30, 20]
    assert _why(answer, 10) == ["best (loss n/a)"]


def test_best_of_a_diverged_run_is_refused() -> None:
    history = _losses({10: math.nan, 20: math.nan})
    with pytest.raises(
        UnsafePrune, match="none of the 2 checkpoints of series 'net' has a number for 'loss'"
    ):
        plan(history, Last(1) | Best(1, "loss", "min"), NOW)


def test_best_by_a_metric_nobody_recorded_is_refused_and_names_the_recorded_ones() -> None:
    history = _losses({10: 1.0, 20: 2.0})
    with pytest.raises(UnsafePrune, match="recorded: loss") as caught:
        plan(history, Last(1) | Best(1, "acc", "max"), NOW)
    assert "best(1, acc, max) cannot rank" in str(caught.value)


def test_best_by_a_metric_nobody_recorded_passes_while_nothing_would_go() -> None:
    answer = plan(_losses({10: None, 20: None}), Last(2) | Best(1, "acc", "max"), NOW)
    assert answer.dropped == ()


def test_every_keeps_the_multiples() -> None:
    answer = plan([checkpoint(step) for step in range(1000, 26000, 1000)], Every(10000), NOW)
    assert _steps(answer.kept) == [25000, 20000, 10000]
    assert _why(answer, 20000) == ["every 10k"]
    assert _why(answer, 3000) == ["every 10k (3000 past 0)"]


def test_every_without_a_save_at_the_multiple_keeps_the_next_one() -> None:
    answer = plan([checkpoint(step) for step in (70, 140, 210, 280, 350)], Every(100), NOW)
    assert _steps(answer.kept) == [350, 210, 140]
    assert _why(answer, 140) == ["every 100 (first after 100)"]
    assert _why(answer, 280) == ["every 100 (80 past 200)"]


def test_within_keeps_what_is_younger_than_the_newest_by_less_than_the_age() -> None:
    history = [checkpoint(step, age=timedelta(hours=30 - step)) for step in (1, 2, 20, 26)]
    answer = plan(history, Within(timedelta(hours=24)), NOW)
    assert _steps(answer.dropped) == [2, 1]
    assert _why(answer, 20) == ["within 1d (6h before the newest)"]
    assert _why(answer, 2) == ["within 1d (1d before the newest)"]


def test_within_is_not_anchored_by_a_checkpoint_dated_in_the_future() -> None:
    history = [
        checkpoint(1, age=timedelta(hours=3)),
        checkpoint(2, age=timedelta(hours=1)),
        checkpoint(3, age=timedelta(days=-3000)),
    ]
    answer = plan(history, Within(timedelta(hours=2, seconds=1)), NOW)
    assert answer.dropped == ()
    assert _why(answer, 3) == ["within 2h1s (dated in the future)"]


def test_within_of_only_future_dates_keeps_all() -> None:
    history = [checkpoint(step, age=timedelta(days=-step)) for step in (1, 2, 3)]
    assert plan(history, Within(timedelta(seconds=1)), NOW).dropped == ()


def test_daily_keeps_the_newest_of_each_day_and_the_oldest_when_days_are_left_over() -> None:
    # NOW is noon; steps 5 and 4 fall on this day, 3 and 2 on the day before, 1 too.
    history = [checkpoint(step, age=timedelta(hours=6 * (5 - step))) for step in range(1, 6)]
    answer = plan(history, Daily(3), NOW)
    assert _steps(answer.kept) == [5, 2, 1]
    assert _why(answer, 5) == ["daily 1/3 2026-03-01"]
    assert _why(answer, 4) == ["daily (2nd newest of 2026-03-01)"]
    assert _why(answer, 1) == ["daily (oldest)"]


def test_daily_with_days_used_up_drops_the_older_days() -> None:
    history = [checkpoint(step, age=timedelta(days=4 - step)) for step in range(1, 5)]
    answer = plan(history, Daily(2), NOW)
    assert _steps(answer.kept) == [4, 3]
    assert _why(answer, 1) == ["daily (4th of 2)"]


def test_daily_skips_days_without_a_checkpoint() -> None:
    history = [checkpoint(step, age=timedelta(days=10 * (4 - step))) for step in range(1, 5)]
    assert _steps(plan(history, Daily(3), NOW).kept) == [4, 3, 2]


@pytest.mark.parametrize(
    ("rule", "same", "other"),
    [
        (Hourly(2), timedelta(minutes=59), timedelta(minutes=60)),
        (Weekly(2), timedelta(days=6), timedelta(days=7)),  # Monday to Sunday
        (Monthly(2), timedelta(days=28), timedelta(days=29)),
    ],
)
def test_period_ends_where_the_calendar_says(rule: Rule, same: timedelta, other: timedelta) -> None:
    end = datetime(2026, 3, 29, 23, 59, 59, tzinfo=UTC)
    history = [
        replace(checkpoint(step), saved_at=end - age)
        for step, age in ((4, timedelta(0)), (3, same), (2, other), (1, timedelta(days=300)))
    ]
    assert _steps(plan(history, rule, end).kept) == [4, 2]


def test_weekly_at_new_year_goes_by_the_iso_week() -> None:
    times = {3: datetime(2027, 1, 3, tzinfo=UTC), 2: datetime(2026, 12, 28, tzinfo=UTC)}
    history = [replace(checkpoint(step), saved_at=time) for step, time in times.items()]
    answer = plan([*history, checkpoint(1)], Weekly(1), times[3])
    assert _steps(answer.kept) == [3]
    assert _why(answer, 3) == ["weekly 1/1 2026-W53"]


def test_period_of_a_time_in_another_zone_is_the_utc_one() -> None:
    tokyo = timezone(timedelta(hours=9))
    history = [
        replace(checkpoint(2), saved_at=datetime(2026, 3, 2, 8, tzinfo=tokyo)),
        replace(checkpoint(1), saved_at=datetime(2026, 3, 1, 1, tzinfo=UTC)),
    ]
    assert _steps(plan(history, Daily(1), NOW).dropped) == [1]


def test_period_with_times_out_of_order_goes_by_the_order_of_commits() -> None:
    # The clock was a day behind for the last save and the first.
    history = [
        checkpoint(9, age=timedelta(days=1)),
        checkpoint(4),
        checkpoint(3),
        checkpoint(2, age=timedelta(days=1)),
    ]
    assert _steps(plan(history, Daily(2), NOW).kept) == [9, 4]


def test_worked_calendar_example() -> None:
    """`last(2) | daily(3) | weekly(2) | monthly(3)` over one checkpoint a day, from 1 January to 1 March 2026 at noon."""
    history = [checkpoint(60 - days, age=timedelta(days=days)) for days in range(60)]
    answer = plan(history, Last(2) | Daily(3) | Weekly(2) | Monthly(3), NOW)
    kept = {item.saved_at.strftime("%m-%d"): _why(answer, item.step) for item in answer.kept}
    assert kept == {
        "03-01": ["last 1/2", "daily 1/3 2026-03-01", "weekly 1/2 2026-W09", "monthly 1/3 2026-03"],
        "02-28": ["last 2/2", "daily 2/3 2026-02-28", "monthly 2/3 2026-02"],
        "02-27": ["daily 3/3 2026-02-27"],
        "02-22": ["weekly 2/2 2026-W08"],
        "01-31": ["monthly 3/3 2026-01"],
    }


def test_per_minutes_keeps_the_oldest_of_the_window_and_the_newest() -> None:
    history = [checkpoint(step, age=timedelta(minutes=10 * (5 - step))) for step in range(1, 6)]
    answer = plan(history, PerMinutes(35), NOW)
    assert _steps(answer.kept) == [5, 2, 1]
    assert _why(answer, 4) == ["per_minutes 35 (one of the window is older)"]


def test_per_minutes_is_strict() -> None:
    history = [checkpoint(step, age=timedelta(minutes=5 * (3 - step))) for step in (1, 2, 3)]
    assert plan(history, PerMinutes(5), NOW).dropped == ()


def test_per_minutes_after_the_clock_went_back_keeps_the_history() -> None:
    before = [checkpoint(step, age=timedelta(minutes=-10 * step)) for step in (1, 2, 3)]
    history = [*before, checkpoint(4, age=timedelta(minutes=60))]
    assert plan(history, PerMinutes(100), NOW).dropped == ()


def test_per_minutes_of_equal_times_keeps_one_of_the_window() -> None:
    """MindSpore removes them all when every file has the time of the clock."""
    assert _steps(plan([checkpoint(step) for step in (1, 2, 3)], PerMinutes(1), NOW).kept) == [3, 1]


def test_all_keeps_everything() -> None:
    answer = plan([checkpoint(step) for step in (1, 2)], All(), NOW)
    assert [_why(answer, step) for step in (1, 2)] == [["all"], ["all"]]


@pytest.mark.parametrize("policy", [Last(1), Last(1) | Pinned(), Pinned() | Last(1)])
def test_pinned_checkpoint_stays_with_its_pins_named_once(policy: Rule | RetentionPolicy) -> None:
    pins = (Pin(name="paper", reason="paper table 2"), Pin(name="release"))
    answer = plan([checkpoint(1, pins=pins), checkpoint(2), checkpoint(3)], policy, NOW)
    assert _steps(answer.dropped) == [2]
    assert _why(answer, 1) == ["pinned: paper table 2, release"]


def test_protected_checkpoint_stays_with_the_given_reason() -> None:
    history = [checkpoint(step) for step in (1, 2, 3)]
    answer = plan(history, Last(1), NOW, protected={history[0].path: "resumed from"})
    assert _steps(answer.dropped) == [2]
    assert _why(answer, 1) == ["resumed from"]


@pytest.mark.parametrize("state", [State.CORRUPT, State.LEFTOVER, State.WRITING])
def test_uncountable_checkpoint_is_kept_and_takes_no_slot(state: State) -> None:
    history = [checkpoint(1), checkpoint(2), checkpoint(3, state=state, problem="cut off")]
    answer = plan(history, Last(1), NOW)
    assert _steps(answer.kept) == [3, 2]
    assert _why(answer, 3) == [f"not counted: {state.value}: cut off"]
    assert _why(answer, 2) == ["last 1/1"]


def test_uncountable_checkpoint_with_a_pin_says_both() -> None:
    answer = plan([checkpoint(1, state=State.CORRUPT, pins=(Pin(name="paper"),))], Last(1), NOW)
    assert _why(answer, 1) == ["not counted: corrupt", "pinned: paper"]


def test_checkpoint_saved_on_an_exception_is_kept_and_takes_no_slot() -> None:
    history = [checkpoint(1), checkpoint(2, why="exception: KeyboardInterrupt")]
    answer = plan(history, Last(1), NOW)
    assert _why(answer, 2) == ["not counted: saved on an exception: KeyboardInterrupt"]
    assert _why(answer, 1) == ["last 1/1"]


def test_unverified_checkpoint_takes_a_slot() -> None:
    history = [checkpoint(1), checkpoint(2, state=State.UNVERIFIED)]
    assert _steps(plan(history, Last(1), NOW).kept) == [2]


def test_attempts_of_one_step_are_two_checkpoints() -> None:
    history = [checkpoint(5, attempt=0), checkpoint(5, attempt=1), checkpoint(4)]
    kept = plan(history, Last(2), NOW).kept
    assert [(item.step, item.attempt) for item in kept] == [(5, 1), (5, 0)]


def test_order_is_by_commit_when_the_times_say_otherwise() -> None:
    history = [checkpoint(step, age=timedelta(hours=step)) for step in (1, 2, 3)]
    assert _steps(plan(history, Last(1), NOW).kept) == [3]


def test_order_after_a_rollback_is_by_commit_not_by_step() -> None:
    history = [
        checkpoint(step, sequence=number) for number, step in enumerate((50, 100, 60), start=1)
    ]
    assert _steps(plan(history, Last(1), NOW).kept) == [60]


def test_every_after_a_rollback_keeps_the_smallest_step_of_the_interval() -> None:
    history = [
        checkpoint(step, sequence=number) for number, step in enumerate((150, 110, 199), start=1)
    ]
    assert _steps(plan(history, Every(100), NOW).kept) == [199, 110]


def test_series_are_planned_one_by_one() -> None:
    history = [checkpoint(step, series="old") for step in (1, 2)]
    history += [checkpoint(step, series="new") for step in (101, 102)]
    answer = plan(history, Last(1), NOW)
    assert [(v.checkpoint.series, v.checkpoint.step, v.is_kept) for v in answer.verdicts] == [
        ("new", 102, True),
        ("new", 101, False),
        ("old", 2, True),
        ("old", 1, False),
    ]


def test_path_that_occurs_twice_counts_once() -> None:
    history = [checkpoint(1), checkpoint(2), checkpoint(2)]
    answer = plan(history, Last(2), NOW)
    assert _steps(answer.kept) == [2, 1]


def test_path_that_occurs_twice_gives_one_answer_in_any_order() -> None:
    history = [checkpoint(1), checkpoint(1, pins=(Pin(name="paper"),)), checkpoint(2)]
    assert plan(history, Last(1), NOW) == plan(history[::-1], Last(1), NOW)


def test_history_that_is_empty_gives_an_empty_plan() -> None:
    assert plan([], Last(1), NOW) == Plan(policy="last(1)", verdicts=())


def test_history_of_the_caller_keeps_its_order() -> None:
    history = [checkpoint(step) for step in (2, 3, 1)]
    plan(history, Last(1), NOW)
    assert _steps(history) == [2, 3, 1]


def test_plan_names_the_policy_and_the_freed_bytes() -> None:
    answer = plan([checkpoint(step) for step in (1, 2, 3)], Last(1) | Pinned(), NOW)
    assert (answer.policy, answer.freed_bytes) == ("last(1) | pinned", 200)


def test_policy_without_rules_is_refused() -> None:
    with pytest.raises(UnsafePrune, match="the retention policy is empty"):
        plan([], RetentionPolicy(()), NOW)


@pytest.mark.parametrize("policy", [Pinned(), Every(1000), Pinned() | Every(1000)])
def test_policy_that_keeps_nothing_is_refused(policy: Rule | RetentionPolicy) -> None:
    with pytest.raises(UnsafePrune, match="keeps none of the 2 checkpoints of series 'net'"):
        plan([checkpoint(1), checkpoint(2)], policy, NOW)


def test_policy_that_keeps_nothing_because_nobody_measured_its_metric_is_refused_for_that() -> None:
    with pytest.raises(UnsafePrune, match="none of the 2 checkpoints of series 'net' has a number"):
        plan([checkpoint(1), checkpoint(2)], Best(2, "acc", "max"), NOW)


def test_policy_that_keeps_nothing_passes_while_nothing_would_go() -> None:
    assert _why(plan([checkpoint(1)], Every(1000), NOW), 1) == ["newest"]


def test_times_without_a_zone_are_taken_as_utc() -> None:
    naive = replace(checkpoint(1), saved_at=NOW.replace(tzinfo=None) - timedelta(hours=2))
    answer = plan([naive, checkpoint(2)], Within(timedelta(hours=1)), NOW.replace(tzinfo=None))
    assert _steps(answer.dropped) == [1]


def test_times_at_the_ends_of_the_calendar_are_planned() -> None:
    far = timezone(timedelta(hours=14))
    ends = (
        datetime.min.replace(tzinfo=far),
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-14))),
    )
    history = [replace(checkpoint(step), saved_at=time) for step, time in enumerate(ends)]
    policy = (
        Within(timedelta.max - timedelta(microseconds=999999)) | Weekly(1) | PerMinutes(2**63 - 1)
    )
    assert plan(history, policy, NOW).dropped == ()


@pytest.mark.parametrize("rule", [Last, Every, Hourly, Daily, Weekly, Monthly, PerMinutes])
@pytest.mark.parametrize(("count", "shown"), [(0, "0"), (-1, "-1"), (2**63, "one of 64 bits")])
def test_rule_with_a_count_out_of_range_is_refused(
    rule: type[Last], count: int, shown: str
) -> None:
    with pytest.raises(ValueError, match=f"needs a number from 1 to .*, but got {shown}"):
        rule(count)


@pytest.mark.parametrize("count", [True, 2.0, "3"])
def test_rule_with_a_count_of_another_type_is_refused(count: object) -> None:
    with pytest.raises(TypeError, match="last needs a whole number"):
        Last(count)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [None, 5, "last(3)", Last])
def test_what_is_no_rule_is_refused_when_it_is_joined(other: object) -> None:
    with pytest.raises(TypeError, match=r"joins rules such as Last\(3\)"):
        Last(1) | other  # type: ignore[operator]


def test_best_without_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the name of a metric"):
        Best(1, "", "min")


def test_best_with_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the mode 'min' or 'max', but got 'least'"):
        Best(1, "loss", "least")  # type: ignore[arg-type]


@pytest.mark.parametrize("age", [timedelta(0), timedelta(seconds=-1), timedelta(seconds=1.5)])
def test_within_of_other_than_whole_positive_seconds_is_refused(age: timedelta) -> None:
    with pytest.raises(ValueError, match="positive number of whole seconds"):
        Within(age)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (0.9, "0s"), (61, "1min1s"), (694_861, "1w1d1h1min1s")]
)
def test_duration_is_printed_in_the_largest_units(seconds: float, text: str) -> None:
    assert format_duration(timedelta(seconds=seconds)) == text


def test_reason_carries_the_figures_for_machines() -> None:
    (verdict,) = plan([checkpoint(1, metrics={"loss": 0.25})], Best(2, "loss", "min"), NOW).verdicts
    (reason,) = verdict.reasons
    assert (reason.rule, reason.rank, reason.of, reason.value) == ("best(2, loss, min)", 1, 2, 0.25)


def test_miss_of_each_rule_is_named() -> None:
    history = [checkpoint(step, metrics={"loss": 1 / step}) for step in range(1, 6)]
    answer = plan(history, Last(3) | Best(2, "loss", "min") | Pinned(), NOW)
    assert _why(answer, 1) == ["last (5th of 3)", "best (5th of 2)"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (11, "12th of 11"),
        (20, "21st of 20"),
        (21, "22nd of 21"),
        (22, "23rd of 22"),
        (111, "112th of 111"),
    ],
)
def test_rank_in_a_miss_is_an_english_ordinal(count: int, text: str) -> None:
    history = [checkpoint(step) for step in range(1, count + 2)]
    assert _why(plan(history, Last(count), NOW), 1) == [f"last ({text})"]


def test_path_in_protected_that_is_not_in_the_history_is_ignored() -> None:
    assert plan([checkpoint(1)], Last(1), NOW, protected={Path("other"): "x"}).dropped == ()


def kept_steps(history: list[Checkpoint], rule: Rule | RetentionPolicy) -> list[int]:
    return sorted(one.step for one in plan(history, rule, NOW).kept)


def hours_ago(*hours: float) -> list[Checkpoint]:
    """Return checkpoints of steps 1, 2, ..., saved so many hours ago, the oldest first."""
    return [checkpoint(i, age=timedelta(hours=one)) for i, one in enumerate(hours, start=1)]


def test_yearly_keeps_the_newest_of_each_year() -> None:
    history = hours_ago(24 * 800, 24 * 790, 24 * 400, 24 * 30, 1)
    assert kept_steps(history, Yearly(2)) == [3, 5]
    assert kept_steps(history, Yearly(9)) == [1, 2, 3, 5]


def test_every_with_last_keeps_only_the_newest_multiples() -> None:
    history = [checkpoint(step) for step in range(0, 1000, 50)]
    assert kept_steps(history, Every(200, last=2)) == [600, 800, 950]
    decided = plan(history, Every(200, last=2), NOW)
    (dropped,) = [v for v in decided.verdicts if v.checkpoint.step == 400]
    assert dropped.nearest[0].detail == "every 200 (3rd of 2)"
    assert Every(200, last=2).most_kept == 2


def test_every_by_time_counts_from_the_oldest_one() -> None:
    history = hours_ago(10, 9, 7.5, 7, 4, 3, 1.5, 0.5)
    assert kept_steps(history, EveryTime(timedelta(hours=3))) == [1, 4, 5, 8]
    decided = plan(history, EveryTime(timedelta(hours=3)), NOW)
    details = [v.nearest[0].detail for v in decided.verdicts if not v.is_kept]
    assert details[0] == "every 3h (2h30min after the one kept)"


def test_every_by_time_keeps_what_is_dated_in_the_future_and_counts_on() -> None:
    history = hours_ago(5, -2, 1, 0)
    assert kept_steps(history, EveryTime(timedelta(hours=3))) == [1, 2, 3, 4]


def test_epochs_keeps_the_newest_of_each_nth_epoch() -> None:
    history = [replace(checkpoint(step), epoch=step // 10) for step in range(10, 70, 5)]
    assert kept_steps(history, Epochs(2)) == [25, 45, 65]
    reasons = [one.nearest[0].detail for one in plan(history, Epochs(2), NOW).verdicts[1:4]]
    assert reasons == ["epochs 2 (2nd newest of 6)", "epochs 2 (1 past 4)", "epochs 2 (1 past 4)"]


def test_epochs_says_nothing_where_no_epoch_is_recorded() -> None:
    history = [checkpoint(10), checkpoint(20)]
    assert kept_steps(history, RetentionPolicy((Epochs(2), Last(1)))) == [20]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (WithinHourly(timedelta(hours=3)), [4, 6]),
        (WithinDaily(timedelta(days=2)), [2, 6]),
        (WithinWeekly(timedelta(days=90)), [1, 6]),
        (WithinMonthly(timedelta(days=90)), [1, 2, 6]),
        (WithinYearly(timedelta(days=500)), [1, 6]),
    ],
)
def test_within_a_period_keeps_the_newest_of_each_up_to_an_age(
    rule: Rule, expected: list[int]
) -> None:
    history = hours_ago(24 * 40, 26, 2, 1.2, 0.9, 0.1)
    assert kept_steps(history, rule) == expected


def test_within_a_period_says_why() -> None:
    history = hours_ago(24 * 40, 1.2, 1.1, -1, 0.1)
    details = {
        one.checkpoint.step: (one.reasons or one.nearest)[0].detail
        for one in plan(history, WithinHourly(timedelta(hours=3)), NOW).verdicts
    }
    assert details == {
        1: "within_hourly (5w4d23h54min before the newest)",
        2: "within_hourly (2nd newest of 2026-03-01 10h)",
        3: "within_hourly 2026-03-01 10h",
        4: "within_hourly (dated in the future)",
        5: "within_hourly 2026-03-01 11h",
    }


@pytest.mark.parametrize(
    "make", [lambda: Every(10, last=0), lambda: Epochs(0), lambda: EveryTime(timedelta(0))]
)
def test_rule_that_would_keep_nothing_is_refused(make: Callable[[], Rule]) -> None:
    with pytest.raises(ValueError, match="needs a"):
        make()
