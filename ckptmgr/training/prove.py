# SPDX-License-Identifier: Apache-2.0
"""Proof that a program of a user's own goes on bit for bit: an uncut run, and runs that are cut and resumed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.store.store import Store
from ckptmgr.training.cut import CUT_AT
from ckptmgr.training.witness import name_of
from ckptmgr.training.witness_record import MOST_BYTES, Recorded, difference_of, parsed

PLACEHOLDER = "{}"
"""Stands for the directory of a run in the arguments of the program."""
_MOST_SHOWN = 3


class ProgramFailed(CkptmgrError):
    """The program cannot be proven: it fails uncut, saves nothing, or records no steps."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has ended: its newest checkpoint, and the steps that it has recorded."""

    store: Store
    newest: Checkpoint
    recorded: Recorded


@dataclass(frozen=True, slots=True)
class Compared:
    """Comparison of the recorded steps of two runs: how many are equal, and the first that is not."""

    equal: int
    difference: str | None


class Prover:
    """Runs one program again and again; `command` has `PLACEHOLDER` in it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command

    def uncut(self, directory: Path) -> Run:
        """Run the program to its end.

        Raises:
            ProgramFailed: It fails, or leaves nothing to compare.
        """
        failure = self._ended(self._start(directory))
        if failure is not None:
            raise ProgramFailed(f"the uncut run failed: {failure}", path=directory)
        return run_in(directory)

    def cut(self, directory: Path, step: int) -> None:
        """Run the program, which dies after a step.

        Raises:
            ProgramFailed: It ended otherwise.
        """
        done = self._start(directory, {CUT_AT: str(step)})
        if done.returncode not in (-signal.SIGKILL, 128 + signal.SIGKILL):
            why = self._ended(done) or "it ended"
            raise ProgramFailed(f"the run did not die after step {step}: {why}", path=directory)

    def resumed(self, directory: Path) -> Run | str:
        """Run the program to its end after a cut; return why it failed, if it did."""
        failure = self._ended(self._start(directory))
        return run_in(directory) if failure is None else failure

    def _start(
        self, directory: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [one.replace(PLACEHOLDER, str(directory)) for one in self._command]
        clean = {name: value for name, value in os.environ.items() if name != CUT_AT}
        return subprocess.run(  # noqa: S603 - the user's own program
            command,
            env={**clean, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )

    @staticmethod
    def _ended(done: subprocess.CompletedProcess[str]) -> str | None:
        """Return why a run failed, with the last lines that it printed; None if it did not."""
        if done.returncode == 0:
            return None
        last = " / ".join(done.stdout.strip().splitlines()[-_MOST_SHOWN:])
        return f"exit code {done.returncode}: {last}"


def run_in(directory: Path) -> Run:
    """Return the run in a directory.

    Raises:
        ProgramFailed: It has no checkpoint, or no recorded step.
    """
    store = Store(directory)
    found = [one for one in store.scan() if one.is_countable]
    if not found:
        raise ProgramFailed(
            "the program has saved nothing there",
            path=directory,
            hint=f"give it the directory: {PLACEHOLDER} in its arguments",
        )
    newest = max(found, key=lambda one: one.order)
    data = store.read_note(name_of(newest.series), most_bytes=MOST_BYTES + 1)
    recorded = parsed(data or b"", after=-1)
    if recorded is None or len(recorded.records) < 2:
        raise ProgramFailed(
            "the program has recorded no steps after its first save, so nothing says when it differs",
            path=directory,
            hint="pass metrics to step_end, or ask manager.batches for the batches, and save before the end",
        )
    return Run(store, newest, recorded)


def cuts_of(run: Run, count: int, seed: int) -> list[int]:
    """Return steps after which to cut, at most `count`, in a random order."""
    steps = sorted(run.recorded.records)[:-1]
    return random.Random(seed).sample(steps, min(count, len(steps)))  # noqa: S311


def compared(uncut: Run, resumed: Run) -> Compared:
    """Compare the steps that two runs have recorded.

    Generators that differ from the first step on are not seeded: if they are used, the rest differs.
    """
    names = uncut.recorded.names
    if names != resumed.recorded.names:
        return Compared(0, f"other metrics: {', '.join(resumed.recorded.names)}")
    equal, others = 0, resumed.recorded.records
    steps = sorted(uncut.recorded.records.items())
    first = next((step for step, _ in steps if step in others), None)
    is_seeded = first is None or dict(steps)[first].generators == others[first].generators
    for step, one in steps:
        now, before = others.get(step), one if is_seeded else one._replace(generators=0)
        difference = "" if now is None else difference_of(before, now, names, {})
        if difference:
            return Compared(equal, f"step {step}: {difference}")
        equal += difference is None
    return Compared(equal, None)
