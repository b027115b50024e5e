# SPDX-License-Identifier: Apache-2.0
"""CPU time of commands that list a directory: `python -m tools.bench.listing [CHECKPOINTS ...]`.

In turns, each in a process of its own: `ckptmgr ls`, `verify --quick` and `prune --dry-run` of so
many checkpoints (two files each), `ckptmgr --help`, and the bare loop: list the directory with the
status of each file, read each manifest and parse its JSON. Shown are the medians.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.bench.kept import fill

COUNTS = (1_000, 50_000)
_ROUNDS = 3
_CKPTMGR = (sys.executable, "-m", "ckptmgr")
_BARE_LOOP = """
import json, os, sys
names = []
with os.scandir(sys.argv[1]) as scan:
    for entry in scan:
        entry.stat(follow_symlinks=False)
        if entry.name.endswith(".json"):
            names.append(entry.path)
found = []
for name in names:
    descriptor = os.open(name, os.O_RDONLY)
    found.append(json.loads(os.read(descriptor, 65536)))
    os.close(descriptor)
"""


class Used(NamedTuple):
    """Seconds of a process: CPU time, in the kernel, too, and wall time."""

    cpu_s: float
    wall_s: float


def commands(directory: Path) -> dict[str, tuple[str, ...]]:
    """Return the measured commands by their names."""
    path = str(directory)
    return {
        "Python alone": (sys.executable, "-c", "pass"),
        "--help": (*_CKPTMGR, "--help"),
        "ls": (*_CKPTMGR, "ls", path),
        "verify --quick": (*_CKPTMGR, "verify", "--quick", path),
        "prune --dry-run": (*_CKPTMGR, "prune", path, "--keep", "last(5)", "--dry-run"),
        "the bare loop": (sys.executable, "-c", _BARE_LOOP, path),
    }


def used_by(command: Sequence[str]) -> Used:
    """Run a command; raise CalledProcessError if it fails."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Used(usage.ru_utime + usage.ru_stime, wall_s)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each count and command."""
    parser = argparse.ArgumentParser(prog="tools.bench.listing", description="CPU time of lists")
    parser.add_argument("counts", type=int, nargs="*", default=COUNTS)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    given = parser.parse_args(arguments)
    print(f"{'command':<20} {'checkpoints':>11} {'CPU s':>8} {'wall s':>8}")
    for count in given.counts:
        with tempfile.TemporaryDirectory() as base:
            fill(Path(base), count)
            measured = commands(Path(base))
            rounds = [
                {name: used_by(command) for name, command in measured.items()}
                for _ in range(given.rounds)
            ]
        for name in measured:
            cpu_s = statistics.median(one[name].cpu_s for one in rounds)
            wall_s = statistics.median(one[name].wall_s for one in rounds)
            print(f"{name:<20} {count:>11} {cpu_s:>8.2f} {wall_s:>8.2f}", flush=True)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    main()
