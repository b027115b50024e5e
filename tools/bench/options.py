# SPDX-License-Identifier: Apache-2.0
"""The options of the benchmark."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.bench.lazy import LAZY_BYTES
from tools.bench.modes import MODES
from tools.bench.peers import LIBRARIES
from tools.bench.ranks import WORLDS
from tools.bench.scale import COUNTS, SIZES_BYTES

SECTIONS = (
    "files",
    "slow",
    "background",
    "loops",
    "sizes",
    "counts",
    "lazy",
    "compression",
    "ranks",
    "memory",
)
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
_MODE_NAMES = tuple(mode.name for mode in MODES)
_QUICK = ("--size", "256MiB", "--rounds", "3", "--peer-rounds", "1", "--lazy-size", "512MiB")
_QUICK_SECTIONS = ("files", "background", "loops", "counts", "lazy", "compression")
_QUICK_COUNTS = (10, 1_000, 10_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The requested options; see `--help`."""

    size_bytes: int
    rounds: int
    peer_rounds: int
    rest_s: float
    directory: Path
    output: Path | None
    sections: Sequence[str]
    libraries: Sequence[str]
    modes: Sequence[str]
    pythons: Mapping[str, str]
    sizes_bytes: Sequence[int]
    counts: Sequence[int]
    worlds: Sequence[int]
    lazy_bytes: int
    processors: int | None


def parse(arguments: Sequence[str]) -> Asked:
    """Return the requested options, or leave with a message."""
    parser = _parser()
    is_quick = parser.parse_args(arguments).quick
    given = parser.parse_args([*_QUICK, *arguments] if is_quick else arguments)
    return Asked(
        size_bytes=given.size,
        rounds=given.rounds,
        peer_rounds=given.peer_rounds,
        rest_s=given.rest,
        directory=given.dir,
        output=given.output,
        sections=given.sections or (_QUICK_SECTIONS if is_quick else SECTIONS),
        libraries=given.libraries or tuple(LIBRARIES),
        modes=given.modes or _MODE_NAMES,
        pythons=dict(given.python),
        sizes_bytes=given.sizes or SIZES_BYTES,
        counts=given.counts or (_QUICK_COUNTS if is_quick else COUNTS),
        worlds=given.worlds,
        lazy_bytes=given.lazy_size,
        processors=given.processors,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench", description="Measure ours, other libraries and the bare disk side by side."
    )
    parser.add_argument("--quick", action="store_true", help="a smaller run of a few minutes")
    parser.add_argument("--size", type=_size, default="1GiB", help="of the model [1GiB]")
    parser.add_argument("--rounds", type=_positive, default=5, help="measured rounds [5]")
    parser.add_argument(
        "--peer-rounds", type=_positive, default=2, help="of libraries that no target names [2]"
    )
    parser.add_argument(
        "--rest", type=float, default=3.0, help="seconds of rest before each measurement [3]"
    )
    parser.add_argument(
        "--processors", type=_positive, help="use no more than the first so many [all]"
    )
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to save [.]")
    parser.add_argument("--output", type=Path, help="write figures, tables and charts here")
    _add_choice(parser, "--sections", SECTIONS)
    _add_choice(parser, "--libraries", tuple(LIBRARIES))
    _add_choice(parser, "--modes", _MODE_NAMES)
    parser.add_argument("--sizes", type=_size, nargs="+", help="of the section `sizes`")
    parser.add_argument("--counts", type=_positive, nargs="+", help="of the section `counts`")
    parser.add_argument(
        "--worlds", type=_positive, nargs="+", default=WORLDS, help="ranks of the section `ranks`"
    )
    parser.add_argument(
        "--lazy-size",
        type=_size,
        default=LAZY_BYTES,
        help="of the file in the section `lazy` [4GiB]",
    )
    parser.add_argument(
        "--python",
        type=_interpreter,
        action="append",
        default=[],
        metavar="LIBRARY=PATH",
        help="run a library with another interpreter",
    )
    return parser


def _add_choice(parser: argparse.ArgumentParser, name: str, choices: Sequence[str]) -> None:
    parser.add_argument(
        name, nargs="+", choices=choices, metavar="NAME", help=f"some of: {', '.join(choices)}"
    )


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]iB)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 64MiB or 1GiB")
    return int(float(match[1]) * _UNITS[(match[2] or "").upper()])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _interpreter(text: str) -> tuple[str, str]:
    library, _, path = text.partition("=")
    if library not in LIBRARIES or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not LIBRARY=PATH, e.g. mindspore=bin/python")
    return library, str(Path(path).absolute())
