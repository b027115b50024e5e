# SPDX-License-Identifier: Apache-2.0
"""The exit saves the last step as it was when its pass ended, and not what the program did later."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, MemoryConfig
from ckptmgr.state.tree import flatten

NEVER_DUE = CheckpointConfig(save_checkpoint_steps=1000)
BATCHES = 4


def train(manager: CheckpointManager, state: dict[str, Any], *, epochs: int, stop: int = 0) -> None:
    start = manager.resume(state)
    step = start.step
    for epoch in range(start.next_epoch, epochs):
        for _ in manager.batches(range(BATCHES)):
            state["w"] += 1
            step += 1
            manager.step_end(step, state, epoch=epoch)
            if step == stop:
                break


def stored(directory: Path) -> tuple[int, float]:
    with CheckpointManager(directory) as manager:
        newest = manager.latest()
        loaded: Any = manager.load("latest")
    assert newest is not None
    return newest.step, loaded["w"][0]


@pytest.mark.parametrize("stop", [0, 3, BATCHES])
def test_weights_that_a_program_loads_after_its_loop_are_not_saved(
    tmp_path: Path, stop: int
) -> None:
    state = {"w": np.zeros(2)}
    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        train(manager, state, epochs=1, stop=stop)
        state["w"][:] = -1.0
    assert stored(tmp_path) == (stop or BATCHES, stop or BATCHES)


def test_iterator_that_is_closed_later_than_its_loop_puts_nothing_aside(tmp_path: Path) -> None:
    state = {"w": np.zeros(2)}

    def train_and_measure(manager: CheckpointManager) -> None:
        kept = iter(manager.batches(range(1, 9)))
        for step in kept:
            state["w"] += 1
            manager.step_end(step, state)
            if step == BATCHES:
                break
        state["w"][:] = -1.0  # weights that are measured

    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        manager.resume(state)
        train_and_measure(manager)
        state["w"][:] = float(BATCHES)
    assert stored(tmp_path) == (BATCHES, BATCHES)


def test_exception_after_the_loop_saves_the_step_as_it_ended(tmp_path: Path) -> None:
    state = {"w": np.zeros(2)}
    config = CheckpointConfig(save_checkpoint_steps=1000, exception_save=True)
    with (  # noqa: PT012 - the exit is what raises
        pytest.raises(ZeroDivisionError),
        CheckpointManager(tmp_path, config) as manager,
    ):
        train(manager, state, epochs=1)
        state["w"][:] = -1.0
        raise ZeroDivisionError
    found = {"w": np.zeros(2)}
    with CheckpointManager(tmp_path) as manager:
        assert manager.resume(found).step == BATCHES
    assert found["w"][0] == BATCHES


def test_run_that_was_put_aside_goes_on_as_an_uncut_one(tmp_path: Path) -> None:
    for epochs in (1, 2):
        state = {"w": np.zeros(2)}
        with CheckpointManager(tmp_path, NEVER_DUE) as manager:
            train(manager, state, epochs=epochs)
            state["w"][:] = -1.0
    assert stored(tmp_path) == (2 * BATCHES, 2 * BATCHES)


def test_run_whose_state_stays_the_same_begins_the_next_pass(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        train(manager, {"w": np.zeros(2)}, epochs=1)
    with CheckpointManager(tmp_path) as manager:
        start = manager.resume({"w": np.zeros(2)})
        assert (start.next_epoch, start.is_inside_epoch) == (1, False)


def test_step_after_the_pass_is_the_one_that_the_exit_saves(tmp_path: Path) -> None:
    state = {"w": np.zeros(2)}
    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        train(manager, state, epochs=1)
        state["w"][:] = 7.0
        manager.step_end(9, state)
    assert stored(tmp_path) == (9, 7.0)


def test_state_without_room_beside_it_is_saved_as_the_exit_finds_it(tmp_path: Path) -> None:
    state = {"w": np.zeros(1 << 20)}
    config = CheckpointConfig(
        save_checkpoint_steps=1000, memory=MemoryConfig(host_budget_bytes=1 << 16)
    )
    with CheckpointManager(tmp_path, config) as manager:
        train(manager, state, epochs=1)
        state["w"][:] = -1.0
    assert stored(tmp_path) == (BATCHES, -1.0)


def test_pass_of_validation_puts_nothing_aside(tmp_path: Path) -> None:
    state = {"w": np.zeros(2)}
    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        manager.resume(state)
        for step, _ in enumerate(manager.batches(range(BATCHES)), 1):
            state["w"] += 1
            manager.step_end(step, state)
            kept, state["w"] = state["w"], np.full(2, -1.0)  # averaged weights
            list(manager.batches(range(2), name="validation"))
            state["w"] = kept
    assert stored(tmp_path) == (BATCHES, BATCHES)


def test_pass_that_ends_in_another_thread_puts_nothing_aside(tmp_path: Path) -> None:
    state = {"w": np.zeros(2)}
    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        manager.resume(state)
        batches = iter(manager.batches([1]))
        next(batches)
        state["w"] += 1
        manager.step_end(1, state)
        thread = threading.Thread(target=lambda: list(batches))  # a prefetcher
        thread.start()
        thread.join()
        state["w"][:] = -1.0
    assert stored(tmp_path) == (1, -1.0)


@pytest.mark.parametrize(("available", "is_held"), [(31, False), (32, True), (None, True)])
def test_state_is_put_aside_only_where_as_much_memory_stays_available(
    tmp_path: Path, *, available: int | None, is_held: bool
) -> None:
    state = {"w": np.zeros(2)}
    with CheckpointManager(tmp_path, NEVER_DUE) as manager:
        manager.resume(state)
        aside = manager._aside
        assert aside is not None
        skeleton = len(flatten(state).skeleton)
        room = None if available is None else available + 2 * skeleton
        aside._available_bytes = lambda: room
        train(manager, state, epochs=1)
        state["w"][:] = -1.0
    assert stored(tmp_path) == (BATCHES, BATCHES if is_held else -1.0)
