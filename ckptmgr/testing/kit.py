# SPDX-License-Identifier: Apache-2.0
"""`Kit`: the cuts of a program, and the comparison of cut runs with the uncut one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ckptmgr.files.state_file import load_state
from ckptmgr.state import tree
from ckptmgr.store.manifest.codec import SUFFIX
from ckptmgr.store.store import Store
from ckptmgr.testing.child import ChildRun, How
from ckptmgr.testing.fork_server import ForkServer, NotConforming

_SHOWN = 10
_RUN = "import sys; from ckptmgr.testing.child import main; main(*sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Cut:
    """One cut: its name, the step after whose save it comes, and how it is made."""

    name: str
    step: int
    how: How

    def __str__(self) -> str:
        return self.name


class Kit:
    """Checks one program; see the package.

    Args:
        program: `file.py:function` or `module:function`.
        steps_per_epoch: Batches of one epoch, at least 3. The program saves after every step.
        keep: Number of checkpoints that its retention policy leaves, besides the one that the run
            resumed from; None to not count them.
        fork: Whether runs are forked from one process that has imported the program; or a
            `ForkServer` that forks the runs of several kits, with its own interpreter and
            variables. It saves the time of imports; frameworks that start threads when they are
            imported cannot have it.
        ends_with_epoch: Whether runs train to the end of an epoch, as `fit` of Keras does.
        stops_at_once: Whether SIGTERM during the save of a step ends the run after that step, and not
            after the next one.
        python: The interpreter.
        environment: Variables for the runs, besides those of this process; `OMP_NUM_THREADS` is 1.
        timeout_s: How long a run may take.

    Raises:
        ValueError: An epoch of fewer steps has no inside; or the server has an interpreter and
            variables already.
    """

    def __init__(
        self,
        program: str,
        *,
        steps_per_epoch: int,
        keep: int | None = None,
        fork: bool | ForkServer = False,
        ends_with_epoch: bool = False,
        stops_at_once: bool = False,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        if steps_per_epoch < 3:
            raise ValueError(f"steps_per_epoch must be at least 3, but got {steps_per_epoch}")
        inside = steps_per_epoch + steps_per_epoch // 2
        first, last = steps_per_epoch + 1, 2 * steps_per_epoch
        self.program = program
        self.steps = last + (steps_per_epoch if ends_with_epoch else steps_per_epoch // 2 + 1)
        self.cuts: Sequence[Cut] = (
            Cut("killed inside an epoch", inside, "kill"),
            Cut("killed at the last batch of an epoch", last, "kill"),
            Cut("killed at the first batch of an epoch", first, "kill"),
            Cut("killed at the first step", 1, "kill"),
            Cut("preempted inside an epoch", inside, "terminate"),
            Cut("preempted at the last batch of an epoch", last, "terminate"),
            Cut("interrupted inside an epoch", inside, "interrupt"),
            Cut("NaN as a metric", inside, "nan"),
        )
        self._keep = keep
        self._timeout_s = timeout_s
        self._command = [python, "-c", _RUN, program]
        self._environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        self._stops_at_once = stops_at_once
        self._own_server: ForkServer | None = None
        if fork is True:
            fork = ForkServer(python=python, environment=environment, timeout_s=timeout_s)
            self._own_server = fork
        elif fork and (python != sys.executable or environment is not None):
            raise ValueError("python and environment are given to the ForkServer, not to the Kit")
        self._server = fork or None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process that forks, and remove the state of the uncut run."""
        if self._own_server is not None:
            self._own_server.close()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def check(self, cut: Cut, directory: str | os.PathLike[str]) -> None:
        """Cut a run, let it resume, and compare its result with that of the uncut run.

        Args:
            cut: One of `cuts`.
            directory: An empty directory.

        Raises:
            NotConforming: The program failed, did not stop as it should, or returned another state.
        """
        expected = self._uncut()
        place, result = Path(directory) / "checkpoints", Path(directory) / "returned.safetensors"
        run = ChildRun(directory=str(place), steps=self.steps, result=str(result))
        is_cut = cut.how != "nan"
        code = self._run(
            ChildRun(
                directory=run.directory,
                steps=run.steps,
                result=run.result,
                how=cut.how,
                step=cut.step + (self._stops_at_once and cut.how == "terminate"),
            )
        )
        self._check_end(cut, code, place, result)
        if is_cut:
            result.unlink(missing_ok=True)
            self._must(self._run(run), "resumed", cut)
        problems = differences(expected, _returned(result))
        if problems:
            raise NotConforming(f"{self.program}, {cut}: {_listed(problems)}")
        self._check_kept(cut, place)

    def _uncut(self) -> object:
        if self._folder is None:
            folder = tempfile.TemporaryDirectory(prefix="ckptmgr-kit-")
            result = Path(folder.name) / "returned.safetensors"
            run = ChildRun(directory=f"{folder.name}/uncut", steps=self.steps, result=str(result))
            try:
                self._must(self._run(run), "uncut", None)
            except BaseException:
                folder.cleanup()
                raise
            self._folder = folder
        return _returned(Path(self._folder.name) / "returned.safetensors")

    def _check_end(self, cut: Cut, code: int, place: Path, result: Path) -> None:
        """Check how the cut run ended."""
        steps = _steps(place)
        match cut.how:
            case "kill" if code != -9:
                raise NotConforming(
                    f"{self.program}, {cut}: no save of step {cut.step} or later became durable; the program ended with {code}"
                )
            case "terminate" | "nan":
                self._must(code, "cut", cut)
            case "interrupt" if code == 0:
                raise NotConforming(f"{self.program}, {cut}: Ctrl-C did not end the program")
        if cut.how == "terminate":
            if max(steps, default=0) >= self.steps:
                raise NotConforming(
                    f"{self.program}, {cut}: it trained to its end; leave the loop when manager.should_stop"
                )
            if max(steps, default=0) < cut.step:
                raise NotConforming(f"{self.program}, {cut}: saved were only {sorted(steps)}")

    def _check_kept(self, cut: Cut, place: Path) -> None:
        steps = _steps(place)
        is_kept = self._keep is None or self._keep <= len(steps) <= self._keep + (cut.how != "nan")
        if not is_kept:  # the checkpoint that the run resumed from is kept, too
            raise NotConforming(
                f"{self.program}, {cut}: {self._keep} checkpoints should be kept, there are {sorted(steps)}"
            )
        if max(steps, default=0) != self.steps:
            raise NotConforming(
                f"{self.program}, {cut}: the last of {self.steps} steps is not saved, but {sorted(steps)}"
            )

    def _must(self, code: int, what: str, cut: Cut | None) -> None:
        if code != 0:
            at = "" if cut is None else f", {cut}"
            raise NotConforming(
                f"{self.program}{at}: the {what} run ended with {code}; its output is above"
            )

    def _run(self, run: ChildRun) -> int:
        Path(run.result).parent.mkdir(parents=True, exist_ok=True)
        if self._server is not None:
            return self._server.run(self.program, run)
        done = subprocess.run(  # noqa: S603 - the program that the user names
            [*self._command, run.to_json()],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            timeout=self._timeout_s,
            check=False,
        )
        return done.returncode


