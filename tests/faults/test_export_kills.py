# SPDX-License-Identifier: Apache-2.0
"""SIGKILL after every call of the system that changes the disk in an export: nothing is lost, and the next one cleans up."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckptmgr import StoreLocked, UnsafeWrite, export_weights, save_state
from ckptmgr.store.name_leases import hold_name
from tests.support import api

OLD, NEW = ({"w": np.full(3, value, np.float32), "b": np.ones(2)} for value in (1, 2))
_CHANGES = {"mkdir", "replace", "unlink", "rmdir", "pwrite"}


def killed_after(work: Callable[[], object], call: int) -> bool:
    """Work in a child process, killed after a call; return whether there were so many."""
    child = os.fork()
    if child == 0:
        left = call

        def look(_: FrameType, event: str, function: object) -> None:
            nonlocal left
            if event == "c_return" and getattr(function, "__module__", None) == "posix":
                left -= getattr(function, "__name__", None) in _CHANGES
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(look)
        work()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def weights_in(directory: Path) -> float | None:
    """Return the value of the weights of an export, or None where there is no export."""
    if not directory.exists():
        return None
    found: dict[str, np.ndarray] = {}
    for path in directory.glob("*.safetensors"):
        found |= load_file(path)
    assert sorted(found) == ["b", "w"]
    return float(found["w"][0])


@pytest.mark.slow
@pytest.mark.parametrize("is_replaced", [False, True])
def test_death_at_every_call_loses_nothing_and_the_next_export_cleans_up(
    tmp_path: Path, is_replaced: bool
) -> None:
    for name, state in (("old", OLD), ("new", NEW)):
        save_state(state, tmp_path / f"{name}.safetensors")
    before = sorted(path.name for path in tmp_path.iterdir())
    out = tmp_path / "out"
    seen: set[float | None] = set()

    def export(name: str) -> None:
        export_weights(tmp_path / f"{name}.safetensors", out, force=is_replaced)

    for call in range(1, 1000):
        shutil.rmtree(out, ignore_errors=True)
        if is_replaced:
            export("old")
        is_killed = killed_after(lambda: export("new"), call)
        found = weights_in(out)
        if found is None and is_replaced:
            (kept,) = tmp_path.glob(".out.export-*.old")
            assert weights_in(kept) == 1
        seen.add(found)
        if found == 2 and not is_replaced:
            with pytest.raises(UnsafeWrite, match="is not empty"):
                export("new")
        else:
            export("new")
        assert weights_in(out) == 2
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "out"])
        if not is_killed:
            break
    assert seen == ({1, 2, None} if is_replaced else {None, 2})


def left_behind(tmp_path: Path, kind: str) -> Path:
    """Return the files that a killed export left beside `out`."""
    left = tmp_path / f".out.export-{'0' * 16}.{kind}"
    export_weights(save_state(OLD, tmp_path / "old.ckpt").path, left)
    return left


def test_earlier_export_gets_its_name_back_even_when_the_next_export_is_refused(
    tmp_path: Path,
) -> None:
    left_behind(tmp_path, "old")
    (tmp_path / "out").mkdir()
    with pytest.raises(UnsafeWrite, match="is not empty"):
        export_weights(tmp_path / "old.ckpt", tmp_path / "out")
    assert weights_in(tmp_path / "out") == 1


@pytest.mark.parametrize("kind", ["new", "old"])
def test_directory_with_files_of_others_is_never_removed(tmp_path: Path, kind: str) -> None:
    export_weights(save_state(OLD, tmp_path / "a.ckpt").path, tmp_path / "out")
    left = left_behind(tmp_path, kind)
    (left / "config.json").touch()
    with pytest.raises(UnsafeWrite, match=r"config\.json.*\n.*was killed left this directory"):
        export_weights(tmp_path / "old.ckpt", tmp_path / "out", force=True)
    assert (left / "config.json").exists()


def test_what_an_export_to_another_directory_left_stays(tmp_path: Path) -> None:
    left = left_behind(tmp_path, "old")
    export_weights(tmp_path / "old.ckpt", tmp_path / "other")
    assert left.exists()


def test_second_export_to_a_directory_is_refused_while_the_first_writes(tmp_path: Path) -> None:
    path = save_state(OLD, tmp_path / "old.ckpt").path
    with hold_name(api.OsFileSystem(), tmp_path, "out"), pytest.raises(StoreLocked, match="out"):
        export_weights(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
