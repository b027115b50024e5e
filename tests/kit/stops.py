# SPDX-License-Identifier: Apache-2.0
"""Stops whose grace ends while a program validates."""

from __future__ import annotations

import signal
import subprocess

TOLD = """
def told(event):
    if event.name == "save.durable":
        print("saved", event.step, flush=True)
"""


def saved_and_killed(child: subprocess.Popen[str]) -> int:
    """Stop a program once it says that it waits, and kill it once it says `saved`; return the step."""
    assert child.stdout is not None
    lines = (line.split() for line in child.stdout)
    assert any(line[:1] == ["waits"] for line in lines)
    child.send_signal(signal.SIGTERM)
    step = next(int(line[1]) for line in lines if line[:1] == ["saved"])
    child.kill()
    child.communicate()
    return step
