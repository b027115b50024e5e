# SPDX-License-Identifier: Apache-2.0
"""How many threads make the bytes of a file, alone and beside a training loop."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.engine.worker import Worker
from ckptmgr.io.threads import producer_threads, work_beside_training


def in_a_thread(work: object) -> int:
    def count() -> int:
        if callable(work):
            work()
        return producer_threads()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(count).result()


@pytest.fixture(params=[(1, 1, 1), (2, 2, 1), (4, 4, 3), (64, 4, 4)], ids=lambda case: f"{case[0]}")
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    processors, alone, beside = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processors)))
    return alone, beside


def test_save_of_its_own_uses_the_processors_that_help(machine: tuple[int, int]) -> None:
    assert in_a_thread(None) == machine[0]


def test_save_beside_a_training_loop_leaves_it_a_processor(machine: tuple[int, int]) -> None:
    assert in_a_thread(work_beside_training) == machine[1]


def test_worker_process_leaves_the_training_a_processor(machine: tuple[int, int]) -> None:
    ours, parents = socket.socketpair()
    parents.close()
    with ours:
        assert in_a_thread(Worker(ours).serve) == machine[1]


def test_save_in_a_thread_leaves_the_training_a_processor(
    machine: tuple[int, int], tmp_path: Path
) -> None:
    seen: list[int] = []
    config = CheckpointConfig(async_save="thread")
    watch = [
        lambda event: seen.append(producer_threads()) if event.name == "save.durable" else None
    ]
    with CheckpointManager(tmp_path, config, observe=watch) as manager:
        manager.save(1, {"w": np.zeros(3)})
    assert seen == [machine[1]]
