# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and retention rules for the tests of policies."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hypothesis import strategies as st

from ckptmgr import Checkpoint
from ckptmgr.core.model import Pin, State
from ckptmgr.policy.rules import All, Best, Epochs, Every, Last, Pinned, Rule
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
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
_COUNTS = st.integers(1, 6)


def checkpoint(
    step: int,
    *,
    age: timedelta = timedelta(0),
    attempt: int = 0,
    series: str = "net",
    metrics: Mapping[str, float] | None = None,
    pins: tuple[Pin, ...] = (),
    state: State = State.OK,
    problem: str | None = None,
    sequence: int | None = None,
    why: str = "policy",
    health: str | None = None,
) -> Checkpoint:
    """Return a checkpoint of 100 bytes, saved `age` before NOW, committed in the order of the steps unless told."""
    return Checkpoint(
        path=Path(f"{series}-{step}-{attempt}.ckpt"),
        series=series,
        step=step,
        attempt=attempt,
        sequence=step * 10 + attempt if sequence is None else sequence,
        why=why,
        saved_at=NOW - age,
        size_bytes=100,
        metrics=metrics or {},
        pins=pins,
        health=health,
        state=state,
        problem=problem,
    )


def rules() -> st.SearchStrategy[Rule]:
    """Return every kind of rule, with numbers small enough to matter in a history of about ten."""
    metrics = st.sampled_from(["loss", "acc"]) | st.text(min_size=1, max_size=5)
    ages = st.integers(1, 10**6).map(lambda s: timedelta(seconds=s))
    return st.one_of(
        st.builds(Last, _COUNTS),
        st.builds(Best, _COUNTS, metrics, st.sampled_from(["min", "max"])),
        st.builds(Every, _COUNTS),
        st.builds(Every, _COUNTS, _COUNTS),
        st.builds(EveryTime, ages),
        st.builds(Epochs, _COUNTS),
        st.builds(Yearly, _COUNTS),
        st.builds(WithinHourly, ages),
        st.builds(WithinDaily, ages),
        st.builds(WithinWeekly, ages),
        st.builds(WithinMonthly, ages),
        st.builds(WithinYearly, ages),
        st.builds(Within, ages),
        st.builds(Hourly, _COUNTS),
        st.builds(Daily, _COUNTS),
        st.builds(Weekly, _COUNTS),
        st.builds(Monthly, _COUNTS),
        st.builds(PerMinutes, st.integers(1, 5000)),
        st.just(Pinned()),
        st.just(All()),
    )


def histories() -> st.SearchStrategy[list[Checkpoint]]:
    """Return histories of up to two series, in any order and state, some dated in the future."""
    values = st.floats(-2, 2) | st.sampled_from([float("nan"), float("inf"), 0.5])
    one = st.builds(
        checkpoint,
        st.integers(0, 12),
        age=st.integers(-(10**5), 10**7).map(lambda s: timedelta(seconds=s)),
        attempt=st.integers(0, 1),
        series=st.sampled_from(["net", "other"]),
        metrics=st.dictionaries(st.sampled_from(["loss", "acc"]), values),
        pins=st.sampled_from([(), (), (), (Pin(name="paper"),)]),
        sequence=st.integers(0, 20) | st.none(),
        why=st.sampled_from(["policy", "policy", "policy", "exception: KeyboardInterrupt"]),
        health=st.sampled_from([None, None, "not finite: w"]),
        state=st.sampled_from(
            [State.OK, State.OK, State.UNVERIFIED, State.CORRUPT, State.LEFTOVER]
        ),
    )
    return st.lists(one, max_size=12, unique_by=lambda item: item.path)
