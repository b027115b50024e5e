# SPDX-License-Identifier: Apache-2.0
"""Start one process per library, pass orders to them, and note who cannot take part."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tools.bench.modes import MODES
from tools.bench.peers import LIBRARIES
from tools.bench.workload import Workload

_ROOT = Path(__file__).resolve().parents[2]
_FIND = "import importlib.util as u, sys; sys.exit(not all(u.find_spec(n) for n in sys.argv[1:]))"
_TAIL_CHARACTERS = 400
_PATIENCE_S = 600
_RARE = {mode.name for mode in MODES if mode.is_rare}


class Failed(Exception):
    """A library failed at something; the text has its message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How processes are started.

    Attributes:
        libraries: Who is asked to take part, as in `LIBRARIES`.
        pythons: Interpreters for libraries that are not installed beside this one.
        directory: Where files may be written.
        rest_s: Seconds of rest before every measurement.
        environment: More variables for every process.
    """

    libraries: Sequence[str]
    pythons: Mapping[str, str]
    directory: Path
    rest_s: float
    environment: Mapping[str, str] = field(default_factory=dict)

    def python_of(self, library: str) -> str:
        """Return the interpreter that runs a library."""
        return self.pythons.get(library, sys.executable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Player:
    """A contestant in its process."""

    process: Process
    who: str
    mode: str
    suffix: str
    actions: tuple[str, ...]

    @property
    def is_peer(self) -> bool:
        """Whether it is neither ours nor the bare disk."""
        return LIBRARIES[self.process.library].is_peer

    @property
    def takes_all_rounds(self) -> bool:
        """Whether a target names it, and its mode is not a rare one."""
        return LIBRARIES[self.process.library].has_target and self.mode not in _RARE

    def ask(self, do: str, path: Path, **details: object) -> dict[str, float]:
        """Let it do something with a path; return its measurement.

        Raises:
            Failed: It could not.
        """
        return self.process.ask(do, who=self.who, mode=self.mode, path=str(path), **details)


class Process:
    """One library in its process."""

    def __init__(self, library: str, setup: Setup) -> None:
        self.library = library
        self._log = setup.directory / f"{library}.log"
        with self._log.open("ab") as log:
            self._child = subprocess.Popen(
                [setup.python_of(library), "-W", "ignore", "-m", "tools.bench.worker", library],
                cwd=_ROOT,
                env=os.environ | {"TOKENIZERS_PARALLELISM": "0"} | dict(setup.environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def send(self, do: str, **details: object) -> None:
        """Send an order; `receive` gets the answer."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"do": do} | details) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise Failed(self._last_words()) from error

    def receive(self) -> dict[str, Any]:
        """Return the answer to an order.

        Raises:
            Failed: The library raised something, or the process ended.
        """
        assert self._child.stdout is not None
        # There is never more than one answer under way, so that none can be waiting in a buffer of ours.
        is_there, _, _ = select.select([self._child.stdout], [], [], _PATIENCE_S)
        if not is_there:
            self._child.kill()
            raise Failed(f"no answer within {_PATIENCE_S} s")
        line = self._child.stdout.readline()
        if not line:
            raise Failed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def ask(self, do: str, **details: object) -> dict[str, Any]:
        """Send an order and return the answer."""
        self.send(do, **details)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        try:
            self.ask("close")
        except Failed:
            self._child.kill()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _last_words(self) -> str:
        code = self._child.wait()
        said = self._log.read_text(errors="replace").strip()[-_TAIL_CHARACTERS:]
        return f"its process ended with code {code}: {said}"


class Team:
    """Everybody who takes part, with one and the same workload in memory.

    Attributes:
        missing: Library to why it does not take part.
        about: Facts that the libraries state about themselves: versions, accelerators, the shape of raw requests.
    """

    def __init__(self, setup: Setup, workload: Workload) -> None:
        self._setup = setup
        self._workload = workload
        self._stack = ExitStack()
        self._processes: list[Process] = []
        self.missing: dict[str, str] = {}
        self.about: dict[str, str] = {}

    def __enter__(self) -> Self:
        try:
            # The bare disk looks for its best shape alone; the others then make their models side by side.
            alone = [library for library in self._setup.libraries if library == "raw"]
            others = [library for library in self._setup.libraries if library != "raw"]
            for together in (alone, others):
                started = [process for name in together for process in self._start(name)]
                for process in started:
                    self._await(process)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _start(self, library: str) -> Iterator[Process]:
        if not is_installed(library, self._setup):
            self.missing[library] = "not installed"
            return
        process = Process(library, self._setup)
        self._stack.callback(process.close)
        self._processes.append(process)
        process.send(
            "prepare",
            size_bytes=self._workload.size_bytes,
            tiny_tensors=self._workload.tiny_tensors,
            directory=str(self._setup.directory),
            rest_s=self._setup.rest_s,
        )
        yield process

    def _await(self, process: Process) -> None:
        try:
            self.about |= process.receive()["about"]
        except Failed as failure:
            self._drop(process, failure)

    def _drop(self, process: Process, failure: Failed) -> None:
        if not LIBRARIES[process.library].is_peer:
            raise failure
        self.missing[process.library] = str(failure)
        self._processes.remove(process)

    def players(self, kind: str) -> Iterator[Player]:
        """Yield the `contestants` or `backgrounds` of everybody."""
        for process in list(self._processes):
            try:
                found = process.ask(kind)["contestants"]
            except Failed as failure:
                self._drop(process, failure)
                continue
            for one in found:
                yield Player(process=process, **one | {"actions": tuple(one["actions"])})


def is_installed(library: str, setup: Setup) -> bool:
    """Return whether a library can be imported by the interpreter that would run it."""
    python = setup.python_of(library)
    if not Path(python).exists():
        return False
    needs = [name.split(".")[0] for name in LIBRARIES[library].needs]
    return subprocess.run([python, "-c", _FIND, *needs], check=False).returncode == 0
