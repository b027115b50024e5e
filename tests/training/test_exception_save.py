# SPDX-License-Identifier: Apache-2.0
"""`exception_save` of a `CheckpointManager`: its save when an exception leaves its block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager, Stop, load_checkpoint
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.runs import manager_on

KEY = bytes(range(16))


@dataclass(frozen=True)
class FrozenError(Exception):
    """An exception that refuses attributes, and so notes."""

    code: int = 0


def _manager(directory: Path, **config: Any) -> CheckpointManager:
    config = {"save_checkpoint_steps": 100, "exception_save": True, **config}
    return CheckpointManager(directory, CheckpointConfig(**config), prefix="net")


def _train(
    manager: CheckpointManager, error: BaseException, states: list[object], *, first: int = 1
) -> None:
    with manager:
        for step, state in enumerate(states, first):
            manager.step_end(step, state, epoch=1, metrics={"loss": 1 / step})
        raise error


def _fail_after(manager: CheckpointManager, steps: int, error: BaseException) -> None:
    """End some steps, then raise the error, which must arrive unchanged."""
    with pytest.raises(type(error)) as caught:
        _train(manager, error, [{"w": np.full(4, step)} for step in range(1, steps + 1)])
    assert caught.value is error
    assert not hasattr(error, "__notes__")


def _names(directory: Path) -> list[str]:
    return [one.name for one in CheckpointManager(directory, prefix="net").checkpoints()]


@pytest.mark.parametrize(
    "mode",
    [
        {"async_save": False},
        {"async_save": "thread"},
        {"async_save": "process"},
        {"async_save": True, "zero_stall": True},
    ],
    ids=["sync", "thread", "process", "zero_stall"],
)
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"format": "safetensors"},
        {"format": "safetensors", "compression": "zstd"},
        {"enc_key": KEY},
        {"format": "safetensors", "enc_key": KEY},
    ],
    ids=["ckpt", "safetensors", "ckpz", "encrypted", "ckpe"],
)
def test_exception_saves_the_state_of_the_last_step_in_every_mode_and_format(
    tmp_path: Path, mode: dict[str, Any], form: dict[str, Any]
) -> None:
    manager = _manager(tmp_path, **mode, **form)
    _fail_after(manager, 3, ValueError("loss is NaN"))
    (saved,) = manager.checkpoints()
    assert (saved.step, saved.epoch, saved.why) == (3, 1, "exception:ValueError")
    assert saved.metrics == {"loss": 1 / 3}
    loaded = manager.load(saved.name)
    assert isinstance(loaded, dict)
    assert loaded["w"].tolist() == [3] * 4


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), MemoryError()])
def test_exception_of_any_class_is_saved_and_passes_on(
    tmp_path: Path, error: BaseException
) -> None:
    manager = _manager(tmp_path)
    _fail_after(manager, 2, error)
    assert [one.why for one in manager.checkpoints()] == [f"exception:{type(error).__name__}"]


def test_state_is_read_when_the_exception_arrives(tmp_path: Path) -> None:
    state = {"w": np.zeros(4)}

    def fail_in_step_2(manager: CheckpointManager) -> None:
        with manager:
            manager.step_end(1, lambda: state)
            state["w"] += 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_step_2(_manager(tmp_path))
    assert load_checkpoint(tmp_path / "net-1.ckpt")["w"].tolist() == [1] * 4


def test_without_exception_save_an_exception_saves_nothing(tmp_path: Path) -> None:
    _fail_after(_manager(tmp_path, exception_save=False), 2, ZeroDivisionError())
    assert _names(tmp_path) == []


def test_exception_before_the_end_of_a_step_saves_nothing(tmp_path: Path) -> None:
    _fail_after(_manager(tmp_path), 0, ZeroDivisionError())
    assert _names(tmp_path) == []


def test_leaving_without_an_exception_saves_as_ever(tmp_path: Path) -> None:
    with _manager(tmp_path) as manager:
        manager.step_end(1, {"w": np.ones(4)})
    assert [one.why for one in manager.checkpoints()] == ["end"]


def test_checkpoint_of_an_exception_is_not_the_latest_and_no_run_resumes_from_it(
    tmp_path: Path,
) -> None:
    _fail_after(_manager(tmp_path, save_checkpoint_steps=2), 3, ZeroDivisionError())
    assert _names(tmp_path) == ["net-2.ckpt", "net-3.ckpt"]
    with CheckpointManager(tmp_path, prefix="net") as manager:
        latest = manager.latest()
        assert isinstance(latest, Checkpoint)
        assert latest.step == 2
        assert manager.resume().step == 2


def test_checkpoint_of_an_exception_takes_no_slot_of_the_policy(tmp_path: Path) -> None:
    options = {"save_checkpoint_steps": 2, "keep_checkpoint_max": 1}
    _fail_after(_manager(tmp_path, **options), 3, ZeroDivisionError())
    with _manager(tmp_path, **options) as manager:
        manager.resume()
        manager.step_end(4, {"w": np.ones(4)})
        manager.step_end(6, {"w": np.ones(4)})
    assert [one.step for one in manager.checkpoints() if not one.is_emergency] == [2, 6]


def test_step_that_was_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    _fail_after(_manager(tmp_path, save_checkpoint_steps=1), 1, ZeroDivisionError())
    assert _names(tmp_path) == ["net-1.ckpt"]


def _resume_and_fail(directory: Path, last: int, *, every: int = 2) -> None:
    """Resume a run and end its steps up to `last`, then fail."""
    manager, error = _manager(directory, save_checkpoint_steps=every), ZeroDivisionError()
    first = manager.resume().next_step or 1
    states: list[object] = [{"w": np.full(4, step)} for step in range(first, last + 1)]
    with pytest.raises(ZeroDivisionError):
        _train(manager, error, states, first=first)


def test_runs_that_fail_again_and_again_leave_one_emergency_save(tmp_path: Path) -> None:
    for _ in range(4):
        _resume_and_fail(tmp_path, 3)
    found = CheckpointManager(tmp_path, prefix="net").checkpoints()
    assert [(one.step, one.is_emergency) for one in found] == [(2, False), (3, True)]


def test_emergency_save_that_is_pinned_stays_beside_the_newer_one(tmp_path: Path) -> None:
    _resume_and_fail(tmp_path, 3)
    with CheckpointManager(tmp_path, prefix="net") as manager:
        manager.pin("net-3.ckpt")
    _resume_and_fail(tmp_path, 3)
    assert _names(tmp_path) == ["net-2.ckpt", "net-3.ckpt", "net-3-r1.ckpt"]


def test_emergency_save_of_a_later_step_or_of_another_run_stays(tmp_path: Path) -> None:
    _resume_and_fail(tmp_path, 7, every=4)
    _resume_and_fail(tmp_path, 5, every=4)
    assert _names(tmp_path) == ["net-4.ckpt", "net-7.ckpt", "net-5.ckpt"]
    _fail_after(_manager(tmp_path), 8, ZeroDivisionError())  # it resumed nothing
    assert _names(tmp_path) == ["net-4.ckpt", "net-7.ckpt", "net-5.ckpt", "net-8.ckpt"]


def test_emergency_save_that_is_the_only_checkpoint_stays(tmp_path: Path) -> None:
    for last in (1, 2):
        _resume_and_fail(tmp_path, last, every=100)
    assert _names(tmp_path) == ["net-1.ckpt", "net-2.ckpt"]


def _fail_on(directory: Path, operation: str, call: int | None) -> list[str]:
    """Resume a run that has an emergency save, and fail again on such a disk; return its calls."""
    _resume_and_fail(directory, 3)
    disk = FailingDisk(api.OsFileSystem(), operation=operation, call=call, is_lasting=True)
    config = CheckpointConfig(save_checkpoint_steps=2, exception_save=True)
    manager = manager_on(directory, config, fs=disk, prefix="net")
    manager.resume()
    with pytest.raises(ZeroDivisionError):
        _train(manager, ZeroDivisionError(), [{"w": np.ones(4)}], first=3)
    return disk.calls


@pytest.mark.parametrize("operation", ["list", "unlink"])
def test_replaced_emergency_save_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    calls = _fail_on(tmp_path / "sound", operation, None)
    assert _names(tmp_path / "sound") == ["net-2.ckpt", "net-3-r1.ckpt"]
    assert not caplog.text
    last = calls.count(operation)
    assert any(
        _fail_on(tmp_path / str(call), operation, call)
        and "replaced emergency saves" in caplog.text
        for call in range(last, max(0, last - 4), -1)
    )


def test_failed_exception_save_is_a_note_on_the_exception(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        _train(_manager(tmp_path), KeyboardInterrupt(), [{"w": 1}, {"socket": object()}], first=6)
    (note,) = caught.value.__notes__
    assert "the state of step 7 could not be saved" in note
    assert "socket" in note


def test_failed_background_save_is_a_note_and_the_exception_save_still_happens(
    tmp_path: Path,
) -> None:
    disk = FailingDisk(api.OsFileSystem(), operation="write_at", call=1)
    manager = manager_on(
        tmp_path, CheckpointConfig(async_save=True, exception_save=True), fs=disk, prefix="net"
    )
    with pytest.raises(ZeroDivisionError) as caught:
        _train(manager, ZeroDivisionError(), [{"w": np.ones(4)}])
    assert ["a save in the background failed" in note for note in caught.value.__notes__] == [True]
    assert [one.why for one in manager.checkpoints()] == ["exception:ZeroDivisionError"]


def _exits() -> object:
    raise SystemExit(3)


@pytest.mark.parametrize("state", [lambda: {"socket": object()}, _exits], ids=["error", "exit"])
@pytest.mark.parametrize("error", [FrozenError(), ZeroDivisionError()], ids=["frozen", "plain"])
def test_failed_exception_save_never_replaces_the_exception(
    tmp_path: Path, state: object, error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        _train(_manager(tmp_path), error, [state])
    assert caught.value is error


def test_failed_background_save_never_replaces_an_exception_that_refuses_notes(
    tmp_path: Path,
) -> None:
    disk = FailingDisk(api.OsFileSystem(), operation="write_at", call=1)
    config = CheckpointConfig(save_checkpoint_steps=1, async_save=True)
    error = FrozenError()
    with pytest.raises(FrozenError) as caught:
        _train(manager_on(tmp_path, config, fs=disk), error, [{"w": np.ones(4)}])
    assert caught.value is error


def _epochs(directory: Path, *, fails_at: int = 0) -> list[tuple[int, ...]]:
    """Train three epochs of four batches, and fail at the beginning of a batch."""
    state: dict[str, Any] = {"rng": np.random.default_rng(0), "seen": []}
    config = CheckpointConfig(save_checkpoint_steps=100, exception_save=True)
    with CheckpointManager(directory, config, stop=Stop(put_aside=False)) as manager:
        start = manager.resume(state)
        step = start.step
        for epoch in range(start.next_epoch, 3):
            for batch in manager.batches(range(4)):
                if step + 1 == fails_at:
                    raise ZeroDivisionError
                state["seen"].append((epoch, batch, int(state["rng"].integers(99))))
                step += 1
                manager.step_end(step, state, epoch=epoch)
            state["seen"].append((epoch,))
    found: list[tuple[int, ...]] = state["seen"]
    return found


@pytest.mark.parametrize("fails_at", [7, 8, 9])
def test_saved_step_goes_on_with_the_batch_of_the_exception(tmp_path: Path, fails_at: int) -> None:
    expected = _epochs(tmp_path / "uncut")
    with pytest.raises(ZeroDivisionError):
        _epochs(tmp_path / "cut", fails_at=fails_at)
    assert _epochs(tmp_path / "cut") == expected


def test_resume_from_a_save_of_an_exception_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fail_after(_manager(tmp_path), 2, ZeroDivisionError())
    _manager(tmp_path).resume({"w": np.zeros(4, int)})
    (said,) = (one for one in caplog.messages if "was saved by an exception" in one)
    assert "may not go on bit for bit" in said
