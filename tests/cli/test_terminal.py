# SPDX-License-Identifier: Apache-2.0
"""Commands at a real terminal of 80 columns: questions, progress, colour, the live table, tables that fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmgr.files.save.job import SaveOptions
from tests.cli.preloaded import Preloaded, preloaded
from tests.cli.running import key_file, run_json
from tests.cli.terminal import CTRL_C, CTRL_D, at_terminal
from tests.support.saved import KEY, OTHER_KEY, items, save_run, tree_of

SEALED = SaveOptions(format="safetensors", key=KEY)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.fixture(scope="module")
def forker() -> Iterator[Preloaded]:
    pytest.importorskip("pyte", reason="needs pyte, a terminal emulator: make")
    with preloaded() as one:
        yield one


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three sealed checkpoints, and two keys beside them."""
    save_run(tmp_path / "runs", [10, 20, 30], options=SEALED, content=items()[:1])
    key_file(tmp_path)
    (tmp_path / "keys").mkdir()
    key_file(tmp_path / "keys", hex_digits=OTHER_KEY.raw.hex())
    return tmp_path / "runs"


def asking(command: str, runs: Path) -> tuple[str | Path, ...]:
    """Return the arguments of a command that asks before it changes anything."""
    key, new = f"file:{runs.parent}/run.key", f"file:{runs.parent}/keys/run.key"
    return {
        "prune": ("prune", runs, "--keep", "last(1)", "--key", key),
        "rm": ("rm", "10", "--dir", runs),
        "rekey": ("rekey", runs, "--key", key, "--add", new),
        "reencrypt": ("reencrypt", runs, "--key", key, "--to", new),
    }[command]


@pytest.mark.parametrize(
    ("keys", "code"), [("y\n", 0), ("n\n", 1), (CTRL_C, 130), (CTRL_D, 130)], ids=repr
)
@pytest.mark.parametrize("command", ["prune", "rm", "rekey", "reencrypt"])
def test_command_that_destroys_acts_only_after_a_yes(
    forker: Preloaded, runs: Path, command: str, keys: str, code: int
) -> None:
    before = tree_of(runs)
    with at_terminal(forker, *asking(command, runs)) as terminal:
        terminal.until("? [y/N]:")
        assert tree_of(runs) == before
        terminal.press(keys)
        assert terminal.end() == code
    assert (tree_of(runs) != before) is (code == 0)
    assert ("ckptmgr: interrupted" in terminal.lines) is (code == 130)


def test_question_is_asked_again_after_another_answer_and_outlives_a_resize(
    forker: Preloaded, runs: Path
) -> None:
    with at_terminal(forker, *asking("rm", runs)) as terminal:
        terminal.until("? [y/N]:")
        terminal.resize(40, 12)
        terminal.press("perhaps\n")
        terminal.until("answer y or n")
        terminal.resize(80, 24)
        terminal.press("y\n")
        assert terminal.end() == 0
    assert [item["step"] for item in run_json("ls", runs)["items"]] == [20, 30]
