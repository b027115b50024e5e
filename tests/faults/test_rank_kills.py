# SPDX-License-Identifier: Apache-2.0
"""Real processes, a real disk, SIGKILL: the remaining ranks learn the state of the storage."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.store.shards import RankFiles
from tests.faults.killed_rank import Part, run_parts
from tests.support import api

WORLD = 3
pytestmark = pytest.mark.slow


def run_with_kill(directory: Path, rank: int, operation: str | None) -> list[str]:
    return run_parts(
        [
            Part(
                directory=str(directory),
                rank=one,
                world=WORLD,
                operation=operation if one == rank else None,
            )
            for one in range(WORLD)
        ]
    )


def test_ranks_that_live_save(tmp_path: Path) -> None:
    assert run_with_kill(tmp_path / "run", 0, None) == ["saved"] * WORLD
    store = api.place(tmp_path / "run")
    (checkpoint,) = store.scan()
    assert api.verify(store, checkpoint).status is api.Status.OK


@pytest.mark.parametrize(
    ("rank", "operation"), [(1, "write_at"), (2, "sync_directory"), (0, "link")]
)
def test_rank_killed_before_the_commit_is_named_and_nothing_is_listed(
    tmp_path: Path, rank: int, operation: str
) -> None:
    printed = run_with_kill(tmp_path / "run", rank, operation)
    for one, line in enumerate(printed):
        assert one == rank or f"rank {rank} did not come" in line
    found = api.listed(tmp_path / "run", clock=lambda: 0.0)
    assert {c.state for c in found} == {api.State.LEFTOVER}
    removed = RankFiles(api.place(tmp_path / "run", clock=lambda: 1e12)).recover("net")
    # Rank 0 died right before the commit: whole files stay, as if only their manifest was lost.
    whole = 3 if operation == "link" else 0
    assert len(removed) == len(found) - whole
    assert len(api.listed(tmp_path / "run")) == whole


def test_rank_0_killed_after_the_commit_has_committed(tmp_path: Path) -> None:
    # After the link rank 0 removes the temporary name.
    assert run_with_kill(tmp_path / "run", 0, "unlink") == ["", "saved", "saved"]
    store = api.place(tmp_path / "run")
    store.recover("net")
    (checkpoint,) = store.scan()
    assert checkpoint.state is api.State.OK
    assert api.verify(store, checkpoint).status is api.Status.OK
