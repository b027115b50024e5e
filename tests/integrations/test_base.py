# SPDX-License-Identifier: Apache-2.0
"""The manager under the loops of frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks, Resume, UnsupportedCheckpoint
from ckptmgr.integrations.base import FrameworkManager
from tests.parallel.ranks import Meeting, Seat, run_ranks


def test_run_of_another_number_of_processes_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    meeting = Meeting(2)
    config = CheckpointConfig(remove_redundancy=True)

    def save(rank: int) -> None:
        with CheckpointManager(tmp_path, config, ranks=Ranks(Seat(meeting, rank))) as manager:
            manager.save(7, {"n": 7})

    assert [one.raised for one in run_ranks(meeting, save)] == [None, None]
    state = {"n": 0}
    with FrameworkManager("Adapter", tmp_path) as manager:
        with pytest.raises(UnsupportedCheckpoint, match="was saved by 2 processes"):
            manager.resume(state)
        assert state == {"n": 0}
    with CheckpointManager(tmp_path) as loop:
        assert loop.resume(state).step == 7


def test_run_of_as_many_processes_goes_on(tmp_path: Path) -> None:
    for step in (0, 1):
        with FrameworkManager("Adapter", tmp_path) as manager:
            assert manager.resume({"n": 0}).step == step
            manager.save(step + 1, {"n": 1})


def test_state_of_another_program_is_refused_by_the_name_of_the_adapter(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": 1})
    with FrameworkManager("Adapter", tmp_path) as manager:
        assert manager.resume_newest({"model"}, of="a fit").step == 1
        with pytest.raises(UnsupportedCheckpoint, match="no state of a fit that Adapter saved"):
            manager.resume_newest({"model", "epoch"}, of="a fit")


def test_training_beside_checkpoints_begins_only_if_it_was_asked_for(tmp_path: Path) -> None:
    with FrameworkManager("Adapter", tmp_path) as manager:
        assert manager.check_may_begin("it begins", way_out="use") is None
        manager.save(1, {"n": 1})
        with pytest.raises(
            ValueError,
            match=r"of step 1, and it begins: use Adapter\(..., resume=Resume\(start='new",
        ):
            manager.check_may_begin("it begins", way_out="use")
    with FrameworkManager("Adapter", tmp_path, resume=Resume(start="new")) as manager:
        assert manager.check_may_begin("it begins", way_out="use") is not None
        assert manager.resume({"n": 0}).is_fresh
        assert manager.resume_newest().step == 1


def test_coordinator_under_an_adapter_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="coordinator= has no effect in Adapter"):
        FrameworkManager("Adapter", tmp_path, ranks=Ranks(Seat(Meeting(1), 0)))
    with (
        pytest.warns(DeprecationWarning, match="start of Adapter will go"),
        FrameworkManager("Adapter", tmp_path, start="new") as manager,
    ):
        assert manager.how == Resume(start="new")


def test_batches_that_the_framework_asks_for_cannot_be_skipped(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="skip_batches has no effect in Adapter"):
        FrameworkManager("Adapter", tmp_path, resume=Resume(skip_batches=1))
    how = Resume(skip_batches=1)
    with FrameworkManager("Adapter", tmp_path, resume=how, gives_batches=True) as manager:
        assert manager.how.skip_batches == 1
