# SPDX-License-Identifier: Apache-2.0
"""The file in which a watch remembers: written at once or not at all, and only where it changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmgr.maintenance.watch.memory import Memory
from tests.support import api
from tests.support.failingdisk import FailingDisk

PASSED = {"/runs/a": {"net-1.ckpt": "1.2.3"}, "/runs/\udcff": {"n\u00e9t.ckpt": "4"}}


def test_what_is_written_is_read_again_by_a_watch_of_that_level_or_a_weaker(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    Memory(path, level=api.Level.FULL).write(PASSED)
    assert Memory(path, level=api.Level.FULL).read() == PASSED
    assert Memory(path, level=api.Level.QUICK).read() == PASSED
    assert Memory(path, level=api.Level.DEEP).read() == {}
    assert os.listdir(tmp_path) == ["state.json"]


def test_absent_file_remembers_nothing(tmp_path: Path) -> None:
    assert Memory(tmp_path / "none", level=api.Level.FULL).read() == {}


def test_same_state_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    memory = Memory(path, level=api.Level.FULL)
    memory.write(PASSED)
    before = path.stat()
    memory.write(PASSED)
    assert path.stat() == before


def test_failed_write_leaves_the_old_state_and_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    Memory(path, level=api.Level.FULL).write(PASSED)
    disk = FailingDisk(api.OsFileSystem(), operation="sync", call=1)
    with pytest.raises(OSError, match="Input/output error"):
        Memory(path, level=api.Level.FULL, fs=disk).write({})
    assert Memory(path, level=api.Level.FULL).read() == PASSED
    assert os.listdir(tmp_path) == ["state.json"]
