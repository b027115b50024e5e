# SPDX-License-Identifier: Apache-2.0
"""The README and the pages: their examples run in the order of the page, from an empty folder."""

from __future__ import annotations

import doctest
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ckptmgr
from ckptmgr.cli.exits import Exit
from ckptmgr.core import errors

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    *sorted((DOCS / "how-to").glob("*.md")),
    *sorted((DOCS / "coming-from").glob("*.md")),
    DOCS / "run-directory.md",
    DOCS / "errors-and-retries.md",
]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
_FRAMEWORKS = ("torch", "jax", "lightning", "mindspore", "pytorch_lightning")

pytestmark = pytest.mark.skipif(
    not DOCS.exists(), reason="needs the sources: the pages are not installed"
)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """Return each command of a block, with the output that the page shows."""
    return ((match[1], match[2]) for match in _COMMAND.finditer(block))


def run_command(command: str) -> tuple[int, str]:
    """Return the exit code and the output of a line that calls `ckptmgr`."""
    line = re.sub(r"^ckptmgr\b", f"{sys.executable} -m ckptmgr", command)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": os.environ.get("PATH", "")}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_runs_from_an_empty_folder(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text(encoding="utf-8")
    for framework in _FRAMEWORKS:
        if re.search(rf"^(import|from) {framework}\b", text, re.MULTILINE):
            pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    matches = doctest.OutputChecker().check_output
    for language, block in _BLOCK.findall(text):
        if language == "python":
            exec(compile(block, str(page), "exec"), names)  # noqa: S102 - our own page
        elif language == "console":
            for command, shown in commands(block):
                code, output = run_command(command)
                assert code == Exit.DONE, f"{command}\n{output}"
                assert matches(shown, output, doctest.ELLIPSIS), f"{command}\n{output}"
        elif language == "bash":
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    listed = set(re.findall(r"^::: ckptmgr\.(?:\w+\.)*(\w+)$", text, re.MULTILINE))
    listed |= set(re.findall(r"^### (\w+)$", text, re.MULTILINE))
    assert listed == set(ckptmgr.__all__) - {"__version__"}


def test_error_page_shows_the_tree_of_the_module() -> None:
    tree = (errors.__doc__ or "").split("```")[1]
    assert tree.strip("\n") in (DOCS / "reference" / "errors.md").read_text()


def test_pictures_of_the_readme_show_the_policy_and_the_figures_of_the_benchmarks() -> None:
    pictures = importlib.import_module("tools.pictures").pictures()
    assert {path: path.read_text(encoding="utf-8") for path in pictures} == pictures


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert [
        one for one in sorted(pages) if "decisions/0" not in one and one not in navigation
    ] == []
