# SPDX-License-Identifier: Apache-2.0
"""A real saver process under strace, which fails or kills it at a chosen system call."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.config import CheckpointConfig
from ckptmgr.manager import CheckpointManager
from tests.faults.training import SERIES, state_of

ROOT = Path(__file__).resolve().parents[2]

# Imports come first: what is injected must meet the save, not the loading of NumPy.
SAVE = """
import sys
import numpy
from ckptmgr.config import CheckpointConfig
from ckptmgr.manager import CheckpointManager
manager = CheckpointManager(sys.argv[1], CheckpointConfig(keep=sys.argv[3]), prefix="net")
step = int(sys.argv[2])
with manager:
    if "resume" in sys.argv:
        manager.resume()
    manager.save(step, {"weights": numpy.full(3, 10.0 * step, numpy.float32), "value": 10.0 * step})
print("acknowledged", flush=True)
"""


@dataclass(frozen=True, slots=True)
class Straced:
    """How a straced saver ended.

    Attributes:
        returncode: Of the saver; negative for a signal.
        output: What it said to both streams.
        log: What strace saw.
    """

    returncode: int
    output: str
    log: str

    @property
    def is_acknowledged(self) -> bool:
        """Whether the save returned."""
        return "acknowledged" in self.output

    @property
    def is_injected(self) -> bool:
        """Whether the fault happened at all; a wrong number would pass silently."""
        return "(INJECTED)" in self.log

    @property
    def is_killed(self) -> bool:
        """Whether the saver was killed at the chosen call."""
        return "killed by SIGKILL" in self.log


def save_steps(directory: Path, *steps: int, keep: str = "all") -> None:
    """Save steps in this process, undisturbed."""
    with CheckpointManager(directory, CheckpointConfig(keep=keep), prefix=SERIES) as manager:
        manager.resume()
        for step in steps:
            manager.save(step, state_of(10.0 * step))


def saver_command(directory: Path, step: int, keep: str | None) -> list[str]:
    """Return the command of a process that saves one step."""
    arguments = (
        [str(directory), str(step), "all"]
        if keep is None
        else [str(directory), str(step), keep, "resume"]
    )
    return [sys.executable, "-c", SAVE, *arguments]


def straced_save(
    directory: Path, log: Path, inject: str, *, step: int, keep: str | None = None
) -> Straced:
    """Save one step in a process whose calls are interfered with.

    Args:
        directory: Of the checkpoints, absolute.
        log: Where strace writes.
        inject: As for `strace -e inject=`.
        step: The step to save.
        keep: Resume first, and keep by this retention policy; None just saves.
    """
    command = ["strace", "-f", "-o", str(log), "-e", f"inject={inject}"]
    done = subprocess.run(
        [*command, *saver_command(directory, step, keep)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
    )
    text = log.read_text(errors="replace")
    return Straced(done.returncode, done.stdout + done.stderr, text)
