# SPDX-License-Identifier: Apache-2.0
"""Two processes at one trash of other tools' checkpoints, in every order of their calls."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ckptmgr import CheckpointNotFound, StoreLocked, parse_policy
from ckptmgr.maintenance.foreign.place import ForeignPlace
from ckptmgr.maintenance.prune import undo
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.foreign import golden_run
from tests.support.pruning import carry_out, foreign_place, propose
from tests.support.visiteddisk import VisitedDisk

NOW = datetime(2100, 1, 1, tzinfo=UTC)


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    """Return a directory with one batch in its trash."""
    run = golden_run("torchtitan-or-dcp", tmp_path / "run")
    store = api.place(run)
    proposal = propose(foreign_place(store), parse_policy("last(1)"), now=NOW)
    assert not carry_out(foreign_place(store), proposal).failures
    return run


def visited(pruned: Path, visit: Callable[[api.Place], None]) -> Iterator[tuple[Path, api.Place]]:
    """Yield copies of a directory, and a store that a rival visits before its first call, second ..."""
    at = 1
    while True:
        run = pruned.with_name(str(at))
        shutil.copytree(pruned, run)

        def come(run: Path = run) -> None:
            with contextlib.suppress(StoreLocked):
                visit(api.place(run))

        disk = VisitedDisk(come, at)
        yield run, api.place(run, fs=disk)
        if not disk.was_visited:
            return
        at += 1


def remove_batches(store: api.Place) -> None:
    trash = ForeignPlace(store).trash
    for batch in trash.batches():
        trash.discard(batch)


def test_listing_passes_over_a_batch_that_is_removed_meanwhile(pruned: Path) -> None:
    for _, store in visited(pruned, remove_batches):
        assert len(ForeignPlace(store).trash.batches()) <= 1


def test_undo_of_a_batch_that_another_process_removes_restores_it_or_says_so(pruned: Path) -> None:
    outcomes = set()
    for run, store in visited(pruned, remove_batches):
        try:
            restored = undo(ForeignPlace(store)).restored
            assert [one.name for one in restored] == ["step-1"]
        except CheckpointNotFound as error:
            outcomes.add(error.message)
            assert not (run / "step-1").exists()
        else:
            assert (run / "step-1").exists()
    assert outcomes == {
        "there is nothing to undo: the trash is empty",
        "another process has restored or removed this batch of the trash",
    }


class _Rival(FailingDisk):
    """A disk that tries to lock the trash as another process whenever a folder is removed."""

    def __init__(self, run: Path) -> None:
        super().__init__(api.OsFileSystem())
        self._run = run
        self.was_locked: list[bool] = []

    def _meet(self, operation: str, path: Path) -> None:
        super()._meet(operation, path)
        if operation == "remove_directory":
            try:
                with ForeignPlace(api.place(self._run)).lease("torchtitan-or-dcp"):
                    self.was_locked.append(False)
            except StoreLocked:
                self.was_locked.append(True)


def test_undo_removes_the_empty_trash_while_other_processes_are_locked_out(pruned: Path) -> None:
    disk = _Rival(pruned)
    store = api.place(pruned, fs=disk)
    undo(ForeignPlace(store))
    assert disk.was_locked == [True, True]
