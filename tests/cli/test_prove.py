# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr prove` with a program that is right, and with wrong ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptmgr import CheckpointManager
from tests.cli.running import run
from tests.cli.schemas import run_with_schema

PROGRAM = Path(__file__).with_name("prove_programs.py")


def program(kind: str) -> tuple[str, ...]:
    return "--", sys.executable, str(PROGRAM), kind, "{}"


def test_right_program_is_proven_at_each_cut(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    answer = run("prove", "--cuts", "3", "--seed", "5", "--dir", runs, *program("right"))
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("uncut    net-24.ckpt, ")
    assert lines[0].endswith("; --seed 5")
    assert len(lines) == 4
    assert all("steps and the state at the end" in line for line in lines[1:])
    assert {one.name.partition("-")[0] for one in runs.iterdir()} == {"uncut", "cut"}


def test_generator_that_is_neither_seeded_nor_used_is_no_difference() -> None:
    answer = run("prove", "--cuts", "2", "--seed", "5", *program("unused"))
    assert answer.exit_code == 0, answer.output


@pytest.mark.parametrize(
    ("kind", "difference", "state"),
    [
        ("unseeded", "another batch", True),
        ("unsaved", "same batch, same random numbers, other loss: ", True),
        ("averaged", "same batch, same random numbers, other loss: ", False),
    ],
)
def test_wrong_program_is_named_with_the_first_step_and_the_paths(
    kind: str, difference: str, state: bool
) -> None:
    options = ("--cuts", "1", "--seed", "3", *program(kind)[1:])  # `--json` comes behind
    document = run_with_schema("prove", *options, code=1)
    (item,) = document["items"]
    assert document["summary"]["different"] == 1
    step, _, what = item["difference"].removeprefix("step ").partition(": ")
    assert difference in what
    if kind != "unseeded":  # those differ before they are cut
        assert int(step) == item["step"] // 5 * 5 + 1
    assert (item["state"] == []) is not state
    if state:
        assert "w" in item["state"]


def test_quiet_prints_the_steps_of_the_cuts_that_differ() -> None:
    answer = run("prove", "--cuts", "1", "--seed", "3", "-q", *program("averaged"))
    assert answer.exit_code == 1
    assert answer.stdout.strip().isdecimal()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (program("failing"), 2, "the uncut run failed: exit code 1: "),
        (("--", sys.executable, "-c", "'{}'"), 2, "the program has saved nothing there"),
        (("--", sys.executable, "-c", "pass"), 2, "the program is not given its directory"),
        (("--dir", "/", *program("right")), 2, "/ exists"),
    ],
)
def test_program_that_cannot_be_proven_is_trouble(
    arguments: tuple[Any, ...], code: int, said: str
) -> None:
    answer = run("prove", "--cuts", "1", *arguments)
    assert (answer.exit_code, said in answer.stderr) == (code, True), answer.output


def test_process_that_is_to_be_cut_says_so_loudly(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "right", str(tmp_path)],
        env={**os.environ, "CKPTMGR_CUT_AT": "7"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert "CKPTMGR_CUT_AT=7: this process kills itself after step 7" in done.stderr
    with CheckpointManager(tmp_path, prefix="net") as manager:
        assert manager.resume({"w": np.zeros(4), "momentum": np.zeros(4)}).recorded == 1


def test_cut_at_no_step_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CKPTMGR_CUT_AT", "soon")
    with pytest.raises(ValueError, match="CKPTMGR_CUT_AT is the step after which"):
        CheckpointManager(tmp_path)
