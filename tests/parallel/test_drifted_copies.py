# SPDX-License-Identifier: Apache-2.0
"""Copies that a layout calls equal and that differ, and tensors that are cut where there is nothing to cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager, ResumeFailed, UnsupportedCheckpoint
from ckptmgr.parallel import ParallelLayout
from tests.parallel.test_sharded_state import alone, job
from tests.support.crashmodel import ModelDisk

TWO_BY_TWO = {"w": ParallelLayout(device_matrix=(2, 2), tensor_map=((0,),))}
WHOLE = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((),))}
HALVES = {"w": ParallelLayout(device_matrix=(2,), tensor_map=((0,),))}


def drifted() -> ModelDisk:
    """A save of four ranks, two for each half, of which none has what another has."""
    disk = ModelDisk()
    job(disk, 4, lambda ours, rank: ours.save(1, {"w": np.full(3, float(rank))}), layout=TWO_BY_TWO)
    return disk


def test_whole_of_drifted_copies_is_refused_instead_of_starting_over() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="'w' differs between the ranks that saved"):
        alone(drifted(), {"w": np.zeros(6)})


def test_whole_of_drifted_copies_is_refused_on_all_of_another_number_of_ranks() -> None:
    def load(ours: CheckpointManager, rank: int) -> str:
        with pytest.raises(ResumeFailed) as raised:
            ours.resume({"w": np.zeros(6)})
        return str(raised.value)

    texts = job(drifted(), 2, load, layout=WHOLE)
    assert ["rank 0 had only a part" in text for text in texts] == [True, True]


def test_half_of_drifted_copies_that_a_rank_saved_is_loaded_on_another_number() -> None:
    def load(ours: CheckpointManager, rank: int) -> Any:
        return ours.resume({"w": np.zeros(3)}).state

    found = job(drifted(), 2, load, layout=HALVES)
    assert [one["w"].tolist() for one in found] == [[0.0] * 3, [1.0] * 3]


def test_rank_that_holds_nothing_of_drifted_copies_resumes() -> None:
    layout = {
        "w": ParallelLayout(device_matrix=(2, 3), tensor_map=((0,),), shape=(2,), is_uneven=True)
    }

    def state(rank: int, value: int) -> dict[str, Any]:
        return {"w": np.full((1, 1, 0)[rank % 3], value)}

    disk = ModelDisk()
    job(disk, 6, lambda ours, rank: ours.save(1, state(rank, rank)), layout=layout)

    def load(ours: CheckpointManager, rank: int) -> Any:
        found = ours.resume(state(rank, -1))
        return found.step, found.state

    back = job(disk, 6, load, layout=layout)
    assert [(step, one["w"].tolist()) for step, one in back] == [
        (1, state(rank, rank)["w"].tolist()) for rank in range(6)
    ]


@pytest.mark.parametrize("matrix", [(2,), (2, 2)], ids=str)
def test_tensor_without_elements_that_is_cut_is_saved_and_loaded(matrix: tuple[int, ...]) -> None:
    layout = {"w": ParallelLayout(device_matrix=matrix, tensor_map=((0,), ()), shape=(8, 0))}
    disk = ModelDisk()
    state = {"w": np.zeros((4, 0))}
    world = 2 * len(matrix)
    job(disk, world, lambda ours, rank: ours.save(1, state), layout=layout)
    whole: Any = alone(disk).state
    assert whole["w"].shape == (8, 0)
    back: list[Any] = job(disk, world, lambda ours, rank: ours.resume(state).state, layout=layout)
    assert [one["w"].shape for one in back] == [(4, 0)] * world
