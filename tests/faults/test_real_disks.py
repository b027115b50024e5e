# SPDX-License-Identifier: Apache-2.0
"""Real file systems: a full tmpfs, and an ext4 whose power is cut at every call."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.straced import ROOT, save_steps, saver_command, straced_save
from tests.faults.test_strace import check_directory

FULL = """
import sys
import numpy
from ckptmgr.errors import StoreFull
from ckptmgr.fsio import OsFileSystem
from ckptmgr.manager import CheckpointManager

class Unknowing(OsFileSystem):
    def free_bytes(self, path):
        return None

with CheckpointManager("/mnt/run", prefix="net", fs=Unknowing()) as manager:
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


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def mounted(image: Path, directory: Path) -> Iterator[Path]:
    """Mount an image; unmounted by its path, whatever happens."""
    directory.mkdir(exist_ok=True)
    run("mount", "-o", "loop", image, directory)
    try:
        yield directory
    finally:
        run("umount", directory)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """Return an ext4 on which steps 1 and 2 are durable."""
    path = tmp_path / "base.img"
    with path.open("wb") as file:
        file.truncate(32 << 20)
    run("mkfs.ext4", "-q", "-F", path)
    with mounted(path, tmp_path / "m") as directory:
        save_steps(directory / "run", 1, 2)
        os.sync()
    return path


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("call", ["pwrite64", "fsync", "rename", "unlink"])
def test_power_cut_at_every_call_on_ext4(tmp_path: Path, image: Path, call: str) -> None:
    disk, photo = tmp_path / "disk.img", tmp_path / "photo.img"
    cut = 0
    for number in range(1, 30):
        run("cp", "--sparse=always", image, disk)
        with mounted(disk, tmp_path / "m") as directory:
            inject = f"{call}:signal=SIGKILL:when={number}"
            saver = straced_save(
                directory / "run", tmp_path / "log", inject, step=3, keep="last(1)"
            )
            # A copy of the mounted image holds just what the file system has sent to the device.
            run("cp", "--sparse=always", disk, photo)
        with mounted(photo, tmp_path / "m") as directory:
            must = {2, 3} if saver.is_acknowledged else {2}
            check_directory(directory / "run", must=must, may={1, 3})
        cut += 1
        if not saver.is_killed:
            break
    assert cut >= 3


@pytest.mark.root
def test_photograph_shows_what_was_never_synced(tmp_path: Path, image: Path) -> None:
    disk, photo = tmp_path / "disk.img", tmp_path / "photo.img"
    run("cp", "--sparse=always", image, disk)
    with mounted(disk, tmp_path / "m") as directory:
        command = [*saver_command(directory / "run", 3, None)]
        subprocess.run(
            ["strace", "-f", "-o", tmp_path / "log", "-e", "inject=fsync:retval=0", *command],
            check=True,
            capture_output=True,
            cwd=ROOT,
        )
        assert "(INJECTED)" in (tmp_path / "log").read_text(errors="replace")
        run("cp", "--sparse=always", disk, photo)
    with (
        mounted(photo, tmp_path / "m") as directory,
        pytest.raises(AssertionError),
    ):
        check_directory(directory / "run", must={1, 2, 3}, may=set())
