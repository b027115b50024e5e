# SPDX-License-Identifier: Apache-2.0
"""Fuzz the parsers: `make fuzz`, or `python -m tools.fuzz --target manifest --inputs 1000000`.

Every target runs in a process of its own with bounded memory, one after the other. Their findings are kept in a corpus, from
which the next run goes on; beside it stand the findings, and `figures.json` adds up what all runs did.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random
from typing import Any

from tools.fuzz.mutators import MAX_INPUT_BYTES
from tools.fuzz.runner import Figures, Finding, alarms, fuzz, limit_memory
from tools.fuzz.targets import TARGETS, Target

MEMORY_BYTES = 256 << 20
"""Of one input of at most 64 KiB."""
HANG_S = 120.0
_TOTAL_S = 600.0
_LENGTH = struct.Struct("<QI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a target has had enough; None for no such limit."""

    inputs: int | None
    cpu_s: float | None
    seconds: float | None

    def hold(self) -> Callable[[Figures], bool]:
        """Return what tells whether to go on, from now on."""
        ends = None if self.seconds is None else time.monotonic() + self.seconds

        def goes_on(figures: Figures) -> bool:
            if self.inputs is not None and figures.inputs >= self.inputs:
                return False
            if self.cpu_s is not None and figures.cpu_s >= self.cpu_s:
                return False
            return ends is None or figures.inputs % 64 != 0 or time.monotonic() < ends

        return goes_on


class Shared:
    """The input that a child is at, which outlives it."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _LENGTH.size + MAX_INPUT_BYTES)
        self._count = 0

    def put(self, data: bytes) -> None:
        """Note the next input."""
        self._count += 1
        self._memory[_LENGTH.size : _LENGTH.size + len(data)] = data
        self._memory[: _LENGTH.size] = _LENGTH.pack(self._count, len(data))

    def get(self) -> tuple[int, bytes]:
        """Return how many inputs there were, and the last one."""
        count, length = _LENGTH.unpack(self._memory[: _LENGTH.size])
        return count, self._memory[_LENGTH.size : _LENGTH.size + length]


def run_apart(target: Target, limits: Limits, *, seed: int, corpus: Path) -> dict[str, Any]:
    """Run a target in a process of its own; return its figures and keep its findings."""
    shared = Shared()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_run, args=(target, limits, seed, corpus, shared, theirs))
    child.start()
    theirs.close()
    report = _waited_for(child, ours, shared)
    if report is None:
        count, data = shared.get()
        problem = f"the process ended with {child.exitcode}, or hung for {HANG_S} s, at this input"
        _keep_finding(corpus, target, Finding(data=data, report=problem))
        report = {"inputs": count, "findings": 1}
    return report


def _waited_for(child: BaseProcess, ours: Connection, shared: Shared) -> dict[str, Any] | None:
    last, since = -1, time.monotonic()
    while not ours.poll(1.0):
        count = shared.get()[0]
        if count != last:
            last, since = count, time.monotonic()
        elif time.monotonic() - since > HANG_S:
            child.kill()
            break
    try:
        report: dict[str, Any] | None = ours.recv() if ours.poll() else None
    except EOFError:
        report = None
    child.join()
    return report


def _run(
    target: Target, limits: Limits, seed: int, corpus: Path, shared: Shared, out: Connection
) -> None:
    target.seeds()  # does its imports before the memory is limited
    folder = corpus / target.name
    known = [path.read_bytes() for path in sorted(folder.glob("*"))]
    old = [path.read_bytes() for path in sorted(_findings(corpus).glob(f"{target.name}-*.bin"))]
    limit_memory(MEMORY_BYTES)
    with alarms():
        figures = fuzz(
            target,
            Random(seed),
            corpus=known,
            old_findings=old,
            goes_on=limits.hold(),
            watch=shared.put,
            report=lambda finding: _keep_finding(corpus, target, finding),
        )
    folder.mkdir(parents=True, exist_ok=True)
    for data in figures.new:
        (folder / Finding(data=data, report="").name).write_bytes(data)
    out.send(
        {
            "inputs": figures.inputs,
            "cpu_s": round(figures.cpu_s, 3),
            "accepted": figures.accepted,
            "findings": len(figures.findings),
            "outcomes": len(figures.new),
            "slowest_input_s": round(figures.slowest_s, 4),
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    )


def _findings(corpus: Path) -> Path:
    return corpus / "findings"


def _keep_finding(corpus: Path, target: Target, finding: Finding) -> None:
    folder = _findings(corpus)
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{target.name}-{finding.name}"
    (folder / f"{stem}.bin").write_bytes(finding.data)
    (folder / f"{stem}.txt").write_text(finding.report, encoding="utf-8", errors="replace")
    last = finding.report.strip().splitlines()[-1]
    print(f"finding: {folder / stem}.bin: {last[:200]}", flush=True)


def add_up(path: Path, name: str, report: dict[str, Any]) -> None:
    """Add the figures of a run to those of the runs before."""
    figures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    old = figures.get(name, {})
    sums = {key: old.get(key, 0) + report.get(key, 0) for key in ("inputs", "cpu_s", "accepted")}
    tops = {
        key: max(old.get(key, 0), report.get(key, 0))
        for key in ("outcomes", "slowest_input_s", "peak_memory_bytes")
    }
    figures[name] = {**sums, "findings": report["findings"], **tops}
    path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    """Run the targets that the command line names; return 1 when something was found."""
    names = [target.name for target in TARGETS]
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description="Fuzz the parsers.")
    parser.add_argument(
        "--target", choices=names, action="append", help="run only this; may be repeated"
    )
    parser.add_argument("--inputs", type=int, help="how many inputs for each target")
    parser.add_argument("--cpu-minutes", type=float, help="CPU time for each target")
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"time for all targets together; {_TOTAL_S:g} unless another limit is given",
    )
    parser.add_argument(
        "--seed", type=int, default=time.time_ns() % (1 << 32), help="of the changes"
    )
    parser.add_argument(
        "--corpus", type=Path, default=Path(".fuzz-corpus"), help="where to go on from"
    )
    options = parser.parse_args(arguments)
    targets = [one for one in TARGETS if options.target is None or one.name in options.target]
    seconds = options.seconds
    if seconds is None and options.inputs is None and options.cpu_minutes is None:
        seconds = _TOTAL_S
    options.corpus.mkdir(parents=True, exist_ok=True)
    print(f"seed {options.seed}, corpus {options.corpus}")
    ends = None if seconds is None else time.monotonic() + seconds
    found = 0
    for number, target in enumerate(targets):
        share = None if ends is None else (ends - time.monotonic()) / (len(targets) - number)
        cpu_s = None if options.cpu_minutes is None else 60 * options.cpu_minutes
        limits = Limits(inputs=options.inputs, cpu_s=cpu_s, seconds=share)
        report = run_apart(target, limits, seed=options.seed, corpus=options.corpus)
        add_up(options.corpus / "figures.json", target.name, report)
        found += report["findings"]
        print(f"{target.name:12} {json.dumps(report)}", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    if not hasattr(os, "fork"):
        sys.exit("needs os.fork")
    sys.exit(main())
