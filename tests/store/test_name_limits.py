# SPDX-License-Identifier: Apache-2.0
"""Prefixes that are too long for a file system, and file systems that have no room for one more file."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, ModelCheckpoint, Ranks, StoreFull
from ckptmgr.store.name_limits import check_name_lengths
from tests.parallel.ranks import Meeting, Seat
from tests.support import api
from tests.support.runs import manager_on
from tests.support.surface import Loop

LIMIT = os.pathconf("/", "PC_NAME_MAX")


def most_bytes(prefix: str, error: pytest.ExceptionInfo[ValueError]) -> int:
    """Return how long the error says that a prefix may be."""
    found = re.search(r"at most (\d+) bytes", str(error.value))
    assert found is not None
    assert f"takes {LIMIT} bytes" in str(error.value)
    assert 0 < int(found[1]) < len(os.fsencode(prefix))
    return int(found[1])


@pytest.mark.parametrize("letter", ["n", "\u00e9", "\u65e5"])
def test_prefix_of_a_manager_that_is_too_long_fails_before_the_training(
    tmp_path: Path, letter: str
) -> None:
    prefix = letter * LIMIT
    with pytest.raises(ValueError, match=r"the prefix .* is too long") as caught:
        CheckpointManager(tmp_path / "new" / "runs", prefix=prefix)
    fitting = letter * (most_bytes(prefix, caught) // len(os.fsencode(letter)))
    for config in (CheckpointConfig(), CheckpointConfig(async_save="process")):
        with CheckpointManager(tmp_path, config, prefix=fitting) as manager:
            manager.save(10**11, {"w": 1})
            manager.save(10**11, {"w": 2})
            manager.wait()
            manager.pin("latest")
            assert manager.resume().state == {"w": 2}


def test_prefix_of_a_callback_that_is_too_long_fails_before_the_training(tmp_path: Path) -> None:
    prefix = "n" * LIMIT
    with pytest.raises(ValueError, match=r"the prefix .* is too long") as caught:
        ModelCheckpoint(prefix, str(tmp_path))
    fitting = "n" * most_bytes(prefix, caught)
    for _ in range(2):
        config = CheckpointConfig(save_checkpoint_steps=1, exception_save=True)
        loop = Loop(callbacks=(ModelCheckpoint(fitting, str(tmp_path), config),))
        loop.begin()
        loop.run_step()
        loop.end()
    assert [path.name for path in sorted(tmp_path.glob("*.ckpt"))] == [
        f"{fitting}-1_1.ckpt",
        f"{fitting}_1-1_1.ckpt",
    ]


def test_prefix_of_many_ranks_has_less_room(tmp_path: Path) -> None:
    prefix = "n" * LIMIT
    with pytest.raises(ValueError, match="too long") as alone:
        CheckpointManager(tmp_path, prefix=prefix)
    with pytest.raises(ValueError, match="too long") as together:
        CheckpointManager(tmp_path, ranks=Ranks(Seat(Meeting(2), 0)), prefix=prefix)
    assert most_bytes(prefix, together) < most_bytes(prefix, alone)
    with pytest.raises(ValueError, match="too long"):
        ModelCheckpoint(prefix, str(tmp_path), ranks=Ranks(Seat(Meeting(2), 0)))


def test_longer_ending_leaves_less_room(tmp_path: Path) -> None:
    for extension, room in (("ckpt", 217), ("safetensors.ckpe", 205)):
        given = {"extension": extension, "has_epochs": False, "world": None}
        check_name_lengths(tmp_path, "n" * room, **given)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"at most {room} bytes"):
            check_name_lengths(tmp_path, "n" * (room + 1), **given)  # type: ignore[arg-type]


def test_directory_that_cannot_be_looked_at_has_the_usual_limit() -> None:
    with pytest.raises(ValueError, match="takes 255 bytes"):
        check_name_lengths(
            Path("/", "n" * 1000), "n" * 250, extension="ckpt", has_epochs=False, world=None
        )


class NoInodes(api.OsFileSystem):
    """A disk with space, but without room for one more file."""

    is_full = False

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> api.OutputFile:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().create(path, mode=mode, owner_of=owner_of)

    def free_inodes(self, path: Path) -> int | None:
        return 0 if self.is_full else super().free_inodes(path)


def test_disk_without_inodes_says_so_and_not_that_space_is_missing(tmp_path: Path) -> None:
    disk = NoInodes()
    manager = manager_on(tmp_path, fs=disk)
    manager.save(1, {"w": 1})
    disk.is_full = True
    with pytest.raises(StoreFull, match=r"no inodes left .* \d+ bytes are free") as caught:
        manager.save(2, {"w": 2})
    assert caught.value.errno == errno.ENOSPC
    assert "df -i" in str(caught.value.hint)
    disk.is_full = False
    manager.save(2, {"w": 2})
    assert manager.load("latest") == {"w": 2}


def test_inodes_of_the_real_disk_are_those_of_statvfs(tmp_path: Path) -> None:
    figures, free = os.statvfs(tmp_path), api.OsFileSystem().free_inodes(tmp_path)
    assert (free is None) == (figures.f_files == 0)


@pytest.mark.root
def test_real_disk_without_inodes_says_so_for_each_file(tmp_path: Path) -> None:
    import subprocess

    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=8,size=16m", "tmpfs", tmp_path], check=True
    )
    try:
        manager = CheckpointManager(tmp_path)
        manager.save(1, {"w": 1})
        taken = 0
        while api.OsFileSystem().free_inodes(tmp_path):
            (tmp_path / f"other-{(taken := taken + 1)}").touch()
        with pytest.raises(StoreFull, match="no inodes left"):
            manager.save(2, {"w": 2})
        with pytest.raises(StoreFull, match="no inodes left"):
            CheckpointManager(tmp_path, prefix="other").save(1, {"w": 1})
        for path in tmp_path.glob("other-*"):
            path.unlink()
        manager.save(2, {"w": 2})
        manager.close()
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)
