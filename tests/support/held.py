# SPDX-License-Identifier: Apache-2.0
"""Saves that stop where a test wants them to, in a thread and in a worker process; nothing waits by the clock."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptmgr.io.filesystem import OsFileSystem, OutputFile
from tests.support.failingdisk import FailingDisk

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 60.0
KEY = b"sixteen byte key"


class HeldDisk(FailingDisk):
    """A disk that holds up the creation of data files while its gate is shut.

    Attributes:
        gate: Set: open.
        arrivals: Released whenever a data file is to be created.
    """

    def __init__(self) -> None:
        super().__init__(OsFileSystem())
        self.gate = threading.Event()
        self.gate.set()
        self.arrivals = threading.Semaphore(0)
        self.failure: OSError | None = None

    def create(self, path: Path, *, mode: int, owner_of: Path | None = None) -> OutputFile:
        """Create a new file, after a while."""
        if ".manifest.json" not in path.name and ".starts" not in path.name:
            self.arrivals.release()
            assert self.gate.wait(TIMEOUT_S)
            failure, self.failure = self.failure, None
            if failure is not None:
                raise failure
        return super().create(path, mode=mode, owner_of=owner_of)

    def arrive(self) -> None:
        """Wait until a data file is to be created."""
        assert self.arrivals.acquire(timeout=TIMEOUT_S)


_SITE = """
import os, signal, sys
if "ckptmgr.engine.worker" in sys.orig_argv:
    operation, call, action, folder = {plan!r}
    calls = 0
    real = getattr(os, operation)
    def interfered(*args, **named):
        global calls
        calls += 1
        if calls == call:
            if action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif action == "hold":
                open(folder + "/arrived", "w").close()
                open(folder + "/go").close()
            else:
                raise OSError(int(action), os.strerror(int(action)))
        return real(*args, **named)
    setattr(os, operation, interfered)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """What happens to a worker process at one of its system calls.

    Attributes:
        folder: The code, and the pipes by which it is held up.
    """

    folder: Path

    @classmethod
    def at(cls, folder: Path, operation: str, call: int, *, action: str) -> Interference:
        """Prepare it.

        Args:
            folder: A new one.
            operation: A function of `os`.
            call: Which call of it in the worker, from 1.
            action: `kill`, `hold`, or the number of an error.
        """
        folder.mkdir()
        os.mkfifo(folder / "arrived")
        os.mkfifo(folder / "go")
        code = _SITE.format(plan=(operation, call, action, str(folder)))
        (folder / "sitecustomize.py").write_text(code)
        return cls(folder=folder)

    def arrive(self) -> None:
        """Wait until a held worker is there."""
        (self.folder / "arrived").read_bytes()

    def let_go(self) -> None:
        """Let a held worker go on."""
        (self.folder / "go").write_bytes(b"")


def interfere(
    monkeypatch: pytest.MonkeyPatch, folder: Path, operation: str, call: int, *, action: str
) -> Interference:
    """Interfere with the workers that this process starts."""
    interference = Interference.at(folder, operation, call, action=action)
    monkeypatch.syspath_prepend(str(folder))
    return interference


def run_program(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end."""
    return subprocess.run(
        _command(code, arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def start_program(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python program whose standard input, output and error are pipes."""
    pipe = subprocess.PIPE
    command = _command(code, arguments)
    return subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def _command(code: str, arguments: tuple[object, ...]) -> list[str]:
    # Python 3.12 warns of forks beside threads, which is what some programs are about.
    ignored = "ignore:This process:DeprecationWarning"
    return [sys.executable, "-W", "error", "-W", ignored, "-c", code, *map(str, arguments)]


def wait_for_end(pid: int) -> None:
    """Wait until a process that need not be a child is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], TIMEOUT_S)[0], f"process {pid} goes on"
    finally:
        os.close(descriptor)


def stop(pid: int) -> None:
    """Stop a process and wait until none of its threads runs: the signal alone takes effect some time after `kill`."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + TIMEOUT_S
    while any(state != "T" for state in _states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        os.sched_yield()


def wait_until_asleep(pid: int) -> None:
    """Wait until all threads of a process wait for something: a signal is heard then.

    One that comes after Python has looked for signals, and before its read blocks, is not.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while any(state != "S" for state in _states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not wait"
        os.sched_yield()


def _states(pid: int) -> list[str]:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


def temporary_files(directory: Path) -> list[str]:
    """Return the names of the temporary files in a directory."""
    return sorted(path.name for path in directory.iterdir() if path.suffix == ".tmp")
