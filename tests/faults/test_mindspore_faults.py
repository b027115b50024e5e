# SPDX-License-Identifier: Apache-2.0
"""The ways in which MindSpore 2.10 was seen to lose checkpoints, and that ours does not: disks that fail, and kills.

The numbers are those of the experiments with the real MindSpore; "MindSpore" has their result there. Data lost by
formats and encryption is in test_mindspore_file_faults.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, ModelCheckpoint, StoreFull, load_checkpoint, save_checkpoint
from tests.faults.killed import kill_during_write
from tests.support import api
from tests.support.crashmodel import FailingDisk
from tests.support.runs import callback_on
from tests.support.surface import KEY, Loop, data_files

MIB = 1 << 20
_NOBODY = 65534


def _network() -> dict[str, np.ndarray]:
    return {"w": np.zeros(MIB // 4, np.float32)}


def _leftovers(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.endswith(".tmp"))


def _value(path: Path, *, key: bytes | None = None) -> float:
    """Return the one number that all weights of a checkpoint of `Loop` have: the step."""
    weights = load_checkpoint(path, dec_key=key)["w"]
    assert isinstance(weights, np.ndarray)
    assert (weights == weights[0]).all()
    return float(weights[0])


class _FullDisk:
    """A real directory on a disk of 12 MiB that somebody else fills."""

    def __init__(self, directory: Path) -> None:
        self.disk = FailingDisk(api.OsFileSystem(), space_bytes=12 * MIB)
        self._filler = directory / "filler.bin"
        self._file: api.OutputFile | None = None

    def fill(self) -> None:
        free = self.disk.free_bytes(self._filler.parent)
        assert free is not None
        file = self.disk.create(self._filler, mode=0o600)
        file.reserve(free - MIB // 2)
        file.close()

    def free(self) -> None:
        self.disk.unlink(self._filler)


def _training(
    directory: Path, config: CheckpointConfig, *, disk: FailingDisk
) -> tuple[Loop, ModelCheckpoint]:
    callback = callback_on("CKP", str(directory), config, fs=disk)
    return Loop(callbacks=(callback,), batch_num=10, network=_network()), callback


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_f01_f02_full_disk_removes_no_checkpoint_and_leaves_no_temporary_file(
    tmp_path: Path, keep: int
) -> None:
    """MindSpore: with keep=1 no checkpoint is left; with 2 or 3 one is lost; one more `.tmp` at each step."""
    full = _FullDisk(tmp_path)
    config = CheckpointConfig(keep_checkpoint_max=keep)
    loop, _ = _training(tmp_path, config, disk=full.disk)
    loop.run(4, end=False)
    before = data_files(tmp_path)
    full.fill()
    for _ in range(3):
        with pytest.raises(StoreFull, match="not enough disk space"):
            loop.run_step()
    assert len(before) == keep
    assert data_files(tmp_path) == before
    assert _value(tmp_path / before[-1]) == 4
    assert _leftovers(tmp_path) == []


def test_f03_failed_step_is_saved_by_end_when_there_is_space_again(tmp_path: Path) -> None:
    """MindSpore: the failed step counts as saved, and `end()` returns without saving it."""
    full = _FullDisk(tmp_path)
    loop, callback = _training(tmp_path, CheckpointConfig(keep_checkpoint_max=2), disk=full.disk)
    loop.run(2, end=False)
    full.fill()
    with pytest.raises(StoreFull):
        loop.run_step()
    with pytest.raises(StoreFull):
        loop.end()
    full.free()
    loop.end()
    assert Path(callback.latest_ckpt_file_name).name == "CKP-1_3.ckpt"
    assert _value(Path(callback.latest_ckpt_file_name)) == 3


@pytest.mark.parametrize("how", [True, "thread"])
def test_f04_full_disk_is_heard_of_with_async_save(tmp_path: Path, how: bool | str) -> None:
    """MindSpore: all steps and `end()` return, the exit code is 0, and the latest name is of a file that never was."""
    full = _FullDisk(tmp_path)
    config = CheckpointConfig(keep_checkpoint_max=2, async_save=how)
    loop, callback = _training(tmp_path, config, disk=full.disk)
    loop.run(3, end=False)
    callback.close()  # waits for the disk
    full.fill()
    with pytest.raises(StoreFull):
        loop.run(3)
    latest = Path(callback.latest_ckpt_file_name)
    assert latest.name == "CKP-1_3.ckpt"
    assert _value(latest) == 3


@pytest.mark.parametrize("how", [False, "thread", "process"])
def test_f05_failure_of_a_save_is_heard_of_wherever_it_runs(
    tmp_path: Path, how: bool | str
) -> None:
    """MindSpore: the parent never looks at the exit code of the process that saves."""
    config = CheckpointConfig(async_save=how)
    callback = ModelCheckpoint("CKP", str(tmp_path), config)
    loop = Loop(callbacks=(callback,), batch_num=10)
    loop.run(3)
    (tmp_path / "CKP-1_4.ckpt").mkdir()
    with pytest.raises(OSError, match=r"CKP-1_4\.ckpt"):
        loop.run(1)
    latest = Path(callback.latest_ckpt_file_name)
    assert latest.name == "CKP-1_3.ckpt"
    assert _value(latest) == 3
    assert _leftovers(tmp_path) == []


_WAYS: dict[str, dict[str, object]] = {
    "ckpt": {},
    "gcm": {"enc_mode": "AES-GCM"},
    "safetensors": {"format": "safetensors"},
    "thread": {"async_save": "thread"},
}


@pytest.mark.parametrize("way", _WAYS)
def test_f06_kill_during_a_write_with_keep_1_leaves_the_previous_checkpoint(
    tmp_path: Path, way: str
) -> None:
    """MindSpore: the previous file was removed first; a temporary file of 0 bytes is all that is left."""
    config = {"keep_checkpoint_max": 1, **_WAYS[way]}
    # Of a series that is opened anew at each step the first write is the name of its owner.
    write = 2 if way == "thread" else 1
    killed = kill_during_write(tmp_path, step=3, write=write, config=config)
    suffix = "safetensors" if way == "safetensors" else "ckpt"
    assert (killed.acknowledged, killed.was_stopped) == (2, True)
    assert data_files(tmp_path) == [f"CKP-1_2.{suffix}"]
    key = KEY if way == "gcm" else None
    assert _value(tmp_path / f"CKP-1_2.{suffix}", key=key) == 2


@pytest.mark.parametrize("write", [1, 2])
def test_f07_resume_after_a_kill_at_any_write_returns_the_last_acknowledged_step(
    tmp_path: Path, write: int
) -> None:
    """MindSpore: with keep=2 the previous file survives; so it does here, and resume finds it."""
    config = {"keep_checkpoint_max": 2}
    killed = kill_during_write(tmp_path, step=4, write=write, config=config)
    assert (killed.acknowledged, killed.was_stopped) == (3, True)
    resumed = ModelCheckpoint("CKP", str(tmp_path)).resume()
    assert resumed is not None
    assert resumed.checkpoint.step == 3
    assert _value(resumed.checkpoint.path) == 3


@pytest.mark.parametrize("write", [1, 2, 3])
def test_f08_kill_while_one_name_is_overwritten_keeps_the_old_or_the_new(
    tmp_path: Path, write: int
) -> None:
    """MindSpore: the old file is unlinked before the new one is written; nothing is left."""
    killed = kill_during_write(tmp_path, step=3, write=write, name="last")
    assert killed.was_stopped
    assert data_files(tmp_path) == ["last.ckpt"]
    assert _value(tmp_path / "last.ckpt") == (2 if write < 3 else 3)


@pytest.mark.parametrize("format", ["ckpt", "safetensors"])
def test_f08_kill_of_save_checkpoint_over_an_old_file_keeps_it(tmp_path: Path, format: str) -> None:
    """MindSpore: nothing is left, in both formats."""
    killed = kill_during_write(
        tmp_path,
        step=2,
        write=1,
        name=f"last.{format}",
        function=True,
        config={"format": format},
    )
    assert (killed.acknowledged, killed.was_stopped) == (1, True)
    assert _value(tmp_path / f"last.{format}") == 1


def test_f08_full_disk_while_one_name_is_overwritten_keeps_the_old_file(tmp_path: Path) -> None:
    """MindSpore: the old file is unlinked first."""
    full = _FullDisk(tmp_path)
    callback = callback_on(lambda _: "last", str(tmp_path), fs=full.disk)
    loop = Loop(callbacks=(callback,), network=_network())
    loop.run(2, end=False)
    full.fill()
    with pytest.raises(StoreFull):
        loop.run_step()
    assert _value(tmp_path / "last.ckpt") == 2


@contextlib.contextmanager
def _as_ordinary_user() -> Iterator[None]:
    """Give up root's power over permissions for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def own_directory() -> Iterator[Path]:
    """Yield a directory that an ordinary user can reach; pytest's own are closed to others."""
    with _as_ordinary_user():
        directory = Path(tempfile.mkdtemp())
    yield directory
    directory.chmod(0o700)
    shutil.rmtree(directory)


