# SPDX-License-Identifier: Apache-2.0
"""Checkpoints go because others stay: where one of these goes first, the removal does not happen."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, UnsafePrune, parse_policy, save_checkpoint
from ckptmgr.maintenance.prune import undo
from tests.support import api
from tests.support.pruning import carry_out, propose
from tests.support.runs import manager_on
from tests.support.saved import overwrite, save_run
from tests.support.visiteddisk import DiskVisitedAtLock

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
TOMORROW = NOW + timedelta(hours=24)
LAST_TWO = parse_policy("last(2)")


def remove(path: Path) -> None:
    """Remove a checkpoint as `rm` does."""
    path.unlink()
    (path.parent / api.manifest_name(path.name)).unlink()


def save_again(path: Path) -> None:
    """Save a file of no run under the name of a checkpoint."""
    save_checkpoint({"w": np.zeros(3, np.float32)}, path)


def cut(path: Path) -> None:
    """Take the last byte away."""
    overwrite(path, path.read_bytes()[:-1])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.ckpt"))


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("change", [remove, save_again, cut])
def test_prune_removes_nothing_when_one_that_stays_goes_after_the_last_listing(
    fast_path: Path, change: Callable[[Path], None], at_once: bool
) -> None:
    save_run(fast_path, [1, 2, 3])
    proposal = propose(api.place(fast_path), LAST_TWO, now=NOW)
    disk = DiskVisitedAtLock(lambda: change(fast_path / "net-1_3.ckpt"), "net-1_1.ckpt")
    outcome = carry_out(api.place(fast_path, fs=disk), proposal, at_once=at_once)
    (failure,) = outcome.failures
    assert isinstance(failure, UnsafePrune)
    assert failure.path == str(fast_path / "net-1_3.ckpt")
    assert "removed or saved again" in str(failure)
    assert (disk.was_visited, outcome.removed) == (True, [])
    assert "net-1_1.ckpt" in names(fast_path)


def test_retention_removes_nothing_when_the_save_that_it_follows_is_gone(fast_path: Path) -> None:
    disk = DiskVisitedAtLock(lambda: remove(fast_path / "net-2.ckpt"), "net-1.ckpt")
    config = CheckpointConfig(keep="last(1)")
    with manager_on(fast_path, config, fs=disk, prefix="net") as manager:
        for step in (1, 2):
            manager.save(step, {"w": np.zeros(3, np.float32)})
    assert (disk.was_visited, names(fast_path)) == (True, ["net-1.ckpt"])


@pytest.mark.parametrize("change", [remove, save_again, cut])
def test_expired_trash_stays_when_the_whole_one_outside_goes_after_the_plan(
    fast_path: Path, change: Callable[[Path], None]
) -> None:
    save_run(fast_path, [1, 2])
    store = api.place(fast_path)
    carry_out(store, propose(store, parse_policy("last(1)"), now=NOW))
    proposal = propose(store, LAST_TWO, now=TOMORROW)
    assert len(proposal.expired) == 1
    change(fast_path / "net-1_2.ckpt")
    (failure,) = carry_out(store, proposal).failures
    assert isinstance(failure, UnsafePrune)
    assert [one.name for one in undo(store).restored] == ["net-1_1.ckpt"]
