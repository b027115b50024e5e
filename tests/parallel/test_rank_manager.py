# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager` as one of many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from ckptmgr.config import CheckpointConfig
from ckptmgr.errors import NotBuiltYet, UnsupportedCheckpoint
from ckptmgr.fsio import FileSystem
from ckptmgr.manager import CheckpointManager
from ckptmgr.model import State
from ckptmgr.observe import Event, Observer
from ckptmgr.parallel.coordinator import Json
from ckptmgr.parallel.rank_errors import RankFailed
from ckptmgr.store import Store
from tests.crashmodel import FailingDisk, ModelDisk
from tests.faults.training import KEY, RUNS, SERIES, ModelProcesses
from tests.manager.damage import flip_bit
from tests.parallel.ranks import START, WORLD, Clock, Meeting, Outcome, Seat, run_ranks

T = TypeVar("T")


def state(rank: int, step: int) -> dict[str, object]:
    return {"weights": np.full(4, 100 * step + rank, np.float32), "rank": rank}


def manager(
    disk: ModelDisk,
    meeting: Meeting,
    rank: int,
    *,
    fs: FileSystem | None = None,
    observe: Observer | None = None,
    **config: Any,
) -> CheckpointManager:
    return CheckpointManager(
        RUNS,
        CheckpointConfig(**{"keep": "all", **config}),
        prefix=SERIES,
        fs=fs or disk,
        processes=ModelProcesses(disk),
        clock=Clock(),
        coordinator=Seat(meeting, rank),
        observe=observe,
    )


def run(
    disk: ModelDisk, work: Callable[[CheckpointManager, int], T], **config: Any
) -> list[Outcome[T]]:
    """Start a job in which every rank does something with its manager."""
    meeting = Meeting()

    def one(rank: int) -> T:
        with manager(disk, meeting, rank, **config) as ours:
            return work(ours, rank)

    return run_ranks(meeting, one)


def train(ours: CheckpointManager, rank: int) -> int:
    """Resume, train two steps, save both."""
    found = ours.resume(state(rank, 0))
    assert found.step == 0 or isinstance(found.state, dict)
    if isinstance(found.state, dict) and found.step:
        assert found.state["weights"].tolist() == state(rank, found.step)["weights"].tolist()  # type: ignore[attr-defined]
    for step in (found.step + 1, found.step + 2):
        ours.save(step, state(rank, step), metrics={"loss": 1.0 / step})
    ours.wait()
    return found.step


@pytest.mark.parametrize(
    "config",
    [{}, {"async_save": True}, {"enc_key": KEY, "enc_mode": "AES-GCM"}, {"format": "safetensors"}],
    ids=["sync", "thread", "encrypted", "safetensors"],
)
def test_every_rank_gets_its_own_state_back(config: dict[str, Any]) -> None:
    disk = ModelDisk()
    assert [o.must() for o in run(disk, train, **config)] == [0] * WORLD
    assert [o.must() for o in run(disk.restart(), train, **config)] == [2] * WORLD


def test_ranks_never_go_on_from_different_steps() -> None:
    disk = ModelDisk()
    run(disk, train)
    newest = max(Store(RUNS, fs=disk).scan(), key=lambda c: c.step)
    flip_bit(disk, newest.shards[2])
    outcomes = run(disk.restart(), lambda ours, rank: ours.resume(state(rank, 0)))
    for outcome in outcomes:
        found = outcome.must()
        assert found.step == 1
        assert len(found.skipped) == 1


def test_retention_and_pins_treat_the_files_of_a_step_as_one() -> None:
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> None:
        ours.save(1, state(rank, 1))
        ours.pin(1, "paper")
        for step in (2, 3):
            ours.save(step, state(rank, step))

    for outcome in run(disk, work, keep="last(1)"):
        assert outcome.raised is None, outcome.raised
    found = Store(RUNS, fs=disk).scan()
    assert {c.name: c.state for c in found} == {"net-1.shards": State.OK, "net-3.shards": State.OK}


