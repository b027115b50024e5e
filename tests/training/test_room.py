# SPDX-License-Identifier: Apache-2.0
"""A run on a full disk whose policy drops checkpoints: they go before the save, and no more than it needs."""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, Ranks, SaveFailed, StoreFull
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support import api
from tests.support.failingdisk import FailingDisk
from tests.support.runs import callback_on, manager_on
from tests.support.surface import Loop, data_files

MIB = 1 << 20


def state(step: int = 0) -> dict[str, Any]:
    return {"w": np.full(MIB // 8, float(step))}


def steps_in(directory: Path) -> list[int]:
    return sorted(int(one.name[5:-5]) for one in directory.glob("ckpt-*.ckpt"))


def full_disk(room: int = 9) -> FailingDisk:
    return FailingDisk(api.OsFileSystem(), space_bytes=room * MIB)


def filled(directory: Path, disk: FailingDisk, **config: Any) -> list[int]:
    """Save until the disk is full, as a run does that keeps too many; return the steps."""
    manager = manager_on(directory, CheckpointConfig(keep="last(50)", **config), fs=disk)
    with pytest.raises(StoreFull) as caught:  # noqa: PT012
        for step in range(1, 20):
            manager.save(step, state(step))
            manager.wait()
    assert "ckptmgr prune --now" in str(caught.value)
    assert "--grace 0s" in str(caught.value)
    manager.close()
    found = steps_in(directory)
    assert len(found) >= 6
    return found


@pytest.mark.parametrize("mode", [False, "thread"])
def test_run_that_keeps_fewer_now_goes_on_where_the_disk_is_full(
    tmp_path: Path, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)
    config = CheckpointConfig(keep="last(2)", async_save=mode)
    with manager_on(tmp_path, config, fs=disk) as manager, caplog.at_level(logging.WARNING):
        step = manager.resume(state()).step
        assert step == before[-1]
        for more in (1, 2, 3):
            manager.save(step + more, state(step + more))
        manager.wait()
    assert steps_in(tmp_path) == [step, step + 2, step + 3]
    assert any(
        "to make room, removed what last(2) drops: ckpt-1.ckpt" in t for t in caplog.messages
    )
    assert not (tmp_path / ".ckptmgr-trash").exists()


def test_no_more_goes_than_the_save_needs(tmp_path: Path) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)
    seen: list[list[int]] = []

    def observe(event: Any) -> None:
        if event.name == "prune":
            seen.append(steps_in(tmp_path))

    config = CheckpointConfig(keep="last(2)")
    with manager_on(tmp_path, config, fs=disk, observe=observe) as manager:
        manager.resume(state())
        manager.save(20, state())
    assert seen[0] == before[1:]


def test_what_the_policy_keeps_stays_and_the_save_fails(tmp_path: Path) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)
    with manager_on(tmp_path, CheckpointConfig(keep="last(40)"), fs=disk) as manager:
        manager.resume(state())
        with pytest.raises(StoreFull):
            manager.save(20, state())
    assert steps_in(tmp_path) == before


def test_pinned_and_resumed_checkpoints_stay(tmp_path: Path) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)
    with manager_on(tmp_path, CheckpointConfig(keep="last(1)"), fs=disk) as manager:
        manager.pin(1)
        manager.resume(state())
        manager.save(20, state())
        assert steps_in(tmp_path) == [1, before[-1], 20]


