# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr watch` and a training run as real processes; tests wait for their lines, never for time."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.cli.running import process_env
from tests.support.json_schema import violations

SCHEMA = Path(__file__).parents[2] / "docs/schemas/watch.json"
_TRAINER = """
import sys
import numpy
from ckptmgr import CheckpointConfig, CheckpointManager

manager = CheckpointManager(sys.argv[1], CheckpointConfig(keep="last(3)", format="safetensors"), prefix="net")
for line in sys.stdin:
    verb, step, size = line.split()
    try:
        if verb == "close":
            manager.close()
        else:
            manager.save(int(step), {"w": numpy.ones(int(size))})
        print("done", flush=True)
    except Exception as error:
        print(type(error).__name__, flush=True)
"""


@cache
def schema() -> dict[str, Any]:
    """Return the schema of a line of JSON; away from the sources one that allows everything."""
    known: dict[str, Any] = json.loads(SCHEMA.read_bytes()) if SCHEMA.exists() else {}
    return known


class Trainer:
    """A training run in another process, which saves when it is asked to."""

    def __init__(self, directory: Path) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=process_env(),
        )

    @property
    def pid(self) -> int:
        return self._child.pid

    def save(self, step: int, *, numbers: int = 10) -> str:
        """Save a step; return `done`, or the class of the error."""
        return self._ask(f"save {step} {numbers}")

    def close(self) -> None:
        assert self._ask("close 0 0") == "done"

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()

    def end(self) -> None:
        self.kill()
        for stream in (self._child.stdin, self._child.stdout):
            if stream is not None:
                stream.close()

    def _ask(self, command: str) -> str:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(f"{command}\n")
        self._child.stdin.flush()
        return self._child.stdout.readline().strip()


class Watch:
    """`ckptmgr watch --json` as a process."""

    def __init__(self, *arguments: str | Path, through: Sequence[str] = (), **extra: str) -> None:
        command = [
            *through,
            sys.executable,
            "-m",
            "ckptmgr",
            "watch",
            *map(str, arguments),
            "--json",
        ]
        self.child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=process_env(**extra),
        )
        self.reports: list[dict[str, Any]] = []
        self.errors = ""  # its standard error, after its end

    def until(self, event: str, **facts: object) -> dict[str, Any]:
        """Read reports until one of this event whose fields are as given, and return it."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            report = self._take(line)
            found = {name: report[name] for name in facts}
            if report["event"] == event and found == facts:
                return report
        assert self.child.stderr is not None
        raise AssertionError(f"no {event} {facts}; {self.reports} {self.child.stderr.read()}")

    def _take(self, line: str) -> dict[str, Any]:
        """Take a line, which is as the schema says."""
        report: dict[str, Any] = json.loads(line)
        assert list(violations(report, schema())) == []
        self.reports.append(report)
        return report

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, read the rest, and return the exit code."""
        self.child.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Read the rest and return the exit code."""
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        for line in self.child.stdout:
            self._take(line)
        self.errors = self.child.stderr.read()
        return self.child.wait()

    def names(self, event: str) -> list[str]:
        """Return the names of the checkpoints of the reports of one event so far."""
        found = [r for r in self.reports if r["event"] == event and r["checkpoint"] is not None]
        return [Path(r["checkpoint"]["path"]).name for r in found]


@contextlib.contextmanager
def training(directory: Path) -> Iterator[Trainer]:
    """Yield a training run."""
    trainer = Trainer(directory)
    try:
        yield trainer
    finally:
        trainer.end()


@contextlib.contextmanager
def watching(*arguments: str | Path, through: Sequence[str] = (), **extra: str) -> Iterator[Watch]:
    """Yield a watch that has listed its directories; `through` is a program that starts it."""
    watch = Watch(*arguments, through=through, **extra)
    try:
        watch.until("watching")
        yield watch
    finally:
        watch.child.kill()
        watch.child.wait()
        for stream in (watch.child.stdout, watch.child.stderr):
            if stream is not None:
                stream.close()
