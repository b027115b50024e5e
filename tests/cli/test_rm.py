# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr rm`."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr import Checkpoint, UnsafePrune
from ckptmgr.maintenance.removal import remove_chosen
from ckptmgr.store.trash_folder import TRASH_NAME
from tests.cli.running import process_env, run, run_json
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.policies import NOW
from tests.support.saved import save_run, tree_of


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four checkpoints of one run."""
    save_run(tmp_path / "runs", [10, 20, 30, 40])
    return tmp_path / "runs"


def steps(directory: Path) -> list[int]:
    return [item["step"] for item in run_json("ls", directory)["items"]]


def test_named_checkpoints_go_to_the_trash_and_come_back(runs: Path) -> None:
    before = {path: data for path, (data, *_) in tree_of(runs).items() if "net-" in path}
    answer = run("rm", "10", "20..30", "--dir", runs, "--yes")
    assert answer.exit_code == 0
    assert [line.split()[0] for line in answer.stdout.splitlines()] == [
        "STEP",
        "10",
        "20",
        "30",
        "moved",
    ]
    assert "moved 3 checkpoints, " in answer.stdout
    assert "prune --undo brings the last batch back" in answer.stderr
    assert steps(runs) == [40]
    assert run("prune", runs, "--undo").exit_code == 0
    assert {path: data for path, (data, *_) in tree_of(runs).items() if "net-" in path} == before


def test_now_removes_for_good(runs: Path) -> None:
    answer = run("rm", runs / "net-1_10.ckpt", "--yes", "--now")
    assert (answer.exit_code, "\nremoved 1 checkpoint, " in answer.stdout) == (0, True)
    assert not (runs / TRASH_NAME).exists()
    assert steps(runs) == [20, 30, 40]


def test_dry_run_shows_the_plan_and_writes_nothing(runs: Path) -> None:
    before = tree_of(runs)
    answer = run("rm", "10", "--dir", runs, "--dry-run")
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert "would remove 1 checkpoint, " in answer.stdout
    document = run_with_schema("rm", "10", "--dir", runs, "-n")
    assert (document["summary"]["is_done"], document["summary"]["removed"]) == (False, [])
    assert tree_of(runs) == before


def test_json_and_quiet_name_what_was_removed(runs: Path) -> None:
    document = run_with_schema("rm", "10", "--dir", runs, "--yes")
    assert document["summary"]["removed"] == [str(runs / "net-1_10.ckpt")]
    (batch,) = document["summary"]["trash"]
    assert Path(batch).parent == runs / TRASH_NAME
    assert run("rm", "20", "--dir", runs, "--yes", "-q").stdout == f"{runs}/net-2_10.ckpt\n"


def test_filter_narrows_the_choice(runs: Path) -> None:
    assert run("rm", "0..30", "--dir", runs, "--filter", "step<20", "--yes").exit_code == 0
    assert steps(runs) == [20, 30, 40]
    answer = run("rm", "0..30", "--dir", runs, "--filter", "step>900")
    assert (answer.exit_code, answer.stdout) == (0, "would remove 0 checkpoints, 0 B\n")


@pytest.mark.parametrize("option", ["--yes", "--dry-run"])
def test_newest_and_pinned_are_refused_by_name_without_force(runs: Path, option: str) -> None:
    run("pin", "20", "--dir", runs, "--reason", "paper, table 2")
    run("pin", "10", "--dir", runs, "--name", "first")
    before = tree_of(runs)
    answer = run("rm", "10", "20", "latest", "--dir", runs, option)
    assert (answer.exit_code, answer.stdout) == (13, "")
    assert (
        "net-1_10.ckpt is pinned as first; net-2_10.ckpt is pinned: paper, table 2;"
        in answer.stderr
    )
    assert "net-4_10.ckpt is the newest good one of run " in answer.stderr
    assert "pass --force" in answer.stderr
    assert tree_of(runs) == before
    assert run("rm", "20", "latest", "--dir", runs, "--yes", "--force").exit_code == 0
    assert steps(runs) == [10, 30]


def test_many_objections_are_counted(tmp_path: Path) -> None:
    for number in range(7):
        save_run(tmp_path, [10], series=f"s{number}")
    names = [tmp_path / f"s{number}-1_10.ckpt" for number in range(6)]
    answer = run("rm", *names, "--yes")
    assert "; and 1 more; nothing was removed" in answer.stderr


def test_last_good_one_of_a_directory_stays_with_force_too(runs: Path) -> None:
    answer = run("rm", "0..99", "--dir", runs, "--yes", "--force")
    assert (answer.exit_code, "last good checkpoint" in answer.stderr) == (13, True)
    assert steps(runs) == [10, 20, 30, 40]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "missing argument"),
        ((".",), 2, "'.' is a directory"),
        (("99",), 10, "no checkpoint is '99'"),
        (("10",), 13, "stdin is not a terminal"),
        (("10", "--filter", "odd"), 2, "is not a condition"),
    ],
)
def test_unusable_call_is_refused_and_changes_nothing(
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    monkeypatch.chdir(runs)
    before = tree_of(runs)
    answer = run("rm", *arguments)
    assert (answer.exit_code, message in answer.stderr.lower()) == (code, True), answer.stderr
    assert tree_of(runs) == before


@pytest.mark.parametrize(("typed", "code", "left"), [(b"y\n", 0, 3), (b"n\n", 1, 4)])
def test_terminal_is_asked(runs: Path, typed: bytes, code: int, left: int) -> None:
    leader, terminal = pty.openpty()
    os.write(leader, typed)
    command = [sys.executable, "-m", "ckptmgr", "rm", "10", "--dir", str(runs)]
    done = subprocess.run(
        command, stdin=terminal, env=process_env(), capture_output=True, check=False
    )
    assert done.returncode == code
    assert b"Move 1 checkpoint to the trash? [y/N]: " in done.stderr
    assert len(steps(runs)) == left


def test_live_run_keeps_its_checkpoints(runs: Path) -> None:
    with api.place(runs).lease("net"):
        answer = run("rm", "10", "--dir", runs, "--yes")
    assert answer.exit_code == 11
    assert steps(runs) == [10, 20, 30, 40]


def test_pin_after_the_plan_stops_the_removal(runs: Path) -> None:
    store = api.place(runs)
    chosen: list[Checkpoint] = [one for one in store.scan() if one.step == 10]
    run("pin", "10", "--dir", runs)
    outcome = remove_chosen(store, chosen, now=NOW, force=False, at_once=False)
    assert (outcome.removed, [type(one) for one in outcome.failures]) == ([], [UnsafePrune])


def test_directories_are_handled_one_by_one(runs: Path, tmp_path: Path) -> None:
    save_run(tmp_path / "b", [10, 20])
    paths = (runs / "net-1_10.ckpt", tmp_path / "b/net-1_10.ckpt")
    with api.place(tmp_path / "b").lease("net"):
        answer = run("rm", *paths, "--yes")
    assert answer.exit_code == 11
    assert (steps(runs), steps(tmp_path / "b")) == ([20, 30, 40], [10, 20])
