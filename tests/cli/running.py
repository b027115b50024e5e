# SPDX-License-Identifier: Apache-2.0
"""Run the command line: in this process with a fixed clock, or as a real process."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ckptmgr.cli import cli
from ckptmgr.cli.options import Session
from tests.support.saved import KEY, START_S

NOW_S = START_S + 86_400
CLEAN = {
    name: None
    for name in (
        "CKPTMGR_KEY",
        "CKPTMGR_KEY_FILE",
        "CKPTMGR_KEY_SERVICE",
        "CKPTMGR_KEY_CONTEXT",
        "NO_COLOR",
        "FORCE_COLOR",
        "TERM",
        "COLUMNS",
    )
}

_HAS_MIXED_STDERR = "mix_stderr" in inspect.signature(CliRunner).parameters


def run(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    charset: str = "utf-8",
    now_s: float = NOW_S,
) -> Result:
    """Run a command one day after the first save of a run."""
    # click 8.1 has to be asked for a stderr of its own, later ones have no such option.
    apart: dict[str, Any] = {"mix_stderr": False} if _HAS_MIXED_STDERR else {}
    runner = CliRunner(charset=charset, env={**CLEAN, **(env or {})}, **apart)
    session = Session(clock=lambda: float(now_s))
    return runner.invoke(cli, [str(argument) for argument in arguments], obj=session)


def run_json(*arguments: str | Path, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a command with `--json` that must succeed and return its output."""
    result = run(*arguments, "--json", env=env)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def process_env(**extra: str) -> dict[str, str]:
    """Return the environment of a process that runs this checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in CLEAN}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2]), **extra}


def run_process(
    *arguments: str | Path, stdin: int = subprocess.DEVNULL, **extra: str
) -> subprocess.CompletedProcess[bytes]:
    """Run a command as a process of its own."""
    command = [sys.executable, "-m", "ckptmgr", *map(str, arguments)]
    return subprocess.run(
        command, stdin=stdin, capture_output=True, env=process_env(**extra), timeout=60, check=False
    )


def key_file(directory: Path, *, hex_digits: str = KEY.raw.hex()) -> str:
    """Put a key into a private file and return it as a key source."""
    path = directory / "run.key"
    path.touch(mode=0o600)
    path.write_text(hex_digits + "\n")
    return f"file:{path}"
