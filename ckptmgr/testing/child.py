# SPDX-License-Identifier: Apache-2.0
"""One run of a program of the kit, in a process of its own, which cuts itself.

The cut comes with the first save of its step, or of a later one, that is durable: `kill` is SIGKILL
to the own process, `terminate` SIGTERM, `interrupt` SIGINT. `nan` lets the run be, and gives NaN for
all metrics of that step.

As a server, the process imports each program once, and forks for each run: an import of torch takes
longer than a run. The server then also imports the modules that the first run of a program
imported later. A run that succeeded ends without tearing down its modules, which takes longer, too.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import math
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from ckptmgr.testing.cell import Ending, Place, carry_out_cell

NOT_IMPORTED = "cannot be imported"
How = Literal["kill", "terminate", "interrupt", "nan"]
_SIGNALS: Mapping[str, signal.Signals] = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}


class Program(Protocol):
    """A program that the kit can check."""

    def __call__(self, directory: str, steps: int, /) -> object:
        """Train to step `steps`, with checkpoints below `directory`; return the final state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRun:
    """One run: where it saves, how far it goes, where its final state goes, and its cut.

    That of a cell of a grid has a feature instead of steps, and an ending at a place as its cut.
    """

    directory: str
    steps: int
    result: str
    how: How | None = None
    step: int = 0
    feature: str = ""
    ending: Ending | None = None
    place: Place | None = None

    def order(self, program: str) -> str:
        """Return it as one line for a server."""
        return json.dumps([program, self.to_json()])

    def to_json(self) -> str:
        """Return it as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> ChildRun:
        """Return the run of a line."""
        return cls(**json.loads(line))


def find_program(spelling: str) -> Program:
    """Return the program `file.py:function` or `module:function`.

    Raises:
        ValueError: It is spelled otherwise.
        ImportError, AttributeError: There is no such program.
    """
    place, colon, name = spelling.rpartition(":")
    if not colon or not name.isidentifier():
        raise ValueError(f"a program is file.py:function or module:function, but got {spelling!r}")
    if not place.endswith(".py"):
        found: Program = getattr(import_module(place), name)
        return found
    spec = spec_from_file_location(Path(place).stem, place)
    if spec is None or spec.loader is None:  # pragma: no cover - every .py file has a loader
        raise ImportError(f"{place} cannot be imported")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # the workers of loaders find its classes there
    spec.loader.exec_module(module)
    program: Program = getattr(module, name)
    return program


def carry_out(program: Program, run: ChildRun) -> None:
    """Run a program, with its cut, and save its result."""
    from ckptmgr.files.state_file import save_state
    from ckptmgr.observe.observers import register

    if run.feature:
        cell: Any = program
        save_state(carry_out_cell(cell, run), run.result)
        return
    if run.how == "nan":
        _give_nan(run.step)
    elif run.how is not None:
        # A run that is asked to stop ends one more step.
        register(_cut(run.step - (run.how == "terminate"), _SIGNALS[run.how]))
    save_state({"returned": program(run.directory, run.steps)}, run.result)


def _cut(step: int, number: signal.Signals) -> Callable[[Any], None]:
    waiting = [number]

    def observe(event: Any) -> None:
        if event.name == "save.durable" and waiting and (event.step or 0) >= step:
            os.kill(os.getpid(), waiting.pop())

    return observe


def _give_nan(at: int) -> None:
    """Let managers of this process get NaN as the metrics of a step."""
    from ckptmgr.training.manager import CheckpointManager

    given = CheckpointManager.step_end

    def step_end(self: CheckpointManager, step: int, state: object, **options: Any) -> object:
        metrics = options.get("metrics")
        if at == step and metrics:
            options["metrics"] = dict.fromkeys(metrics, math.nan)
        return given(self, step, state, **options)

    CheckpointManager.step_end = step_end  # type: ignore[method-assign, assignment]


def serve(orders: TextIO, answers: TextIO) -> None:
    """Fork for each run that is ordered, and answer with its exit code, or `NOT_IMPORTED`."""
    programs: dict[str, Program] = {}
    for line in orders:
        spelling, run = json.loads(line)
        is_first = spelling not in programs
        try:
            program = programs.get(spelling) or find_program(spelling)
        except (Exception, SystemExit):
            traceback.print_exc()
            print(NOT_IMPORTED, file=answers, flush=True)
            continue
        programs[spelling] = program
        gc.collect()
        gc.freeze()  # a collection in a child would copy all pages
        with tempfile.TemporaryFile("w+") as imported:
            child = os.fork()
            if child == 0:  # pragma: no cover - it ends before anything measures it
                known = set(sys.modules)
                carry_out(program, ChildRun.from_json(run))
                json.dump([name for name in sys.modules if name not in known], imported)
                _succeeded.append(run)
                return  # and end as any program does
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(code, file=answers, flush=True)
            if is_first and code == 0:
                imported.seek(0)
                _import_all(json.load(imported))


def _import_all(names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # one that only the run could import
            import_module(name)


_succeeded: list[str] = []
"""Whether this process is a run that succeeded."""


def _end_at_once() -> None:
    """End a run that succeeded after its threads and exit functions, with its modules as they are."""
    if _succeeded:  # pragma: no cover
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def serve_standard_input() -> None:
    """Serve the orders on standard input; answers go to standard output."""
    atexit.register(_end_at_once)  # first, so that it is called last
    answers = _own_output()
    serve(sys.stdin, answers)


def main(spelling: str, order: str) -> None:
    """Carry out one run."""
    _own_output()
    carry_out(find_program(spelling), ChildRun.from_json(order))


def _own_output() -> TextIO:
    """Return standard output, in whose place the program gets standard error."""
    own = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return own
