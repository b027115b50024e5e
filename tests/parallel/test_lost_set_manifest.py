# SPDX-License-Identifier: Apache-2.0
"""The files of all ranks without their manifest: named when a run resumes, and kept until a newer checkpoint is whole."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from ckptmgr import Checkpoint, CheckpointConfig, Ranks, Resumption
from ckptmgr.store.listing import lone_sets
from tests.faults.training import RUNS, SERIES, ModelProcesses
from tests.parallel.ranks import START, Clock, Meeting, Seat, run_ranks
from tests.parallel.test_rank_manager import run, state, train
from tests.support import api
from tests.support.crashmodel import ModelDisk
from tests.support.runs import manager_on

LATER_S = 100_000.0


def trained() -> ModelDisk:
    """Return a disk on which all ranks have saved steps 1 and 2."""
    disk = ModelDisk()
    for outcome in run(disk, train):
        outcome.must()
    return disk


def set_of(disk: ModelDisk, step: int) -> Checkpoint:
    (found,) = (one for one in api.listed(RUNS, fs=disk) if one.name == f"net-{step}.shards")
    return found


def start_again(disk: ModelDisk, *, steps: int = 0) -> list[Resumption]:
    """Resume on all ranks, long after every attempt has expired, and save some steps more."""
    meeting = Meeting()

    def one(rank: int) -> Resumption:
        with manager_on(
            RUNS,
            CheckpointConfig(keep="all"),
            fs=disk,
            processes=ModelProcesses(disk),
            clock=Clock(START + LATER_S),
            ranks=Ranks(Seat(meeting, rank)),
            prefix=SERIES,
        ) as ours:
            found = ours.resume(state(rank, 0))
            for step in range(found.step + 1, found.step + 1 + steps):
                ours.save(step, state(rank, step))
            return found

    return [outcome.must() for outcome in run_ranks(meeting, one)]


def test_newest_whose_manifest_is_lost_is_named_and_its_files_stay() -> None:
    disk = trained()
    lost = set_of(disk, 2)
    disk.unlink(RUNS / api.manifest_name(lost.name))
    again = disk.restart()
    for found in start_again(again):
        assert found.step == 1
        (skipped,) = found.skipped
        assert (skipped.checkpoint.name, skipped.checkpoint.step) == (lost.name, 2)
        assert "the files of all 3 ranks are here, but no manifest" in skipped.reason
    assert set(lost.shards) <= set(again.list(RUNS))


def test_manifest_that_comes_later_brings_the_checkpoint_back() -> None:
    disk = trained()
    path = RUNS / api.manifest_name(set_of(disk, 2).name)
    disk.replace(path, RUNS / "kept")
    again = disk.restart()
    start_again(again)
    again.replace(RUNS / "kept", path)
    for found in start_again(again.restart()):
        assert (found.step, found.skipped) == (2, ())


def test_files_without_a_manifest_go_once_a_newer_checkpoint_is_whole() -> None:
    disk = trained()
    lost = set_of(disk, 2)
    disk.unlink(RUNS / api.manifest_name(lost.name))
    again = disk.restart()
    start_again(again, steps=2)
    assert not set(lost.shards) & set(again.list(RUNS))
    for found in start_again(again.restart()):
        assert (found.step, found.skipped) == (3, ())


@pytest.mark.parametrize(("step", "files"), [(1, 3), (2, 2)], ids=["older", "incomplete"])
def test_what_an_interrupted_removal_or_save_left_goes_at_once(step: int, files: int) -> None:
    disk = trained()
    left = set_of(disk, step)
    for name in (api.manifest_name(left.name), *left.shards[files:]):
        disk.unlink(RUNS / name)
    again = disk.restart()
    for found in start_again(again):
        assert (found.step, found.skipped) == (3 - step, ())
    assert not set(left.shards) & set(again.list(RUNS))


NAMES = {
    "ckpt-5": (5, None),
    "ckpt-5-r1": (5, None),
    "net_1-2_3": (0, 2),
    "net_1-2_3-r1": (0, 2),
}


def listed_files(*names: str) -> list[Checkpoint]:
    """Return the states in a listing of files of ranks that no manifest names."""
    return [
        Checkpoint(
            path=RUNS / name,
            series="of the file",
            step=0,
            saved_at=datetime(2026, 3, 1, tzinfo=UTC),
            size_bytes=10,
            state=api.State.LEFTOVER,
        )
        for name in names
    ]


def whole(name: str, series: str) -> Checkpoint:
    return replace(listed_files(name)[0], series=series, state=api.State.OK, run_id="run")


def both(stem: str) -> list[Checkpoint]:
    return listed_files(*(f"{stem}.{rank}-of-2.67d2f1a41f0c9a2e.ckpt" for rank in (0, 1)))


@pytest.mark.parametrize("stem", NAMES)
def test_step_or_epoch_is_that_of_the_name(stem: str) -> None:
    (found,) = lone_sets(both(stem))
    assert (found.name, found.size_bytes) == (f"{stem}.shards", 20)
    assert (found.step, found.epoch) == NAMES[stem]


@pytest.mark.parametrize(
    ("stem", "series", "name", "is_lone"),
    [
        ("net-5", "net", "net-5.shards", False),
        ("net-5-r1", "net", "net-5.shards", True),
        ("net-5", "net", "net-9.safetensors.ckpe", False),
        ("net-5", "other", "other-9.shards", True),
        ("net-5", "net", "anything.ckpt", True),
        ("net_1-2_3", "net_2", "net_2-2_4.shards", False),
        ("net_1-2_3", "net_2", "net_2-1_9.shards", True),
        ("net_1-2_3", "network", "network-9_9.shards", True),
        ("net-5", "net", "net-9_9.shards", True),
    ],
)
def test_whole_checkpoint_as_new_by_its_name_makes_the_files_superfluous(
    stem: str, series: str, name: str, is_lone: bool
) -> None:
    files = [replace(one, series=stem.partition("-")[0]) for one in both(stem)]
    assert bool(lone_sets([*files, whole(name, series)])) is is_lone


def test_files_whose_name_says_no_step_are_not_kept() -> None:
    assert lone_sets(both("whatever")) == []
