# SPDX-License-Identifier: Apache-2.0
"""`CheckpointManager` as one of many ranks."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    MemoryConfig,
    RankFailed,
    Ranks,
    RanksMissing,
    RanksOutOfStep,
    ResumeFailed,
    Resumption,
    Snapshots,
    StateMismatch,
    UnsupportedCheckpoint,
    UnsupportedState,
)
from ckptmgr.formats.strict_json import Json
from ckptmgr.io.filesystem import FileStatus
from ckptmgr.io.temp_names import temp_name
from ckptmgr.observe.observers import Event, Observer
from ckptmgr.parallel import ParallelLayout
from tests.faults.training import KEY, KEYS, RUNS, SERIES, ModelProcesses
from tests.parallel.ranks import START, WORLD, Clock, Meeting, Outcome, Seat, run_ranks
from tests.support import api
from tests.support.crashmodel import FailingDisk, ModelDisk
from tests.support.damage import flip_bit
from tests.support.held import interfere
from tests.support.runs import manager_on

T = TypeVar("T")


def state(rank: int, step: int) -> dict[str, object]:
    return {"weights": np.full(4, 100 * step + rank, np.float32), "rank": rank}


def manager(
    disk: ModelDisk,
    meeting: Meeting,
    rank: int,
    *,
    fs: api.FileSystem | None = None,
    observe: Observer | None = None,
    snapshots: int = 2,
    **config: Any,
) -> CheckpointManager:
    return manager_on(
        RUNS,
        CheckpointConfig(**{"keep": "all", **config}),
        fs=fs or disk,
        processes=ModelProcesses(disk),
        clock=Clock(),
        ranks=Ranks(Seat(meeting, rank)),
        snapshots=Snapshots(most=snapshots),
        prefix=SERIES,
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
    newest = max(api.listed(RUNS, fs=disk), key=lambda c: c.step)
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
    found = api.listed(RUNS, fs=disk)
    assert {c.name: c.state for c in found} == {
        "net-1.shards": api.State.OK,
        "net-3.shards": api.State.OK,
    }


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


def save_and_wait(ours: CheckpointManager, step: int, value: object) -> None:
    ours.save(step, value)
    ours.wait()


class Unstorable:
    """Nothing that a tree can hold."""


def no_state() -> object:
    raise ZeroDivisionError("no state")


@pytest.mark.parametrize("config", [{}, {"async_save": True}], ids=["sync", "thread"])
@pytest.mark.parametrize("given", [Unstorable(), no_state], ids=["unstorable", "raises"])
def test_rank_whose_state_cannot_be_had_is_named_on_all_at_once(
    config: dict[str, Any], given: object
) -> None:
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> None:
        with pytest.raises(RankFailed, match="rank 1: ") as raised:
            save_and_wait(ours, 1, given if rank == 1 else state(rank, 1))
        assert (raised.value.__cause__ is not None) == (rank == 1)
        ours.save(2, state(rank, 2))

    for outcome in run(disk, work, **config):
        assert outcome.raised is None, outcome.raised
    assert [c.name for c in api.listed(RUNS, fs=disk)] == ["net-2.shards"]


@pytest.mark.parametrize("zero_stall", [False, True])
def test_rank_that_cannot_copy_its_state_is_named_on_all_at_once(zero_stall: bool) -> None:
    disk, meeting = ModelDisk(), Meeting()

    def one(rank: int) -> str:
        memory = MemoryConfig(host_budget_bytes=1) if rank == 2 else None
        with manager(
            disk, meeting, rank, async_save=True, zero_stall=zero_stall, memory=memory
        ) as ours:
            ours.save(1, {"weights": np.zeros(1 << 20, np.float32)})
            with pytest.raises(RankFailed, match="rank 2: ") as raised:
                ours.wait()
        return str(raised.value)

    told = {outcome.must() for outcome in run_ranks(meeting, one)}
    assert len(told) == 1
    assert "/write" not in "".join(meeting.tags)


class Unlisted(FailingDisk):
    """A disk whose directories cannot be listed while it is told so."""

    is_blind = False

    def list(self, path: Path) -> dict[str, FileStatus]:
        if self.is_blind:
            raise OSError(errno.EIO, "cannot be listed")
        return super().list(path)


def test_name_that_rank_0_cannot_find_is_an_error_on_all_at_once() -> None:
    disk, meeting = ModelDisk(), Meeting()

    def one(rank: int) -> None:
        fs = Unlisted(disk)
        with manager(disk, meeting, rank, fs=fs) as ours:
            ours.save(1, state(rank, 1))
            fs.is_blind = rank == 0
            with pytest.raises(RankFailed, match=r"rank 0: OSError \[EIO\]"):
                ours.save(2, state(rank, 2))
            fs.is_blind = False

    for outcome in run_ranks(meeting, one):
        assert outcome.raised is None, outcome.raised


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
    alone = manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix=SERIES)
    with alone, pytest.raises(UnsupportedCheckpoint, match="was saved by 3 ranks"):
        alone.resume()


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"async_save": True, "back_pressure": "skip"}, "use 'wait'"),
        ({"async_save": True, "on_error": "warn"}, "use 'raise' or 'retry"),
        ({"async_save": True, "on_error": print}, "use 'raise' or 'retry"),
    ],
)
def test_what_ranks_cannot_agree_on_is_refused(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        manager(ModelDisk(), Meeting(), 0, **config)


def weights(found: Resumption) -> list[float]:
    assert isinstance(found.state, dict)
    return found.state["weights"].tolist()  # type: ignore[no-any-return]


def test_ranks_roll_back_to_the_newest_step_that_all_have_in_memory() -> None:
    def work(ours: CheckpointManager, rank: int) -> tuple[int, list[float]]:
        for step in (1, 2, 3):
            if (rank, step) != (2, 2):
                ours.snapshot(step, state(rank, step))
        found = ours.rollback(state(rank, 0))
        ours.save(4, state(rank, 4))
        return found.step, weights(found)

    outcomes = [outcome.must() for outcome in run(ModelDisk(), work, snapshots=3)]
    assert outcomes == [(1, [100.0 + rank] * 4) for rank in range(WORLD)]


def test_ranks_roll_back_to_a_newer_checkpoint_or_past_one_that_is_damaged() -> None:
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> tuple[int, list[float]]:
        ours.snapshot(1, state(rank, 1))
        for step in (2, 3, 4):
            ours.save(step, state(rank, step))
        if rank == 0:
            flip_bit(disk, next(c for c in ours.checkpoints() if c.step == 3).shards[1])
        found = ours.rollback(state(rank, 0))
        assert len(found.skipped) == 1
        return found.step, weights(found)

    assert [o.must() for o in run(disk, work)] == [(2, [200.0 + r] * 4) for r in range(WORLD)]


def test_ranks_that_have_nothing_that_old_are_told_so() -> None:
    def work(ours: CheckpointManager, rank: int) -> None:
        ours.snapshot(3, state(rank, 3))
        with pytest.raises(CheckpointNotFound):
            ours.rollback()

    for outcome in run(ModelDisk(), work):
        assert outcome.raised is None, outcome.raised


def test_ranks_that_roll_back_to_different_steps_change_nothing() -> None:
    def work(ours: CheckpointManager, rank: int) -> None:
        for step in (1, 2, 3):
            ours.snapshot(step, state(rank, step))
        with pytest.raises(RanksOutOfStep, match="different steps: 2, 1, 2"):
            ours.rollback(steps_back=2 if rank == 1 else 1)
        assert ours.rollback().step == 2

    for outcome in run(ModelDisk(), work):
        assert outcome.raised is None, outcome.raised


def test_rank_that_does_not_roll_back_is_named_and_nobody_falls_back_to_memory() -> None:
    def work(ours: CheckpointManager, rank: int) -> None:
        ours.snapshot(1, state(rank, 1))
        if rank == 2:
            return
        with pytest.raises(RanksMissing, match="rank 2 did not come"):
            ours.rollback(steps_back=0)

    for outcome in run(ModelDisk(), work):
        assert outcome.raised is None, outcome.raised


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS, ids=["plain", "encrypted"])
def test_worker_processes_write_the_files_of_the_ranks(tmp_path: Path, key: bytes | None) -> None:
    config = CheckpointConfig(async_save="process", enc_key=key, keep="all")

    def one(rank: int) -> int:
        with CheckpointManager(
            tmp_path, config, ranks=Ranks(Seat(meeting, rank)), prefix=SERIES
        ) as ours:
            start = ours.resume(state(rank, 0)).step
            ours.save(start + 1, state(rank, start + 1))
            handle = ours.save(start + 2, state(rank, start + 2))
            assert handle is not None
            return handle.wait().step

    for last in (2, 4):
        meeting = Meeting(2)
        assert [o.must() for o in run_ranks(meeting, one)] == [last] * 2
    found = api.listed(tmp_path, keys=None if key is None else api.Key(key), allow_unencrypted=True)
    assert {c.state for c in found} == {api.State.OK}
    assert len(found) == 4


def test_worker_process_that_is_killed_is_named_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interfere(monkeypatch, tmp_path / "site", "pwrite", 1, action="kill")
    meeting, runs = Meeting(2), tmp_path / "runs"
    of_another_host = runs / temp_name("x.ckpt", token="elsewhere-1", series=SERIES)

    def one(rank: int) -> None:
        config = CheckpointConfig(async_save="process" if rank else False, keep="all")
        with CheckpointManager(
            runs, config, ranks=Ranks(Seat(meeting, rank)), prefix=SERIES
        ) as ours:
            ours.resume()
            if rank == 0:
                of_another_host.touch()
            with pytest.raises(RankFailed, match=r"rank 1: SaveFailed: the saving process died"):
                save_and_wait(ours, 1, state(rank, 1))

    for outcome in run_ranks(meeting, one):
        assert outcome.raised is None, outcome.raised
    assert of_another_host.exists()
    assert list(runs.iterdir()) == [of_another_host]


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
        with manager_on(
            directory, fs=disk, processes=ModelProcesses(disk), ranks=Ranks(seat), prefix=SERIES
        ) as ours:
            ours.resume()
    assert Listening.said
    assert len(Listening.said) == len(set(Listening.said))


@pytest.mark.parametrize("way", ["resume", "rollback to disk", "rollback to memory"])
def test_state_of_one_rank_that_does_not_fit_changes_nothing_on_any(way: str) -> None:
    disk = ModelDisk()

    def save(ours: CheckpointManager, rank: int) -> None:
        ours.save(1, {"w": np.arange(4.0) + 1})

    def work(ours: CheckpointManager, rank: int) -> tuple[str, list[float]]:
        if way == "rollback to memory":
            assert ours.snapshot(1, {"w": np.arange(4.0) + 1})
        if way != "resume":
            ours.snapshot(2, {"w": np.ones(4)})
        wrong = {"w": np.zeros(5 if rank == 1 else 4)}
        with pytest.raises((StateMismatch, ResumeFailed)) as raised:
            ours.resume(wrong) if way == "resume" else ours.rollback(wrong)
        right = {"w": np.zeros(4)}
        found = ours.resume(right) if way == "resume" else ours.rollback(right)
        assert (found.step, right["w"].tolist()) == (1, [1, 2, 3, 4])
        return str(raised.value.message), wrong["w"].tolist()

    run(disk, save)
    told, left = zip(*(one.must() for one in run(disk.restart(), work)), strict=True)
    assert left == ([0] * 4, [0] * 5, [0] * 4)
    assert all("does not fit this state" in one for one in told)
    assert told[0] == told[2]
    assert told[0].startswith("rank 1: StateMismatch: ")


def test_coordinator_with_slots_is_kept_and_its_managers_told_apart() -> None:
    class Slotted:
        __slots__ = ("rank", "tags", "world")

        def __init__(self) -> None:
            self.rank, self.world = 0, 1
            self.tags: list[str] = []

        def all_gather(self, tag: str, value: Json, *, timeout_s: float) -> list[Json]:
            self.tags.append(tag)
            return [value]

    coordinator, disk = Slotted(), ModelDisk()
    for directory in (RUNS, RUNS / "other"):
        with manager_on(
            directory,
            fs=disk,
            processes=ModelProcesses(disk),
            ranks=Ranks(coordinator),
            prefix=SERIES,
        ) as ours:
            ours.resume()
    assert len(coordinator.tags) == len(set(coordinator.tags)) > 0


def test_rank_that_raises_saves_what_it_alone_holds_and_meets_nobody() -> None:
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> None:
        ours.step_end(1, state(rank, 1))
        ours.step_end(2, state(rank, 2))
        if rank == 1:
            raise ZeroDivisionError

    outcomes = run(disk, work, exception_save=True, save_checkpoint_steps=1)
    assert isinstance(outcomes[1].raised, ZeroDivisionError)
    assert not hasattr(outcomes[1].raised, "__notes__")
    assert [outcomes[rank].raised for rank in (0, 2)] == [None, None]
    names = {one.name: one.why for one in api.listed(RUNS, fs=disk)}
    assert names.pop("net.rank_1-2.ckpt") == "exception:ZeroDivisionError"
    assert names == {"net-1.shards": "policy", "net-2.shards": "policy"}
    alone = manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix="net.rank_1")
    held = alone.load("net.rank_1-2.ckpt")
    assert isinstance(held, dict)
    assert held["weights"].tolist() == [201.0] * 4
    resumed = run(disk.restart(), lambda ours, rank: ours.resume(state(rank, 0)).step)
    assert [outcome.must() for outcome in resumed] == [2] * WORLD


def test_ranks_that_fail_again_and_again_leave_one_emergency_save_each() -> None:
    disk = ModelDisk()

    def work(ours: CheckpointManager, rank: int) -> None:
        for step in range((ours.resume(state(rank, 0)).next_step or 1), 4):
            ours.step_end(step, state(rank, step))
        if rank < 2:
            raise ZeroDivisionError

    for _ in range(3):
        run(disk, work, exception_save=True, save_checkpoint_steps=2)
        disk = disk.restart()
    found = {one.name: one.is_emergency for one in api.listed(RUNS, fs=disk)}
    assert found == {
        "net-2.shards": False,
        "net.rank_0-3-r2.ckpt": True,
        "net.rank_1-3-r2.ckpt": True,
    }


def test_rank_that_raises_saves_its_slice_in_the_shape_that_it_holds() -> None:
    disk, meeting = ModelDisk(), Meeting(2)
    layout = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}

    def one(rank: int) -> None:
        ours = manager_on(
            RUNS,
            CheckpointConfig(exception_save=True, save_checkpoint_steps=9),
            fs=disk,
            processes=ModelProcesses(disk),
            clock=Clock(),
            ranks=Ranks(Seat(meeting, rank), layout=layout),
            prefix=SERIES,
        )
        with ours:
            ours.step_end(1, {"w": np.full(3, rank, np.float32)})
            raise ZeroDivisionError

    for outcome in run_ranks(meeting, one):
        assert not hasattr(outcome.raised, "__notes__")
    alone = manager_on(RUNS, fs=disk, processes=ModelProcesses(disk), prefix="net.rank_1")
    held = alone.load("net.rank_1-1.ckpt")
    assert isinstance(held, dict)
    assert held["w"].tolist() == [1.0] * 3


def test_value_that_no_rank_can_append_is_an_error_on_all() -> None:
    def work(ours: CheckpointManager, rank: int) -> None:
        ours.step_end(1, state(rank, 1), epoch=None if rank == 1 else 1)

    outcomes = run(ModelDisk(), work, append_info=["epoch_num"], save_checkpoint_steps=1)
    for outcome in outcomes:
        assert "append_info has 'epoch_num'" in str(outcome.raised)


def test_text_in_append_info_of_ranks_is_refused_at_construction() -> None:
    with pytest.raises(UnsupportedState, match="'note' is no tensor"):
        manager(ModelDisk(), Meeting(), 0, append_info=[{"note": "x"}])


def test_step_0_of_all_ranks_is_saved_and_resumed() -> None:
    disk = ModelDisk()

    def begin(ours: CheckpointManager, rank: int) -> tuple[int, int]:
        start = ours.resume(state(rank, 0))
        ours.step_end(start.next_step, state(rank, start.next_step))
        return start.next_step, len(ours.checkpoints())

    options: dict[str, Any] = {"save_checkpoint_steps": 2}
    assert [one.must() for one in run(disk, begin, **options)] == [(0, 1)] * WORLD
    assert [one.must() for one in run(disk.restart(), begin, **options)] == [(1, 1)] * WORLD
