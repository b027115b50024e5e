# SPDX-License-Identifier: Apache-2.0
"""Saves through DCP when the power goes, or the disk of a rank fails: whole, or not there."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("torch.distributed.checkpoint")

from ckptmgr.config.config import CheckpointConfig  # noqa: E402 - only where there is torch
from ckptmgr.core.errors import CheckpointNotFound, SaveFailed  # noqa: E402
from ckptmgr.core.model import State  # noqa: E402
from ckptmgr.integrations.dcp import StorageReader, StorageWriter  # noqa: E402
from ckptmgr.integrations.dcp import run as dcp_run  # noqa: E402
from ckptmgr.io.filesystem import FileSystem  # noqa: E402
from ckptmgr.store.store import Store  # noqa: E402
from tests.faults.training import RUNS  # noqa: E402
from tests.integrations.dcp.dcp_ranks import cut, load, save  # noqa: E402
from tests.support.crashmodel import FailingDisk, ModelDisk, Order, every_crash, every_failure  # noqa: E402

WORLD = 2
CONFIG = CheckpointConfig(keep="last(1)")


@pytest.fixture(autouse=True)
def _no_run_is_left() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    """End the run of this process: the next save is one of another process."""
    StorageWriter(RUNS).close()


def weights(step: int) -> Any:
    return torch.full((5,), float(step))


def save_step(step: int, disks: Sequence[FileSystem]) -> None:
    writers = [StorageWriter(RUNS, CONFIG, step=step, fs=disk) for disk in disks]
    save(writers, [{"w": cut(weights(step), rank, WORLD)} for rank in range(WORLD)])


def disk_with_step_1() -> ModelDisk:
    disk = ModelDisk()
    save_step(1, [disk] * WORLD)
    forget()
    disk.settle()
    return disk


def newest(disk: FileSystem) -> int:
    """Check that all that is listed is whole, and load the newest; return its step, 0 for none."""
    unfinished = (State.LEFTOVER, State.WRITING)
    steps = [0]
    for found in Store(RUNS, fs=disk).scan():
        if found.state not in unfinished:
            assert found.state is State.OK, found
            steps.append(found.step)
    state = {"w": torch.zeros(5)}
    try:
        load([StorageReader(RUNS, fs=disk)], [state])
    except CheckpointNotFound:
        return 0
    assert torch.equal(state["w"], weights(max(steps)))
    return max(steps)


def test_power_cut_leaves_the_new_checkpoint_or_the_old_one() -> None:
    disk = disk_with_step_1()

    def run(running: ModelDisk) -> None:
        save_step(2, [running] * WORLD)
        running.acknowledge("step 2")

    seen = set()
    for crash in every_crash(disk, run, order=Order.WEAK, tears=1):
        step = newest(crash.disk)
        assert step == 2 if crash.disk.acknowledged else step in (1, 2), crash
        seen.add((crash.is_finished, step))
    assert {(False, 1), (False, 2), (True, 2)} <= seen


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(WORLD))
def test_failure_of_the_disk_of_a_rank_leaves_the_new_checkpoint_or_the_old_one(rank: int) -> None:
    disk = disk_with_step_1()

    def run(failing: FailingDisk) -> None:
        forget()
        own = failing._disk
        save_step(2, [failing if one == rank else own for one in range(WORLD)])

    raised = 0
    for failure in every_failure(disk, run):
        step = newest(failure.disk)
        if failure.raised is None:
            assert step == 2, failure
            continue
        raised += 1
        assert isinstance(failure.raised, (SaveFailed, OSError)), failure
        is_open = "may not be durable" in str(failure.raised)
        assert step == 2 if is_open else step == 1, failure
        save_step(2, [failure.disk] * WORLD)
        assert newest(failure.disk) == 2, failure
        left = {name for name in failure.disk.list(RUNS) if not name.startswith(".")}
        named = {
            name
            for one in Store(RUNS, fs=failure.disk).scan()
            for name in (*one.shards, f"{one.name}.manifest.json")
        }
        assert left == named, failure
    assert raised


def test_files_of_a_dead_coordinator_are_removed_when_they_have_expired() -> None:
    disk = disk_with_step_1()
    clock = [1_700_000_000.0]

    def writers(step: int) -> list[StorageWriter]:
        return [
            StorageWriter(RUNS, step=step, fs=disk, timeout_s=10.0, clock=lambda: clock[0])
            for _ in range(WORLD)
        ]

    class Dead(Exception):
        pass

    dying = writers(2)

    def die(metadata: object, results: object) -> None:
        raise Dead

    dying[0].finish = die  # type: ignore[method-assign]
    states = [{"w": cut(weights(2), rank, WORLD)} for rank in range(WORLD)]
    with pytest.raises(Dead):
        save(dying, states)
    assert newest(disk) == 1
    dcp_run._runs.clear()
    disk = disk.restart()
    save(writers(3), states)
    assert any(name.startswith("ckpt-2.") for name in disk.list(RUNS))
    clock[0] += 1000.0
    save(writers(4), states)
    assert not any(name.startswith("ckpt-2.") for name in disk.list(RUNS))


def test_interrupt_at_any_call_of_the_coordinator_never_harms_a_committed_checkpoint() -> None:
    class Interrupted(FailingDisk):
        at = 0

        def _meet(self, operation: str, path: Path) -> None:
            super()._meet(operation, path)
            if len(self.calls) == self.at:
                raise KeyboardInterrupt

    disk = disk_with_step_1()
    seen = set()
    for call in itertools.count(1):
        own = disk.copy()
        failing = Interrupted(own)
        failing.at = call
        with contextlib.suppress(KeyboardInterrupt):
            save_step(2, [failing, own])
            forget()  # as a program does when it goes on, or ends
        forget()
        if len(failing.calls) < call:
            break
        seen.add(newest(own))
        save_step(3, [own] * WORLD)
        assert newest(own) == 3
        forget()
    assert seen == {1, 2}
