# SPDX-License-Identifier: Apache-2.0
"""One planted run that cannot be read, or whose policy is refused, changes no answer about the others."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from ckptmgr import CheckpointConfig, CheckpointManager
from tests.cli.running import run
from tests.support import api
from tests.support.users import GROUP, USER, as_user

Plant = Callable[[Path], object]


def train(directory: Path, prefix: str) -> None:
    """Save steps 1 to 3 of a run that keeps two of them; pins keep all until the end."""
    config = CheckpointConfig(keep="last(2)", format="safetensors")
    with CheckpointManager(directory, config, prefix=prefix) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": np.full(3, float(step))}, metrics={"loss": 1.0 / step})
            manager.pin(step)
        for step in (1, 2, 3):
            manager.unpin(step)


def changed(**fields: object) -> Plant:
    def plant(manifest: Path) -> None:
        document = json.loads(manifest.read_bytes())
        manifest.chmod(0o644)
        manifest.write_text(json.dumps({**document, **fields}))

    return plant


def replaced(content: bytes) -> Plant:
    def plant(manifest: Path) -> None:
        manifest.chmod(0o644)
        manifest.write_bytes(content)

    return plant


def made(make: Plant) -> Plant:
    def plant(manifest: Path) -> None:
        manifest.unlink()
        make(manifest)

    return plant


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(65 << 20)


def data_replaced(make: Plant) -> Plant:
    def plant(manifest: Path) -> None:
        data = manifest.with_name(manifest.name.removesuffix(".manifest.json"))
        data.unlink()
        make(data)

    return plant


KINDS: dict[str, Plant] = {
    "newer schema": changed(schema="ckptmgr.manifest/2"),
    "no schema": changed(schema=99),
    "newer policy": changed(keep="newest(3)"),
    "policy that others can write": lambda path: path.chmod(0o666),
    "policy that keeps nothing": changed(keep="tagged(none)"),
    "no metric": changed(metrics={}),
    "JSON of somebody else": replaced(b'{"a": [1, 2]}'),
    "no JSON": replaced(b"\x00\xff{"),
    "empty": replaced(b""),
    "nested": replaced(b"[" * 100_000),
    "number without end": replaced(b'{"schema": ' + b"9" * 100_000 + b"}"),
    "many metrics": changed(metrics={f"a{number}": 0.5 for number in range(20_000)}),
    "long metric": changed(metrics={"x" * 1_000_000: 0.5}),
    "huge": made(huge),
    "pipe": made(os.mkfifo),
    "directory": made(os.mkdir),
    "link to nothing": made(lambda path: path.symlink_to("nowhere")),
    "link to a device": made(lambda path: path.symlink_to("/dev/zero")),
    "data that is a pipe": data_replaced(os.mkfifo),
    "data that is a directory": data_replaced(os.mkdir),
    "data that is gone": data_replaced(lambda path: None),
}

COMMANDS: dict[str, tuple[str, ...]] = {
    "ls": ("ls", "{}"),
    "ls -r": ("ls", "-r", "{}"),
    "verify": ("verify", "{}"),
    "report": ("report", "{}"),
    "prune": ("prune", "{}", "--dry-run"),
    "prune --keep": ("prune", "{}", "--keep", "last(1)", "--dry-run"),
    "prune --by-series": ("prune", "{}", "--by-series", "--dry-run"),
    "prune --keep best": ("prune", "{}", "--keep", "best(1, loss, min)", "--dry-run"),
    "simulate": ("simulate", "last(1)", "{}"),
    "simulate best": ("simulate", "best(1, loss, min)", "{}"),
}


def answer(result: Result, series: str) -> list[dict[str, Any]]:
    """Return the items about a series, without the fields that the clock decides."""
    assert "internal error" not in result.stderr, result.stderr
    items = json.loads(result.stdout)["items"]
    for item in items:
        for name in ("seconds", "checked", "verified_at"):
            item.pop(name, None)
    return [item for item in items if Path(item["path"]).name.startswith(f"{series}-")]


def planted(directory: Path, plant: Plant) -> None:
    (newest,) = directory.glob("bad-3.*.manifest.json")
    plant(newest)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the runs `net` and `bad`."""
    directory = tmp_path_factory.mktemp("pristine") / "runs"
    for series in ("net", "bad"):
        train(directory, series)
    return directory


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", KINDS)
def test_planted_run_changes_no_answer_about_another_one(
    kind: str, command: str, pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    arguments = [part.format(directory) for part in COMMANDS[command]]
    before = answer(run(*arguments, "--json"), "net")
    assert len(before) == 3
    planted(directory, KINDS[kind])
    assert answer(run(*arguments, "--json"), "net") == before


@pytest.mark.parametrize("kind", KINDS)
def test_planted_run_does_not_keep_another_one_from_being_pruned(
    kind: str, pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    planted(directory, KINDS[kind])
    result = run("prune", directory, "--yes")
    assert "internal error" not in result.stderr
    assert [one.step for one in api.listed(directory) if one.series == "net"] == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_planted_run_ends_neither_a_watch_nor_its_retention_of_another_one(
    kind: str, pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    planted(directory, KINDS[kind])
    result = run("watch", directory, "--once", "--prune")
    assert result.exit_code in (0, 1), result.stderr
    assert [one.step for one in api.listed(directory) if one.series == "net"] == [2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_planted_run_leaves_pages_and_settings_of_another_one(
    kind: str, pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    planted(directory, KINDS[kind])
    page = run("report", directory, "-o", "-")
    assert "net-3.safetensors" in page.stdout, page.stderr
    assert len(page.stdout) < 100_000
    assert "last(2)" in run("config", "show", directory).stdout
    for form in ("--csv", "--markdown", "--terminal"):
        shown = run("report", directory, form).stdout
        assert "loss" in shown.lower()
        assert len(shown) < 50_000
    assert "internal error" not in run("doctor", directory).stderr


@pytest.mark.parametrize("kind", KINDS)
def test_planted_run_changes_no_sum_of_a_tree_about_another_one(
    kind: str, pristine: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    for name in ("good", "evil"):
        shutil.copytree(pristine, tree / name)

    def rows() -> list[dict[str, Any]]:
        items = json.loads(run("stats", tree, "--json").stdout)["items"]
        return [item for item in items if item["directory"].endswith("good")]

    before = rows()
    planted(tree / "evil", KINDS[kind])
    assert rows() == before


@pytest.mark.parametrize(
    ("kind", "code"),
    [("newer policy", 3), ("policy that others can write", 3), ("policy that keeps nothing", 13)],
)
def test_refused_policy_of_one_run_is_named_and_the_exit_code_says_it(
    kind: str, code: int, pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    planted(directory, KINDS[kind])
    for arguments in (("prune", directory, "--dry-run"), ("report", directory, "-o", "-")):
        result = run(*arguments)
        assert result.exit_code == code
        assert "bad" in result.stderr
    assert "left out: " in run("report", directory, "--markdown").stdout
    assert "all stay, because of an error" in run("prune", directory, "--dry-run").stdout
    assert run("prune", directory, "--check").exit_code == code
    assert run("prune", directory, "--yes").exit_code == code


def test_directory_of_another_tool_does_not_end_the_watch_of_others(
    pristine: Path, tmp_path: Path
) -> None:
    good = Path(shutil.copytree(pristine, tmp_path / "good"))
    other = tmp_path / "lightning"
    other.mkdir()
    (other / "epoch=1-step=2.ckpt").write_bytes(b"PK\x03\x04")
    result = run("watch", good, other, "--once")
    assert (result.exit_code, "PyTorch Lightning" in result.stderr) == (3, True)
    assert "verified" in result.stdout


def test_policy_file_of_one_directory_does_not_end_the_retention_of_others(
    pristine: Path, tmp_path: Path
) -> None:
    good, bad = (Path(shutil.copytree(pristine, tmp_path / name)) for name in ("good", "bad"))
    (bad / "ckptmgr.toml").write_text("keep = 3\n")
    result = run("watch", good, bad, "--once", "--prune")
    assert (result.exit_code, "keep is not a text" in result.stdout) == (1, True)
    assert len(api.listed(good)) == 4
    assert len(api.listed(bad)) == 6


def test_report_with_a_refused_policy_file_shows_the_directory(
    pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    (directory / "ckptmgr.toml").write_text("keep = 3\n")
    result = run("report", directory, "-o", "-")
    assert (result.exit_code, "net-3.safetensors" in result.stdout) == (3, True)
    assert "keep is not a text" in result.stderr
    assert "keep is not a text" in result.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("ls", "-r", "{}"), 3),
        (("stats", "{}"), 3),
        (("verify", "{}/a", "{}/b"), 3),
        (("watch", "{}/a", "{}/b", "--once"), None),
    ],
)
def test_folder_that_may_not_be_read_is_named_and_the_rest_is_answered(
    mode: int, command: tuple[str, ...], code: int | None, pristine: Path
) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as text:  # pytest's is for its user alone
        tree = Path(text)
        tree.chmod(0o755)
        for name in ("a", "b"):
            shutil.copytree(pristine, tree / name)
            for path in (tree / name, *(tree / name).iterdir()):
                os.chown(path, USER, GROUP)
        (tree / "b").chmod(mode)
        arguments = [part.format(tree) for part in command]

        def act() -> tuple[int, str, str]:
            result = run(*arguments)
            return result.exit_code, result.stdout, result.stderr

        act()  # its imports are done then
        shutil.rmtree(tree / "a/.ckptmgr-checks", ignore_errors=True)
        answered = as_user(act)
    assert isinstance(answered, list)
    exit_code, output, errors = answered
    assert exit_code == code if code is not None else exit_code in (1, 3)
    assert f"{tree / 'b'}" in errors + output
    assert "internal error" not in errors
    assert "net-3" in output or "6" in output


def test_run_without_the_metric_of_a_policy_is_left_out_by_name(
    pristine: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    for manifest in directory.glob("bad-*.manifest.json"):
        KINDS["no metric"](manifest)
    for command in (
        ("simulate", "best(1, loss, min)", directory),
        ("prune", directory, "--keep", "best(1, loss, min)", "--dry-run"),
    ):
        result = run(*command, "--json")
        assert (result.exit_code, "series 'bad'" in result.stderr) == (13, True)
        assert len(answer(result, "net")) == 3
        assert not answer(result, "bad")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_trash_of_a_stranger_is_named_and_the_report_made(pristine: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(pristine, tmp_path / "runs"))
    (directory / ".ckptmgr-trash").mkdir()
    os.chown(directory / ".ckptmgr-trash", USER, GROUP)
    result = run("report", directory, "--json")
    assert (result.exit_code, ".ckptmgr-trash" in result.stderr) == (3, True)
    assert len(answer(result, "net")) == 3
