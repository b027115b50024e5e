# SPDX-License-Identifier: Apache-2.0
"""Two processes at one trash: one empties it between any two calls of the other."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from ckptmgr import CheckpointNotFound, StoreLocked
from ckptmgr.maintenance.prune import undo
from ckptmgr.store.trash import DirectoryTrash
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.support import api
from tests.support.saved import save_run
from tests.support.visiteddisk import VisitedDisk

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
FIRST, SECOND, THIRD = (f"net-{number}_10.ckpt" for number in (1, 2, 3))


def throw(store: api.Place, name: str) -> Path:
    """Throw one checkpoint away in a batch of its own."""
    (chosen,) = (one for one in store.scan() if one.name == name)
    into = DirectoryTrash(store).new_batch_path(NOW)
    for failure in DirectoryTrash(store).throw_away([chosen], into):
        raise failure
    return into


def discard_first(directory: Path) -> None:
    """Remove the first batch, as a prune after its grace time does, and the trash if it is empty."""
    store = api.place(directory)
    for batch in DirectoryTrash(store).batches():
        if any(one.name == FIRST for one in batch.checkpoints):
            with contextlib.suppress(StoreLocked):
                DirectoryTrash(store).discard(batch)


@pytest.fixture
def pruned(tmp_path: Path) -> Path:
    """Return a directory with three checkpoints, the first of them in the trash."""
    runs = tmp_path / "runs"
    save_run(runs, [10, 20, 30])
    throw(api.place(runs), FIRST)
    return runs


def visited(pruned: Path, visit: Callable[[Path], None]) -> Iterator[tuple[Path, api.Place]]:
    """Yield copies of a directory, and a store that a rival visits before its first call, second ..."""
    at = 1
    while True:
        runs = pruned.with_name(str(at))
        shutil.copytree(pruned, runs)
        disk = VisitedDisk(partial(visit, runs), at)
        yield runs, api.place(runs, fs=disk)
        if not disk.was_visited:
            return
        at += 1


def test_prune_succeeds_while_another_one_removes_the_emptied_trash(pruned: Path) -> None:
    for runs, store in visited(pruned, discard_first):
        into = throw(store, SECOND)
        assert [one.name for one in api.listed(runs)] == [THIRD]
        assert {one.name for one in into.iterdir()} == {SECOND, api.manifest_name(SECOND)}


def test_prune_succeeds_while_an_undo_removes_its_folder_that_is_still_empty(pruned: Path) -> None:
    def tidy(runs: Path) -> None:
        store = api.place(runs)
        for folder in (runs / TRASH_NAME).iterdir():
            DirectoryTrash(store).tidy(folder)

    for _, store in visited(pruned, tidy):
        into = throw(store, SECOND)
        assert {one.name for one in into.iterdir()} == {SECOND, api.manifest_name(SECOND)}


def remove_when_made(directory: Path, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the trash right after each attempt to make it, as another process may, so many times."""
    make = os.mkdir
    rounds = iter(range(times))

    def made_and_removed(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        try:
            make(path, mode, dir_fd=dir_fd)
        finally:
            if path == TRASH_NAME and next(rounds, None) is not None:
                (directory / path).rmdir()

    monkeypatch.setattr(os, "mkdir", made_and_removed)


@pytest.mark.parametrize("is_there", [True, False])
def test_prune_makes_the_trash_again_that_goes_right_after_it_was_made(
    tmp_path: Path, is_there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path, [10, 20])
    if is_there:
        (tmp_path / TRASH_NAME).mkdir()
    remove_when_made(tmp_path, 2, monkeypatch)
    assert (throw(api.place(tmp_path), FIRST) / FIRST).exists()


def test_prune_whose_trash_never_stays_fails_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_run(tmp_path, [10, 20])
    remove_when_made(tmp_path, 999, monkeypatch)
    with pytest.raises(FileNotFoundError, match=TRASH_NAME):
        throw(api.place(tmp_path), FIRST)
    assert (tmp_path / FIRST).exists()


class _FolderGoes(api.OsFileSystem):
    """A disk on which another process removes the empty folder before any file is moved into it."""

    def replace(self, source: Path, target: Path) -> None:
        target.parent.rmdir()
        super().replace(source, target)


def test_prune_whose_folder_never_stays_fails_and_removes_nothing(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20])
    with pytest.raises(FileNotFoundError, match=FIRST):
        throw(api.place(tmp_path, fs=_FolderGoes()), FIRST)
    assert (tmp_path / FIRST).exists()


def test_listing_passes_over_a_trash_that_is_removed_meanwhile(pruned: Path) -> None:
    for _, store in visited(pruned, discard_first):
        assert len(DirectoryTrash(store).batches()) <= 1


def test_manifest_left_alone_stays_when_its_data_goes_from_the_trash_meanwhile(
    pruned: Path,
) -> None:
    (into,) = (pruned / TRASH_NAME).iterdir()
    (into / api.manifest_name(FIRST)).rename(pruned / api.manifest_name(FIRST))
    places = set()
    for runs, store in visited(pruned, discard_first):
        DirectoryTrash(store).finish("net")
        places |= {path.parent.name == into.name for path in runs.rglob(api.manifest_name(FIRST))}
    assert places == {True, False}


def test_undo_of_a_batch_that_another_process_removes_restores_it_or_says_so(pruned: Path) -> None:
    outcomes = set()
    for runs, store in visited(pruned, discard_first):
        try:
            assert [one.name for one in undo(store).restored] == [FIRST]
        except CheckpointNotFound as error:
            outcomes.add(error.message)
        assert (runs / FIRST).exists() == (runs / api.manifest_name(FIRST)).exists()
    assert outcomes == {
        "there is nothing to undo: the trash is empty",
        "another process has restored or removed this batch of the trash",
    }
