# SPDX-License-Identifier: Apache-2.0
"""The page about `watch` names what there is, and its commands and files are well-formed."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import get_args

import click
import pytest

from ckptmgr.cli.commands.watch import watch_command
from ckptmgr.maintenance.watch.model import AlarmKind

PAGE = Path(__file__).parents[1] / "docs/watch.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="needs a checkout")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def options_of(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts}


def test_every_option_on_the_page_exists_and_every_own_option_is_on_it() -> None:
    text = PAGE.read_text()
    named = set(re.findall(r"`(--?[a-z][a-z-]*)", text))
    assert named - options_of(watch_command) - {"--undo", "--yes"} == set()
    shared = {"--color", "--no-color", "--null", "--quiet", "--verbose", "-h", "--help", "-0"}
    shared |= {"--allow-unsealed", "--allow-unencrypted"}
    assert options_of(watch_command) - shared - named == {"directories"}


def test_table_of_alarms_is_complete() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert tuple(rows) == get_args(AlarmKind)


def test_every_watch_on_the_page_is_a_command_that_parses() -> None:
    pages = (PAGE, *(PAGE.parent / "how-to" / f"{name}.md" for name in ("slurm", "kubernetes")))
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    lines = re.findall(r"ckptmgr watch (?!DIR)([^`\n]*)", text)
    commands = [re.split(r" [>&]|\"\]", line)[0] for line in lines]
    assert len(commands) >= 5
    for command in commands:
        expanded = [word.replace("$", "") for word in shlex.split(command)]  # as a shell does
        watch_command.make_context("watch", expanded, resilient_parsing=False)


def test_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    unit = tmp_path / "ckptmgr-watch.service"
    unit.write_text(blocks("ini")[0])
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )
    assert (checked.returncode, checked.stderr) == (0, "")
