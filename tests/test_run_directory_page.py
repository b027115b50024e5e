# SPDX-License-Identifier: Apache-2.0
"""The page about a run's directory: its table has every name there, and may be believed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import CheckpointConfig, CheckpointManager, Ranks
from tests.cli.running import run
from tests.parallel.ranks import Meeting, Seat, run_ranks
from tests.support.saved import flip

PAGE = Path(__file__).parents[1] / "docs" / "run-directory.md"
DIGITS = "67d2f1a41f0c9a2e"
SUFFIXES = (".safetensors", ".ckpz", ".ckpe", ".tmp")

pytestmark = pytest.mark.skipif(
    not PAGE.exists(), reason="needs the sources: the page is not installed"
)


def rows() -> list[list[str]]:
    lines = re.findall(r"^\| (`.*) \|$", PAGE.read_text(), re.MULTILINE)
    return [line.split(" | ") for line in lines]


def pattern(name: str) -> str:
    """Return the names that an example in the table stands for."""
    escaped = re.escape(name.removesuffix("/"))
    for example, those in (
        (DIGITS, "[0-9a-f]{16}"),
        (r"\.0\-of\-2", "[.][0-9]+-of-[0-9]+"),
        (r"\-40", "-[0-9]+"),
    ):
        escaped = escaped.replace(example, those)
    return escaped


def answers() -> dict[str, str]:
    """Return the pattern of each whole name in the table, and whether it may be deleted by hand."""
    return {
        pattern(name): cells[3]
        for cells in rows()
        for name in re.findall(r"`([^`]*)`", cells[0])
        if name not in SUFFIXES
    }


def filled(directory: Path) -> None:
    """Run, prune, verify and damage, until a directory has all that the library puts there."""
    with CheckpointManager(directory, CheckpointConfig(keep="last(9)"), prefix="net") as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, {"w": np.full(4, float(step))})
    for _ in range(2):
        with CheckpointManager(directory, prefix="net") as manager:
            manager.resume({"w": np.zeros(4)})
    meeting = Meeting(2)

    def rank(number: int) -> None:
        seat = Seat(meeting, number)
        with CheckpointManager(directory, prefix="net", ranks=Ranks(seat)) as manager:
            manager.resume({"w": np.zeros(4)})
            manager.save(5, {"w": np.full(4, 5.0)})

    assert all(one.raised is None for one in run_ranks(meeting, rank))
    assert run("rm", directory / "net-1.ckpt", "--yes").exit_code == 0
    flip(directory / "net-2.ckpt", 0)
    run("verify", directory, "--quarantine")


def test_table_has_every_name_in_a_directory(tmp_path: Path) -> None:
    filled(tmp_path)
    with CheckpointManager(tmp_path, prefix="net") as manager:
        start = manager.resume({"w": np.zeros(4)})
        manager.step_end(start.next_step, {"w": np.zeros(4)})
        names = {path.name for path in tmp_path.iterdir()}
    known = answers()
    assert {".net.lease", ".net.starts", ".ckptmgr-trash", ".ckptmgr-quarantine"} <= names
    assert [name for name in names if not any(re.fullmatch(one, name) for one in known)] == []


def test_what_may_be_deleted_by_hand_costs_no_checkpoint(tmp_path: Path) -> None:
    filled(tmp_path)
    before = CheckpointManager(tmp_path, prefix="net").checkpoints()
    deletable = [one for one, answer in answers().items() if answer.startswith("yes")]
    for path in list(tmp_path.iterdir()):
        if any(re.fullmatch(one, path.name) for one in deletable):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with CheckpointManager(tmp_path, prefix="net") as manager:
        assert manager.resume({"w": np.zeros(4)}).step == 5
        assert manager.checkpoints() == before
