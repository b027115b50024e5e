# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr simulate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.policy import simulation
from tests.cli.running import run
from tests.cli.schemas import run_with_schema
from tests.support.saved import save_run, tree_of

MONTH = ("--every", "10min", "--for", "30d")


def test_history_of_a_directory_is_shown_as_by_prune_and_stays(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30], metrics={10: {"loss": 1.0}, 20: {"loss": 3.0}, 30: {"loss": 2.0}})  # fmt: skip
    before = tree_of(tmp_path)
    answer = run("simulate", "last(1) | best(1, loss, min)", tmp_path)
    assert (answer.exit_code, answer.stderr) == (0, "")
    pruned = run("prune", tmp_path, "--keep", "last(1) | best(1, loss, min)", "--dry-run").stdout
    assert answer.stdout.splitlines()[:-1] == pruned.splitlines()
    assert answer.stdout.splitlines()[-1].startswith("at most 2 checkpoints at once after a save, ")
    assert answer.stdout.endswith("in 3 saves\n")
    assert tree_of(tmp_path) == before
    assert run("simulate", "last(1)", tmp_path, "-q").stdout.splitlines() == [
        str(tmp_path / name) for name in ("net-2_10.ckpt", "net-1_10.ckpt")
    ]


def test_rule_by_age_drops_what_a_plan_of_today_would_keep(tmp_path: Path) -> None:
    save_run(tmp_path, [10, 20, 30, 40])  # one hour apart
    command = (tmp_path, "--json")
    now = run("prune", *command, "--keep", "within(30min) | every(10)", "--dry-run")
    assert '"keep": false' not in now.stdout
    replayed = run("simulate", "within(1h) | every(20)", *command)
    assert replayed.stdout.count('"keep": true') == 2


def test_made_up_run_shows_what_stays_and_the_peak() -> None:
    answer = run("simulate", "last(3) | daily(7) | best(2, loss, min)", *MONTH)
    assert answer.exit_code == 0
    assert answer.stderr == "ckptmgr: note: made up: loss, which improves with noise\n"
    lines = answer.stdout.splitlines()
    assert lines[0].startswith("made-up  4320 checkpoints, 4.2 TiB   policy last(3) | daily(7)")
    kept = [line for line in lines if line.startswith("keep ")]
    assert len(kept) == 11
    assert not any(line.startswith("drop ") for line in lines)
    assert lines[-2].endswith("; 11 stay (11.0 GiB)")
    verbose = run("simulate", "last(3)", "--every", "1d", "--for", "5d", "-v").stdout
    assert verbose.count("\ndrop ") == 2


def test_steps_and_size_of_a_made_up_run_are_chosen() -> None:
    times = ("--every", "1h", "--for", "4h")
    document = run_with_schema("simulate", "every(100)", *times, "--steps", "50", "--size", "2GB")
    assert [item["step"] for item in document["items"]] == [200, 150, 100, 50]
    assert [item["keep"] for item in document["items"]] == [True, False, True, False]
    assert document["summary"] == {
        "policy": "every(100)",
        "is_made_up": True,
        **{"saves": 4, "kept": 2, "kept_bytes": 4 * 10**9},
        **{"dropped": 2, "dropped_bytes": 4 * 10**9, "peak_count": 2, "peak_bytes": 6 * 10**9},
    }


def test_each_run_of_a_directory_is_replayed_by_itself(tmp_path: Path) -> None:
    for series in ("a", "b"):
        save_run(tmp_path, [10, 20], series=series)
    document = run_with_schema("simulate", "last(1)", tmp_path)
    assert document["summary"]["kept"] == document["summary"]["peak_count"] == 2
    assert run_with_schema("simulate", "last(1)", tmp_path, "--series", "a")["summary"]["kept"] == 1
    assert run_with_schema("simulate", "last(1)", tmp_path, "--by-series")["summary"]["kept"] == 2


def test_replay_that_judges_too_many_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "_MOST_JUDGED", 100)
    answer = run("simulate", "all", "--every", "1h", "--for", "1d")
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert "all keeps 14 after 14 of 24 saves" in answer.stderr
    assert "choose times that make fewer saves" in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("last(", *MONTH), 2, "at column"),
        (("last(1)", "--every", "10min"), 2, "needs --every and --for"),
        (("last(1)", "--size", "1g"), 2, "needs --every and --for"),
        (("last(1)", ".", *MONTH), 2, "made up, or that of a directory"),
        (("last(1)", "--by-series", *MONTH), 2, "made up, or that of a directory"),
        (("last(1)", "--every", "0s", "--for", "1d"), 2, "no time to wait"),
        (("last(1)", "--every", "2d", "--for", "1d"), 2, "that makes 0 saves"),
        (("last(1)", "--every", "1s", "--for", "9d"), 2, "that makes 777600 saves"),
        (("last(1)", *MONTH, "--size", "big"), 2, "--size: 'big' is not a size"),
        (("last(1)", "nowhere"), 10, "no such directory"),
        (("best(1, acc, max)", "."), 13, "acc"),
    ],
)
def test_unusable_argument_is_refused_by_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    save_run(tmp_path, [10, 20])
    monkeypatch.chdir(tmp_path)
    answer = run("simulate", *arguments)
    assert (answer.exit_code, answer.stdout) == (code, "")
    assert message in answer.stderr
