# SPDX-License-Identifier: Apache-2.0
"""Retention policies as text."""

from __future__ import annotations

import contextlib
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import CkptmgrError, PolicyTextError, parse_policy
from ckptmgr.policy.rules import RetentionPolicy
from ckptmgr.policy.text import parse_duration
from tests.support.policies import rules

_EVERYTHING = (
    "last(3) | best(2, loss, min) | every(1000) | within(2d) | hourly(24) | daily(7) | weekly(4) | monthly(6) | "
    "per_minutes(5) | pinned | all"
)


def test_policy_with_every_rule_reads_and_prints_the_same() -> None:
    assert str(parse_policy(_EVERYTHING)) == _EVERYTHING


@given(st.lists(rules(), min_size=1, max_size=4))
def test_policy_printed_and_parsed_is_the_same_policy(some: list[object]) -> None:
    policy = RetentionPolicy(tuple(some))  # type: ignore[arg-type]
    assert parse_policy(str(policy)) == policy


@given(st.lists(rules(), min_size=1, max_size=4))
def test_text_parsed_and_printed_is_the_same_text(some: list[object]) -> None:
    text = str(RetentionPolicy(tuple(some)))  # type: ignore[arg-type]
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (" last ( 3 )|\n\tpinned() ", "last(3) | pinned"),
        ("all()", "all"),
        ("best(1, 'val loss', max)", 'best(1, "val loss", max)'),
        ("best(1, 'loss', min)", "best(1, loss, min)"),
        ('best(1, "a\\"b", min)', 'best(1, "a\\"b", min)'),
        ("best(1, min, min)", "best(1, min, min)"),
        ("best(1, val/top-5.acc, max)", "best(1, val/top-5.acc, max)"),
        ("within(90s)", "within(1min30s)"),
        ("within(24h)", "within(1d)"),
        ("within(1w2d3h4min5s)", "within(1w2d3h4min5s)"),
    ],
)
def test_policy_in_another_spelling_has_one_printed_form(text: str, canonical: str) -> None:
    assert str(parse_policy(text)) == canonical


@pytest.mark.parametrize(
    ("text", "message", "offset"),
    [
        ("", "the policy is empty; name what to keep", 0),
        ("  ", "the policy is empty", 0),
        ("x" * 5000, "at most 4096 characters, not 5000", 0),
        ("lsat(3)", "unknown rule 'lsat', did you mean 'last'?", 0),
        ("LAST(3)", "unknown rule 'LAST', did you mean 'last'?", 0),
        ("zzz", "unknown rule 'zzz'; known: last, best, every", 0),
        ("last(3) |", "expected a rule", 9),
        ("last(3) daily(2)", "expected '|' before the next rule", 8),
        ("last(3) || all", "expected a rule", 9),
        ("last", "expected '('", 4),
        ("last()", "expected a number from 1", 5),
        ("last(0)", "expected a number from 1", 5),
        ("last(-1)", "unexpected character '-'", 5),
        ("last(1.5)", "expected a number from 1", 5),
        ("last(9223372036854775808)", "expected a number from 1", 5),
        ("last(" + "9" * 4000 + ")", "expected a number from 1", 5),
        ("last(3", "expected ')'", 6),
        ("last(3, 4)", "expected ')'", 6),
        ("best(2)", "expected ',', as in best(2, loss, min)", 6),
        ("best(2, 5, min)", "expected the name of a metric", 8),
        ("best(2, '', min)", "expected the name of a metric", 8),
        ('best(2, "\\x", min)', "not a quoted name", 8),
        ("best(2, 'loss, min)", "this quote is never closed", 8),
        ("best(2, loss)", "expected ','", 12),
        ("best(2, loss, least)", "expected min (smaller is better) or max", 14),
        ("within(2)", "expected a duration such as 90s", 7),
        ("within(0s)", "expected a duration", 7),
        ("within(2y)", "expected a duration", 7),
        ("within(999999999999w)", "expected a duration", 7),
        ("pinned(1)", "expected ')'", 7),
        ("last(3) ; all", "unexpected character ';'", 8),
        ("last(3)\0", "unexpected character '\\x00'", 7),
    ],
)
def test_policy_that_cannot_be_read_names_the_place(text: str, message: str, offset: int) -> None:
    with pytest.raises(PolicyTextError) as caught:
        parse_policy(text)
    assert message in str(caught.value)
    assert caught.value.offset == offset


def test_error_points_at_the_wrong_word() -> None:
    with pytest.raises(PolicyTextError) as caught:
        parse_policy("last(3) | dialy(7)")
    assert str(caught.value) == (
        "unknown rule 'dialy', did you mean 'daily'? (at column 11)\n"
        "  last(3) | dialy(7)\n"
        "            ^^^^^"
    )


def test_error_in_a_long_text_shows_only_the_surroundings() -> None:
    with pytest.raises(PolicyTextError) as caught:
        parse_policy("last(3) | " * 30 + "dialy(7)" + " | last(3)" * 30)
    _, shown, carets = str(caught.value).split("\n")
    assert len(shown) <= 82
    assert shown[carets.index("^") :].startswith("dialy")


def test_error_in_a_text_with_control_characters_prints_none() -> None:
    with pytest.raises(PolicyTextError) as caught:
        parse_policy("last(3)\t|\x1b[2J")
    assert str(caught.value).splitlines()[1:] == ["  last(3)?|?[2J", "           ^"]


def test_error_is_one_of_ours_and_a_value_error() -> None:
    assert issubclass(PolicyTextError, CkptmgrError)
    assert issubclass(PolicyTextError, ValueError)


@given(st.text(alphabet="lastbe()|,' \"\\0123dwm.\n", max_size=40) | st.text(max_size=20))
def test_policy_of_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(PolicyTextError):
        policy = parse_policy(text)
        assert parse_policy(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("90s", timedelta(seconds=90)),
        ("30min", timedelta(minutes=30)),
        ("1d12h", timedelta(hours=36)),
        ("1w", timedelta(weeks=1)),
        ("1h1h", timedelta(hours=2)),
    ],
)
def test_duration_is_the_sum_of_its_parts(text: str, duration: timedelta) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "5", "h", "5 h", "1.5h", "-1h", "999999999999w", "1h "])
def test_duration_that_is_none_gives_none(text: str) -> None:
    assert parse_duration(text) is None


@pytest.mark.parametrize("text", ["within(30m)", "every(1h30m)", "within_daily(6m)"])
def test_typed_m_is_refused_because_it_means_months_elsewhere(text: str) -> None:
    with pytest.raises(PolicyTextError, match="m may mean minutes or months; write min"):
        parse_policy(text)


def test_stored_m_is_minutes_and_printed_as_min() -> None:
    assert str(parse_policy("within(1h30m)", is_stored=True)) == "within(1h30min)"
    assert parse_duration("30m") is None
    assert parse_duration("30m", is_stored=True) == timedelta(minutes=30)


@pytest.mark.parametrize(
    "text",
    [
        "yearly(3)",
        "within_hourly(2d)",
        "within_daily(1w)",
        "within_weekly(4w)",
        "within_monthly(52w)",
        "within_yearly(520w)",
        "every(1000, last=5)",
        "every(3h)",
        "epochs(2)",
    ],
)
def test_rules_of_other_tools_are_read_and_printed(text: str) -> None:
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("every(1000, 5)", "expected last="),
        ("every(1000, last 5)", "expected '='"),
        ("every(3h, last=5)", "expected '\\)'"),
        ("every(0, last=5)", "expected a number"),
    ],
)
def test_options_of_every_that_are_none_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(PolicyTextError, match=complaint):
        parse_policy(text)
