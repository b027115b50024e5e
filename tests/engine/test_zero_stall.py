# SPDX-License-Identifier: Apache-2.0
"""Saves that copy in the background: written content, waits, and updates that do not wait."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import (
    CheckpointConfig,
    CheckpointManager,
    MemoryConfig,
    ModelCheckpoint,
    SaveFailed,
    SaveHandle,
    SaveSuperseded,
    StagingExhausted,
)
from ckptmgr.engine.staging import StagingPool
from ckptmgr.engine.zero_stall import DeferredState, Updates, defer
from ckptmgr.formats.dtypes import BY_NAME
from ckptmgr.formats.tensor import Item, Tensor, TensorSpec, tensor_from_array
from ckptmgr.memory_config import MIB
from ckptmgr.state.arrays import jax_bytes
from ckptmgr.state.tree import flatten
from tests.support.descriptors import open_descriptors
from tests.support.held import KEY, TIMEOUT_S, HeldDisk, run_program
from tests.support.held_staging import HeldStaging
from tests.support.interrupts import is_interrupted, pressing_ctrl_c
from tests.support.runs import manager_on
from tests.support.staging_memory import failing, map_tensors, values

torch: Any = pytest.importorskip("torch")

SIZE = 100_000
in_background = pytest.mark.parametrize("mode", ["thread", "process"])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldStaging:
    return HeldStaging(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that no descriptor and no thread is left behind."""
    before = open_descriptors()
    yield
    if open_descriptors() - before:
        gc.collect()
    assert open_descriptors() - before == set()
    for thread in threading.enumerate():
        if thread.name.startswith("ckptmgr-s"):
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()


def manager_of(path: Path, mode: str = "thread", **options: Any) -> CheckpointManager:
    fs = options.pop("fs", None)
    config = CheckpointConfig(async_save=mode, zero_stall=True, **options)
    return manager_on(path, config, fs=fs)


def fresh() -> dict[str, Any]:
    return {"w": torch.zeros(SIZE), "n": 0, "rng": random.Random(1), "small": np.zeros(3)}


def saved(handle: SaveHandle | None) -> SaveHandle:
    assert handle is not None
    return handle


def loaded(manager: CheckpointManager, step: int) -> dict[str, Any]:
    state = manager.load(step)
    assert isinstance(state, dict)
    return state


@in_background
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_save_returns_before_anything_large_is_copied_and_writes_the_state_of_its_call(
    tmp_path: Path, held: HeldStaging, mode: str, key: bytes | None
) -> None:
    state = fresh()
    with manager_of(tmp_path, mode, enc_key=key) as manager:
        for step in (1, 2, 3):
            state["w"][...] = state["n"] = step
            state["small"][...] = step
            handle = saved(manager.save(step, state))
            assert not handle.staged.done()
            # Forward and backward: numbers, generators and small values may change.
            state["n"] = -1
            state["rng"].random()
            state["small"][...] = -1
            held.let_go_soon()
            manager.before_update()
            assert handle.staged.done()
            state["w"][...] = -1
        manager.wait()
        for step in (1, 2, 3):
            found = loaded(manager, step)
            assert np.unique(found["w"]).tolist() == [step]
            assert np.unique(found["small"]).tolist() == [step]
            assert found["n"] == step
        first = random.Random(1)
        assert loaded(manager, 1)["rng"].random() == first.random()


@in_background
def test_large_update_before_the_copy_fails_the_save_and_names_the_array(
    tmp_path: Path, held: HeldStaging, mode: str
) -> None:
    state = fresh()
    with manager_of(tmp_path, mode) as manager:
        manager.save(1, state)
        held.let_go()
        manager.wait()
        handle = saved(manager.save(2, state))
        state["w"] += 1.0
        held.let_go()
        with pytest.raises(SaveFailed, match=r"'w' changed before it was copied[^$]*before_update"):
            manager.wait()
        assert handle.staged.exception() is None
        assert [c.step for c in manager.checkpoints()] == [1]
        assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".tmp") == []


