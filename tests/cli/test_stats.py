# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr stats`."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.store.trash import DirectoryTrash
from tests.cli.running import NOW_S, run
from tests.cli.schemas import run_with_schema
from tests.support import api
from tests.support.saved import KEY, save_run, tree_of


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two runs in one directory, and an encrypted one in another."""
    save_run(tmp_path / "a", [10, 20, 30], series="x")
    save_run(tmp_path / "a", [10], series="y")
    save_run(tmp_path / "b/c", [10], options=api.SaveOptions(key=KEY))
    return tmp_path


def test_each_run_is_a_row_and_kinds_and_ages_follow(tree: Path) -> None:
    before = tree_of(tree)
    answer = run("stats", tree)
    assert (answer.exit_code, answer.stderr) == (0, "")
    lines = answer.stdout.splitlines()
    assert lines[0].split() == ["RUN", "COUNT", "SIZE", "SHARE", "STEP", "SAVED", "KINDS"]
    rows = [line.split() for line in lines[1:4]]
    assert [row[:2] for row in rows if row[0] == "a"] == [["a", "run-of-x"], ["a", "run-of-y"]]
    assert ["b/c", "1"] in [row[:2] for row in rows]
    assert lines[4].startswith("kind  ckpt ")
    assert ", ckpt AES-GCM " in lines[4] or lines[4].startswith("kind  ckpt AES-GCM ")
    assert "under 1 d " in lines[5]
    assert lines[6].startswith("3 runs, 5 checkpoints, ")
    assert tree_of(tree) == before


def test_json_has_the_bytes_of_each_run(tree: Path) -> None:
    document = run_with_schema("stats", tree)
    sizes = [item["size_bytes"] for item in document["items"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == document["summary"]["size_bytes"]
    assert sum(item["count"] for item in document["items"]) == document["summary"]["count"] == 5
    by_run = {item["run"]: item for item in document["items"]}
    assert by_run["run-of-x"]["newest"] == {"path": f"{tree}/a/x-3_10.ckpt", "step": 30}
    assert set(by_run["run-of-net"]["kinds"]) == {"ckpt AES-GCM"}
    assert sum(document["summary"]["ages"].values()) == sum(sizes)


def test_age_and_conditions_are_those_of_now(tree: Path) -> None:
    assert "  over 30 d " in run("stats", tree, now_s=NOW_S + 40 * 86_400).stdout
    assert run("stats", tree, "--filter", "step>10").stdout.splitlines()[-1].startswith("1 run, 2 ")
    assert run("stats", tree, "--series", "y").stdout.splitlines()[-1].startswith("1 run, 1 ")
    assert run("stats", tree, "--filter", "step>99").stdout == "0 runs, 0 checkpoints, 0 B\n"
    assert run("stats", tree, "-q").stdout.splitlines() == [f"{tree}/a", f"{tree}/b/c"]


def test_leftovers_and_trash_are_kinds(tree: Path) -> None:
    run("prune", tree / "a", "--keep", "last(1)", "--yes")
    (tree / "a/.x-1_1.ckpt.0a-0b-1-2.0a1b2c3d.7f-0.tmp").write_bytes(b"x" * 5000)
    shown = run("stats", tree).stdout
    assert ", trash " in shown
    assert "kind  leftover 4.9 KiB, " in shown
    assert run_with_schema("stats", tree)["summary"]["trash_bytes"] > 0


def test_trash_that_cannot_be_read_is_noted(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(store: api.Place) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DirectoryTrash, "batches", fail)
    answer = run("stats", tree)
    assert answer.exit_code == 0
    assert f"the trash in {tree}/a cannot be read: Input/output error" in answer.stderr
