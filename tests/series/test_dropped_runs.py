# SPDX-License-Identifier: Apache-2.0
"""A run that is dropped without `close` ends when its last reference goes, not at a collection of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from tests.parallel.ranks import Meeting, Seat
from tests.remote.buckets import new_url


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", ["alone", "thread", "ranks", "address"])
def test_next_run_of_the_process_has_the_lease(tmp_path: Path, kind: str) -> None:
    place: Any = tmp_path
    if kind == "address":
        pytest.importorskip("obstore")
        place = new_url()
    for step in (1, 2):
        config = CheckpointConfig(async_save="thread" if kind == "thread" else False)
        ranks = Ranks(Seat(Meeting(1), 0)) if kind == "ranks" else None
        manager = CheckpointManager(place, config, ranks=ranks)
        manager.resume()
        manager.save(step, {"w": np.ones(3)})
        manager.wait()
        assert manager.load("latest") is not None
        del manager
    assert [one.step for one in CheckpointManager(place).checkpoints()] == [1, 2]