def test_f09_read_only_directory_leaves_every_file_and_its_permissions(own_directory: Path) -> None:
    """MindSpore: the oldest file is changed to mode 0200, cannot be removed, and cannot be loaded any more."""
    with _as_ordinary_user():
        callback = ModelCheckpoint(
            "CKP", str(own_directory), CheckpointConfig(keep_checkpoint_max=2)
        )
        loop = Loop(callbacks=(callback,))
        loop.run(2, end=False)
        own_directory.chmod(0o500)
        for _ in range(2):
            with pytest.raises(PermissionError):
                loop.run_step()
        assert data_files(own_directory) == ["CKP-1_1.ckpt", "CKP-1_2.ckpt"]
        for number, name in enumerate(data_files(own_directory), 1):
            assert stat.S_IMODE((own_directory / name).stat().st_mode) == 0o400
            assert _value(own_directory / name) == number


def test_f09_overwriting_in_a_read_only_directory_keeps_the_old_file(own_directory: Path) -> None:
    """MindSpore: the old file is left without read permission."""
    with _as_ordinary_user():
        path = own_directory / "last.ckpt"
        save_checkpoint({"w": np.full(4, 1, np.float32)}, path)
        own_directory.chmod(0o500)
        with pytest.raises(PermissionError):
            save_checkpoint({"w": np.full(4, 2, np.float32)}, path)
        assert _value(path) == 1


