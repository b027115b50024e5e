# SPDX-License-Identifier: Apache-2.0
"""A state that no save could store is refused at `resume`, before the first step is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Resume, ResumeFailed, UnsupportedState
from tests.parallel.ranks import Meeting, Outcome, Seat, run_ranks
from tests.support.runs import manager_on


def _manager(directory: Path, **more: Any) -> CheckpointManager:
    return manager_on(directory, CheckpointConfig(), prefix="net", **more)


@pytest.mark.parametrize("start", ["newest", "new"])
@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["resumed", "fresh"])
def test_value_that_cannot_be_stored_is_refused_at_resume_and_nothing_is_changed(
    tmp_path: Path, start: Literal["newest", "new"], has_checkpoint: bool
) -> None:
    if has_checkpoint:
        with _manager(tmp_path) as manager:
            manager.save(1, {"w": np.ones(2), "files": [None]})
    weights = np.zeros(2)
    state = {"w": weights, "files": [object()]}
    manager = _manager(tmp_path)
    with pytest.raises(UnsupportedState, match=r"(?s)state\['files'\]\[0\] is a object.*hint: "):
        manager.resume(state, Resume(start=start))
    assert weights.tolist() == [0, 0]
    state["files"] = [None]
    assert manager.resume(state, Resume(start=start)).is_fresh is (
        start == "new" or not has_checkpoint
    )
    manager.close()


def test_array_of_objects_is_refused_at_resume(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedState, match=r"state\['a'\] is an array with elements of type"):
        _manager(tmp_path).resume({"a": np.array([None])})


def test_state_dict_is_not_called_at_a_fresh_resume(tmp_path: Path) -> None:
    class Loader:
        def state_dict(self) -> object:  # may start workers, or draw random numbers
            raise AssertionError

    assert _manager(tmp_path).resume({"loader": Loader()}).is_fresh


def test_tensor_without_elements_is_a_target_at_resume(tmp_path: Path) -> None:
    torch: Any = pytest.importorskip("torch")
    with _manager(tmp_path) as manager:
        manager.save(1, {"w": torch.ones(2)})
    state = {"w": torch.empty(2, device="meta")}
    _manager(tmp_path).resume(state)
    assert state["w"].tolist() == [1, 1]


def test_value_that_one_rank_cannot_store_is_refused_on_all_ranks(tmp_path: Path) -> None:
    meeting = Meeting(2)

    def work(rank: int) -> None:
        state = {"x": object() if rank == 1 else None}
        with _manager(tmp_path, coordinator=Seat(meeting, rank)) as manager:
            manager.resume(state)

    outcomes: list[Outcome[None]] = run_ranks(meeting, work)
    assert isinstance(outcomes[0].raised, ResumeFailed)
    assert "state['x'] is a object" in str(outcomes[0].raised)
    assert isinstance(outcomes[1].raised, UnsupportedState)
