# SPDX-License-Identifier: Apache-2.0
"""The three ways to save: the same promises, the same file, nothing left over."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import (
    Checkpoint,
    CheckpointConfig,
    CheckpointManager,
    MemoryConfig,
    StagingExhausted,
    StoreLocked,
)
from ckptmgr.engine.engine import Mode, SaveEngine, save_mode_of
from ckptmgr.events import Event
from ckptmgr.files.save.job import FixedName, SaveJob
from ckptmgr.formats.tensor import Item, tensor_from_array
from ckptmgr.memory_config import MIB
from ckptmgr.series.commit import BegunSave
from ckptmgr.series.writer import SeriesWriter
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.descriptors import nothing_stays_open
from tests.support.held import KEY, TIMEOUT_S, HeldDisk, temporary_files
from tests.support.runs import manager_on

in_background = pytest.mark.parametrize("mode", ["thread", "process"])
everywhere = pytest.mark.parametrize("mode", ["sync", "thread", "process"])


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Check that no descriptor, thread or temporary file is left behind."""
    with nothing_stays_open():
        yield
        gc.collect()
    assert temporary_files(tmp_path) == []
    assert [t for t in threading.enumerate() if t.name == "ckptmgr-save" and t.is_alive()] == []


def state_of(value: float) -> dict[str, object]:
    return {"w": np.full(1000, value, np.float32)}


def value_in(manager: CheckpointManager, step: int) -> float:
    state = manager.load(step)
    assert isinstance(state, dict)
    assert np.unique(state["w"]).size == 1
    return float(state["w"][0])


class RefusingWriter:
    """A writer whose ranks are told that there is no state."""

    store = api.place(Path("/none"))

    def begin(self, job: SaveJob) -> BegunSave:
        assert not job.items
        raise StagingExhausted("told to the others")


@pytest.mark.parametrize("has_peers", [False, True])
def test_state_that_could_not_be_copied_is_let_go_at_once(has_peers: bool) -> None:
    memory = MemoryConfig(host_budget_bytes=1)
    engine = SaveEngine("thread", memory=memory, has_peers=has_peers)
    array = np.zeros(1 << 20)
    is_there = weakref.ref(array)

    gc.disable()
    try:
        job = SaveJob(
            naming=FixedName("w.ckpt"),
            facts=api.SaveFacts(step=1),
            items=[tensor_from_array("w", array)],
        )
        with suppress(StagingExhausted):
            engine.run(job, RefusingWriter())
        with suppress(StagingExhausted):
            engine.close()
        del array, job
        assert is_there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("async_save", "mode"),
    [(False, "sync"), (True, "thread"), ("thread", "thread"), ("process", "process")],
)
def test_mode_of_every_async_save(async_save: bool | str, mode: Mode) -> None:
    assert save_mode_of(async_save) == mode


@everywhere
@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
def test_save_writes_what_was_there_when_it_was_called(
    tmp_path: Path, mode: str, key: bytes | None
) -> None:
    config = CheckpointConfig(async_save=False if mode == "sync" else mode, enc_key=key)
    state = state_of(1.0)
    weights = state["w"]
    assert isinstance(weights, np.ndarray)
    with CheckpointManager(tmp_path, config) as manager:
        for step in range(1, 6):
            weights[...] = step
            handle = manager.save(step, state)
            weights[...] = -1.0
            assert handle is not None
            assert handle.staged.done()
        manager.wait()
        assert [value_in(manager, step) for step in range(1, 6)] == [1.0, 2.0, 3.0, 4.0, 5.0]


@everywhere
def test_handle_says_what_the_save_cost(tmp_path: Path, mode: str) -> None:
    config = CheckpointConfig(async_save=False if mode == "sync" else mode)
    with CheckpointManager(tmp_path, config) as manager:
        handle = manager.save(1, state_of(1.0))
        assert handle is not None
        checkpoint = handle.wait(TIMEOUT_S)
        assert handle.stats.size_bytes == checkpoint.size_bytes
        assert handle.stats.staged_bytes == (0 if mode == "sync" else 4000)
        assert handle.stats.blocked_s > 0.0
        assert min(handle.stats.write_s, handle.stats.sync_s, handle.stats.commit_s) > 0.0
        assert handle.stats.gigabytes_per_s > 0.0


@in_background
def test_close_frees_everything_and_the_next_save_starts_anew(tmp_path: Path, mode: str) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(async_save=mode))
    for step in (1, 2):
        manager.save(step, state_of(step))
        manager.close()
    manager.close()
    assert [c.step for c in manager.checkpoints()] == [1, 2]