@in_background
def test_optimizer_step_right_after_save_waits_and_changes_nothing_that_is_written(
    tmp_path: Path, held: HeldStaging, mode: str
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(400, 400), torch.nn.BatchNorm1d(400))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    # One state holds the optimizer, the other its state_dict().
    states: list[Callable[[], dict[str, Any]]] = [
        lambda: {"model": model, "optimizer": optimizer},
        lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
    ]
    expected: dict[int, Any] = {}
    with manager_of(tmp_path, mode) as manager:
        for step in range(1, 7):
            model(torch.randn(8, 400)).square().sum().backward()
            held.let_go_soon()
            optimizer.step()
            optimizer.zero_grad()
            expected[step] = [value.clone() for value in model.state_dict().values()]
            manager.save(step, states[step % 2]())
            assert held.count == 1
        held.let_go()
        manager.wait()
        for step in range(2, 7):
            found = loaded(manager, step)["model"]
            assert [list(expected[step][i].shape) for i in range(len(found))] == [
                list(value.shape) for value in found.values()
            ]
            pairs = zip(found.values(), expected[step], strict=True)
            assert all(torch.equal(value, want) for value, want in pairs)


def test_torch_update_without_waiting_fails_the_save(tmp_path: Path, held: HeldStaging) -> None:
    weights = torch.zeros(SIZE)
    with manager_of(tmp_path) as manager:
        manager.save(1, {"w": weights})
        weights[12345] = 1.0
        held.let_go()
        with pytest.raises(SaveFailed, match="'w' changed before it was copied"):
            manager.wait()
        assert manager.checkpoints() == []


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("how", ["before_update", "handle"])
def test_update_after_waiting_is_right_although_the_save_still_runs(
    tmp_path: Path, kind: str, how: str
) -> None:
    weights = np.zeros(SIZE) if kind == "numpy" else torch.zeros(SIZE)
    disk = HeldDisk()
    with manager_of(tmp_path, fs=disk) as manager:
        disk.gate.clear()
        handle = saved(manager.save(1, {"w": weights}))
        if how == "handle":
            handle.staged.result(TIMEOUT_S)
        else:
            manager.before_update()
        weights += 1.0
        disk.gate.set()
        manager.wait()
        assert not loaded(manager, 1)["w"].any()


def test_running_statistics_of_any_size_may_change_in_forward(
    tmp_path: Path, held: HeldStaging
) -> None:
    model = torch.nn.BatchNorm1d(50_000)
    with manager_of(tmp_path) as manager:
        manager.save(1, {"model": model})
        model(torch.randn(2, 50_000))
        held.let_go_soon()
        manager.wait()
        assert not loaded(manager, 1)["model"]["running_mean"].any()


def test_sparse_buffers_are_copied_at_once_because_forward_changes_them(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("graph", torch.ones(200, 200).to_sparse())
    with manager_of(tmp_path) as manager:
        manager.save(1, model)
        model.graph._values().zero_()
        manager.wait()
        assert torch.equal(loaded(manager, 1)["graph"].to_dense(), torch.ones(200, 200))


def test_array_of_bytes_is_not_copied_and_a_worker_gets_its_copy(tmp_path: Path) -> None:
    for mode, copied_bytes in (("thread", 0), ("process", 8 * SIZE)):
        array = np.frombuffer(np.arange(float(SIZE)).tobytes())
        with manager_of(tmp_path / mode, mode) as manager:
            handle = saved(manager.save(1, {"w": array}))
            handle.wait(TIMEOUT_S)
            assert handle.stats.staged_bytes == copied_bytes
            assert np.array_equal(loaded(manager, 1)["w"], array)


def test_array_that_is_read_only_for_the_time_being_is_saved_as_it_was(tmp_path: Path) -> None:
    array = np.zeros(SIZE)
    writable = array[:]
    array.flags.writeable = False
    disk = HeldDisk()
    with manager_of(tmp_path, fs=disk) as manager:
        disk.gate.clear()
        manager.save(1, {"w": array})
        manager.before_update()
        writable[777] = 1.0
        disk.gate.set()
        manager.wait()
        assert not loaded(manager, 1)["w"].any()


def test_state_with_nothing_large_is_staged_when_save_returns(
    tmp_path: Path, held: HeldStaging
) -> None:
    with manager_of(tmp_path) as manager:
        assert saved(manager.save(1, {"n": 1, "w": np.zeros(3)})).staged.done()
        held.let_go()


def test_before_update_without_zero_stall_does_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(async_save=True)) as manager:
        manager.before_update()
        assert saved(manager.save(1, fresh())).staged.done()
        manager.before_update()


