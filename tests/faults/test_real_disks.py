# SPDX-License-Identifier: Apache-2.0
"""Real file systems: a full tmpfs; ext4, xfs and btrfs whose power is cut at every call of savers and commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptmgr import CkptmgrError
from tests.faults.photographs import KINDS, Disks, Unavailable, copy, photographs
from tests.faults.straced import ROOT, Call, changes, straced
from tests.faults.works import WORKS, each_saver, each_work, prepare_second, without_sync

FULL = """
import sys
import numpy
from ckptmgr.core.errors import StoreFull
from ckptmgr.io.filesystem import OsFileSystem
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.options import System

class Unknowing(OsFileSystem):
    def free_bytes(self, path):
        return None

with CheckpointManager._on(System(fs=Unknowing()), "/mnt/run", prefix="net") as manager:
    manager.save(1, {"w": numpy.zeros(100_000, numpy.uint8)})
    try:
        manager.save(2, {"w": numpy.zeros(2_000_000, numpy.uint8)})
    except StoreFull as error:
        print("StoreFull", error)
    manager.save(3, {"w": numpy.zeros(100_000, numpy.uint8)})
    print([c.step for c in manager.checkpoints()], sorted(p.name for p in manager.directory.iterdir()))
"""


def in_namespace(script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in its own user and mount namespace."""
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-ec", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )


def test_full_tmpfs_is_reported_and_cleaned_up(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    mount = "mount -t tmpfs -o size=1M tmpfs /mnt"
    if in_namespace(mount).returncode != 0:
        pytest.skip("user namespaces may not mount tmpfs here")
    code = tmp_path / "full.py"
    code.write_text(FULL)
    done = in_namespace(f"{mount} && PYTHONPATH={ROOT} {sys.executable} {code}")
    assert done.returncode == 0, done.stderr
    assert "StoreFull" in done.stdout
    assert "bytes needed" in done.stdout
    assert "[1, 3]" in done.stdout
    assert ".tmp" not in done.stdout


@dataclass(frozen=True, slots=True)
class Lab:
    """Disks of one kind, and an empty image of it."""

    disks: Disks
    empty: Path

    def prepared(self, prepare: Callable[[Path], None]) -> Path:
        """Return an image on which all writes of a function are durable."""
        image = copy(self.empty, self.disks.folder / "base.img")
        with self.disks.mounted(image) as disk:
            prepare(
                disk
            )  # unmounting makes it durable; os.sync() would also sync the disks of other tests
        return image


@pytest.fixture(params=KINDS)
def lab(request: pytest.FixtureRequest, fast_path: Path) -> Lab:
    """Return a lab for each file system that this machine makes and mounts."""
    disks = Disks(KINDS[request.param], fast_path)
    try:
        return Lab(disks, disks.new())
    except Unavailable as reason:
        pytest.skip(f"{request.param}: {reason}")


@pytest.mark.root
@pytest.mark.slow
@each_work
def test_power_cut_at_every_call_loses_nothing_that_was_acknowledged(lab: Lab, name: str) -> None:
    work = WORKS[name]
    taken = photographs(lab.disks, lab.prepared(work.prepare), work.command)
    for photo in taken:
        with lab.disks.mounted(photo.image) as disk:
            try:
                work.check(disk, photo.is_acknowledged)
            except AssertionError as error:
                raise AssertionError(f"after {photo.after}: {error}") from error
        photo.image.unlink()
    assert len(taken) >= 7


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["data", "manifest", "commit"])
@each_saver
def test_saver_without_one_of_its_syncs_is_caught(
    lab: Lab, tmp_path: Path, name: str, forgotten: str
) -> None:
    work = WORKS[name]
    image, log = lab.prepared(prepare_second), tmp_path / "log"
    calls: list[Call] = []
    for trial in (tmp_path / "first", tmp_path / "second"):
        prepare_second(trial)  # the first run fills the cache of byte code
        calls = changes(straced(work.command(trial), log).log, trial)
    with lab.disks.mounted(image) as disk:
        done = straced(work.command(disk), log, *without_sync(calls, forgotten))
        assert done.is_injected
        assert done.is_acknowledged, done.output
        if forgotten != "commit":
            commit_journal(disk)
        photo = copy(image, lab.disks.folder / "photo.img")
    with lab.disks.mounted(photo) as disk, pytest.raises((AssertionError, CkptmgrError)):
        work.check(disk, True)


def commit_journal(disk: Path) -> None:
    """Commit names without the contents of other files, as the clock does any moment."""
    with (disk / "unrelated").open("wb") as file:
        file.write(b"unrelated")
        os.fsync(file.fileno())
