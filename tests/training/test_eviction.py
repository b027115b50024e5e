# SPDX-License-Identifier: Apache-2.0
"""Which snapshot a manager gives up: the one whose state is cheap to get again, by DTR's factors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, MemoryConfig, Snapshots
from tests.support.failingdisk import FailingDisk
from tests.support.modeldisk import ModelDisk
from tests.support.runs import manager_on

KIB = 1024


class Run:
    """A manager with room for two snapshots, on a clock that the test sets."""

    def __init__(self, directory: Path, *, time: float, memory: float, **options: Any) -> None:
        self.now = 1000.0
        room = MemoryConfig.from_dtr(2 * KIB + KIB // 2, 0, memory, time)
        config = CheckpointConfig(
            **{"save_checkpoint_steps": 10**6, "keep": "all", "memory": room}
            | options.pop("config", {})
        )
        self.manager = manager_on(
            directory, config, clock=lambda: self.now, snapshots=Snapshots(most=9), **options
        )

    def save(self, step: int, *, at: float, size_bytes: int = KIB) -> None:
        self.now = 1000.0 + at
        self.manager.save(step, {"w": np.ones(size_bytes // 8)})

    def snapshot(self, step: int, *, at: float) -> None:
        self.now = 1000.0 + at
        assert self.manager.snapshot(step, {"w": np.full(KIB // 8, float(step))})

    def remembers(self, step: int) -> bool:
        """Return whether a rollback to this step finds it in memory."""
        found = self.manager.rollback(steps_back=self.manager._past.seen_step - step)
        return (found.step, found.checkpoint) == (step, None)


def far_and_near(run: Run) -> None:
    """Snapshot 5 is 500 s of training behind its checkpoint; 11 is 1 s behind, and newer."""
    run.save(0, at=0)
    run.snapshot(5, at=500)
    run.save(10, at=510)
    run.snapshot(11, at=511)
    run.snapshot(12, at=512)  # one of the others must go


@pytest.mark.parametrize(("factor", "kept"), [(0, 11), (1, 5)])
def test_recomp_time_factor_chooses_by_the_training_since_the_checkpoint(
    tmp_path: Path, factor: float, kept: int
) -> None:
    run = Run(tmp_path, time=factor, memory=0)
    far_and_near(run)
    assert run.remembers(kept)


@pytest.mark.parametrize(("factor", "kept"), [(0, 11), (1, 5)])
def test_recomp_memory_factor_chooses_by_the_bytes_of_the_checkpoint(
    tmp_path: Path, factor: float, kept: int
) -> None:
    run = Run(tmp_path, time=0, memory=factor)
    run.save(0, at=0, size_bytes=512 * KIB)
    run.snapshot(5, at=500)
    run.save(10, at=510)
    run.snapshot(11, at=511)
    run.snapshot(12, at=512)
    assert run.remembers(kept)


def near_step_9(run: Run) -> None:
    """Snapshot 10 is 1 s behind step 9, or 510 s behind step 0; 21 is 10 s behind step 20."""
    run.snapshot(10, at=510)
    run.save(20, at=600)
    run.snapshot(21, at=610)


@pytest.mark.parametrize(("is_gone", "kept"), [(False, 21), (True, 10)])
def test_checkpoint_that_is_gone_is_no_way_back(tmp_path: Path, is_gone: bool, kept: int) -> None:
    run = Run(tmp_path, time=1, memory=0)
    run.save(0, at=0)
    run.save(9, at=509)
    near_step_9(run)
    for path in tmp_path.glob("ckpt-9.*") if is_gone else ():
        path.unlink()
    run.snapshot(22, at=700)
    assert run.remembers(kept)


class Disk(FailingDisk):
    """A disk that fails to sync while it is broken."""

    def __init__(self) -> None:
        super().__init__(ModelDisk())
        self.is_broken = False

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if self.is_broken and operation == "sync":
            raise OSError(errno.EIO, "broken", str(path))


@pytest.mark.parametrize(("is_broken", "kept"), [(False, 21), (True, 10)])
def test_checkpoint_whose_save_failed_is_no_way_back(is_broken: bool, kept: int) -> None:
    disk = Disk()
    background = {"async_save": True, "on_error": "warn"}
    run = Run(Path("/runs"), time=1, memory=0, fs=disk, config=background)
    run.save(0, at=0)
    run.manager.wait()
    disk.is_broken = is_broken
    run.save(9, at=509)
    run.manager.wait()
    disk.is_broken = False
    near_step_9(run)
    run.manager.wait()
    run.snapshot(22, at=700)
    assert run.remembers(kept)


def without_checkpoint(run: Run) -> None:
    run.snapshot(1, at=1)
    run.snapshot(2, at=300)
    run.snapshot(3, at=301)


def after_resume(run: Run) -> None:
    run.save(10, at=0)
    other = CheckpointManager(run.manager.directory)
    run.manager.close()
    assert other.latest() is not None
    run.now += 5000
    run.manager = manager_on(
        run.manager.directory,
        run.manager._config,
        clock=lambda: run.now,
        snapshots=Snapshots(most=9),
    )
    run.manager.resume()
    run.snapshot(11, at=5001)
    run.snapshot(12, at=5300)
    run.snapshot(13, at=5301)


def after_rollback(run: Run) -> None:
    run.save(0, at=0)
    run.snapshot(1, at=1)
    run.now += 4000  # lost: the rollback takes the time back, too
    run.manager.snapshot(2, {"w": np.zeros(KIB // 8)})
    run.manager.rollback(steps_back=1)
    run.snapshot(2, at=4300)
    run.snapshot(3, at=4301)


@pytest.mark.parametrize(
    ("training", "kept"), [(without_checkpoint, 2), (after_resume, 12), (after_rollback, 2)]
)
def test_seconds_count_from_the_start_of_the_run_or_its_checkpoint(
    tmp_path: Path, training: Callable[[Run], None], kept: int
) -> None:
    run = Run(tmp_path, time=2, memory=1)
    training(run)
    assert run.remembers(kept)


def test_own_checkpoint_that_is_resumed_keeps_the_earlier_ones(tmp_path: Path) -> None:
    run = Run(tmp_path, time=1, memory=0)
    far_and_near(run)
    run.save(13, at=513)
    assert run.manager.resume().step == 13
    run.snapshot(14, at=514)
    assert run.remembers(5)