def test_f10_file_system_that_becomes_read_only_loses_nothing(tmp_path: Path) -> None:
    """MindSpore: EROFS and nothing lost; the same here."""
    disk = FailingDisk(
        api.OsFileSystem(), error=errno.EROFS, operation="create", call=5, is_lasting=True
    )
    loop, _ = _training(tmp_path, CheckpointConfig(keep_checkpoint_max=1), disk=disk)
    loop.run(2, end=False)
    with pytest.raises(OSError, match="Read-only file system") as caught:
        loop.run_step()
    assert caught.value.errno == errno.EROFS
    assert data_files(tmp_path) == ["CKP-1_2.ckpt"]
    assert _value(tmp_path / "CKP-1_2.ckpt") == 2


def test_f11_orphans_of_a_killed_run_are_removed_by_the_next_save(tmp_path: Path) -> None:
    """MindSpore: they are never removed, not even on restart."""
    kill_during_write(tmp_path, step=2, write=1)
    orphans = _leftovers(tmp_path)
    Loop(callbacks=(ModelCheckpoint("CKP", str(tmp_path)),)).run(1)
    assert len(orphans) == 1
    assert _leftovers(tmp_path) == []


def test_f11_temporary_files_of_others_stay(tmp_path: Path) -> None:
    """MindSpore: a `.tmp` of the user's beside the checkpoint is deleted."""
    for name in ("CKP-1_1.tmp", ".CKP-1_1.ckpt.mine.tmp", "x.tmp"):
        (tmp_path / name).write_text("mine")
    Loop(callbacks=(ModelCheckpoint("CKP", str(tmp_path)),)).run(2)
    save_checkpoint({"w": np.zeros(1)}, tmp_path / "x.ckpt")
    assert _leftovers(tmp_path) == [".CKP-1_1.ckpt.mine.tmp", "CKP-1_1.tmp", "x.tmp"]


def test_f12_async_process_saves_every_step_once(tmp_path: Path) -> None:
    """MindSpore: after a lost notification running savers are killed, and one save took 15 s and four forks."""
    config = CheckpointConfig(keep_checkpoint_max=10, async_save="process")
    Loop(callbacks=(ModelCheckpoint("CKP", str(tmp_path), config),)).run(5)
    names = [f"CKP-1_{n}.ckpt" for n in (1, 2, 3)] + [f"CKP-2_{n}.ckpt" for n in (1, 2)]
    assert data_files(tmp_path) == names
    assert [_value(tmp_path / name) for name in names] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("mode", "size"), [("AES-GCM", 5), ("SM4-CBC", 24), ("SM4-CBC", 32), ("AES-CTR", 16)]
)
def test_f13_wrong_key_length_or_mode_is_refused_before_anything_is_removed(
    tmp_path: Path, mode: str, size: int
) -> None:
    """MindSpore: accepted by the configuration; the first save removes the oldest file and then fails."""
    save_checkpoint({"w": np.full(4, 1, np.float32)}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="must be"):
        CheckpointConfig(enc_key=bytes(size), enc_mode=mode)
    with pytest.raises(ValueError, match="must be"):
        save_checkpoint({"w": np.zeros(4)}, tmp_path / "x.ckpt", enc_key=bytes(size), enc_mode=mode)
    assert _value(tmp_path / "x.ckpt") == 1
    assert _leftovers(tmp_path) == []
