# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.io.directory_watch import DirectoryWatch


def watch(directory: Path) -> DirectoryWatch:
    found = DirectoryWatch.of(directory)
    if found is None:
        pytest.skip("the directory cannot be watched here")
    return found


def test_changed_names_are_reported_once(fast_path: Path) -> None:
    (fast_path / "before").touch()
    found = watch(fast_path)
    (fast_path / "one").write_text("1")
    (fast_path / "before").rename(fast_path / "two")
    assert found.changed_names() == {"one", "two", "before"}
    assert found.changed_names() == set()
    found.close()


def test_closed_watch_knows_nothing(fast_path: Path) -> None:
    found = watch(fast_path)
    found.close()
    assert found.changed_names() is None


def test_only_a_directory_that_is_there_is_watched(fast_path: Path) -> None:
    (fast_path / "file").touch()
    assert DirectoryWatch.of(fast_path / "file") is None
    assert DirectoryWatch.of(fast_path / "missing") is None