@in_background
def test_manager_that_is_dropped_without_close_leaves_nothing(tmp_path: Path, mode: str) -> None:
    manager = CheckpointManager(tmp_path, CheckpointConfig(async_save=mode))
    handle = manager.save(1, state_of(1.0))
    assert handle is not None
    handle.wait(TIMEOUT_S)
    manager.wait()
    manager._writer.close()  # only the lease would stay, until the end of the process
    del manager


def test_process_needs_the_real_disk() -> None:
    config = CheckpointConfig(async_save="process")
    with (
        manager_on("/runs", config, fs=ModelDisk()) as manager,
        pytest.raises(ValueError, match="needs the real disk"),
    ):
        manager.save(1, state_of(1.0))


@in_background
def test_state_that_does_not_fit_is_refused_at_once_and_the_next_one_is_saved(
    tmp_path: Path, mode: str
) -> None:
    config = CheckpointConfig(async_save=mode, memory=MemoryConfig(host_budget_bytes=MIB))
    with CheckpointManager(tmp_path, config) as manager:
        with pytest.raises(StagingExhausted, match="do not fit"):
            manager.step_end(1, {"w": np.zeros(2 * MIB, np.uint8)})
        manager.step_end(2, state_of(2.0))
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [2]


@pytest.mark.parametrize("mode", ["thread"])
def test_engine_coalesces_within_two_staged_states(tmp_path: Path, mode: Mode) -> None:
    disk = HeldDisk()
    config = CheckpointConfig(async_save=mode, back_pressure="coalesce")
    with manager_on(tmp_path, config, fs=disk) as manager:
        disk.gate.clear()
        manager.save(1, state_of(1.0))
        disk.arrive()
        handles = [manager.save(step, state_of(step)) for step in range(2, 6)]
        assert [handle.durable.done() for handle in handles if handle] == [True, True, True, False]
        disk.gate.set()
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [1, 5]
        assert value_in(manager, 5) == 5.0


@pytest.mark.slow
def test_process_saves_states_of_changing_size(tmp_path: Path) -> None:
    config = CheckpointConfig(
        async_save="process", memory=MemoryConfig(allocation="slabs", slab_bytes=MIB)
    )
    with CheckpointManager(tmp_path, config) as manager:
        for step, size in enumerate((10, 70 * MIB, 3 * MIB, 0, 80 * MIB), 1):
            manager.save(step, {"w": np.full(size, step, np.uint8)})
        manager.wait()
        for step, size in enumerate((10, 70 * MIB, 3 * MIB, 0, 80 * MIB), 1):
            state = manager.load(step)
            assert isinstance(state, dict)
            assert np.array_equal(state["w"], np.full(size, step, np.uint8))


def test_process_saves_from_a_spill_file(tmp_path: Path) -> None:
    runs, spill = tmp_path / "runs", tmp_path / "spill"
    spill.mkdir()
    memory = MemoryConfig(host_budget_bytes=MIB, spill_directory=spill)
    config = CheckpointConfig(async_save="process", memory=memory)
    with CheckpointManager(runs, config) as manager:
        manager.save(1, {"w": np.arange(3 * MIB, dtype=np.uint8)})
        manager.wait()
        state = manager.load(1)
        assert isinstance(state, dict)
        assert np.array_equal(state["w"], np.arange(3 * MIB, dtype=np.uint8))
    assert list(spill.iterdir()) == []


@in_background
def test_handle_can_be_awaited(tmp_path: Path, mode: str) -> None:
    async def train() -> Checkpoint:
        handle = manager.save(3, state_of(3.0))
        assert handle is not None
        await asyncio.wrap_future(handle.staged)
        return await asyncio.wrap_future(handle.durable)

    with CheckpointManager(tmp_path, CheckpointConfig(async_save=mode)) as manager:
        assert asyncio.run(train()).step == 3


@in_background
def test_second_save_of_a_step_in_flight_is_another_checkpoint(tmp_path: Path, mode: str) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(async_save=mode)) as manager:
        for value in (1.0, 2.0, 3.0):
            manager.save(1, state_of(value))
        manager.wait()
        assert [(c.step, c.attempt) for c in manager.checkpoints()] == [(1, 0), (1, 1), (1, 2)]


