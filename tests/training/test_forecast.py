# SPDX-License-Identifier: Apache-2.0
"""The forecast: pure decisions about space, memory and time, and when a run hears of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    Forecast,
    MemoryConfig,
    Overhead,
    SaveHandle,
    UnsupportedState,
    parse_policy,
)
from ckptmgr.core.handle import SaveStats
from ckptmgr.memory_config import MIB
from ckptmgr.observe.observers import Event, Observers
from ckptmgr.policy.forecast import GOOD_SHARE, Demand, Pace, most_kept
from ckptmgr.training.forecast import Forecaster, available_memory_bytes, demand_of
from tests.support import api
from tests.support.runs import callback_on, manager_on
from tests.support.surface import Loop

GB = 2**30
DEMAND = Demand(save_bytes=2 * GB, keep=5, policy="last(5)", free_bytes=100 * GB)
PACE = Pace(saves=10, interval_s=100.0, blocked_s=1.0, durable_s=5.0)


class SmallDisk(api.OsFileSystem):
    """A disk with room for so many bytes."""

    def __init__(self, free_bytes: int) -> None:
        super().__init__()
        self.free = free_bytes

    def free_bytes(self, path: Path) -> int | None:
        assert path.is_dir()
        return self.free


def kinds(forecast: Forecast) -> list[str]:
    return [concern.kind for concern in forecast.concerns]


def heard_of(events: list[Event]) -> list[str | None]:
    return [event.error_type for event in events if event.name == "forecast"]


@pytest.mark.parametrize(
    ("policy", "count"),
    [
        ("last(3)", 3),
        ("last(3) | best(2, loss, min)", 5),
        ("hourly(2) | daily(3) | weekly(4) | monthly(5)", 14),
        ("last(2) | pinned", 2),
        ("pinned", 1),
        ("last(3) | every(100)", None),
        ("within(2d)", None),
        ("all", None),
    ],
)
def test_most_kept_is_the_sum_of_what_is_bounded(policy: str, count: int | None) -> None:
    assert most_kept(parse_policy(policy)) == count


def test_all_is_well_where_everything_fits() -> None:
    forecast = Forecast(demand=DEMAND, pace=PACE)
    assert (forecast.needed_bytes, forecast.room, forecast.concerns) == (12 * GB, 50, ())
    assert str(forecast).splitlines() == [
        "a checkpoint takes 2.0 GiB; last(5) keeps at most 5",
        "the disk has 100 GiB free, room for 50 more; 12.0 GiB are needed",
        "saving holds up the training for 1.0% of the time: 1 s every 100 s;"
        " a checkpoint is durable after 5 s",
    ]


@given(save_bytes=st.integers(1, 10**12), keep=st.integers(1, 100), present=st.integers(0, 10**12))
def test_disk_is_enough_exactly_from_what_is_needed_on(
    save_bytes: int, keep: int, present: int
) -> None:
    demand = replace(DEMAND, save_bytes=save_bytes, keep=keep, present_bytes=present)
    needed = Forecast(demand=demand).needed_bytes
    assert needed is not None
    assert kinds(Forecast(demand=replace(demand, free_bytes=needed))) == []
    if needed:
        assert kinds(Forecast(demand=replace(demand, free_bytes=needed - 1))) == ["disk"]


def test_disk_too_small_names_what_would_fit() -> None:
    (concern,) = Forecast(demand=replace(DEMAND, free_bytes=9 * GB)).concerns
    assert "9.0 GiB free" in concern.text
    assert "12.0 GiB: 6 checkpoints of 2.0 GiB" in concern.text
    assert concern.hint == "free 3.0 GiB, or keep at most 3"


def test_disk_too_small_for_two_has_no_smaller_policy_to_offer() -> None:
    (concern,) = Forecast(demand=replace(DEMAND, free_bytes=3 * GB)).concerns
    assert concern.hint == "free 9.0 GiB"


@pytest.mark.parametrize(("free_bytes", "found"), [(20 * GB, []), (20 * GB - 1, ["disk"])])
def test_policy_without_a_bound_needs_room_for_ten(free_bytes: int, found: list[str]) -> None:
    demand = replace(DEMAND, keep=None, policy="every(100)", free_bytes=free_bytes)
    forecast = Forecast(demand=demand)
    assert (kinds(forecast), forecast.needed_bytes) == (found, None)
    assert "keeps any number" in str(forecast)


def test_empty_state_and_unknown_disk_are_no_concern() -> None:
    assert kinds(Forecast(demand=replace(DEMAND, save_bytes=0, free_bytes=0))) == []
    unknown = Forecast(demand=replace(DEMAND, free_bytes=None))
    assert (kinds(unknown), unknown.room) == ([], None)
    assert "disk" not in str(unknown)
    assert "any number more" in str(Forecast(demand=replace(DEMAND, save_bytes=0)))


@pytest.mark.parametrize(
    ("states", "has_budget", "text", "hint"),
    [
        (1, True, "takes 2.0 GiB of memory, but the memory budget is 1.0 GiB", "host_budget_bytes"),
        (
            2,
            False,
            "takes 4.0 GiB of memory for 2 states, but the system has 1.0 GiB",
            "async_save",
        ),
    ],
)
def test_memory_that_does_not_hold_the_copies(
    states: int, has_budget: bool, text: str, hint: str
) -> None:
    demand = replace(DEMAND, staged_states=states, memory_bytes=GB, has_memory_budget=has_budget)
    (concern,) = Forecast(demand=demand).concerns
    assert (concern.kind, text in concern.text, hint in concern.hint) == ("memory", True, True)
    assert kinds(Forecast(demand=replace(demand, memory_bytes=4 * GB))) == []
    assert "into memory" in str(Forecast(demand=demand))


@pytest.mark.parametrize("may_spill", [True, False])
def test_spilling_is_advised_only_where_it_would_help(may_spill: bool) -> None:
    demand = replace(DEMAND, staged_states=1, memory_bytes=GB, has_memory_budget=True)
    (concern,) = Forecast(demand=replace(demand, may_spill=may_spill)).concerns
    assert ("spill_directory" in concern.hint) == may_spill


@pytest.mark.parametrize(
    ("blocked_s", "saves", "found"),
    [(10.0, 10, []), (10.1, 10, ["time"]), (60.0, 1, ["time"]), (0.4, 10, [])],
)
def test_saving_that_costs_more_than_a_tenth_is_told(
    blocked_s: float, saves: int, found: list[str]
) -> None:
    interval_s = 1.0 if blocked_s < 1 else 100.0
    pace = replace(PACE, blocked_s=blocked_s, saves=saves, interval_s=interval_s)
    assert kinds(Forecast(demand=DEMAND, pace=pace)) == found


@pytest.mark.parametrize("states", [0, 1])
def test_saving_that_costs_too_much_names_the_interval_that_would_do(states: int) -> None:
    pace = replace(PACE, blocked_s=30.0)
    (concern,) = Forecast(demand=replace(DEMAND, staged_states=states), pace=pace).concerns
    assert concern.text == "saving costs 30% of the training time: 30 s every 100 s"
    assert "save every 1000 s or less often" in concern.hint
    assert ("async_save='process'" in concern.hint) is (states == 0)
    assert Pace(saves=1, interval_s=1000.0, blocked_s=30.0, durable_s=0.0).share == GOOD_SHARE


@pytest.mark.parametrize(
    ("durable_s", "states", "found"),
    [(101.0, 1, ["backlog"]), (100.0, 1, []), (101.0, 0, [])],
)
def test_save_in_the_background_that_outlasts_the_interval_is_told(
    durable_s: float, states: int, found: list[str]
) -> None:
    pace = replace(PACE, durable_s=durable_s)
    demand = replace(DEMAND, staged_states=states)
    assert kinds(Forecast(demand=demand, pace=pace)) == found


def test_share_of_no_time_is_zero_and_never_above_one() -> None:
    assert replace(PACE, interval_s=0.0).share == 0.0
    assert replace(PACE, interval_s=0.5).share == 1.0


@pytest.mark.parametrize(
    ("config", "states", "memory_bytes"),
    [
        ({}, 0, 7),
        ({"async_save": True}, 1, 7),
        ({"async_save": "process", "back_pressure": "coalesce"}, 2, 7),
        ({"async_save": True, "memory": MemoryConfig()}, 1, 7),
        ({"async_save": True, "memory": MemoryConfig(host_budget_bytes=MIB)}, 1, MIB),
        (
            {
                "async_save": True,
                "memory": MemoryConfig(host_budget_bytes=MIB, spill_directory=Path("/spill")),
            },
            1,
            None,
        ),
        (
            {
                "async_save": True,
                "memory": MemoryConfig.from_mindspore({"offload_cpu_size": "1GB"}),
            },
            1,
            1024 * MIB,
        ),
    ],
)
def test_demand_of_a_configuration(
    config: dict[str, Any], states: int, memory_bytes: int | None
) -> None:
    demand = demand_of(CheckpointConfig(**config), 5, available_bytes=7)
    assert (demand.staged_states, demand.memory_bytes) == (states, memory_bytes)
    assert (demand.keep, demand.policy) == (5, "last(5)")


def test_available_memory_is_read_from_the_system(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal: 5 kB\nMemAvailable:       3 kB\n")
    assert available_memory_bytes(file) == 3072
    file.write_text("MemAvailable:\n")
    assert available_memory_bytes(file) is None
    file.write_text("MemTotal: 5 kB\n")
    assert available_memory_bytes(file) is None
    assert available_memory_bytes(tmp_path / "none") is None


def test_run_hears_of_a_small_disk_once_before_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Event] = []
    config = CheckpointConfig(save_checkpoint_steps=3)
    disk = SmallDisk(5 * MIB)
    manager = manager_on(tmp_path / "new", config, fs=disk, observe=heard.append)
    state = {"w": np.zeros(MIB, np.uint8)}
    with manager:
        manager.step_end(1, state)
        assert heard_of(heard) == ["disk"]
        assert not (tmp_path / "new").exists()
        manager.step_end(2, state)
        manager.step_end(3, state)
    assert heard_of(heard) == ["disk"]
    assert len([r for r in caplog.records if r.name == "ckptmgr.training.forecast"]) == 1
    assert "need 6.0 MiB: 6 checkpoints of 1.0 MiB\nhint: free" in caplog.text


def test_state_behind_a_function_is_asked_for_only_when_it_is_saved(tmp_path: Path) -> None:
    heard: list[Event] = []
    asked: list[int] = []

    def state() -> dict[str, object]:
        asked.append(1)
        return {"w": np.zeros(MIB, np.uint8)}

    config = CheckpointConfig(save_checkpoint_steps=2)
    with manager_on(tmp_path, config, fs=SmallDisk(5 * MIB), observe=heard.append) as manager:
        manager.step_end(1, state)
        assert (asked, heard_of(heard)) == ([], [])
        manager.step_end(2, state)
    assert (asked, heard_of(heard)) == ([1], ["disk"])


def test_state_that_cannot_be_saved_is_refused_at_the_first_step(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=100)
    manager = CheckpointManager(tmp_path, config)
    for step in (1, 2):  # also if the first error was caught
        with pytest.raises(UnsupportedState, match=r"(?s)state\['loader'\] is a object.*hint: "):
            manager.step_end(step, {"loader": object()})
    assert manager.step_end(3, {"loader": None}) is None
    manager.close()


def test_result_of_state_dict_that_cannot_be_saved_is_refused_at_the_first_step(
    tmp_path: Path,
) -> None:
    class Loader:
        def state_dict(self) -> object:
            return {"file": object()}

    config = CheckpointConfig(save_checkpoint_steps=100)
    with pytest.raises(UnsupportedState, match=r"state\['loader'\].state_dict\(\)\['file'\]"):
        CheckpointManager(tmp_path, config).step_end(1, {"loader": Loader()})


def test_state_whose_code_fails_fails_when_it_is_saved_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def state_dict(self) -> object:
            raise ZeroDivisionError

    config = CheckpointConfig(save_checkpoint_steps=2)
    manager = CheckpointManager(tmp_path, config)
    with caplog.at_level(logging.DEBUG, "ckptmgr"):
        manager.step_end(1, {"loader": Broken()})
    assert "no forecast: ZeroDivisionError" in caplog.text
    with pytest.raises(ZeroDivisionError):
        manager.step_end(2, {"loader": Broken()})


def test_run_that_never_saves_is_not_asked_for_its_state(tmp_path: Path) -> None:
    config = CheckpointConfig(save_checkpoint_steps=0, save_checkpoint_seconds=0)
    heard: list[Event] = []
    manager = CheckpointManager(tmp_path, config, observe=heard.append)
    manager.step_end(1, {"loader": object()})
    assert heard == []


def test_checkpoints_of_the_run_count_as_kept(tmp_path: Path) -> None:
    state = {"w": np.zeros(MIB, np.uint8)}
    config = CheckpointConfig(keep="last(2)")
    with manager_on(tmp_path, config, fs=SmallDisk(50 * MIB)) as manager:
        before = manager.forecast(state)
        manager.save(1, state)
        after = manager.forecast()
    assert before.needed_bytes == 3 * before.demand.save_bytes
    assert after.demand.present_bytes == after.demand.save_bytes > MIB
    assert after.needed_bytes == 2 * after.demand.save_bytes
    assert after.demand.free_bytes == 50 * MIB


def test_forecast_of_an_unknown_size_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    with pytest.raises(CheckpointNotFound, match="pass the state"):
        manager.forecast()


def test_callback_hears_of_a_small_disk_before_training(tmp_path: Path) -> None:
    heard: list[Event] = []
    callback = callback_on(
        "net", str(tmp_path), CheckpointConfig(), fs=SmallDisk(1), observe=heard.append
    )
    callback.begin(Loop(callbacks=()))
    assert heard_of(heard) == ["disk"]


def test_callback_whose_names_are_computed_foresees_nothing(tmp_path: Path) -> None:
    heard: list[Event] = []
    callback = callback_on(
        lambda _: "net", str(tmp_path), CheckpointConfig(), fs=SmallDisk(1), observe=heard.append
    )
    callback.begin(Loop(callbacks=()))
    assert heard == []


def noted(forecaster: Forecaster, at: float, **stats: Any) -> None:
    forecaster.saved(SaveHandle(stats=SaveStats(**stats)), api.SaveFacts(step=1, at=at))


def test_pace_leaves_out_the_first_save_and_those_that_failed() -> None:
    forecaster = Forecaster(CheckpointConfig(), Observers())
    noted(forecaster, 0.0, blocked_s=9.0, write_s=9.0, size_bytes=1)
    noted(forecaster, 10.0, blocked_s=1.0, write_s=1.0, stage_s=0.5, size_bytes=1)
    assert forecaster.pace is None
    noted(forecaster, 20.0, blocked_s=2.0, sync_s=1.0, commit_s=0.5, size_bytes=1)
    noted(forecaster, 30.0, blocked_s=3.0)
    assert forecaster.pace == Pace(saves=4, interval_s=10.0, blocked_s=2.0, durable_s=1.5)


def test_pace_of_saves_that_are_all_in_flight_knows_what_is_known() -> None:
    forecaster = Forecaster(CheckpointConfig(async_save=True), Observers())
    for at in (0.0, 10.0, 20.0):
        noted(forecaster, at, blocked_s=1.0, stage_s=0.5)
    assert forecaster.pace == Pace(saves=3, interval_s=10.0, blocked_s=1.0, durable_s=0.5)


def test_costly_saves_are_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    forecaster = Forecaster(CheckpointConfig(async_save=True), Observers(heard.append))
    for at in range(0, 100, 10):
        noted(forecaster, float(at), blocked_s=6.0, write_s=11.0, size_bytes=1)
    assert heard_of(heard) == ["time", "backlog"]
    assert len(caplog.records) == 2


def test_cost_is_told_once_however_long_the_run() -> None:
    heard: list[Event] = []
    forecaster = Forecaster(CheckpointConfig(), Observers(heard.append))
    for at in range(0, 100, 10):
        noted(forecaster, float(at), blocked_s=6.0, size_bytes=1)
    assert heard_of(heard) == ["time"]


def test_saves_within_their_share_are_not_told() -> None:
    heard: list[Event] = []
    forecaster = Forecaster(CheckpointConfig(), Observers(heard.append))
    for at in range(0, 1000, 100):
        noted(forecaster, float(at), blocked_s=3.0, size_bytes=1)
    assert heard == []


@pytest.mark.parametrize("mode", [False, "thread"])
def test_overhead_spaces_saves_by_what_the_last_one_cost(tmp_path: Path, mode: bool | str) -> None:
    now = [1000.0]
    share = 0.25
    config = CheckpointConfig(save_checkpoint_overhead=share, async_save=mode)
    assert config.save_policy() == Overhead(share)
    state = {"w": np.zeros(4, np.uint8)}
    saved: list[Checkpoint] = []
    with manager_on(tmp_path, config, clock=lambda: now[0]) as manager:
        handle = manager.step_end(1, state)
        assert handle is not None  # to learn the cost
        saved.append(handle.wait())
        interval_s = handle.stats.blocked_s / share
        assert interval_s > 0
        now[0] = 1000.0 + interval_s * 0.9
        assert manager.step_end(2, state) is None
        now[0] = 1000.0 + interval_s * 1.1
        due = manager.step_end(3, state)
        assert due is not None
        saved.append(due.wait())
    assert [checkpoint.step for checkpoint in saved] == [1, 3]


@pytest.mark.parametrize(
    ("budget", "limit"),
    [(None, "limit of this container"), (3 * GB, "limit of this container"), (MIB, "budget is")],
)
def test_limit_of_a_container_counts_where_it_is_the_smallest(
    budget: int | None, limit: str
) -> None:
    memory = None if budget is None else MemoryConfig(host_budget_bytes=budget)
    config = CheckpointConfig(async_save=True, memory=memory)
    demand = demand_of(config, 2 * GB, available_bytes=64 * GB, group_bytes=GB)
    [concern] = [one for one in Forecast(demand=demand).concerns if one.kind == "memory"]
    assert limit in concern.text
    assert "async_save=False" in concern.hint
