# SPDX-License-Identifier: Apache-2.0
"""Going back to an earlier state: from memory, else from disk."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    CheckpointNotFound,
    EverySeconds,
    EverySteps,
    MemoryConfig,
    Never,
    Overhead,
    Snapshots,
    StateMismatch,
)
from ckptmgr.engine.recent_states import RecentStates
from ckptmgr.memory_config import MIB
from ckptmgr.policy.save import SavePolicy
from ckptmgr.state.tree import flatten


def fresh() -> dict[str, Any]:
    return {"w": np.zeros(8), "rng": np.random.default_rng(3), "n": 0}


def advance(state: dict[str, Any]) -> None:
    state["w"] += state["rng"].normal(size=8)
    state["n"] += 1


def run(manager: CheckpointManager, state: dict[str, Any], steps: range) -> None:
    for step in steps:
        advance(state)
        manager.step_end(step, state, epoch=step // 4, metrics={"loss": float(step)})


def reference(steps: int) -> np.ndarray:
    state = fresh()
    for _ in range(steps):
        advance(state)
    return np.array(state["w"])


def manager_with(
    path: Path, *, every: int | None = 1, save: int = 100, **options: Any
) -> CheckpointManager:
    config = CheckpointConfig(save_checkpoint_steps=save, **options)
    return CheckpointManager(path, config, snapshots=Snapshots(every, most=3))


def test_rollback_restores_the_state_of_a_step_back_from_memory(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path) as manager:
        run(manager, state, range(1, 6))
        found = manager.rollback(state)
        assert (found.step, found.epoch, found.checkpoint) == (4, 1, None)
        assert found.metrics == {"loss": 4.0}
        assert np.array_equal(state["w"], reference(4))
        assert not list(tmp_path.glob("*.ckpt"))


def test_rollback_then_training_on_gives_the_same_future(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path) as manager:
        run(manager, state, range(1, 6))
        start = manager.rollback(state, steps_back=2)
        run(manager, state, range(start.step + 1, 8))
    assert np.array_equal(state["w"], reference(7))


def test_rollback_without_a_state_returns_a_new_one(tmp_path: Path) -> None:
    with manager_with(tmp_path) as manager:
        run(manager, fresh(), range(1, 4))
        restored: Any = manager.rollback(steps_back=1).state
    assert np.array_equal(restored["w"], reference(2))


def test_rollback_further_than_memory_reaches_falls_back_to_disk(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=2) as manager:
        run(manager, state, range(1, 10))
        found = manager.rollback(state, steps_back=5)
        assert found.step == 4
        assert found.checkpoint is not None
        assert np.array_equal(state["w"], reference(4))


def test_rollback_takes_a_newer_checkpoint_rather_than_an_older_snapshot(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, every=5, save=2) as manager:
        run(manager, state, range(1, 10))
        assert manager.rollback(state).step == 8


def test_rollback_skips_a_damaged_checkpoint_and_says_so(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, every=None, save=2) as manager:
        run(manager, state, range(1, 7))
        newest = tmp_path / "ckpt-4.ckpt"
        newest.chmod(0o600)
        newest.write_bytes(newest.read_bytes()[:-1])
        found = manager.rollback(state, steps_back=2)
        assert found.step == 2
        assert [one.checkpoint.name for one in found.skipped] == ["ckpt-4.ckpt"]


def test_rollback_without_anything_that_old_changes_nothing(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path) as manager:
        run(manager, state, range(1, 6))
        before = state["w"].copy()
        with pytest.raises(CheckpointNotFound, match=r"in memory are \[3, 4, 5\]"):
            manager.rollback(state, steps_back=4)
        assert np.array_equal(state["w"], before)


def test_rollback_into_another_state_changes_nothing(tmp_path: Path) -> None:
    with manager_with(tmp_path) as manager:
        run(manager, fresh(), range(1, 4))
        other: dict[str, Any] = {"w": np.ones(9), "rng": np.random.default_rng(0), "n": 0}
        with pytest.raises(StateMismatch):
            manager.rollback(other)
        assert np.array_equal(other["w"], np.ones(9))
        assert manager.rollback(fresh()).step == 2


def test_rollback_forgets_the_future_that_was_given_up(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path) as manager:
        run(manager, state, range(1, 6))
        manager.rollback(state, steps_back=2)
        assert manager.rollback(state, steps_back=0).step == 3


def test_last_step_after_a_rollback_is_not_saved_at_the_end(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path) as manager:
        run(manager, state, range(1, 6))
        manager.rollback(state)
    assert not list(tmp_path.glob("*.ckpt"))


def test_save_after_a_rollback_is_newer_than_what_was_given_up(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=2, async_save=True, keep_checkpoint_max=2) as manager:
        run(manager, state, range(1, 7))
        start = manager.rollback(state, steps_back=2)
        run(manager, state, range(start.step + 1, 6))
        manager.wait()
        latest = manager.latest()
    assert latest is not None
    assert latest.step == 5
    with manager_with(tmp_path, every=None) as manager:
        assert manager.resume(fresh()).step == 5


def redo_a_saved_step(path: Path, policy: SavePolicy) -> list[tuple[int, float]]:
    """Save step 10, go back to 9, redo 10; return the step and the value of each checkpoint then."""
    state = {"w": np.zeros(2)}
    with CheckpointManager(path, snapshots=Snapshots(1), save_policy=policy) as manager:
        manager.snapshot(9, state)
        state["w"] += 666.0
        manager.save(10, state)
        assert manager.rollback(state).step == 9
        state["w"] += 1.0
        manager.step_end(10, state)
        return values(manager)


def values(manager: CheckpointManager) -> list[tuple[int, float]]:
    restored: list[Any] = [manager.load(c) for c in manager.checkpoints()]
    steps = [c.step for c in manager.checkpoints()]
    return [(step, float(one["w"][0])) for step, one in zip(steps, restored, strict=True)]


@pytest.mark.parametrize(
    "policy",
    [EverySteps(10), EverySeconds(3600.0), Overhead(0.001)],
    ids=lambda policy: type(policy).__name__,
)
def test_first_step_after_a_saved_one_was_given_up_is_saved(
    tmp_path: Path, policy: SavePolicy
) -> None:
    assert redo_a_saved_step(tmp_path, policy) == [(10, 666.0), (10, 1.0)]


def test_policy_that_never_saves_does_not_after_a_rollback_either(tmp_path: Path) -> None:
    assert redo_a_saved_step(tmp_path, Never()) == [(10, 666.0)]


def test_rollback_that_gives_up_no_save_leaves_the_interval_alone(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=4) as manager:
        run(manager, state, range(1, 7))
        start = manager.rollback(state)
        assert start.step == 5
        run(manager, state, range(start.step + 1, 9))
        assert [c.step for c in manager.checkpoints()] == [4, 8]


def test_interval_after_a_rollback_stays_at_its_multiples(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=4) as manager:
        run(manager, state, range(1, 9))
        manager.rollback(state, steps_back=2)
        run(manager, state, range(7, 13))
        assert [c.step for c in manager.checkpoints()] == [4, 8, 7, 8, 12]


def test_resume_in_the_middle_of_a_run_forgets_the_last_step(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=4) as manager:
        run(manager, state, range(1, 7))
        assert manager.resume(state).step == 4
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["ckpt-4.ckpt"]


def test_resume_keeps_the_snapshots_before_a_checkpoint_of_this_run(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=4) as manager:
        run(manager, state, range(1, 6))
        manager.resume(state)
        assert manager.rollback(state).step == 3


def test_resume_from_another_run_forgets_the_snapshots_of_this_one(tmp_path: Path) -> None:
    with manager_with(tmp_path, every=None, save=9) as manager:
        run(manager, fresh(), range(1, 10))
    state = fresh()
    with manager_with(tmp_path) as manager:
        run(manager, state, range(1, 4))
        assert manager.resume(state).step == 9
        with pytest.raises(CheckpointNotFound, match=r"in memory are \[\]"):
            manager.rollback(state, steps_back=6)


@pytest.mark.parametrize("step", [0, 2])
def test_rollback_to_a_state_in_memory_is_no_fresh_start(tmp_path: Path, step: int) -> None:
    state = fresh()
    with manager_with(tmp_path, save=9) as manager:
        manager.snapshot(0, state)
        run(manager, state, range(1, step + 1))
        found = manager.rollback(state, steps_back=0)
    assert (found.step, found.next_step, found.checkpoint) == (step, step + 1, None)
    assert not found.is_fresh


def test_fresh_resume_forgets_the_run_before(tmp_path: Path) -> None:
    state = fresh()
    with manager_with(tmp_path, save=4) as manager:
        manager.snapshot(0, state)
        run(manager, state, range(1, 6))
        for checkpoint in manager.checkpoints():
            manager.directory.joinpath(checkpoint.name + ".manifest.json").unlink()
            checkpoint.path.unlink()
        assert manager.resume(state).is_fresh
        with pytest.raises(CheckpointNotFound, match=r"of step 0 or before: in memory are \[\]"):
            manager.rollback(state, steps_back=0)
        run(manager, fresh(), range(1, 5))
        assert [c.step for c in manager.checkpoints()] == [4]


def state_with(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(2, value)}


def manual(path: Path) -> CheckpointManager:
    return CheckpointManager(path, snapshots=Snapshots(most=3), save_policy=Never())


def test_rollback_never_returns_a_future_that_an_earlier_one_gave_up(tmp_path: Path) -> None:
    with manual(tmp_path) as manager:
        manager.snapshot(80, state_with(80.0))
        manager.save(103, state_with(666.0))
        assert manager.rollback(steps_back=23).step == 80
        manager.snapshot(100, state_with(100.0))
        manager.step_end(105, state_with(105.0))
        assert manager.rollback().step == 100
        with pytest.raises(CheckpointNotFound):
            manager.rollback(steps_back=50)


def test_save_under_the_name_of_one_that_was_given_up_can_be_gone_back_to(tmp_path: Path) -> None:
    with manual(tmp_path) as manager:
        manager.snapshot(1, state_with(1.0))
        manager.save(3, state_with(666.0))
        manager.rollback()
        manager.directory.joinpath("ckpt-3.ckpt.manifest.json").unlink()
        manager.directory.joinpath("ckpt-3.ckpt").unlink()
        manager.save(3, state_with(3.0))
        assert [c.name for c in manager.checkpoints()] == ["ckpt-3.ckpt"]
        manager.step_end(4, state_with(4.0))
        assert manager.rollback().step == 3


def test_checkpoint_that_was_given_up_and_then_resumed_from_counts_again(tmp_path: Path) -> None:
    with manual(tmp_path) as manager:
        manager.snapshot(1, state_with(1.0))
        manager.save(2, state_with(2.0))
        manager.save(3, state_with(3.0))
        manager.rollback(steps_back=2)
        assert manager.resume().step == 3
        assert manager.rollback().step == 2


def test_rollback_takes_a_snapshot_rather_than_an_older_save_of_another_branch(
    tmp_path: Path,
) -> None:
    with manual(tmp_path) as manager:  # it went back from 103 to 80
        manager.save(103, state_with(666.0))
        manager.save(81, state_with(81.0))
    with manual(tmp_path) as manager:
        assert manager.resume().step == 81
        manager.snapshot(100, state_with(100.0))
        manager.step_end(105, state_with(105.0))
        assert manager.rollback().step == 100


def test_rollback_takes_a_snapshot_when_the_newer_checkpoint_is_damaged(tmp_path: Path) -> None:
    with manual(tmp_path) as manager:
        manager.save(2, state_with(2.0))
        manager.snapshot(3, state_with(3.0))
        manager.save(4, state_with(4.0))
        manager.step_end(5, state_with(5.0))
        newest = tmp_path / "ckpt-4.ckpt"
        newest.chmod(0o600)
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
        found = manager.rollback()
    assert found.step == 3
    assert [one.checkpoint.name for one in found.skipped] == ["ckpt-4.ckpt"]


def test_rollback_takes_a_snapshot_when_the_newer_checkpoint_needs_a_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with manual(tmp_path) as manager:
        manager.save(2, state_with(2.0))
    config = CheckpointConfig(enc_key=bytes(range(32)), enc_mode="AES-GCM")
    with CheckpointManager(tmp_path, config) as manager:
        manager.save(4, state_with(4.0))
    with manual(tmp_path) as manager, caplog.at_level(logging.WARNING):
        manager.snapshot(3, state_with(3.0))
        manager.step_end(5, state_with(5.0))
        assert manager.rollback().step == 3
        assert "going back to step 3 in memory, as no newer checkpoint loads" in caplog.text


def test_snapshot_without_room_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryConfig(snapshot_budget_bytes=10)
    with manager_with(tmp_path, memory=memory) as manager, caplog.at_level(logging.WARNING):
        run(manager, fresh(), range(1, 3))
        assert not manager.snapshot(2, fresh())
    assert "no snapshot of step 2" in caplog.text


def test_snapshots_within_a_budget_push_out_older_ones() -> None:
    recent = RecentStates(
        MemoryConfig(snapshot_budget_bytes=150, smallest_evictee_bytes=0), lambda: 0.0, most=9
    )
    for step in range(1, 6):
        assert recent.put(step, flatten({"w": np.full(8, step)}), epoch=None, metrics={})
    assert len(recent.steps) == 2
    assert recent.newest_of([]) is None
    recent.close()


@pytest.mark.parametrize("options", [{"every": 0}, {"most": 0}])
def test_number_of_snapshots_that_makes_no_sense_is_refused(
    options: dict[str, int],
) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Snapshots(**options)


def test_metrics_that_are_no_mapping_are_refused(tmp_path: Path) -> None:
    with manager_with(tmp_path) as manager, pytest.raises(TypeError, match="mapping of names"):
        manager.save(1, fresh(), metrics=[1.0])  # type: ignore[arg-type]


def test_resume_says_that_manifests_were_left_behind(tmp_path: Path) -> None:
    with manager_with(tmp_path, save=2) as manager:
        run(manager, fresh(), range(1, 3))
    (tmp_path / "ckpt-2.ckpt.manifest.json").unlink()
    with manager_with(tmp_path, every=None) as manager:
        found = manager.resume(fresh())
    assert found.is_fresh
    assert [one.checkpoint.name for one in found.skipped] == ["ckpt-2.ckpt"]
    assert "no manifest" in found.skipped[0].reason


@pytest.mark.parametrize("async_save", ["thread", "process"])
def test_snapshots_and_staging_stay_within_one_budget_and_the_save_comes_first(
    tmp_path: Path, async_save: str
) -> None:
    memory = MemoryConfig(host_budget_bytes=20 * MIB, slab_bytes=MIB)
    state = {"w": np.zeros(MIB)}  # two of its copies fit
    with manager_with(tmp_path, memory=memory, async_save=async_save) as manager:
        ledger = manager._engine.ledger
        run_copies = [manager.snapshot(step, state) for step in (1, 2)]
        handle = manager.save(3, state)
        assert handle is not None
        handle.wait(60)
        assert run_copies == [True, True]
        assert manager._keep_states().recent.steps == [2]
        assert 16 * MIB <= ledger.host_bytes <= 20 * MIB
        assert handle.stats.staging_bytes < 9 * MIB
        assert manager.rollback().step == 2


@pytest.mark.parametrize("place", [None, "disk"])
def test_snapshot_of_an_encrypted_run_is_never_spilled_as_plaintext(
    tmp_path: Path, place: Literal["disk"] | None, caplog: pytest.LogCaptureFixture
) -> None:
    spill = tmp_path / "spill"
    memory = MemoryConfig(
        host_budget_bytes=1, spill_directory=spill, snapshot_place=place, is_automatic=place is None
    )
    with manager_with(tmp_path / "runs", memory=memory, enc_key=bytes(16)) as manager:
        assert not manager.snapshot(1, fresh())
    assert not spill.exists()
    assert "snapshots do not spill" in caplog.text


def test_step_after_close_is_copied_into_memory_again(tmp_path: Path) -> None:
    with manager_with(tmp_path) as manager:
        manager.step_end(1, fresh())
        manager.close()
        assert manager._keep_states().recent.steps == []
        manager.step_end(2, fresh())
        assert manager._keep_states().recent.steps == [2]


def test_close_gives_all_memory_of_snapshots_back(tmp_path: Path) -> None:
    manager = manager_with(tmp_path)
    for step in (1, 2):
        assert manager.snapshot(step, fresh())
        assert manager._engine.ledger.host_bytes > 0
        manager.close()
        assert manager._engine.ledger.host_bytes == 0