def test_engine_overwrites_a_name_in_both_modes_alike(tmp_path: Path) -> None:
    modes: Sequence[Mode] = ("sync", "thread", "process")
    for mode in modes:
        store = api.place(tmp_path / mode)
        writer = SeriesWriter(store, "net", options=api.SaveOptions(), clock=lambda: 0.0)
        engine = SaveEngine(mode)
        for step in (1, 2):
            items: list[Item] = [tensor_from_array("w", np.full(4, step, np.float32))]
            facts = api.SaveFacts(step=step)
            job = SaveJob(naming=FixedName("net.ckpt"), facts=facts, items=items)
            writer.open()
            engine.run(job, writer)
        engine.close()
        writer.close()
        (found,) = store.scan()
        assert (found.step, found.state.name) == (2, "OK")
    contents = {mode: (tmp_path / mode / "net.ckpt").read_bytes() for mode in modes}
    assert len(set(contents.values())) == 1


def test_in_flight_save_is_neither_listed_nor_latest_and_pins_hold(tmp_path: Path) -> None:
    disk = HeldDisk()
    config = CheckpointConfig(async_save="thread", keep="last(1)")
    with manager_on(tmp_path, config, fs=disk) as manager:
        manager.save(1, state_of(1.0))
        manager.wait()
        disk.arrive()
        disk.gate.clear()
        manager.save(2, state_of(2.0))
        disk.arrive()
        assert [c.step for c in manager.checkpoints()] == [1]
        latest = manager.latest()
        assert latest is not None
        assert latest.step == 1
        manager.pin(latest, "paper")
        disk.gate.set()
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [1, 2]
        manager.unpin(1)
        manager.save(3, state_of(3.0))
        manager.wait()
        assert [c.step for c in manager.checkpoints()] == [3]


def test_retention_waits_for_durability_and_runs_in_the_background(tmp_path: Path) -> None:
    disk = HeldDisk()
    config = CheckpointConfig(async_save="thread", keep="last(1)")
    with manager_on(tmp_path, config, fs=disk) as manager:
        manager.save(1, state_of(1.0))
        manager.wait()
        disk.arrive()
        disk.gate.clear()
        handle = manager.save(2, state_of(2.0))
        disk.arrive()
        assert value_in(manager, 1) == 1.0
        disk.gate.set()
        assert handle is not None
        handle.wait(TIMEOUT_S)
        assert [c.step for c in manager.checkpoints()] == [2]


@in_background
def test_lease_is_held_until_what_is_in_flight_is_durable(tmp_path: Path, mode: str) -> None:
    with CheckpointManager(tmp_path, CheckpointConfig(async_save=mode)) as manager:
        manager.save(1, state_of(1.0))
        with pytest.raises(StoreLocked), CheckpointManager(tmp_path) as other:
            other.save(1, state_of(2.0))
    with CheckpointManager(tmp_path) as other:
        other.save(2, state_of(2.0))
    assert [c.step for c in other.checkpoints()] == [1, 2]