def test_second_save_of_a_step_has_another_name() -> None:
    def work(ours: CheckpointManager, rank: int) -> list[str]:
        for _ in range(2):
            ours.save(5, state(rank, 5))
        return [c.name for c in ours.checkpoints()]

    for outcome in run(ModelDisk(), work):
        assert outcome.must() == ["net-5.shards", "net-5-r1.shards"]


def test_full_disk_of_one_rank_is_an_error_on_all_and_due_again() -> None:
    disk = ModelDisk()
    meeting = Meeting()

    def one(rank: int) -> str:
        fs = FailingDisk(disk, operation="reserve", call=2 if rank == 1 else None)
        with manager(disk, meeting, rank, fs=fs) as ours:
            ours.save(1, state(rank, 1))
            with pytest.raises(RankFailed, match="rank 1"):
                ours.save(2, state(rank, 2))
            ours.save(2, state(rank, 2))
            latest = ours.latest()
            return "" if latest is None else latest.name

    assert [o.must() for o in run_ranks(meeting, one)] == ["net-2.shards"] * WORLD


def test_nobody_is_told_that_a_save_is_durable_before_all_ranks_are_done() -> None:
    disk = ModelDisk()
    meeting = Meeting()
    heard: list[list[str]] = [[] for _ in range(WORLD)]

    def one(rank: int) -> None:
        fs = FailingDisk(disk, operation="reserve", call=1 if rank == 1 else None)

        def observe(event: Event) -> None:
            heard[rank].append(event.name)

        with manager(disk, meeting, rank, fs=fs, observe=observe) as ours:
            with pytest.raises(RankFailed):
                ours.save(1, state(rank, 1))
            ours.save(1, state(rank, 1))

    for outcome in run_ranks(meeting, one):
        assert outcome.raised is None, outcome.raised
    once = ["save.started", "save.failed", "save.started", "save.durable"]
    assert heard == [once] * WORLD


def test_checkpoint_of_many_ranks_is_not_resumed_by_one() -> None:
    disk = ModelDisk()
    run(disk, train)
    alone = CheckpointManager(RUNS, prefix=SERIES, fs=disk, processes=ModelProcesses(disk))
    with alone, pytest.raises(UnsupportedCheckpoint, match="was saved by 3 ranks"):
        alone.resume()


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"async_save": "process"}, NotBuiltYet, "use async_save=True"),
        ({"async_save": True, "back_pressure": "skip"}, ValueError, "use 'wait'"),
        ({"async_save": True, "on_error": "warn"}, ValueError, "use 'raise' or 'retry"),
        ({"async_save": True, "on_error": print}, ValueError, "use 'raise' or 'retry"),
        (
            {"save_checkpoint_steps": 0, "save_checkpoint_seconds": 9},
            ValueError,
            "use save_checkpoint_steps",
        ),
    ],
)
def test_what_ranks_cannot_agree_on_is_refused(
    config: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        manager(ModelDisk(), Meeting(), 0, **config)


def test_rollback_of_many_ranks_is_not_built_yet() -> None:
    with manager(ModelDisk(), Meeting(1), 0) as ours, pytest.raises(NotBuiltYet):
        ours.rollback()


def test_checkpoints_carry_the_time_of_rank_0() -> None:
    def work(ours: CheckpointManager, rank: int) -> float:
        handle = ours.save(1, state(rank, 1))
        assert handle is not None
        return handle.wait().saved_at.timestamp()

    assert [o.must() for o in run(ModelDisk(), work)] == [START] * WORLD


def test_two_managers_of_a_series_over_one_coordinator_never_say_the_same_tag() -> None:
    disk = ModelDisk()

    class Listening(Seat):
        said: ClassVar[list[str]] = []

        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            self.said.append(f"{self.rank}: {tag}")
            return super().all_gather(tag, value, timeout_s=timeout_s)

    seat = Listening(Meeting(1), 0)
    for directory in (RUNS, RUNS / "other"):
        with CheckpointManager(
            directory, prefix=SERIES, fs=disk, processes=ModelProcesses(disk), coordinator=seat
        ) as ours:
            ours.resume()
    assert Listening.said
    assert len(Listening.said) == len(set(Listening.said))