def test_wait_in_before_update_counts_as_blocked(tmp_path: Path, held: HeldStaging) -> None:
    with manager_of(tmp_path) as manager:
        handle = saved(manager.save(1, fresh()))
        before_s = handle.stats.blocked_s
        held.let_go_soon()
        manager.before_update()
        assert handle.stats.blocked_s > before_s
        assert handle.stats.stage_s > 0.0


def test_load_into_the_state_waits_for_its_copy(tmp_path: Path, held: HeldStaging) -> None:
    state = fresh()
    with manager_of(tmp_path) as manager:
        manager.save(1, state)
        held.let_go()
        manager.wait()
        state["w"] += 1.0
        manager.save(2, state)
        held.let_go_soon()
        manager.load(1, state)
        manager.wait()
        assert np.unique(loaded(manager, 2)["w"]).tolist() == [1.0]


@pytest.mark.parametrize("back", ["rollback", "resume", "close"])
def test_going_back_and_closing_wait_for_the_copy(
    tmp_path: Path, held: HeldStaging, back: str
) -> None:
    state = fresh()
    manager = manager_of(tmp_path)
    handle = saved(manager.step_end(1, state))
    held.let_go_soon()
    if back == "rollback":
        assert manager.rollback(state, steps_back=0).step == 1
    elif back == "resume":
        assert manager.resume(state).step == 1
    else:
        manager.close()
    assert handle.wait(TIMEOUT_S).step == 1
    manager.close()


def test_skip_skips_while_a_state_is_being_copied(tmp_path: Path, held: HeldStaging) -> None:
    state = fresh()
    with manager_of(tmp_path, back_pressure="skip") as manager:
        first = saved(manager.save(1, state))
        assert manager.save(2, state) is None
        assert held.count == 1
        held.let_go()
        assert first.wait(TIMEOUT_S).step == 1


def test_coalesce_gives_up_a_copy_that_is_not_begun_and_lets_go_of_its_arrays(
    tmp_path: Path, held: HeldStaging
) -> None:
    disk = HeldDisk()
    disk.gate.clear()
    with manager_of(tmp_path, back_pressure="coalesce", fs=disk) as manager:
        manager.save(1, fresh())
        held.let_go()
        manager.before_update()
        disk.arrive()
        state = fresh()
        second = saved(manager.save(2, state))
        array = weakref.ref(state["w"])
        del state
        third = saved(manager.save(3, fresh()))
        assert isinstance(second.durable.exception(0), SaveSuperseded)
        assert second.staged.done()
        held.let_go()
        gc.collect()
        assert array() is None
        disk.gate.set()
        assert third.wait(TIMEOUT_S).step == 3
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [1, 3]


def test_array_that_the_caller_let_go_of_is_freed_when_it_is_copied(tmp_path: Path) -> None:
    disk = HeldDisk()
    disk.gate.clear()
    with manager_of(tmp_path, fs=disk) as manager:
        state = fresh()
        array = weakref.ref(state["w"])
        handle = saved(manager.save(1, state))
        del state
        handle.staged.result(TIMEOUT_S)
        disk.arrive()
        gc.collect()
        assert array() is None
        disk.gate.set()