def test_encrypted_state_is_never_spilled_as_plaintext(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryConfig(
        host_budget_bytes=1 << 20, spill_directory=tmp_path / "spill", slab_bytes=1 << 20
    )
    config = CheckpointConfig(enc_key=bytes(16), async_save=True, memory=memory)
    with CheckpointManager(tmp_path / "runs", config) as manager, pytest.raises(StagingExhausted):
        manager.save(1, {"w": np.zeros(1 << 20)})
    assert not (tmp_path / "spill").exists()
    assert "do not spill" in caplog.text


def test_budget_that_a_key_makes_final_is_named_at_construction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryConfig.from_mindspore(
        {"offload_cpu_size": "1GB", "offload_path": str(tmp_path), "auto_offload": True}
    )
    config = CheckpointConfig(enc_key=bytes(16), async_save=True, memory=memory)
    CheckpointManager(tmp_path / "runs", config)
    (message,) = caplog.messages
    assert "every background save of a state above 1.0 GiB will fail" in message
    assert "raise host_budget_bytes (offload_cpu_size), or save with async_save=False" in message


def test_key_without_a_budget_limits_no_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryConfig(spill_directory=tmp_path / "spill")
    config = CheckpointConfig(enc_key=bytes(16), async_save=True, memory=memory)
    CheckpointManager(tmp_path / "runs", config)
    (message,) = caplog.messages
    assert message.endswith("the state is saved encrypted")


def test_staging_on_the_disk_only_together_with_a_key_is_refused(tmp_path: Path) -> None:
    memory = MemoryConfig.from_mindspore({"offload_param": "disk", "offload_path": str(tmp_path)})
    config = CheckpointConfig(enc_key=bytes(16), async_save=True, memory=memory)
    with pytest.raises(ValueError, match=r"staging_place='disk' \(offload_param\) together with"):
        CheckpointManager(tmp_path / "runs", config)
    CheckpointManager(tmp_path / "runs", CheckpointConfig(enc_key=bytes(16), memory=memory))


def test_budget_without_auto_offload_is_not_exceeded_by_spilling(tmp_path: Path) -> None:
    memory = MemoryConfig.from_mindspore(
        {"offload_cpu_size": "0.001GB", "offload_path": str(tmp_path / "spill")}
    )
    config = CheckpointConfig(async_save=True, memory=memory)
    with CheckpointManager(tmp_path / "runs", config) as manager, pytest.raises(StagingExhausted):
        manager.save(1, {"w": np.zeros(1 << 20)})
    assert not (tmp_path / "spill").exists()


@everywhere
def test_saves_of_two_threads_are_all_kept_and_follow_each_other(tmp_path: Path, mode: str) -> None:
    steps = 6
    config = CheckpointConfig(async_save=False if mode == "sync" else mode, keep="last(99)")
    with CheckpointManager(tmp_path, config) as manager:
        together = threading.Barrier(2)

        def save_all(value: float) -> None:
            together.wait(TIMEOUT_S)
            for step in range(steps):
                manager.save(step, state_of(value))

        threads = [threading.Thread(target=save_all, args=(value,)) for value in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
        manager.wait()
        saved = manager.checkpoints()
    assert sorted(c.step for c in saved) == sorted([*range(steps)] * 2)
    assert sorted(c.sequence for c in saved) == [*range(1, 2 * steps + 1)]


def test_save_in_the_middle_of_the_retention_of_another_is_no_deadlock(tmp_path: Path) -> None:
    """As from the handler of a signal; an observer stands for it, which is called in the middle of a save, too."""
    handled: list[str] = []

    def handle(event: Event) -> None:
        if event.name == "save.durable" and event.step == 3 and not handled:
            handled.append(event.name)
            with manager._writer.changing:  # as while files are removed
                manager.save(4, state_of(4.0))

    config = CheckpointConfig(keep="last(1)")
    with CheckpointManager(tmp_path, config, observe=handle) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_of(float(step)))
        assert handled == ["save.durable"]
        assert [c.step for c in manager.checkpoints()][-1] == 4


@everywhere
def test_manager_that_is_dropped_lets_its_state_go_at_once(tmp_path: Path, mode: str) -> None:
    weights = np.zeros(9)
    state, array = {"w": weights}, weakref.ref(weights)
    config = CheckpointConfig(async_save=False if mode == "sync" else mode)
    manager = CheckpointManager(tmp_path, config)
    manager.step_end(1, state)
    manager.wait()
    gc.disable()
    try:
        del weights, state, manager
        assert array() is None
    finally:
        gc.enable()


def test_close_in_the_middle_of_a_save_leaves_it_the_lease(tmp_path: Path) -> None:
    closed: list[str] = []

    def close(event: Event) -> None:
        if event.name == "save.durable" and not closed:
            closed.append(event.name)
            manager.close()
            with pytest.raises(StoreLocked), CheckpointManager(tmp_path) as other:
                other.save(2, state_of(2.0))

    manager = CheckpointManager(tmp_path, observe=close)
    manager.save(1, state_of(1.0))
    assert closed
    manager.close()
    with CheckpointManager(tmp_path) as other:
        other.save(3, state_of(3.0))
    assert [c.step for c in other.checkpoints()] == [1, 3]


@pytest.mark.parametrize("async_save", [False, "thread"])
def test_close_waits_for_the_save_of_another_thread(
    tmp_path: Path, *, async_save: bool | str
) -> None:
    disk = HeldDisk()
    config = CheckpointConfig(async_save=async_save)
    manager = manager_on(tmp_path, config, fs=disk)
    disk.gate.clear()
    saving = threading.Thread(target=manager.save, args=(1, state_of(1.0)))
    saving.start()
    disk.arrive()
    opener = threading.Thread(target=disk.gate.set)
    opener.start()
    manager.close()
    assert [c.step for c in manager.checkpoints()] == [1]
    saving.join(TIMEOUT_S)
    opener.join(TIMEOUT_S)
