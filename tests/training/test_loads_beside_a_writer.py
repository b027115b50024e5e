# SPDX-License-Identifier: Apache-2.0
"""Readers beside a run that keeps only its last checkpoint: a found one may be gone before it is opened."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, CheckpointNotFound, CorruptCheckpoint
from ckptmgr.io.files import FileHead
from ckptmgr.io.filesystem import FileStatus
from tests.support import api
from tests.support.runs import manager_on

LAST = CheckpointConfig(keep="last(1)")
KEY = b"sixteen byte key"
READS = 60

WRITE = """
import sys, threading
import numpy as np
from ckptmgr import CheckpointConfig, CheckpointManager
threading.Thread(target=lambda: (sys.stdin.read(), done.append(1)), daemon=True).start()
done, step = [], 0
with CheckpointManager(sys.argv[1], CheckpointConfig(keep="last(1)")) as manager:
    while not done:
        step += 1
        manager.save(step, {"step": step, "w": np.full(64, step)})
        if step == 1:
            print("saved", flush=True)
"""


class Unseen(api.OsFileSystem):
    """A disk whose listings miss all checkpoints, as often as it is said: they come and go while it is read."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def list(self, path: Path) -> dict[str, FileStatus]:
        found = super().list(path)
        if self.left:
            self.left -= 1
            return {f".temp-{self.left}": found.popitem()[1]}
        return found


class Overtaken(api.OsFileSystem):
    """A disk on which something happens before a file is opened for reading, as often as it is said."""

    def __init__(self, call: Callable[[], object], *, suffix: str, times: int = 1) -> None:
        super().__init__()
        self._call, self._suffix, self.left = call, suffix, times

    def open(self, path: Path, *, is_uncached: bool = False) -> api.InputFile:
        self._overtake(path)
        return super().open(path, is_uncached=is_uncached)

    def read_head(self, directory: Path, name: str, *, most_bytes: int) -> FileHead:
        self._overtake(directory / name)
        return super().read_head(directory, name, most_bytes=most_bytes)

    def _overtake(self, path: Path) -> None:
        if self.left and path.name.endswith(self._suffix):
            self.left -= 1
            self._call()


def saver(runs: Path, config: CheckpointConfig) -> Callable[[], object]:
    """Return a function that saves the next step, after which the one before is gone."""
    manager = CheckpointManager(runs, config)
    steps = iter(range(1, 100))

    def save() -> None:
        step = next(steps)
        manager.save(step, {"w": step})

    return save


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("target", [False, True], ids=["new", "into"])
def test_checkpoint_that_is_removed_before_it_is_opened_is_not_found(
    tmp_path: Path, key: bytes | None, target: bool
) -> None:
    config = CheckpointConfig(keep="last(1)", enc_key=key)
    save = saver(tmp_path, config)
    save()
    reader = manager_on(tmp_path, config, fs=Overtaken(save, suffix=".ckpt"))
    newest = reader.latest()
    assert newest is not None
    with pytest.raises(
        CheckpointNotFound, match=r"removed.*the newest is now ckpt-2\.ckpt"
    ) as caught:
        reader.load(newest, {"w": 0} if target else None)
    assert caught.value.path == str(newest.path)
    assert "load('latest')" in str(caught.value.hint)


@pytest.mark.parametrize("asked", [1, "ckpt-1.ckpt"])
def test_step_that_is_removed_before_it_is_opened_is_not_found(
    tmp_path: Path, asked: int | str
) -> None:
    save = saver(tmp_path, LAST)
    save()
    reader = manager_on(tmp_path, fs=Overtaken(save, suffix=".ckpt"))
    with pytest.raises(CheckpointNotFound, match=r"the newest is now ckpt-2\.ckpt"):
        reader.load(asked)


def test_newest_is_looked_for_until_it_is_there(tmp_path: Path) -> None:
    save = saver(tmp_path, LAST)
    save()
    disk = Overtaken(save, suffix=".ckpt", times=5)
    assert manager_on(tmp_path, fs=disk).load("latest") == {"w": 6}
    state = {"w": 0}
    disk.left = 2
    manager_on(tmp_path, fs=disk).load("latest", state)
    assert state == {"w": 8}


@pytest.mark.parametrize("times", range(1, 6))
def test_directory_that_changes_while_it_is_listed_is_listed_again(
    tmp_path: Path, times: int
) -> None:
    CheckpointManager(tmp_path).save(1, {"w": 1})
    newest = manager_on(tmp_path, fs=Unseen(times)).latest()
    assert newest is not None
    assert manager_on(tmp_path, fs=Unseen(times)).load(1) == {"w": 1}
    assert manager_on(tmp_path, fs=Unseen(1000)).latest() is None


def test_newest_of_nothing_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint 'latest' in series 'ckpt'"):
        CheckpointManager(tmp_path).load("latest")


def test_last_one_that_is_removed_leaves_none(tmp_path: Path) -> None:
    CheckpointManager(tmp_path).save(1, {"w": 1})

    def remove() -> None:
        for path in tmp_path.iterdir():
            path.unlink()

    reader = manager_on(tmp_path, fs=Overtaken(remove, suffix=".ckpt"))
    newest = reader.latest()
    assert newest is not None
    with pytest.raises(CheckpointNotFound, match="there is none now"):
        reader.load(newest)


def test_damage_of_what_is_there_is_damage(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": np.arange(100)})
        data = tmp_path / "ckpt-1.ckpt"
        content = bytearray(data.read_bytes())
        content[200] ^= 1
        data.chmod(0o600)
        data.write_bytes(content)
        for asked in ("latest", 1):
            with pytest.raises(CorruptCheckpoint):
                manager.load(asked)


def test_reader_beside_a_process_that_keeps_the_last_one_always_gets_one(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITE, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "saved\n"
        reader = CheckpointManager(tmp_path)
        last = 0
        for _ in range(READS):
            state = reader.load("latest")
            assert isinstance(state, dict)
            assert np.array_equal(state["w"], np.full(64, state["step"]))
            assert state["step"] >= last
            last = state["step"]
            newest = reader.latest()
            assert newest is not None
            with contextlib.suppress(CheckpointNotFound):
                loaded = reader.load(newest)
                assert isinstance(loaded, dict)
                assert loaded["step"] == newest.step
        writer.communicate("", timeout=60)
    assert writer.returncode == 0
