# SPDX-License-Identifier: Apache-2.0
"""`on_error`: a failed save, in every mode and on each surface."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    MemoryConfig,
    Ranks,
    SaveFailed,
    StagingExhausted,
    StoreFull,
)
from tests.faults.training import RUNS, SERIES, ModelProcesses
from tests.parallel.ranks import WORLD, Clock, Meeting, Seat, run_ranks
from tests.support.crashmodel import ModelDisk
from tests.support.failingdisk import FailingDisk
from tests.support.held import HeldDisk
from tests.support.runs import callback_on, manager_on
from tests.support.surface import Loop, data_files

MODES = [False, "thread"]


class BrokenDisk(HeldDisk):
    """A disk on which as many saves fail as `failures` says, of files with `part` in their names."""

    def __init__(self, part: str = "") -> None:
        super().__init__()
        self.failures = 0
        self.part = part

    def create(self, path: Path, **options: Any) -> Any:
        if self.failures and self.part in path.name and ".manifest.json" not in path.name:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        return super().create(path, **options)


def train(
    directory: Path, mode: Any, on_error: Any, *, failures: int = 1, observe: Any = None
) -> list[int]:
    """Save steps 1 to 3, of which the second fails; return the steps that are there then."""
    disk = BrokenDisk()
    config = CheckpointConfig(
        save_checkpoint_steps=1, async_save=mode, on_error=on_error, keep="all"
    )
    with manager_on(directory, config, fs=disk, observe=observe) as manager:
        for step in (1, 2, 3):
            if step == 2:
                disk.failures = failures
            manager.step_end(step, {"w": np.full(4, step)})
            manager.wait()
        return [one.step for one in manager.checkpoints()]


@pytest.mark.parametrize("mode", MODES)
def test_warned_failure_is_logged_and_the_training_goes_on(
    tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert train(tmp_path, mode, "warn") == [1, 3]
    assert "save failed" in caplog.text
    assert "No space left" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_function_gets_the_failure_and_the_training_goes_on(tmp_path: Path, mode: Any) -> None:
    failures: list[BaseException] = []
    assert train(tmp_path, mode, failures.append) == [1, 3]
    assert [type(one).__mro__[1:3].count(OSError) > 0 for one in failures] == [True]


@pytest.mark.parametrize("mode", MODES)
def test_failed_save_is_tried_again_as_often_as_asked(tmp_path: Path, mode: Any) -> None:
    assert train(tmp_path, mode, "retry(2)", failures=2) == [1, 2, 3]


@pytest.mark.parametrize("mode", MODES)
def test_failure_after_the_last_attempt_is_raised(tmp_path: Path, mode: Any) -> None:
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path, mode, "retry(2)", failures=3)


@pytest.mark.parametrize("mode", MODES)
def test_failure_is_reported_once_to_observers(tmp_path: Path, mode: Any) -> None:
    events: list[tuple[str, int | None]] = []
    train(tmp_path, mode, "warn", observe=lambda event: events.append((event.name, event.step)))
    assert [step for kind, step in events if kind == "save.failed"] == [2]
    assert [step for kind, step in events if kind == "save.durable"] == [1, 3]


@pytest.mark.parametrize("mode", MODES)
def test_step_whose_save_failed_is_due_again_at_the_end(tmp_path: Path, mode: Any) -> None:
    disk = BrokenDisk()
    config = CheckpointConfig(save_checkpoint_steps=2, async_save=mode, on_error="warn")
    with manager_on(tmp_path, config, fs=disk) as manager:
        manager.step_end(1, {"w": np.zeros(4)})
        disk.failures = 1
        handle = manager.step_end(2, {"w": np.ones(4)})
        assert handle is not None
        assert handle.durable.exception() is not None
        assert manager.latest() is None
    assert [one.step for one in manager.checkpoints()] == [2]


def test_failure_leaves_no_file_and_the_earlier_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, False, "warn")
    assert sorted(one.name for one in tmp_path.glob("*.ckpt*")) == [
        f"ckpt-{step}.ckpt{end}" for step in (1, 3) for end in ("", ".manifest.json")
    ]


def test_error_of_the_function_ends_a_save_in_the_caller(tmp_path: Path) -> None:
    def refuse(error: BaseException) -> None:
        raise RuntimeError("stop here") from error

    with pytest.raises(RuntimeError, match="stop here"):
        train(tmp_path, False, refuse)


def test_function_may_save_and_wait_where_saves_run_in_the_caller(tmp_path: Path) -> None:
    disk = BrokenDisk()
    found: list[int] = []

    def again(error: BaseException) -> None:
        manager.save(20, {"w": np.ones(4)})
        manager.wait()
        found.extend(one.step for one in manager.checkpoints())

    config = CheckpointConfig(on_error=again)
    with manager_on(tmp_path, config, fs=disk) as manager:
        disk.failures = 1
        manager.save(2, {"w": np.ones(4)})
    assert found == [20]


def test_save_of_the_function_that_fails_too_is_raised_to_it(tmp_path: Path) -> None:
    disk = BrokenDisk()
    met: list[BaseException] = []

    def again(error: BaseException) -> None:
        with pytest.raises(OSError, match="No space left") as caught:
            manager.save(20, {"w": np.ones(4)})
        met.append(caught.value)

    with manager_on(tmp_path, CheckpointConfig(on_error=again), fs=disk) as manager:
        disk.failures = 2
        manager.save(2, {"w": np.ones(4)})
    assert len(met) == 1


def test_interrupt_is_no_failure_that_is_tried_again_or_warned_of(tmp_path: Path) -> None:
    class InterruptedDisk(BrokenDisk):
        def create(self, path: Path, **options: Any) -> Any:
            if self.failures and ".manifest.json" not in path.name:
                self.failures -= 1
                raise KeyboardInterrupt
            return super().create(path, **options)

    disk = InterruptedDisk()
    config = CheckpointConfig(on_error="retry(3)")
    with manager_on(tmp_path, config, fs=disk) as manager:
        disk.failures = 1
        with pytest.raises(KeyboardInterrupt):
            manager.save(1, {"w": np.ones(4)})
        assert manager.latest() is None


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("on_error", "steps"), [("warn", [1, 3]), ("retry(1)", [1, 2, 3]), (logging.debug, [1, 3])]
)
def test_callback_goes_on_after_a_failed_save(
    tmp_path: Path, mode: Any, on_error: Any, steps: list[int]
) -> None:
    disk = BrokenDisk("-1_2.")
    disk.failures = 1
    config = CheckpointConfig(async_save=mode, on_error=on_error)
    callback = callback_on("net", str(tmp_path), config, fs=disk)
    Loop(callbacks=(callback,), batch_num=10).run(3)
    assert data_files(tmp_path) == [f"net-1_{step}.ckpt" for step in steps]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_try_a_failed_save_again_together(mode: Any) -> None:
    disk, meeting = ModelDisk(), Meeting()

    def work(rank: int) -> list[int]:
        own = FailingDisk(disk, operation="write_at", call=1 if rank == 1 else None)
        config = CheckpointConfig(keep="all", async_save=mode, on_error="retry(1)")
        with manager_on(
            RUNS,
            config,
            fs=own,
            processes=ModelProcesses(disk),
            clock=Clock(),
            ranks=Ranks(Seat(meeting, rank)),
            prefix=SERIES,
        ) as manager:
            manager.save(1, {"w": np.full(4, rank)})
            manager.wait()
            return [one.step for one in manager.checkpoints()]

    outcomes = run_ranks(meeting, work)
    assert [one.must() for one in outcomes] == [[1]] * WORLD


def test_wait_in_the_function_of_a_background_save_is_still_refused(tmp_path: Path) -> None:
    disk = BrokenDisk()
    met: list[str] = []

    def wait(error: BaseException) -> None:
        with pytest.raises(SaveFailed) as caught:
            manager.wait()
        met.append(str(caught.value))

    config = CheckpointConfig(async_save=True, on_error=wait)
    with manager_on(tmp_path, config, fs=disk) as manager:
        disk.failures = 1
        manager.save(1, {"w": np.ones(4)})
    assert len(met) == 1


def test_state_that_cannot_be_staged_is_a_failure_like_any_other(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    memory = MemoryConfig(host_budget_bytes=1 << 16, slab_bytes=1 << 16)
    config = CheckpointConfig(async_save=True, memory=memory, on_error=failures.append, keep="all")
    with CheckpointManager(tmp_path, config) as manager:
        handle = manager.save(1, {"w": np.ones(1 << 16)})
        assert handle is not None
        assert handle.has_failed
        manager.save(2, {"w": np.ones(1)})
    assert [type(one) for one in failures] == [StagingExhausted]
    assert [one.step for one in manager.checkpoints()] == [2]


@pytest.mark.parametrize("mode", MODES)
def test_function_that_saves_on_a_broken_disk_is_called_once(tmp_path: Path, mode: Any) -> None:
    disk = BrokenDisk()
    calls: list[str] = []

    def again(error: BaseException) -> None:
        calls.append(type(error).__name__)
        manager.save(50 + len(calls), {"w": np.ones(4)})

    config = CheckpointConfig(async_save=mode, on_error=again)
    manager = manager_on(tmp_path, config, fs=disk)
    with pytest.raises(StoreFull):  # noqa: PT012
        disk.failures = 1_000_000
        manager.save(1, {"w": np.ones(4)})
        manager.wait()
    disk.failures = 0
    assert len(calls) == 1
    manager.close()
