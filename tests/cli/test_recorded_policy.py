# SPDX-License-Identifier: Apache-2.0
"""Policies that runs record with their saves: `prune`, `watch`, `report` and `config show` without flags."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from ckptmgr import Checkpoint, CheckpointConfig, CheckpointManager
from ckptmgr.policy.rules import Finding, Rule
from tests.cli.running import key_file, run, run_json
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.saved import KEY, save_run, tree_of


def train(
    directory: Path,
    steps: Sequence[int],
    keep: str | Rule,
    *,
    prefix: str = "net",
    key: bytes | None = None,
    resumes: bool = False,
) -> None:
    """Save some steps of a run, each with its loss; pins keep them all until the last one is saved."""
    config = CheckpointConfig(keep=keep, format="safetensors", enc_key=key)
    with CheckpointManager(directory, config, prefix=prefix) as manager:
        if resumes:
            manager.resume({"w": np.zeros(3)})
        for step in steps:
            manager.save(step, {"w": np.full(3, float(step))}, metrics={"loss": 1.0 / step})
            manager.pin(step)
        for step in steps:
            manager.unpin(step)


def planned(directory: Path, *arguments: str) -> dict[str, list[int]]:
    """Return the steps that `prune` would keep and drop."""
    items = run_with_schema("prune", directory, "--dry-run", *arguments)["items"]
    return {
        name: sorted(item["step"] for item in items if item["keep"] is is_kept)
        for name, is_kept in (("keep", True), ("drop", False))
    }


def rewrite(directory: Path, step: int, *, keep: str) -> Path:
    """Change the policy in a manifest."""
    path = directory / f"net-{step}.safetensors.manifest.json"
    document = json.loads(path.read_bytes())
    document["keep"] = keep
    path.write_text(json.dumps(document))
    return path


@dataclass(frozen=True, slots=True)
class Third(Rule):
    """Keep everything; a rule of the user."""

    def __str__(self) -> str:
        return "third(3)"

    def judge(self, history: Sequence[Checkpoint], now: datetime) -> list[Finding]:
        return [self.finding(True, "third") for _ in history]


def test_prune_without_flags_applies_the_policy_of_the_run(tmp_path: Path) -> None:
    train(tmp_path, [1, 2, 3], "last(1)")
    assert run_json("prune", tmp_path, "--dry-run")["summary"]["policy"] == "last(1)"
    assert planned(tmp_path) == {"keep": [3], "drop": [1, 2]}
    assert run("prune", tmp_path, "--yes").exit_code == 0
    assert [one.step for one in api.listed(tmp_path)] == [3]


def test_prune_without_flags_applies_the_policy_of_each_series(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)", prefix="a")
    train(tmp_path, [3, 4], "last(9)", prefix="b")
    assert planned(tmp_path) == {"keep": [2, 3, 4], "drop": [1]}
    summary = run_json("prune", tmp_path, "--dry-run")["summary"]
    assert summary["policy"] == "last(1); last(9)"
    shown = run("prune", tmp_path, "--dry-run").stdout
    assert "policy last(1)\n" in shown
    assert "policy last(9)\n" in shown
    assert planned(tmp_path, "--by-series") == {"keep": [2, 3, 4], "drop": [1]}


def test_policy_that_changed_between_two_runs_is_that_of_the_last(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "all")
    train(tmp_path, [3], "last(3)", resumes=True)
    train(tmp_path, [4], "all", resumes=True)
    rewritten = run_json("prune", tmp_path, "--dry-run")["summary"]["policy"]
    assert rewritten == "all"
    train(tmp_path, [5], "last(7)", resumes=True)
    assert run_json("prune", tmp_path, "--dry-run")["summary"]["policy"] == "last(7)"


@pytest.mark.parametrize("other", ["all", None])
def test_policy_of_one_run_is_not_applied_to_another_of_the_same_series(
    tmp_path: Path, other: str | None
) -> None:
    if other is None:
        save_run(tmp_path, [1, 2])
    else:
        train(tmp_path, [1, 2], other)
    train(tmp_path, [11, 12], "last(1)")
    assert planned(tmp_path)["drop"] == [11]
    result = run("prune", tmp_path, "--by-series", "--yes", "--now")
    said = f"the runs of series 'net' recorded different policies: last(1); {other or 'none'}"
    assert (result.exit_code, said in result.stderr) == (2, True)
    assert len(api.listed(tmp_path)) == 4
    assert planned(tmp_path, "--by-series", "--keep", "last(1)")["drop"] != []


def test_ckptmgr_toml_written_by_hand_comes_before_the_policy_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "ckptmgr.toml").write_text('keep = "last(2)"\n')
    train(tmp_path, [1, 2, 3], "all")
    assert planned(tmp_path) == {"keep": [2, 3], "drop": [1]}
    assert (tmp_path / "ckptmgr.toml").read_text() == 'keep = "last(2)"\n'
    assert planned(tmp_path, "--keep", "last(1)") == {"keep": [3], "drop": [1, 2]}


def test_run_adds_no_file_for_its_policy(tmp_path: Path) -> None:
    train(tmp_path, [1], "last(3)")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "net-1.safetensors",
        "net-1.safetensors.manifest.json",
    ]


def test_policy_without_text_is_not_recorded(tmp_path: Path) -> None:
    train(tmp_path, [1], Third())
    result = run("prune", tmp_path, "--yes")
    assert (result.exit_code, "no retention policy" in result.stderr) == (2, True)


def test_run_without_recorded_policy_is_named_and_stays(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)", prefix="a")
    save_run(tmp_path, [10, 20], series="b")
    shown = run("prune", tmp_path, "--dry-run")
    assert (
        f"{tmp_path} [b]  all stay: their run recorded no policy; --keep names one" in shown.stdout
    )
    assert run("prune", tmp_path, "--yes").exit_code == 0
    assert sorted(one.step for one in api.listed(tmp_path)) == [2, 10, 20]
    only = run("prune", tmp_path, "--series", "b", "--yes")
    assert (only.exit_code, "no retention policy" in only.stderr) == (2, True)


def test_best_by_a_metric_that_no_save_has_is_replaced_as_the_run_does(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "best(2, accuracy, max)")
    assert run_json("prune", tmp_path, "--dry-run")["summary"]["policy"] == "last(1) | last(5)"


def test_policy_with_a_quoted_metric_is_applied(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], 'best(1, loss, min) | best(2, "val \\"x\\" loss", min) | last(9)')
    policy = run_json("prune", tmp_path, "--dry-run")["summary"]["policy"]
    assert policy == "best(1, loss, min) | last(9) | last(5)"


def test_policy_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path, [1], "all")
    path = rewrite(tmp_path, 1, keep="newest(3)")
    result = run("prune", tmp_path, "--yes")
    assert (result.exit_code, f"{path}: the policy that its run recorded" in result.stderr) == (
        2,
        True,
    )
    assert "hint: pass --keep" in result.stderr


def test_policy_in_a_manifest_that_others_can_write_is_refused(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)")
    (tmp_path / "net-2.safetensors.manifest.json").chmod(0o666)
    result = run("prune", tmp_path, "--yes", "--now")
    assert (result.exit_code, "can be changed by others (mode 0666)" in result.stderr) == (2, True)
    assert len(api.listed(tmp_path)) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_policy_in_a_manifest_of_another_user_is_refused(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)")
    os.chown(tmp_path / "net-2.safetensors.manifest.json", 12_345, 12_345)
    result = run("prune", tmp_path, "--yes")
    assert (result.exit_code, "belongs to another user (uid 12345)" in result.stderr) == (2, True)


def test_policy_that_the_key_proves_needs_no_owner(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)", key=KEY.raw)
    for path in tmp_path.glob("*.manifest.json"):
        path.chmod(0o666)
    key = ("--key", key_file(tmp_path.parent))
    assert planned(tmp_path, *key) == {"keep": [2], "drop": [1]}


def test_changed_policy_of_an_authenticated_manifest_decides_nothing(tmp_path: Path) -> None:
    train(tmp_path, [1, 2, 3], "last(9)", key=KEY.raw)
    (path,) = tmp_path.glob("net-3.*.manifest.json")
    path.write_text(path.read_text().replace("last(9)", "last(1)"))
    found = run_json("prune", tmp_path, "--dry-run", "--key", key_file(tmp_path.parent))
    assert found["summary"]["policy"] == "last(9)"
    assert found["summary"]["dropped"] == 0


def test_files_without_manifests_record_no_policy(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)")
    for path in tmp_path.glob("*.manifest.json"):
        path.unlink()
    result = run("prune", tmp_path, "--yes")
    assert (result.exit_code, "no retention policy" in result.stderr) == (2, True)


def test_dry_run_with_a_recorded_policy_writes_nothing(tmp_path: Path) -> None:
    train(tmp_path, [1, 2, 3], "last(1)")
    before = tree_of(tmp_path)
    run("prune", tmp_path, "--dry-run")
    run("config", "show", tmp_path)
    assert tree_of(tmp_path) == before


def test_config_shows_the_recorded_policies_and_the_manifests_that_say_them(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(9)", prefix="a")
    train(tmp_path, [3], "last(9)", prefix="b")
    train(tmp_path, [4], "all", prefix="c")
    save_run(tmp_path, [10], series="d")  # which says nothing
    items = run_with_schema("config", "show", tmp_path)["items"]
    assert [(one["value"], one["origin"]) for one in items if one["name"] == "keep"] == [
        ("last(9)", f"{tmp_path}/a-2.safetensors.manifest.json"),
        ("all", f"{tmp_path}/c-4.safetensors.manifest.json"),
    ]


def test_inspect_shows_the_recorded_policy(tmp_path: Path) -> None:
    train(tmp_path, [1], "last(9)")
    path = tmp_path / "net-1.safetensors"
    assert run_with_schema("inspect", path)["summary"]["policy"] == "last(9)"
    assert "policy     last(9)" in run("inspect", path).stdout


def test_report_says_what_the_recorded_policy_would_drop(tmp_path: Path) -> None:
    train(tmp_path, [1, 2, 3], "last(1)")
    save_run(tmp_path, [10], series="other")
    document = run_json("report", tmp_path)
    assert document["summary"]["policy"] == "last(1)"
    fates = {item["step"]: item["fate"] for item in document["items"]}
    assert fates == {1: "goes", 2: "goes", 3: "kept", 10: "kept"}


def test_watch_prunes_by_the_recorded_policy(tmp_path: Path) -> None:
    train(tmp_path, [1, 2, 3], "last(1)")
    result = run("watch", tmp_path, "--once", "--prune")
    assert result.exit_code == 0, result.stderr
    assert [one.step for one in api.listed(tmp_path)] == [3]


def test_watch_alarms_about_a_run_that_recorded_no_policy(tmp_path: Path) -> None:
    train(tmp_path, [1, 2], "last(1)", prefix="a")
    save_run(tmp_path, [10, 20], series="b")
    result = run("watch", tmp_path, "--once", "--prune")
    assert (result.exit_code, "a run of series b has recorded none" in result.stdout) == (1, True)
    assert sorted(one.step for one in api.listed(tmp_path)) == [2, 10, 20]
