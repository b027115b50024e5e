# SPDX-License-Identifier: Apache-2.0
"""Damaged checkpoints whose metrics hold NaN: two readings of a manifest are equal, so every command ends."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.running import process_env
from tests.support import api
from tests.support.saved import overwrite, save_run

HANG_GUARD_S = 120.0
NAN = {10: {"loss": math.nan}}

LOAD = "import sys, ckptmgr; ckptmgr.load_checkpoint(sys.argv[1])"
OPEN = "import sys, ckptmgr; ckptmgr.open_checkpoint(sys.argv[1]).read('fc.weight')"
RESUME = """
import os, sys, ckptmgr
from ckptmgr.core.errors import CorruptCheckpoint
with ckptmgr.CheckpointManager(os.path.dirname(sys.argv[1]), prefix="net") as manager:
    assert manager.resume(None).skipped
    raise CorruptCheckpoint("skipped")
"""


def result_of(*arguments: str | Path) -> tuple[int, str]:
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command,
        env=process_env(),
        capture_output=True,
        text=True,
        timeout=HANG_GUARD_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def damaged(directory: Path) -> Path:
    (path,) = save_run(directory, [10], metrics=NAN)
    data = path.read_bytes()
    overwrite(path, data[:70] + bytes([data[70] ^ 1]) + data[71:] + bytes(1))
    return path


@pytest.mark.parametrize("level", [(), ("--quick",), ("--deep",)], ids=["full", "quick", "deep"])
def test_verify_of_a_damaged_file_with_nan_metrics_ends(
    tmp_path: Path, level: tuple[str, ...]
) -> None:
    damaged(tmp_path)
    code, said = result_of("-m", "ckptmgr", "verify", tmp_path, *level)
    assert (code, "damaged     net-1_10.ckpt" in said) == (1, True), said


@pytest.mark.parametrize("program", [LOAD, OPEN, RESUME], ids=["load", "open", "resume"])
def test_reading_a_damaged_file_with_nan_metrics_ends(tmp_path: Path, program: str) -> None:
    code, said = result_of("-c", program, damaged(tmp_path))
    assert code == 1
    assert any(f"{kind}: " in said for kind in ("ChecksumMismatch", "CorruptCheckpoint")), said


def test_two_readings_of_a_manifest_are_equal_and_another_value_is_not(tmp_path: Path) -> None:
    save_run(tmp_path / "a", [10], metrics=NAN)
    save_run(tmp_path / "b", [10], metrics={10: {"loss": 1.0}})
    (one, other), (changed, _) = [
        [manifest_in(directory) for _ in range(2)] for directory in (tmp_path / "a", tmp_path / "b")
    ]
    assert one == other
    assert one.metrics == other.metrics != changed.metrics
    not_figures: object = "loss"
    assert one.metrics not in ({}, not_figures)
    assert api.listed(tmp_path / "a") == api.listed(tmp_path / "a")


def manifest_in(directory: Path) -> api.Manifest:
    manifest = api.place(directory).read_manifest("net-1_10.ckpt")
    assert manifest is not None
    return manifest