def test_failed_copy_is_raised_at_the_next_step_and_retried_saves_fail_with_it(
    tmp_path: Path, held: HeldStaging
) -> None:
    state = fresh()
    with manager_of(tmp_path, on_error="retry(2)") as manager:
        handle = saved(manager.step_end(1, state))
        state["w"] += 1
        held.let_go()
        assert isinstance(handle.durable.exception(TIMEOUT_S), SaveFailed)
        with pytest.raises(SaveFailed, match="changed before it was copied"):
            manager.step_end(2, state)
        manager.step_end(3, state)
        held.let_go()
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [3]


@in_background
def test_state_that_does_not_fit_is_refused_by_save_itself(tmp_path: Path, mode: str) -> None:
    with manager_of(tmp_path, mode, memory=MemoryConfig(host_budget_bytes=MIB)) as manager:
        with pytest.raises(StagingExhausted, match="do not fit"):
            manager.save(1, {"w": np.zeros(2 * MIB, np.uint8)})
        manager.save(2, fresh())
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [2]


@in_background
def test_state_that_is_spilled_is_saved(tmp_path: Path, mode: str) -> None:
    spill = tmp_path / "spill"
    memory = MemoryConfig(host_budget_bytes=MIB, spill_directory=spill)
    state = {"w": np.arange(3 * MIB, dtype=np.uint8), "small": [np.arange(9) for _ in range(5)]}
    with manager_of(tmp_path / "runs", mode, memory=memory) as manager:
        manager.save(1, state)
        manager.wait()
        found = loaded(manager, 1)
        assert np.array_equal(found["w"], np.arange(3 * MIB, dtype=np.uint8))
        assert all(np.array_equal(small, np.arange(9)) for small in found["small"])
    assert list(spill.iterdir()) == []


def test_thread_that_cannot_be_started_is_an_error_of_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with manager_of(tmp_path) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start"):
                manager.save(1, fresh())
        for step in (2, 3, 4):
            manager.save(step, fresh())
        manager.wait()


def test_stage_thread_that_cannot_be_started_is_an_error_of_save_and_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    disk = HeldDisk()
    with manager_of(tmp_path, back_pressure="coalesce", fs=disk) as manager:
        disk.gate.clear()
        manager.save(1, fresh())
        disk.arrive()
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(RuntimeError, match="can't start"):
                    manager.save(2, fresh())
        manager.save(3, fresh())
        disk.gate.set()
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [1, 3]


