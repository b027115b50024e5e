# SPDX-License-Identifier: Apache-2.0
"""`save_checkpoint` and `load_checkpoint` beside others that write or read the same name at the same time."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import ChecksumMismatch, StoreLocked, load_checkpoint, save_checkpoint
from tests.faults.killed import ROOT, kill_during_write
from tests.support import api

_RANGE_ITEMS = (16 << 20) // 4


def _weights(value: float, *, ranges: int = 1) -> dict[str, np.ndarray]:
    """Weights that differ from those of another value at their end only."""
    weights = np.zeros(_RANGE_ITEMS * ranges, np.float32)
    weights[-1] = value
    return {"w": weights}


def test_save_while_another_saves_the_same_name_is_refused_and_changes_nothing(
    tmp_path: Path,
) -> None:
    save_checkpoint({"w": np.ones(1)}, tmp_path / "x.ckpt")
    before = (tmp_path / "x.ckpt").read_bytes()
    with (
        api.place(tmp_path).lease("x.ckpt"),
        pytest.raises(StoreLocked, match="being written by process"),
    ):
        save_checkpoint({"w": np.zeros(1)}, tmp_path / "x.ckpt")
    assert (tmp_path / "x.ckpt").read_bytes() == before


def test_save_of_another_name_in_the_directory_goes_on(tmp_path: Path) -> None:
    with api.place(tmp_path).lease("rank_0.ckpt"):
        save_checkpoint({"w": np.zeros(1)}, tmp_path / "rank_1.ckpt")
    assert set(load_checkpoint(tmp_path / "rank_1.ckpt")) == {"w"}


def test_save_leaves_the_file_and_its_manifest_only(tmp_path: Path) -> None:
    for _ in range(2):
        save_checkpoint({"w": np.zeros(1)}, tmp_path / "x.ckpt")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"x.ckpt", "x.ckpt.manifest.json"}


def test_save_removes_what_a_killed_save_of_that_name_left(tmp_path: Path) -> None:
    options: dict[str, Any] = {"name": "x.ckpt", "function": True}
    assert kill_during_write(tmp_path, step=2, write=2, **options).was_stopped
    assert ".tmp" in [path.suffix for path in tmp_path.iterdir()]
    save_checkpoint({"w": np.zeros(1)}, tmp_path / "x.ckpt")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"x.ckpt", "x.ckpt.manifest.json"}


_HAMMER = """
import sys
import numpy as np
from ckptmgr import save_checkpoint
from ckptmgr.core.errors import StoreLocked
saved = 0
while saved < 20:
    try:
        save_checkpoint({"w": np.full(1000, float(sys.argv[2]))}, sys.argv[1])
        saved += 1
    except StoreLocked:
        pass
"""


@pytest.mark.slow
def test_two_processes_saving_one_name_never_leave_data_beside_a_foreign_manifest(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.ckpt"
    save_checkpoint({"w": np.full(1000, 0.0)}, path)
    commands = [[sys.executable, "-c", _HAMMER, str(path), str(value)] for value in (1, 2)]
    writers = [subprocess.Popen(command, cwd=ROOT) for command in commands]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        weights = load_checkpoint(path)["w"]
        assert isinstance(weights, np.ndarray)
        assert (weights == weights[0]).all()
        seen.add(float(weights[0]))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen <= {0.0, 1.0, 2.0}
    assert set(load_checkpoint(path)) == {"w"}


def _swap_data(path: Path, value: float) -> bytes:
    """Put the data of another save beside the old manifest, and return the manifest that belongs to it."""
    old = path.with_name(path.name + ".manifest.json").read_bytes()
    save_checkpoint(_weights(value, ranges=2), path)
    manifest = path.with_name(path.name + ".manifest.json")
    new = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(old)
    return new


def test_load_while_the_file_is_replaced_takes_the_manifest_that_describes_the_data(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x.ckpt"
    save_checkpoint(_weights(1, ranges=2), path)
    newer = _swap_data(path, 2)

    def finish_the_swap(_: str) -> bool:
        path.with_name("x.ckpt.manifest.json").write_bytes(newer)
        return True

    path.with_name("x.ckpt.manifest.json").chmod(0o600)
    loaded = load_checkpoint(path, choice_func=finish_the_swap)["w"]
    assert isinstance(loaded, np.ndarray)
    assert loaded[-1] == 2


def test_load_of_data_that_no_manifest_describes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_checkpoint(_weights(1, ranges=2), path)
    _swap_data(path, 2)
    with pytest.raises(ChecksumMismatch):
        load_checkpoint(path)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_lock_on_a_file_that_its_holder_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    path = tmp_path / "x.lease"
    flock, removals = fcntl.flock, [path]

    def flock_after_removal(descriptor: int, operation: int) -> None:
        while removals:
            removals.pop().unlink()
            if is_replaced:
                path.touch()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_removal)
    with api.OsFileSystem().lock(path, owner="me") as holder:
        assert holder is None
        assert path.read_text() == "me"
        with api.OsFileSystem().lock(path, owner="you") as other:
            assert other == "me"
