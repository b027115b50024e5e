# SPDX-License-Identifier: Apache-2.0
"""CPU time of `ckptmgr watch` at rest: `python -m tools.bench.watch --directories 100 --seconds 60`.

The directories have a few verified checkpoints each, and nothing changes. Exits with 1 above the
target of 1 % of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ckptmgr import save_checkpoint

TARGET_PERCENT = 1.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def make_directories(root: Path, *, directories: int, checkpoints: int) -> list[Path]:
    """Make directories with small checkpoints."""
    made = [root / f"run-{number:03}" for number in range(directories)]
    for path in made:
        path.mkdir()
        for step in range(1, checkpoints + 1):
            save_checkpoint({"w": np.full(100, step)}, path / f"net-{step}.ckpt")
    return made


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def percent_at_rest(directories: Sequence[Path], *, checkpoints: int, seconds: float) -> float:
    """Return the share of a core that a watch takes, once everything is verified."""
    command = [sys.executable, "-m", "ckptmgr", "watch", "--json", *map(str, directories)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        left = len(directories) * checkpoints
        while left:
            left -= json.loads(child.stdout.readline())["event"] == "verified"
        used = _used_per_s(child.pid, seconds)
        child.terminate()
    return 100 * used


def percent_of_table(directories: Sequence[Path], *, seconds: float) -> float:
    """Return the share of a core that the live table on a terminal takes at rest."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "ckptmgr", "watch", *map(str, directories)]
    with subprocess.Popen(
        command, stdin=follower, stdout=follower, env={**os.environ, "TERM": "xterm"}
    ) as child:
        os.close(follower)
        threading.Thread(target=_drain, args=(leader,), daemon=True).start()
        while _used_per_s(child.pid, min(2.0, seconds)) > 0.1:  # still verifying
            pass
        used = _used_per_s(child.pid, seconds)
        child.terminate()
    return 100 * used


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:
        os.close(descriptor)


def _used_per_s(pid: int, seconds: float) -> float:
    before, started = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and judge."""
    parser = argparse.ArgumentParser(description="CPU time of `ckptmgr watch` at rest")
    parser.add_argument("--directories", type=int, default=100)
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        directories = make_directories(
            Path(name), directories=given.directories, checkpoints=given.checkpoints
        )
        lines = percent_at_rest(directories, checkpoints=given.checkpoints, seconds=given.seconds)
        table = percent_of_table(directories, seconds=given.seconds)
    about = f"{given.directories} directories, {given.checkpoints} checkpoints each, at rest"
    print(f"{about}: {lines:.2f} % of a core with --json, {table:.2f} % with the table")
    return int(max(lines, table) > TARGET_PERCENT)


if __name__ == "__main__":
    sys.exit(main())
