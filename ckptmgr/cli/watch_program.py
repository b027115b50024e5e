# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch --exec`: the program that runs when an alarm begins or ends."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckptmgr.cli import render
from ckptmgr.cli.exits import UsageProblem, note
from ckptmgr.core.printable import printable

if TYPE_CHECKING:
    from ckptmgr.maintenance.watch.model import Report

_EXEC_TIMEOUT_S = 60.0
_MOST_MESSAGE = 4096
"""Characters of a message in the environment: Linux starts no program with a variable of 128 KiB."""


def program_of(command: str | None) -> Callable[[Report], None]:
    """Return the function that runs the program of `--exec` for a report."""
    if command is None:
        return lambda _: None
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise UsageProblem(f"--exec: {error}", hint="quote it as for a shell") from error
    if not arguments:
        raise UsageProblem("--exec names no program", hint="write --exec 'PROGRAM ARGUMENT...'")
    if shutil.which(arguments[0]) is None:
        hint = "give its path, or put it on PATH; alarms would be lost"
        raise UsageProblem(f"--exec: no such program: {arguments[0]}", hint=hint)
    return partial(_run_program, arguments)


def _run_program(arguments: Sequence[str], report: Report) -> None:
    from ckptmgr.cli.watch_view import report_json
    from ckptmgr.crypto.keys.child_environment import child_environment

    facts = {
        "EVENT": report.event,
        "ALARM": report.alarm or "",
        "DIRECTORY": "" if report.directory is None else os.fspath(report.directory),
        "MESSAGE": printable(report.message, _MOST_MESSAGE),
    }
    environment = {f"CKPTMGR_WATCH_{name}": text.replace("\0", "") for name, text in facts.items()}
    try:
        done = subprocess.run(  # noqa: S603 - the program that the user names
            arguments,
            input=json.dumps(render.finite(report_json(report))).encode() + b"\n",
            stdout=sys.__stderr__,  # stdout carries the result only
            env={**child_environment(), **environment},
            timeout=_EXEC_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        note(f"--exec {arguments[0]}: {error}")
        return
    if done.returncode:
        note(f"--exec {arguments[0]} ended with status {done.returncode}")
