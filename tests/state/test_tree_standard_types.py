# SPDX-License-Identifier: Apache-2.0
"""Values of Python's standard library in a state: times, paths, decimals, ranges, deques, defaultdicts."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr import CheckpointConfig, CheckpointManager, Snapshots, StateMismatch, UnsupportedState
from ckptmgr.state.paths import TreeError
from ckptmgr.state.skeleton_merge import merge_skeletons
from ckptmgr.state.tree import flatten, restore, unflatten
from tests.support.trees import reader, round_trip, same

OFFSETS = st.timedeltas(timedelta(hours=-23, minutes=-59), timedelta(hours=23, minutes=59)).map(
    lambda offset: timezone(offset if abs(offset) >= timedelta(seconds=1) else timedelta())
)
ZONES = st.none() | OFFSETS
NOTHING: dict[str, np.ndarray] = {}
FINITE = st.decimals(allow_nan=False, min_value=-(10**12), max_value=10**12)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "datetime": st.datetimes(timezones=ZONES, allow_imaginary=True),
    "date": st.dates(),
    "time": st.times(timezones=ZONES),
    "timedelta": st.timedeltas(),
    "decimal": FINITE | st.sampled_from([Decimal("-0"), Decimal("1E-999999"), Decimal("Infinity")]),
    "range": st.builds(
        range,
        st.integers(-(2**40), 2**40),
        st.integers(-(2**40), 2**40),
        st.integers(1, 9) | st.integers(-9, -1),
    ),
    "path": st.text(st.characters(exclude_characters="\0"), max_size=20).map(Path),
    "pureposixpath": st.text(max_size=20).map(PurePosixPath),
    "purewindowspath": st.text(max_size=20).map(PureWindowsPath),
}


def _into(target: object, state: object) -> Any:
    flat = flatten(state)
    return restore(target, flat.skeleton, reader(flat))


@pytest.mark.parametrize("kind", VALUES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_value_comes_back_equal_as_a_value_as_a_key_and_in_a_target(
    kind: str, data: st.DataObject
) -> None:
    value = data.draw(VALUES[kind])
    state = {"value": value, "keys": {value: 1}, "set": {value}}
    back = round_trip(state)
    assert same(back["value"], value)
    assert repr(back["value"]) == repr(value)
    assert back == state
    assert json.loads(flatten(value).skeleton) == {
        "version": 3,
        "nodes": [{kind: json.loads(flatten(value).skeleton)["nodes"][0][kind]}],
    }
    assert repr(_into([None, value], [value, value])) == repr([value, value])


def test_values_and_containers_survive_a_save_and_a_resume(tmp_path: Path) -> None:
    history: dict[str, list[float]] = defaultdict(list, {"loss": [0.5, 0.25]})
    state = {
        "began": datetime(2026, 11, 23, 8, 30, tzinfo=UTC),
        "day": date(2026, 11, 23),
        "data": Path("/data/train"),
        "price": Decimal("0.10"),
        "steps": range(0, 100, 5),
        "window": deque([1.0, 2.0], maxlen=3),
        "replay": deque([np.ones(2), np.zeros(2)]),
        "history": history,
    }
    config = CheckpointConfig()
    with CheckpointManager(tmp_path, config, prefix="net") as manager:
        manager.save(1, state)
    target: dict[str, Any] = {
        "began": datetime(1, 1, 1),
        "day": date(1, 1, 1),
        "data": Path(),
        "price": Decimal(0),
        "steps": range(0),
        "window": deque([9.0], maxlen=3),
        "replay": deque(),
        "history": defaultdict(list),
    }
    window, metrics = target["window"], target["history"]
    CheckpointManager(tmp_path, config, prefix="net").resume(target)
    assert repr(target) == repr(state)
    assert target["window"] is window
    assert target["history"] is metrics
    assert metrics["new"] == []


@pytest.mark.parametrize(
    "value",
    [Decimal("NaN123"), Decimal("-sNaN"), datetime(2026, 10, 25, 2, 30, fold=1), time(2, fold=1)],
    ids=str,
)
def test_value_that_equality_cannot_check_comes_back_with_every_part(value: object) -> None:
    back = round_trip([value])[0]
    assert repr(back) == repr(value)
    assert getattr(back, "fold", None) == getattr(value, "fold", None)


def test_time_zone_comes_back_as_its_offset() -> None:
    summer = datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))
    back = round_trip(summer)
    assert back == summer
    assert back.tzinfo == timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (Decimal("1E+1000000"), "more than 1000 digits or an exponent over 999999"),
        (Decimal("1" * 1001), "more than 1000 digits"),
        (range(2**63), "bounds or a step beyond 64 bits"),
        (time(1, tzinfo=ZoneInfo("Europe/Berlin")), "a time zone whose offset depends on the date"),
        (
            datetime(2026, 1, 1, tzinfo=timezone(timedelta(microseconds=-1))),
            "a time zone less than a second from UTC",
        ),
        (Path("a" * 70_000), "more than 65536 characters"),
    ],
    ids=["exponent", "digits", "range", "zone", "offset", "path"],
)
def test_value_beyond_its_text_form_is_refused_with_its_path(value: object, problem: str) -> None:
    with pytest.raises(
        UnsupportedState, match=rf"state\['x'\] is a .*, which has {problem}(?s:.*)as a string"
    ):
        flatten({"x": value})


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("datetime", "2026-02-30T00:00:00"),
        ("datetime", "10000-01-01T00:00:00"),
        ("datetime", "2026-11-23"),
        ("datetime", "2026-11-23T00:00:00+24:00"),
        ("datetime", "2026-11-23 00:00:00"),
        ("datetime", "2026-11-23T00:00:00 fold=2"),
        ("datetime", 5),
        ("date", "20261123"),
        ("date", "2026-W01-1"),
        ("time", "25:00:00"),
        ("time", "10:00"),
        ("timedelta", "1000000000 0 0"),
        ("timedelta", "0 86400 0"),
        ("timedelta", "1"),
        ("timedelta", "1 2 3 4 5 6 7 8"),
        ("timedelta", "9" * 5000 + " 0 0"),
        ("decimal", "1E+1000000"),
        ("decimal", "1E+99999999999999999999"),
        ("decimal", "1" * 1001),
        ("decimal", "1" * 100_000),
        ("decimal", "1_0"),
        ("decimal", " 1"),
        ("decimal", "x"),
        ("decimal", ["1"]),
        ("range", "0 9223372036854775808 1"),
        ("range", "0 1 0"),
        ("range", "0 1"),
        ("range", "0  1 1"),
        ("path", "a//b"),
        ("path", "a" * 70_000),
        ("path", None),
        ("purewindowspath", "a/b"),
    ],
)
def test_other_spelling_than_its_own_is_refused(kind: str, body: object) -> None:
    skeleton = json.dumps({"version": 3, "nodes": [{kind: body}]})
    with pytest.raises(TreeError, match=f"a {kind} is spelled"):
        unflatten(skeleton, NOTHING.__getitem__)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(VALUES)), st.text(max_size=30))
def test_any_text_is_a_value_or_a_tree_error(kind: str, text: str) -> None:
    skeleton = json.dumps({"version": 3, "nodes": [{kind: text}]})
    try:
        value = unflatten(skeleton, NOTHING.__getitem__)
    except TreeError:
        return
    assert json.loads(flatten(value).skeleton)["nodes"] == [{kind: text}]


def test_states_without_new_kinds_keep_their_version() -> None:
    shared = [1]
    assert json.loads(flatten([1, {"a": 2.0}]).skeleton)["version"] == 1
    assert json.loads(flatten([shared, shared]).skeleton)["version"] == 2
    assert json.loads(flatten([shared, shared, date(1, 1, 1)]).skeleton)["version"] == 3


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers() | st.floats(allow_nan=False)), st.none() | st.integers(0, 9))
def test_deque_comes_back_with_its_maxlen(values: list[Any], maxlen: int | None) -> None:
    window = deque(values, maxlen)
    back = round_trip({"window": window, "deep": [deque([window])]})
    assert type(back["window"]) is deque
    assert (back["window"], back["window"].maxlen) == (window, maxlen)
    assert back["deep"][0][0] is back["window"]
    target = deque([0, 1, 2], maxlen)
    assert _into(target, window) is target
    assert target == window


def test_deque_of_arrays_is_filled_in_place() -> None:
    first = np.zeros(2)
    target = deque([first, np.zeros(2)])
    _into(target, deque([np.ones(2), np.ones(2)]))
    assert first.tolist() == [1, 1]
    assert target[0] is first


def test_deque_that_has_grown_is_given_what_was_stored(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=1000)
    with CheckpointManager(tmp_path, config, snapshots=Snapshots(1, most=5)) as manager:
        state: dict[str, Any] = {"replay": deque(maxlen=100)}
        replay = state["replay"]
        for step in range(1, 4):
            replay.append(np.full(2, step))
            manager.step_end(step, state)
        manager.rollback(state, steps_back=1)
    assert state["replay"] is replay
    assert [one.tolist() for one in replay] == [[1, 1], [2, 2]]


def test_deque_in_two_places_of_the_target_takes_one_value() -> None:
    one = deque([np.zeros(2)])
    _into([one, one], [deque([np.ones(2)]), deque([np.ones(2)])])
    assert one[0].tolist() == [1, 1]
    with pytest.raises(StateMismatch, match="is the same object as"):
        _into([one, one], [deque([np.ones(2)]), deque([np.zeros(2)])])


@pytest.mark.parametrize(
    ("target", "stored", "problem"),
    [
        (deque(maxlen=3), deque(maxlen=5), r"state\['x'\] has maxlen 3, stored is 5"),
        (deque(), [], r"state\['x'\] is a deque, stored is a list"),
        ([], deque(), r"state\['x'\] is a list, stored is a deque"),
        (defaultdict(int, a=1), defaultdict(int), r"state\['x'\]\['a'\] is not in the checkpoint"),
        ({"b": 1}, defaultdict(int, a=1, b=1), r"state\['x'\]\['a'\] is only in the checkpoint"),
    ],
    ids=["maxlen", "list", "deque", "missing", "extra"],
)
def test_container_that_does_not_fit_is_named(target: object, stored: object, problem: str) -> None:
    with pytest.raises(StateMismatch, match=problem):
        _into({"x": target}, {"x": stored})


def test_defaultdict_without_a_target_has_no_factory() -> None:
    back = round_trip({"d": defaultdict(list, {"a": [1]})})["d"]
    assert type(back) is defaultdict
    assert (back, back.default_factory) == ({"a": [1]}, None)


def test_list_of_times_is_a_history_of_any_length() -> None:
    assert _into([date(1, 1, 1)], [date(2, 2, 2), date(3, 3, 3)]) == [date(2, 2, 2), date(3, 3, 3)]


def test_rank_without_a_file_takes_deques_and_defaultdicts_that_all_agree_on() -> None:
    state = {"d": deque([1, 2], 3), "m": defaultdict(int, a=1), "rank": 0, "day": date(1, 1, 1)}
    first, other = flatten(state).skeleton, flatten({**state, "rank": 1}).skeleton
    merged = merge_skeletons(first, [other], flatten({**state, "rank": 7}).skeleton, has=bool)
    back: Any = unflatten(merged.skeleton, NOTHING.__getitem__)
    assert back == {**state, "rank": 7}
    assert back["d"].maxlen == 3
