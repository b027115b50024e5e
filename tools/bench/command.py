# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tools.bench import options
from tools.bench.compression import ELEMENTS, measure_compression
from tools.bench.figures import Figures
from tools.bench.lazy import measure_lazy
from tools.bench.machine import machine
from tools.bench.memory import Peak, measure_memory
from tools.bench.modes import MODES
from tools.bench.peers import LIBRARIES
from tools.bench.ranks import measure_ranks
from tools.bench.scale import measure_counts, measure_sizes
from tools.bench.sections import measure_backgrounds, measure_files, measure_loops
from tools.bench.session import Pace, Session
from tools.bench.tables import report
from tools.bench.targets import verdicts
from tools.bench.team import Setup, Team
from tools.bench.workload import Workload

_SLOW_SHARE = 8
_SCALE_ROUNDS = 2
_SHORT_REST_S = 0.25
_FEWER_ROUNDS = ("sizes", "counts", "compression")
_SHORTER_REST = ("counts", "lazy", "compression")
_ONE_THREAD: Mapping[str, str] = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)


class Benchmark:
    """One run: which sections, with whom, how often.

    Args:
        asked: The parsed options.
        directory: Where to write; emptied by the caller.
    """

    def __init__(self, asked: options.Asked, directory: Path) -> None:
        self._asked = asked
        self._setup = Setup(
            libraries=asked.libraries,
            pythons=asked.pythons,
            directory=directory,
            rest_s=asked.rest_s,
        )
        self._pace = Pace(
            rounds=asked.rounds,
            peer_rounds=min(asked.peer_rounds, asked.rounds),
            rest_s=asked.rest_s,
        )
        self.figures = Figures()
        self.peaks: list[Peak] = []
        self.missing: dict[str, str] = {}
        self.about: dict[str, str] = {}

    def run(self) -> None:
        """Measure every section that was asked for."""
        whole = Workload(size_bytes=self._asked.size_bytes)
        for section in self._asked.sections:
            match section:
                case "files":
                    self._files(section, whole, is_slow=False)
                case "slow":
                    small = Workload(size_bytes=self._asked.size_bytes // _SLOW_SHARE)
                    self._files("slow files", small, is_slow=True)
                case "background":
                    self._backgrounds(section, Workload(size_bytes=whole.size_bytes // 2))
                case "loops":
                    self._loops(section, whole)
                case "sizes":
                    measure_sizes(self._setup, self._session, self._asked.sizes_bytes)
                case "counts":
                    measure_counts(self._setup, self._session, self._asked.counts)
                case "lazy":
                    measure_lazy(self._session, self._asked.lazy_bytes)
                case "compression":
                    measure_compression(self._session, whole.size_bytes // len(ELEMENTS))
                case "ranks":
                    measure_ranks(self._session(section, whole), self._asked.worlds)
                case "memory":
                    self._memory()

    def _files(self, section: str, workload: Workload, *, is_slow: bool) -> None:
        chosen = {mode.name for mode in MODES if mode.is_slow is is_slow} & set(self._asked.modes)
        if not chosen:
            return
        if not is_slow:
            chosen |= {"plain", "encrypted"}
        libraries = [
            name
            for name in self._setup.libraries
            if not is_slow or name in ("raw", "ckptmgr", "mindspore")
        ]
        with self._team(workload, libraries=libraries) as team:
            players = [
                player
                for player in team.players("contestants")
                if player.mode in chosen | {"limit"}
            ]
            measure_files(self._session(section, workload), players)
            self._note(team)

    def _backgrounds(self, section: str, workload: Workload) -> None:
        # The bare disk takes no copy that could hold up the caller.
        libraries = [name for name in self._with_background() if name != "raw"]
        with self._team(workload, libraries=libraries) as team:
            players = list(team.players("backgrounds"))
            measure_backgrounds(self._session(section, workload), players)
            self._note(team)

    def _loops(self, section: str, workload: Workload) -> None:
        """Each loop gets one processor, and the save the rest."""
        libraries = self._with_background()
        with self._team(workload, libraries=libraries, environment=_ONE_THREAD) as team:
            players = list(team.players("backgrounds"))
            measure_loops(self._session(section, workload), players)
            self._note(team)

    def _with_background(self) -> list[str]:
        return [name for name in self._setup.libraries if LIBRARIES[name].has_background]

    def _memory(self) -> None:
        for mode in MODES:
            if mode.name in self._asked.modes:
                size_bytes = self._asked.size_bytes // (_SLOW_SHARE if mode.is_slow else 1)
                peak = measure_memory(
                    mode.name,
                    self._setup.directory,
                    size_bytes=size_bytes,
                    is_encrypted=mode.is_encrypted,
                )
                self.peaks.append(peak)

    def _team(
        self,
        workload: Workload,
        *,
        libraries: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> Team:
        setup = replace(self._setup, libraries=libraries, environment=environment or {})
        return Team(setup, workload)

    def _session(self, section: str, workload: Workload) -> Session:
        pace = self._pace
        if section in _FEWER_ROUNDS:
            pace = replace(pace, rounds=min(_SCALE_ROUNDS, pace.rounds), peer_rounds=1)
        if section in _SHORTER_REST:
            pace = replace(pace, rest_s=min(_SHORT_REST_S, pace.rest_s))
        return Session(
            section=section,
            workload=workload,
            directory=self._setup.directory,
            pace=pace,
            figures=self.figures,
            failures=self.missing,
            report=_progress,
        )

    def _note(self, team: Team) -> None:
        self.missing |= team.missing
        self.about |= team.about


def main(arguments: Sequence[str]) -> int:
    """Measure, print the tables, write JSON and charts; 1 when a memory limit is passed."""
    asked = options.parse(arguments)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[: asked.processors])  # the workers inherit it
    try:
        return _measure(asked)
    finally:
        os.sched_setaffinity(0, allowed)


def _measure(asked: options.Asked) -> int:
    with tempfile.TemporaryDirectory(prefix="ckptmgr-bench-", dir=asked.directory) as scratch:
        where = machine(Path(scratch))
        print(where)
        benchmark = Benchmark(asked, Path(scratch))
        try:
            benchmark.run()
        finally:
            _tell(where, benchmark, asked.output)  # values measured before Ctrl-C, too
    return int(not all(peak.is_within for peak in benchmark.peaks))


def _tell(where: str, benchmark: Benchmark, output: Path | None) -> None:
    judged = verdicts(benchmark.figures, benchmark.peaks, benchmark.about)
    about = ", ".join(f"{name} {value}" for name, value in benchmark.about.items())
    tables = report(benchmark.figures, judged, benchmark.peaks, benchmark.missing)
    text = f"{about}\n\n{tables}\n"
    print(text)
    if output is None:
        return
    everything = {
        "machine": where,
        "about": benchmark.about,
        "missing": benchmark.missing,
        "figures": benchmark.figures.as_json(),
        "memory": [peak.as_json() for peak in benchmark.peaks],
        "targets": [verdict.as_json() for verdict in judged],
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "figures.json").write_text(json.dumps(everything, indent=1) + "\n")
    (output / "tables.md").write_text(f"{where}\n{text}")
    try:
        from tools.bench.chart import draw
    except ModuleNotFoundError as error:
        print(f"no chart: {error}; it needs matplotlib (`make bench` installs it)")
        return
    draw(benchmark.figures, output)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)
