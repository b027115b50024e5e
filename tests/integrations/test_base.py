# SPDX-License-Identifier: Apache-2.0
"""The manager under the loops of frameworks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from ckptmgr.core.errors import UnsupportedCheckpoint
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