def test_only_checkpoint_of_a_run_stays_where_the_next_one_has_no_room(tmp_path: Path) -> None:
    disk = full_disk(3)
    with manager_on(tmp_path, CheckpointConfig(keep="last(1)"), fs=disk) as manager:
        manager.save(1, state())
        with pytest.raises(StoreFull):
            manager.save(2, {"w": np.zeros(MIB // 4)})
    assert steps_in(tmp_path) == [1]


def test_checkpoints_of_another_run_stay(tmp_path: Path) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)
    with (
        manager_on(tmp_path, CheckpointConfig(keep="last(1)"), fs=disk) as manager,
        pytest.raises(StoreFull),
    ):
        manager.save(20, state())
    assert steps_in(tmp_path) == before


def test_removal_that_fails_ends_the_save_with_the_full_disk(tmp_path: Path) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)

    class Stuck(FailingDisk):
        def unlink(self, path: Path) -> None:
            if path.name.startswith("ckpt-"):
                raise OSError(1, "Operation not permitted", str(path))
            super().unlink(path)

    stuck = Stuck(api.OsFileSystem(), space_bytes=disk.free_bytes(tmp_path))
    with manager_on(tmp_path, CheckpointConfig(keep="last(2)"), fs=stuck) as manager:
        manager.resume(state())
        with pytest.raises(StoreFull):
            manager.save(20, state())
    assert steps_in(tmp_path) == before


def test_quota_that_shows_only_while_writing_is_room_to_be_made(tmp_path: Path) -> None:
    disk = full_disk()
    filled(tmp_path, disk)

    quota = FailingDisk(api.OsFileSystem(), space_bytes=MIB // 2, space_error=errno.EDQUOT)
    with manager_on(tmp_path, CheckpointConfig(keep="last(2)"), fs=quota) as manager:
        step = manager.resume(state()).step
        manager.save(20, state())
    assert steps_in(tmp_path) == [step, 20]


@pytest.mark.parametrize("operation", ["create", "reserve", "write_at", "sync"])
def test_nothing_goes_where_the_disk_has_room_and_refuses(tmp_path: Path, operation: str) -> None:
    before = filled(tmp_path, full_disk())
    disk = FailingDisk(
        api.OsFileSystem(), error=errno.ENOSPC, operation=operation, call=1, is_lasting=True
    )
    manager = manager_on(tmp_path, CheckpointConfig(keep="last(1)"), fs=disk)
    with pytest.raises((StoreFull, SaveFailed)):  # noqa: PT012
        manager.resume(state())
        manager.save(20, state())
    with contextlib.suppress(OSError):
        manager.close()
    assert steps_in(tmp_path) == before


def test_callback_makes_room_too(tmp_path: Path) -> None:
    disk = full_disk()
    network = {"w": np.zeros(MIB // 4, np.float32)}
    for keep in ("last(50)", "last(2)"):
        callback = callback_on("net", str(tmp_path), CheckpointConfig(keep=keep), fs=disk)
        loop = Loop(callbacks=(callback,), batch_num=100, network=network)
        if keep == "last(50)":
            with pytest.raises(StoreFull):
                loop.run(20)
            callback.close()
            continue
        found = callback.resume()
        assert found is not None
        loop.step = found.checkpoint.step
        loop.run(2)
    assert len(data_files(tmp_path)) == 3  # the one that was resumed from, and two


def test_ranks_make_room_before_a_save(tmp_path: Path) -> None:
    def work(keep: str, saves: range) -> Any:
        def one(rank: int) -> list[int]:
            config = CheckpointConfig(keep=keep)
            seat = Seat(meeting, rank)
            manager = manager_on(tmp_path, config, fs=disk, ranks=Ranks(seat))
            with manager:
                first = manager.resume(state()).step
                for step in saves:
                    manager.save(first + step, state())
                return [one.step for one in manager.checkpoints()]

        return one

    disk = full_disk(20)
    meeting = Meeting(2)
    outcomes = run_ranks(meeting, work("last(50)", range(1, 20)))
    assert all(isinstance(one.raised, Exception) for one in outcomes[:2])
    meeting = Meeting(2)
    outcomes = run_ranks(meeting, work("last(2)", range(1, 4)))
    steps = outcomes[0].must()
    assert len(steps) == 3


def test_nothing_goes_where_the_save_would_not_fit_all_the_same(tmp_path: Path) -> None:
    disk = full_disk()
    before = filled(tmp_path, disk)
    config = CheckpointConfig(keep="last(1)")
    with manager_on(tmp_path, config, fs=disk) as manager:
        manager.resume(state())
        with pytest.raises(StoreFull):
            manager.save(100, {"w": np.zeros(16 * MIB // 8)})
    assert steps_in(tmp_path) == before
