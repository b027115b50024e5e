# SPDX-License-Identifier: Apache-2.0
"""`--filter` and `--sort` of `ls`, `verify`, `prune` and `stats`."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from ckptmgr.cli import places
from tests.cli.running import run, run_json
from tests.support.foreign import golden_run, write_archive
from tests.support.saved import flip, save_run, tree_of

METRICS = {10: {"loss": 0.9, "val acc": 1.0}, 20: {"loss": math.nan}, 30: {"loss": 0.2}, 40: {}}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Four checkpoints, saved one hour apart from a day ago on, of which one is pinned."""
    save_run(tmp_path, [10, 20, 30, 40], metrics=METRICS)
    assert run("pin", "30", "--dir", tmp_path, "--name", "paper-2").exit_code == 0
    return tmp_path


def steps(*arguments: str | Path) -> list[int]:
    return [item["step"] for item in run_json("ls", *arguments)["items"]]


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["step>=20"], [20, 30, 40]),
        (["step > 10", "step != 30"], [20, 40]),
        (["step=30"], [30]),
        (["epoch<=2"], [10, 20]),
        (["size>1g"], []),
        (["size<1MB"], [10, 20, 30, 40]),
        (["age>22h30min"], [10, 20]),
        (["age<22h"], [40]),
        (["loss<0.5"], [30]),
        (["loss>=0"], [10, 30]),
        (["val acc=1"], [10]),
        (["tag=paper*"], [30]),
        (["tag!=paper*"], [10, 20, 40]),
        (["state=ok"], [10, 20, 30, 40]),
        (["state=corrupt"], []),
        (
            ["name=*_10.ckpt", "format=ckpt", "cipher=none", "series=net", "why=policy"],
            [10, 20, 30, 40],
        ),
        (["run=run-of-net"], [10, 20, 30, 40]),
    ],
)
def test_conditions_choose_what_is_listed(
    runs: Path, conditions: list[str], expected: list[int]
) -> None:
    given = [part for one in conditions for part in ("--filter", one)]
    assert steps(runs, *given) == expected


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("-step", [40, 30, 20, 10]),
        ("age", [40, 30, 20, 10]),
        ("-age", [10, 20, 30, 40]),
        ("loss", [30, 10, 20, 40]),
        ("-loss", [10, 30, 20, 40]),
        ("-name", [40, 30, 20, 10]),
        ("tag", [10, 20, 40, 30]),
        ("epoch", [10, 20, 30, 40]),
    ],
)
def test_field_orders_what_is_listed_and_missing_numbers_come_last(
    runs: Path, field: str, expected: list[int]
) -> None:
    assert steps(runs, "--sort", field) == expected


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ((), [None]),
        (("step<10",), []),
        (("step=0",), []),
        (("step!=10",), []),
        (("size>0",), [None]),
    ],
)
def test_unknown_step_of_another_tool_meets_no_condition_on_steps(
    tmp_path: Path, conditions: tuple[str, ...], expected: list[None]
) -> None:
    write_archive(tmp_path / "release/mp_rank_00/model_optim_rng.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    given = [part for one in conditions for part in ("--filter", one)]
    assert steps(tmp_path, *given) == expected
    listed = run_json("verify", tmp_path, *given)["items"]
    assert [item["step"] for item in listed] == expected


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("--filter", "step", "'step' is not a condition"),
        ("--filter", "step>", "'step>' is not a condition"),
        ("--filter", "step>many", "'many' is no number"),
        ("--filter", "size>much", "--filter: 'much' is not a size"),
        ("--filter", "age>old", "'old' is not a time"),
        ("--filter", "state>ok", "state is a text"),
        ("--filter", "stp=3", "no checkpoint here has a field or metric 'stp'"),
        ("--sort", "lss", "did you mean loss?"),
        ("--sort", "zzzzzz", "there are step, epoch, size, age, state"),
        ("--sort", "", "--sort is empty"),
        ("--sort", "-", "--sort is empty"),
    ],
)
@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_unusable_condition_is_refused_by_name(
    runs: Path, command: str, option: str, text: str, message: str
) -> None:
    rest = ("--keep", "last(1)", "--dry-run") if command == "prune" else ()
    answer = run(command, runs, *rest, option, text)
    assert (answer.exit_code, answer.stdout) == (2, "")
    assert message in answer.stderr


def test_verify_checks_only_the_chosen_in_their_order(runs: Path) -> None:
    flip(runs / "net-1_10.ckpt", 40)
    answer = run("verify", runs, "--filter", "step>10", "--sort", "-step")
    assert answer.exit_code == 0
    assert [line.split()[1] for line in answer.stdout.splitlines()[:-1]] == [
        *("net-4_10.ckpt", "net-3_10.ckpt", "net-2_10.ckpt"),
    ]
    assert run("verify", runs, "--filter", "step=10").exit_code == 1
    refused = run("verify", runs, "--filter", "step=10", "--expect-step", "40")
    assert (refused.exit_code, "drop --filter and --sort" in refused.stderr) == (2, True)