def test_manager_that_is_dropped_without_close_leaves_no_hook(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    manager = manager_of(tmp_path)
    saved(manager.save(1, fresh())).wait(TIMEOUT_S)
    manager.wait()
    assert len(hooks) == before + 1
    manager._writer.close()  # only the lease would stay, until the end of the process
    del manager
    gc.collect()
    assert len(hooks) == before


def test_close_leaves_the_optimizers_alone_and_the_next_save_hooks_them_again(
    tmp_path: Path,
) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    before = len(hooks)
    manager = manager_of(tmp_path)
    for step in (1, 2):
        manager.save(step, fresh())
        assert len(hooks) == before + 1
        manager.close()
        assert len(hooks) == before


def test_states_that_were_saved_are_not_remembered_when_nobody_calls_before_update(
    tmp_path: Path,
) -> None:
    with manager_of(tmp_path) as manager:
        for step in range(1, 6):
            manager.save(step, fresh())
        manager.wait()
        updates = manager._engine._updates
        assert updates is not None
        assert len(updates._pending) == 1


_FORK = """
import os, sys
import torch
from pathlib import Path
from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.training.options import System
from tests.support.held import HeldDisk

disk = HeldDisk()
disk.gate.clear()
manager = CheckpointManager._on(System(fs=disk), sys.argv[1], CheckpointConfig(async_save=True, zero_stall=True))
import threading
real = threading.Thread.start
held = []
threading.Thread.start = lambda thread: held.append(thread) if thread.name == "ckptmgr-save" else real(thread)
manager.save(1, {"w": torch.zeros(100_000)})
child = os.fork()
if child == 0:
    manager.before_update()  # nothing is being copied here
    os._exit(7 + len(manager._engine._updates._pending))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
real(held.pop())
disk.gate.set()
manager.wait()
manager.close()
print([c.step for c in manager.checkpoints()])
"""


@pytest.mark.slow
def test_forked_child_waits_for_nothing(tmp_path: Path) -> None:
    done = run_program(_FORK, tmp_path)
    assert (done.stdout.split("\n")[:2], done.stderr) == (["7", "[1]"], "")


def test_deferred_state_holds_all_kinds_of_items() -> None:
    large = tensor_from_array("large", np.zeros(SIZE))
    items: list[Item] = [
        map_tensors("map"),
        *flatten({"w": torch.ones(SIZE), "s": np.ones(2)}).tensors,
    ]
    items.append(large)
    with StagingPool() as pool:
        deferred = defer(items, pool)
        deferred.wait()
        assert values(deferred.items) == values(items)
        deferred.release()
        deferred.release()
        deferred.copy()


def test_copy_at_once_that_fails_is_an_error_of_the_call_and_nothing_stays() -> None:
    large = flatten({"w": torch.zeros(SIZE)}).tensors
    with StagingPool() as pool:
        for _ in range(3):
            with pytest.raises(OSError, match="no content"):
                defer([*large, failing("s", 3, OSError("no content"))], pool)
        deferred = defer([*large], pool)
        deferred.wait()
        deferred.release()


def test_child_of_a_fork_forgets_what_its_parent_copies() -> None:
    updates = Updates()
    with StagingPool() as pool:
        deferred = defer(list(flatten({"w": torch.zeros(SIZE)}).tensors), pool)
        updates.add(deferred)
        updates.forget_parent()
        updates.wait()
        assert not deferred.handle.staged.done()
        deferred.release()
    updates.close()


class Failing:
    """A JAX array on an accelerator that cannot be fetched."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        raise self.error

    def devices(self) -> list[Any]:
        return []


def failing_with(error: BaseException) -> list[Item]:
    spec = TensorSpec(name="w", dtype=BY_NAME["uint8"], shape=(SIZE,))
    return [Tensor(spec=spec, content=partial(jax_bytes, Failing(error)))]


def test_ctrl_c_in_before_update_is_raised_there_and_fails_the_save() -> None:
    with StagingPool() as pool:
        deferred = defer(failing_with(KeyboardInterrupt("Ctrl-C")), pool, copies_all=True)
        with pytest.raises(KeyboardInterrupt):
            deferred.wait_until_copied()
        assert deferred.handle.staged.done()
        with pytest.raises(KeyboardInterrupt):
            deferred.wait()
        deferred.wait_until_copied()
        deferred.release()


def test_ctrl_c_at_any_point_of_before_update_lets_nobody_wait_for_ever() -> None:
    items = list(flatten({"w": torch.zeros(SIZE)}).tensors)
    at = 0
    for at in itertools.count(1):
        with StagingPool() as pool:
            deferred = defer(items, pool)
            was_interrupted = is_interrupted(deferred.wait_until_copied, at=at)
            deferred.copy()  # as the thread that saves does; who comes second has nothing to do
            assert deferred.handle.staged.done()
            deferred.release()
        if not was_interrupted:
            break
    assert at > 10


def test_ctrl_c_at_any_point_of_registering_a_save_gives_its_memory_back() -> None:
    items = list(flatten({"w": torch.zeros(SIZE), "small": np.zeros(1)}).tensors)
    at = 0
    for at in itertools.count(1):
        with StagingPool() as pool:
            pool.stage(items).release()
            made: list[DeferredState] = []
            was_interrupted = is_interrupted(lambda: made.append(defer(items, pool)), at=at)  # noqa: B023
            for deferred in made:
                deferred.release()
            assert pool.host_bytes == pool.usage.kept_bytes
        if not was_interrupted:
            break
    assert at > 50


def test_copy_that_fails_is_raised_by_wait_and_nothing_stays() -> None:
    with StagingPool() as pool:
        for _ in range(3):
            items = failing_with(RuntimeError("Array has been deleted"))
            deferred = defer(items, pool, copies_all=True)
            with pytest.raises(RuntimeError, match="deleted"):
                deferred.wait()
            deferred.wait_until_copied()
            deferred.release()


class Slow:
    """A JAX array on an accelerator that is fetched when a test lets it."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.fetches = 0

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        self.fetches += 1
        self.begun.set()
        assert self.go_on.wait(TIMEOUT_S)
        return np.zeros(SIZE, np.uint8)

    def devices(self) -> list[Any]:
        return []


def slow_items(slow: Slow, count: int) -> list[Item]:
    return [
        Tensor(
            spec=TensorSpec(name=f"w{index}", dtype=BY_NAME["uint8"], shape=(SIZE,)),
            content=partial(jax_bytes, slow),
        )
        for index in range(count)
    ]


def test_release_while_the_copy_is_made_waits_for_it_and_copies_no_further() -> None:
    slow = Slow()
    with StagingPool() as pool:
        deferred = defer(slow_items(slow, 3), pool, copies_all=True)
        copying = threading.Thread(target=deferred.copy)
        copying.start()
        assert slow.begun.wait(TIMEOUT_S)
        releasing = threading.Thread(target=deferred.release)
        releasing.start()
        while not deferred._is_released:
            os.sched_yield()
        assert not deferred.handle.staged.done()
        slow.go_on.set()
        releasing.join(TIMEOUT_S)
        copying.join(TIMEOUT_S)
        assert slow.fetches == 1
        assert pool.usage.kept_bytes > 0
        with pytest.raises(SaveFailed, match="given up"):
            deferred.wait()


def test_ctrl_c_while_another_thread_copies_leaves_the_copy_to_be_waited_for_again() -> None:
    slow = Slow()
    updates = Updates()

    def interrupt() -> None:
        while not deferred.handle.staged._condition._waiters:  # type: ignore[attr-defined]
            os.sched_yield()
        press()

    with StagingPool() as pool, pressing_ctrl_c() as press:
        deferred = defer(slow_items(slow, 1), pool, copies_all=True)
        updates.add(deferred)
        copying = threading.Thread(target=deferred.copy)
        copying.start()
        assert slow.begun.wait(TIMEOUT_S)
        interrupter = threading.Thread(target=interrupt)
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            updates.wait()
        assert not deferred.handle.staged.done()
        slow.go_on.set()
        updates.wait()
        deferred.wait()
        copying.join(TIMEOUT_S)
        interrupter.join(TIMEOUT_S)
        deferred.release()
    updates.close()


@pytest.mark.parametrize("value", [1, "yes", None])
def test_zero_stall_must_be_a_bool(value: Any) -> None:
    with pytest.raises(ValueError, match="zero_stall"):
        CheckpointConfig(async_save=True, zero_stall=value)


def test_zero_stall_without_background_saves_is_refused() -> None:
    with pytest.raises(ValueError, match=r"zero_stall .* needs async_save"):
        CheckpointConfig(zero_stall=True)


def test_callback_refuses_zero_stall(tmp_path: Path) -> None:
    config = CheckpointConfig(async_save=True, zero_stall=True)
    with pytest.raises(ValueError, match="use CheckpointManager"):
        ModelCheckpoint("net", str(tmp_path), config)


def test_real_jax_state_is_saved_from_where_it_is_although_it_is_donated(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    update = jax.jit(lambda weights: weights + 1, donate_argnums=0)
    disk = HeldDisk()
    disk.gate.clear()
    with manager_of(tmp_path, fs=disk) as manager:
        weights = jax.numpy.zeros(SIZE)
        handle = saved(manager.save(1, {"w": weights}))
        assert handle.staged.done()
        for _ in range(3):
            weights = update(weights)
        weights.block_until_ready()
        disk.gate.set()
        handle.wait(TIMEOUT_S)
        assert handle.stats.staged_bytes == 0
        assert not loaded(manager, 1)["w"].any()
