# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import json

import pytest

from ckptmgr.store.store import Store
from ckptmgr.training.resume import count_start
from tests.faults.training import RUNS, SERIES, Trainer, check_no_leftovers, disk_with
from tests.support.crashmodel import FailingDisk, ModelDisk, Order
from tests.support.manifests import manifest

CHECKPOINT = manifest().to_checkpoint(RUNS)
NEWER = manifest("net-2.ckpt").to_checkpoint(RUNS)
NOTE = RUNS / f".{SERIES}.starts"


def store() -> Store:
    return Trainer(disk_with(1.0)).store()


def test_starts_from_one_checkpoint_are_counted() -> None:
    counting = store()
    assert [count_start(counting, SERIES, CHECKPOINT) for _ in range(3)] == [1, 2, 3]


def test_start_from_a_newer_checkpoint_counts_from_one() -> None:
    counting = store()
    assert [count_start(counting, SERIES, c) for c in (CHECKPOINT, CHECKPOINT, NEWER)] == [1, 2, 1]


def put_note(disk: ModelDisk, content: bytes) -> None:
    file = disk.create(NOTE, mode=0o600)
    file.write_at(0, content)
    file.close()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 46,
        b"null",
        b"[]",
        b"{}",
        b"[" * 4096,
        b'{"checkpoint": 1, "starts": 4}',
        json.dumps({"checkpoint": ["net-1.ckpt", 7], "starts": None}).encode(),
        json.dumps({"checkpoint": ["net-1.ckpt", 7], "starts": "x"}).encode(),
        b'{"checkpoint": ["net-1.ckpt", 7], "starts": 1e999}',
    ],
)
def test_damaged_note_counts_as_absent(content: bytes) -> None:
    disk = disk_with(1.0)
    put_note(disk, content)
    assert count_start(Trainer(disk).store(), SERIES, CHECKPOINT) == 1
    assert count_start(Trainer(disk).store(), SERIES, CHECKPOINT) == 2


@pytest.mark.parametrize("operation", ["open", "create", "write_at", "close", "replace"])
def test_note_that_cannot_be_kept_is_no_error(operation: str) -> None:
    disk = disk_with(1.0)
    failing = FailingDisk(disk, error=errno.EROFS, operation=operation, call=1)
    assert count_start(Trainer(disk, fs=failing).store(), SERIES, CHECKPOINT) == 1
    check_no_leftovers(disk)


def test_note_lost_in_a_power_cut_is_no_error() -> None:
    disk = disk_with(1.0)
    count_start(Trainer(disk).store(), SERIES, CHECKPOINT)
    for left in disk.crash_states(Order.WEAK):
        assert count_start(Trainer(left).store(), SERIES, CHECKPOINT) in (1, 2)
