# SPDX-License-Identifier: Apache-2.0
"""The bare disk in a process of its own, which gives way to the training as ours does.

Beside a training loop it shows the cost of the writing alone. Orders and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from ckptmgr.engine.worker import NICENESS
from tools.bench.contestant import Flight
from tools.bench.raw_disk import RawDisk, Shape

_ROOT = Path(__file__).resolve().parents[2]


class RawWriter:
    """Starts the process, which lives until `close`.

    Args:
        shape: How many requests of which size it has in flight.
    """

    def __init__(self, shape: Shape) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.raw_writer", json.dumps(asdict(shape))],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._wait()

    def start(self, path: Path, size_bytes: int) -> Flight:
        """Let it write a file of `size_bytes`; the flight is over when that is durable."""
        assert self._child.stdin is not None
        print(json.dumps([str(path), size_bytes]), file=self._child.stdin, flush=True)
        return Flight(wait=self._wait)

    def close(self) -> None:
        """End the process."""
        self._child.communicate()

    def _wait(self) -> None:
        assert self._child.stdout is not None
        answer = json.loads(self._child.stdout.readline() or '"the process that writes has ended"')
        if answer:
            raise OSError(answer)


def main(shape: Shape) -> None:
    """Write until standard input ends; answer with what went wrong, at first and after each file."""
    os.nice(NICENESS)
    disk = RawDisk()
    disk.write_shape = shape
    print('""', flush=True)
    for line in sys.stdin:
        path, size_bytes = json.loads(line)
        problem = ""
        try:
            disk.write(Path(path), size_bytes)
        except OSError as error:
            problem = str(error)
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main(Shape(**json.loads(sys.argv[1])))
