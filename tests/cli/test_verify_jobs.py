# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr verify --jobs`."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.maintenance import verify
from tests.cli.running import run, run_json
from tests.support.saved import flip, save_run

WAIT_S = 60.0


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Six checkpoints of two directories, of which one is damaged."""
    save_run(tmp_path / "a", [10, 20, 30, 40])
    save_run(tmp_path / "b", [10, 20])
    flip(tmp_path / "a/net-2_10.ckpt", 40)
    return tmp_path


def test_answers_and_their_order_are_those_of_one_at_a_time(runs: Path) -> None:
    command = ("verify", runs / "a", runs / "b")
    alone, together = run(*command), run(*command, "--jobs", "3")
    assert (together.exit_code, together.stdout) == (alone.exit_code, alone.stdout)
    assert alone.exit_code == 1
    assert run(*command, "-j", "2", "-q").stdout == f"{runs}/a/net-2_10.ckpt\n"
    assert run_json("verify", runs / "b", "-j", "99")["summary"]["statuses"] == {"ok": 2}


def test_so_many_are_verified_at_the_same_time(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, both_here = verify.verify_checkpoint, threading.Barrier(2)

    def met(*arguments: Any, **options: Any) -> verify.Verification:
        both_here.wait(WAIT_S)  # breaks, and so fails, where only one comes
        return real(*arguments, **options)

    monkeypatch.setattr(verify, "verify_checkpoint", met)
    assert run("verify", runs / "b", "--jobs", "2").exit_code == 0


def test_error_of_one_ends_the_command_and_its_threads(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> verify.Verification:
        raise OSError(5, "Input/output error", "net")

    monkeypatch.setattr(verify, "verify_checkpoint", fail)
    answer = run("verify", runs / "a", "--jobs", "2")
    assert (answer.exit_code, "Input/output error" in answer.stderr) == (2, True)
    assert not [one for one in threading.enumerate() if one.name.startswith("ckptmgr-verify")]


@pytest.mark.parametrize("count", ["0", "-1", "257", "many"])
def test_unusable_number_is_refused(runs: Path, count: str) -> None:
    answer = run("verify", runs / "b", "--jobs", count)
    assert (answer.exit_code, "--jobs" in answer.stderr) == (2, True)