def test_prune_drops_only_what_the_filter_takes(runs: Path) -> None:
    before = tree_of(runs)
    command = ("prune", runs, "--keep", "last(1)", "--filter", "age>22h30min")
    plan = run(*command, "--dry-run", "--sort", "step")
    assert "policy last(1)   filter age>22h30min" in plan.stdout
    assert [line.split()[:2] for line in plan.stdout.splitlines()[4:8]] == [
        *(["drop", "10"], ["drop", "20"], ["keep", "30"], ["keep", "40"]),
    ]
    assert tree_of(runs) == before
    document = run_json(*command, "--yes")
    assert document["summary"]["filters"] == {"series": None, "conditions": ["age>22h30min"]}
    assert document["items"][1]["reasons"][0]["detail"].startswith("pinned")
    assert steps(runs) == [30, 40]


def test_prune_says_why_a_checkpoint_outside_the_filter_stays(runs: Path) -> None:
    plan = run("prune", runs, "--keep", "last(1)", "--filter", "step<20", "--dry-run").stdout
    assert "left out by --filter" in plan
    assert plan.count("\ndrop ") == 1
    refused = run("prune", runs, "--undo", "--filter", "step<20")
    assert (refused.exit_code, "--undo stands alone" in refused.stderr) == (2, True)


def test_prune_without_a_terminal_asks_only_where_the_filter_leaves_something(runs: Path) -> None:
    command = ("prune", runs, "--keep", "last(1)", "--filter")
    assert run(*command, "step>900").exit_code == 0
    assert run(*command, "step<20").exit_code == 13


def test_runs_in_folders_below_are_listed_with_their_directory(tmp_path: Path) -> None:
    save_run(tmp_path / "a/deep", [10, 20], series="net")
    save_run(tmp_path / "b", [30], series="other")
    (tmp_path / ".hidden").mkdir()
    save_run(tmp_path / ".hidden", [99])
    os.symlink(tmp_path / "b", tmp_path / "link")
    answer = run("ls", "-r", tmp_path)
    assert (answer.exit_code, answer.stderr) == (0, "")
    rows = [line.split()[:2] for line in answer.stdout.splitlines()]
    assert rows == [
        ["DIR", "STEP"],
        ["a/deep", "10"],
        ["a/deep", "20"],
        ["b", "30"],
        ["3", "checkpoints"],
    ]
    assert answer.stdout.splitlines()[-1].startswith("3 checkpoints in 2 directories, ")
    assert steps("-r", tmp_path, "--sort", "-step") == [30, 20, 10]
    assert run("ls", "-r", tmp_path, "-q").stdout.splitlines()[-1] == str(
        tmp_path / "b/other-3_10.ckpt"
    )
    flip(tmp_path / "b/other-3_10.ckpt.manifest.json", 3)
    assert "b/other-3_10.ckpt: " in run("ls", "-r", tmp_path).stdout


def test_search_that_ends_early_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_run(tmp_path, [10])
    (tmp_path / "more").mkdir()
    monkeypatch.setattr(places, "_MOST_FOLDERS", 1)
    assert "only the first 1 folders were searched" in run("ls", "-r", tmp_path).stderr


def test_tree_without_a_run_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    answer = run("ls", "-r", tmp_path)
    assert (answer.exit_code, answer.stdout) == (10, "")
    assert "nor in folders below it" in answer.stderr


@pytest.mark.parametrize("command", [("ls", "-r"), ("stats",)])
def test_checkpoints_of_another_tool_are_listed_once(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    golden_run("transformers", tmp_path / "hf")
    save_run(tmp_path / "own", [10])
    assert run(*command, tmp_path).exit_code == 0
    found = run_json("ls", "-r", tmp_path)["items"]
    assert {Path(item["path"]).parent.name for item in found} == {"hf", "own"}
    assert len(run_json("ls", "-r", tmp_path / "hf")["items"]) == len(found) - 1


def test_conditions_choose_among_checkpoints_of_another_tool(tmp_path: Path) -> None:
    folder = golden_run("transformers", tmp_path / "hf")
    prune = ("prune", folder, "--keep", "last(1)", "--dry-run")
    assert run_json(*prune, "--filter", "step>1")["summary"]["dropped"] == 1
    assert run_json(*prune, "--filter", "step>2")["summary"]["dropped"] == 0
    assert len(steps(folder, "--filter", "step>3")) < len(steps(folder))
    assert run("verify", folder, "--filter", "step>99").stdout.startswith("0 checkpoints")
