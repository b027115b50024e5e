# SPDX-License-Identifier: Apache-2.0
"""The man pages that `tools/man.py` makes from the text of `--help`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr.cli import _COMMANDS
from tests.cli.running import process_env, run

ROOT = Path(__file__).parents[2]
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXAMPLES", "EXIT STATUS"]

pytestmark = pytest.mark.skipif(
    not (ROOT / "tools/man.py").exists(), reason="needs the sources: tools are not installed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages of all commands."""
    folder = tmp_path_factory.mktemp("man")
    command = [sys.executable, "-m", "tools.man", str(folder)]
    subprocess.run(command, cwd=ROOT, env=process_env(), capture_output=True, check=True)
    return folder


def test_every_command_has_a_page_with_all_sections(folder: Path) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {"ckptmgr.1", *(f"ckptmgr-{name}.1" for name in (*_COMMANDS, "help"))}
    for name in _COMMANDS:
        text = (folder / f"ckptmgr-{name}.1").read_text()
        assert re.findall(r"^\.SH (.*)$", text, re.MULTILINE)[:6] == SECTIONS, name


def test_page_of_a_command_has_each_option_and_example_of_its_help(folder: Path) -> None:
    for name in ("diff", "prune", "rm"):
        text = (folder / f"ckptmgr-{name}.1").read_text().replace("\\-", "-")
        shown = re.sub(r" \\\n +", " ", run(name, "--help").stdout)  # examples on one line
        options = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE))
        assert options
        assert [option for option in options if option not in text] == []
        assert [line.strip() for line in shown.splitlines() if line.strip().startswith("$ ")] == [
            line for line in text.splitlines() if line.startswith("$ ")
        ]


def test_pages_are_read_without_a_warning(folder: Path) -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("needs groff")
    pages = sorted(str(path) for path in folder.iterdir())
    done = subprocess.run(
        [groff, "-man", "-Tutf8", "-wall", *pages], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert "Compare two checkpoints" in done.stdout
