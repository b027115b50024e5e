# SPDX-License-Identifier: Apache-2.0
"""Every command in directories of other tools and above runs: it handles them, or names the tool and the way out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cli.running import key_file, run
from tests.cli.test_ranks import STRATEGIES
from tests.cli.watching import watching
from tests.cli.world import commands
from tests.support.foreign import GOLDEN, TOOLS, any_run, golden_run
from tests.support.saved import save_run, tree_of

HANDLED = {
    "ls": "lists them",
    "verify": "checks them",
    "prune": "prunes them",
    "stats": "counts their bytes",
    "doctor": "is about the directory, and names them under resume",
    "config": "is about settings",
}
NOT_ABOUT_DIRECTORIES = {"keygen", "help", "completion", "prove", "storage"}
REFUSED = {
    "inspect": ("inspect {}", "inspect latest --dir {}"),
    "diff": ("diff {} {}", "diff 1 2 --dir {}"),
    "decrypt": ("decrypt {} -o {out} --key {key}", "decrypt {} -o - --key {key}"),
    "encrypt": ("encrypt {} -o {out} --key {key}", "encrypt {} -o - --key {key}"),
    "convert": ("convert {} --compression zstd",),
    "export": ("export {} --hf -o {out}", "export latest --dir {} --hf -o {out}"),
    "rekey": ("rekey {} --key {key} --add {key}",),
    "reencrypt": ("reencrypt {} --key {key} --to {key}",),
    "rm": ("rm {} --yes", "rm latest --dir {} --yes"),
    "simulate": ("simulate last(1) {}",),
    "report": ("report {} --terminal",),
    "pin": ("pin {}", "pin latest --dir {}"),
    "unpin": ("unpin {}",),
    "copy": ("copy {} memory://foreign/run",),
    "tag": ("tag {} name", "tag latest name --dir {}"),
    "untag": ("untag {} name",),
    "watch": ("watch {} --once",),
    "repair": ("repair {}", "repair latest --dir {}"),
    "sign": ("sign {} --private-key {key}",),
    "transform": ("transform {} -o {out}", "transform {} -o {out} --from {strategy}"),
    "unify": ("unify {} -o {out}",),
    "merge": ("merge {} -o {out}",),
}
NAMES = {
    "transformers": "the Trainer of Transformers",
    "lightning": "PyTorch Lightning",
    "orbax": "Orbax",
    "deepspeed": "DeepSpeed",
    "megatron": "Megatron",
    "dcp": "torch.distributed.checkpoint",
}
ONE = {
    "transformers": "checkpoint-4",
    "lightning": "epoch=1-loss=0.015-step=4.ckpt",
    "orbax": "1",
    "deepspeed": "global_step10",
    "megatron": "iter_0000100",
    "dcp": "alone",
}


def run_of(tool: str, into: Path) -> Path:
    """Make the directory of a tool."""
    if tool != "dcp":
        return any_run(tool, into)
    shutil.copytree(GOLDEN / "dcp/alone", into / "alone")
    return into


def refusals(place: Path, work: Path) -> list[tuple[str, int, str]]:
    """Run every command that does not handle a place; return the line, its code and its stderr."""
    before = tree_of(place)
    key = key_file(work)
    strategy = STRATEGIES / "dp2_mp2.ckpt"
    answers = []
    for line in (line for lines in REFUSED.values() for line in lines):
        parts = [
            part.format(place, key=key, out=work / "out", strategy=strategy)
            for part in line.split(" ")
        ]
        result = run(*parts)
        assert result.exception is None or isinstance(result.exception, SystemExit), line
        assert result.stdout == "", line
        answers.append((line, result.exit_code, result.stderr))
    assert tree_of(place) == before
    assert not (work / "out").exists()
    return answers


def test_every_command_handles_other_tools_or_refuses_them() -> None:
    assert {name for name, _ in commands()} == {*HANDLED, *NOT_ABOUT_DIRECTORIES, *REFUSED}


@pytest.mark.parametrize("tool", NAMES)
def test_directory_of_a_tool_is_refused_with_its_name_and_the_way_out(
    tool: str, tmp_path: Path
) -> None:
    for line, code, stderr in refusals(run_of(tool, tmp_path / "run"), tmp_path):
        assert code == 2, (line, stderr)
        assert (
            f"holds checkpoints of {NAMES[tool]} ({ONE['dcp'] if tool == 'dcp' else ''}" in stderr
        )
        assert "hint: ckptmgr ls and verify handle them" in stderr, (line, stderr)
        assert f"{NAMES[tool]} loads them" in stderr, (line, stderr)


@pytest.mark.parametrize("tool", NAMES)
def test_one_checkpoint_of_a_tool_is_refused_with_its_name_and_the_way_out(
    tool: str, tmp_path: Path
) -> None:
    place = run_of(tool, tmp_path / "run") / ONE[tool]
    for line, code, stderr in refusals(place, tmp_path):
        if place.is_file() and "--dir" in line:
            continue  # a file is no directory to look in
        assert code == 2, (line, stderr)
        assert f"is a checkpoint of {NAMES[tool]}, which this command does not handle" in stderr, (
            line
        )
        assert "hint: ckptmgr ls and verify handle them" in stderr, (line, stderr)


def test_directory_above_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    save_run(tmp_path / "runs/own", [10])
    golden_run("orbax", tmp_path / "runs/jax")
    for line, code, stderr in refusals(tmp_path / "runs", tmp_path):
        assert code == 10, (line, stderr)
        assert (
            "2 runs in folders below it: jax (2 checkpoints of Orbax), own (1 checkpoint)" in stderr
        )
        assert f"hint: name one of them, as in ckptmgr ls {tmp_path}/runs/jax" in stderr, line


def test_doctor_names_the_tool_and_the_runs_below(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    golden_run("transformers", runs / "hf")
    for place, words in (
        (runs / "hf", "holds checkpoints of the Trainer of Transformers"),
        (runs / "hf/checkpoint-4", "is a checkpoint of the Trainer of Transformers"),
        (runs, "1 run in folders below it: hf (3 checkpoints of the Trainer of Transformers)"),
    ):
        shown = run("doctor", place).stdout
        assert words in next(line for line in shown.splitlines() if "resume" in line)


def test_merge_of_files_that_are_no_strategies_keeps_its_own_error(tmp_path: Path) -> None:
    save_run(tmp_path / "in/own", [10])
    (tmp_path / "in/a.json").write_text('{"x": 0.5}')
    result = run("merge", tmp_path / "in", "-o", tmp_path / "out.ckpt")
    assert result.exit_code == 1
    assert "only integers are allowed" in result.stderr


def test_step_that_no_rank_has_keeps_its_own_error(tmp_path: Path) -> None:
    save_run(tmp_path / "in/rank_0", [10])
    result = run("transform", tmp_path / "in", "-o", tmp_path / "out", "--step", "99")
    assert "runs in folders below" not in result.stderr
    assert "99" in result.stderr


def test_encrypt_of_a_directory_says_what_it_takes(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    result = run("encrypt", tmp_path / "in", "-o", tmp_path / "out", "--key", key_file(tmp_path))
    assert (result.exit_code, "is a directory" in result.stderr) == (10, True)


@pytest.mark.parametrize("command", ["report", "doctor", "watch", "prune", "ls"])
def test_file_in_the_place_of_a_directory_is_called_so(command: str, tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, [10])
    result = run(command, path)
    assert (result.exit_code, f"{path}: not a directory" in result.stderr) == (10, True)


def test_tools_of_this_file_are_those_that_are_known() -> None:
    assert set(NAMES) - {"dcp"} <= set(TOOLS)


def test_lasting_watch_above_runs_says_that_they_are_not_watched(tmp_path: Path) -> None:
    save_run(tmp_path / "runs/own", [10])
    with watching(tmp_path / "runs") as watch:
        assert watch.stop() == 0
    assert "1 run in folders below it: own (1 checkpoint); those are not watched" in watch.errors
