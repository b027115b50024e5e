# SPDX-License-Identifier: Apache-2.0
"""The command line of the benchmark."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.bench.contestants import MODES, contestants
from tools.bench.measure import measure
from tools.bench.memory import Peak, measure_memory
from tools.bench.report import as_json, machine, memory_table, table
from tools.bench.workload import new_state, size_of

_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MODE_NAMES = [mode.name for mode in MODES]


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, write the JSON; 1 when a memory limit is passed."""
    options = _parser().parse_args(arguments)
    names = frozenset(options.modes or _MODE_NAMES)
    with tempfile.TemporaryDirectory(prefix="ckptmgr-bench-", dir=options.dir) as scratch:
        directory = Path(scratch)
        where = machine(directory)
        print(where)
        if options.memory:
            peaks = [
                measure_memory(
                    mode.name,
                    directory,
                    size_bytes=options.size,
                    is_encrypted=mode.is_encrypted,
                )
                for mode in MODES
                if mode.name in names
            ]
            print(memory_table(peaks))
            _write_json(options.json, as_json(where, options.size, [], peaks))
            return int(not all(peak.is_within for peak in peaks))
        state = new_state(options.size)
        size_bytes = size_of(state)
        everybody = contestants(state, names)
        figures = measure(
            everybody, directory, rounds=options.rounds, rest_s=options.rest, report=_progress
        )
    no_peaks: list[Peak] = []
    print(f"{size_bytes} bytes, {options.rounds} rounds, medians; durable saves, cold loads")
    print(table(figures, size_bytes))
    _write_json(options.json, as_json(where, size_bytes, figures, no_peaks))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--size", type=_size, default="1GiB", help="of the model [1GiB]")
    parser.add_argument("--rounds", type=_positive, default=5, help="measured rounds [5]")
    parser.add_argument(
        "--rest", type=float, default=3.0, help="seconds of rest before each save and load [3]"
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write [.]")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument(
        "--modes", nargs="+", choices=_MODE_NAMES, metavar="MODE", help=", ".join(_MODE_NAMES)
    )
    parser.add_argument("--memory", action="store_true", help="measure peak extra memory instead")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]iB)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 64MiB or 1GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{line}", end="", file=sys.stderr, flush=True)


def _write_json(path: Path | None, figures: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
