# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr completion`, and the requests of its scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr.cli import _COMMANDS
from tests.cli.running import process_env, run

SHELLS = ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_one_that_the_shell_reads(shell: str) -> None:
    answer = run("completion", shell)
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert f"_CKPTMGR_COMPLETE={shell}_complete" in answer.stdout
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=answer.stdout, text=True, check=True)


def completed(*words: str) -> set[str]:
    """Return what bash offers for the last word of a command line."""
    env = process_env(
        _CKPTMGR_COMPLETE="bash_complete",
        COMP_WORDS=" ".join(("ckptmgr", *words)),
        COMP_CWORD=str(len(words)),
    )
    command = [sys.executable, "-m", "ckptmgr"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return {line.partition(",")[2] for line in done.stdout.splitlines()}


def test_commands_options_and_choices_are_completed() -> None:
    assert completed("comp") == {"completion"}
    assert {"--filter", "--sort", "--series"} <= completed("ls", "--")
    assert completed("completion", "f") == {"fish"}
    assert "help" in completed("he")
    assert completed("") == {*_COMMANDS, "help"}


def test_script_completes_in_a_real_bash(tmp_path: Path) -> None:
    script = tmp_path / "ckptmgr.bash"
    script.write_text(run("completion", "bash").stdout)
    program = tmp_path / "ckptmgr"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ckptmgr "$@"\n')
    program.chmod(0o700)
    words = "COMP_WORDS=(ckptmgr simu); COMP_CWORD=1"
    asked = f'source {script}; {words}; _ckptmgr_completion {program}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "--norc", "-c", asked],
        env=process_env(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["simulate"]


def test_other_shells_are_refused() -> None:
    answer = run("completion", "tcsh")
    assert (answer.exit_code, "'bash', 'zsh', 'fish'" in answer.stderr) == (2, True)
