# SPDX-License-Identifier: Apache-2.0
"""A save that is interrupted around its commit point, where the disk may have done more than the caller hears."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ckptmgr.files.load.open import open_listed
from ckptmgr.files.load.values import read_values
from ckptmgr.series.writer import SeriesWriter
from tests.faults.training import RUNS, Trainer, disk_with, name_of, state_of
from tests.support import api
from tests.support.crashmodel import ModelDisk, Operation
from tests.support.runs import manager_on
from tests.support.saved import items

NAME = "net-1_1.ckpt"


class DiskThatAnswersTooLate(api.OsFileSystem):
    """Renames data files and then raises: Ctrl-C during the call, or the lost answer of a file server."""

    def __init__(self, failure: BaseException) -> None:
        super().__init__()
        self._failure = failure

    def replace(self, source: Path, target: Path) -> None:
        """Rename, and raise when it was the data."""
        super().replace(source, target)
        if target.name == NAME:
            raise self._failure


def save(directory: Path, seed: float, fs: api.OsFileSystem | None = None) -> None:
    writer = SeriesWriter(
        api.place(directory, fs=fs), "net", options=api.SaveOptions(), clock=lambda: 1_772_359_200.0
    )
    try:
        writer.save(NAME, items(seed), api.SaveFacts(step=1, epoch=1))
    finally:
        writer.close()


def weight(store: api.Place) -> float:
    [checkpoint] = store.scan()
    assert checkpoint.state is api.State.OK
    with open_listed(store, checkpoint, options=api.reading()) as (opened, _):
        value = read_values(opened)["fc.weight"]
    assert isinstance(value, np.ndarray)
    return float(value[0, 1])


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.EIO, "lost answer")])
@pytest.mark.parametrize("is_overwrite", [True, False])
def test_save_that_fails_after_its_rename_leaves_the_new_checkpoint(
    tmp_path: Path, failure: BaseException, is_overwrite: bool
) -> None:
    if is_overwrite:
        save(tmp_path, 1.0)
    with pytest.raises(type(failure)):
        save(tmp_path, 2.0, DiskThatAnswersTooLate(failure))
    assert weight(api.place(tmp_path)) == 2.0


def test_overwrite_that_fails_after_its_rename_is_finished_by_recovery(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2.0, DiskThatAnswersTooLate(KeyboardInterrupt()))
    store = api.place(tmp_path)
    assert store.recover("net") == [f"finished the interrupted overwrite of {NAME}"]
    assert weight(store) == 2.0


def test_save_that_cannot_be_described_leaves_no_file(tmp_path: Path) -> None:
    manager = manager_on(tmp_path, clock=lambda: 1e18)
    with pytest.raises((ValueError, OverflowError, OSError)):
        manager.save(1, {"w": np.zeros(4)})
    manager.close()
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lease"] == []


@pytest.mark.parametrize(("keep", "syncs"), [("all", 4), ("last(1)", 5)])
def test_save_under_a_new_name_makes_4_syncs_and_one_more_with_retention(
    keep: str, syncs: int
) -> None:
    disk = ModelDisk()
    with Trainer(disk, keep=keep).manager() as manager:
        manager.save(1, state_of(1.0))
        before = len(disk.operations)
        manager.save(2, state_of(2.0))
        assert len(syncs_in(disk.operations[before:])) == syncs


def test_overwrite_makes_6_syncs() -> None:
    disk = disk_with(1.0)
    before = len(disk.operations)
    Trainer(disk).overwrite(name_of(1), 2.0)
    assert len(syncs_in(disk.operations[before:])) == 6


def syncs_in(operations: Sequence[Operation]) -> list[Operation]:
    """Return the syncs in the run directory, whose parent only a model disk syncs in each save."""
    kinds = ("sync", "sync_directory")
    return [one for one in operations if one.kind in kinds and one.path != RUNS.parent]