def differences(expected: object, found: object) -> list[str]:
    """Return where two states differ, by the names of their tensors."""
    flats = [tree.flatten(one) for one in (expected, found)]
    contents = [
        {tensor.spec.name: (tensor.spec, bytes(tensor.content())) for tensor in flat.tensors}
        for flat in flats
    ]
    names = sorted({*contents[0], *contents[1]})
    problems = [name for name in names if contents[0].get(name) != contents[1].get(name)]
    if not problems and flats[0].skeleton != flats[1].skeleton:
        problems = [_first_difference(flats[0].skeleton, flats[1].skeleton)]
    return problems


def _first_difference(expected: str, found: str) -> str:
    at = next(
        (i for i, pair in enumerate(zip(expected, found, strict=False)) if len(set(pair)) > 1),
        min(len(expected), len(found)),
    )
    return f"{expected[max(0, at - 40) : at + 40]!r} became {found[max(0, at - 40) : at + 40]!r}"


def _listed(problems: Sequence[str]) -> str:
    more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return f"the resumed run returned another state than the uncut one: {', '.join(problems[:_SHOWN])}{more}"


def _returned(result: Path) -> object:
    return load_state(result)


def _steps(place: Path) -> list[int]:
    """Return the steps of all checkpoints below a directory."""
    folders = {manifest.parent for manifest in place.rglob(f"*{SUFFIX}")}
    found = [one for folder in folders for one in Store(folder).scan()]
    return [one.step for one in found if one.is_countable or one.is_unproven]
