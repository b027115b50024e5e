# SPDX-License-Identifier: Apache-2.0
"""`Grid`: features of training, ended in four ways at four places, and resumed.

`python -m ckptmgr.testing.grid PROGRAM PAGE` runs all cells of a program, and writes their table to
a page of Markdown, between `<!-- grid -->` and `<!-- end of the grid -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, get_args

from ckptmgr.files.state_file import load_state
from ckptmgr.testing.cell import BATCH_OF, BATCHES, EPOCHS, Ending, Place
from ckptmgr.testing.child import ChildRun
from ckptmgr.testing.fork_server import NotConforming
from ckptmgr.testing.kit import Kit, differences

FEATURES: Sequence[str] = (
    "frozen and unfrozen layers",
    "two optimizers",
    "moments of another type",
    "averages of the epoch",
    "state changed at the end of an epoch",
    "finder",
    "data without a length",
    "loaders of unequal length",
    "persistent workers",
    "EMA",
    "accumulation that does not divide",
    "torch.compile",
)
ENDINGS: Sequence[Ending] = get_args(Ending)
PLACES: Sequence[Place] = get_args(Place)
ABSENT, REFUSED, WARNED, EQUAL, _FAILED = "none", "refused", "warned", "=", "FAILED"
_AGAIN = "\N{MINUS SIGN}"
_WIDTH = 80  # of the beginning of a message that a page shows
_BEGIN, _END = "<!-- grid -->", "<!-- end of the grid -->"


@dataclass(frozen=True, slots=True)
class Cell:
    """A feature, and how and where its training ends."""

    feature: str
    ending: Ending
    place: Place

    def __str__(self) -> str:
        return f"{self.feature}, {self.ending} {self.place}"


CELLS: Sequence[Cell] = [
    Cell(feature, ending, place) for feature in FEATURES for ending in ENDINGS for place in PLACES
]
PAIRS: Sequence[Cell] = [
    Cell(feature, ending, PLACES[(row + column) % len(PLACES)])
    for row, feature in enumerate(FEATURES)
    for column, ending in enumerate(ENDINGS)
]
"""Cells in which each pair of a feature, an ending and a place occurs."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell: `=`, or `-n` after n batches more than once; else why not."""

    symbol: str
    note: str = ""

    def is_within(self, shown: str) -> bool:
        """Return whether it is at least as good as a cell of a table."""
        is_better = self.symbol == EQUAL and shown == WARNED
        return self.symbol == shown or is_better or _lost(self.symbol) <= _lost(shown)


NOT_RUN = Outcome("·")


def _lost(symbol: str) -> float:
    """Return the number of batches that a symbol says are trained again; NaN for the others."""
    if symbol == EQUAL:
        return 0
    return float(symbol[1:]) if re.fullmatch(rf"{_AGAIN}\d+", symbol) else float("nan")


class Grid(Kit):
    """The cells of one program; see `ckptmgr.testing.cell.GridProgram` for what that is.

    Args:
        program: `file.py:function` or `module:function`.
        options: `fork`, `python`, `environment` and `timeout_s`, as for `Kit`.
    """

    def __init__(self, program: str, **options: Any) -> None:
        super().__init__(program, steps_per_epoch=BATCHES, **options)
        self._expected: dict[str, Any] = {}

    def outcome(self, cell: Cell, directory: str | Path) -> Outcome:
        """Run a cell and resume it.

        Args:
            cell: One of `CELLS`.
            directory: An empty directory.

        Raises:
            NotConforming: The cell is silent: the resumed run returned another state, and nothing
                said so; or a run failed, or did not end as it should.
        """
        expected = self._expected.get(cell.feature) or self._whole(cell, Path(directory))
        self._expected[cell.feature] = expected
        if found := _answer(expected):
            return found
        run = self._of(cell, Path(directory) / "cut")
        ended = self._read(cell, replace(run, ending=cell.ending, place=cell.place))
        resumed = self._read(cell, run)
        if found := _answer(ended or {}) or _answer(resumed or {}):
            return found
        self._check_ended(cell, ended, expected)
        if resumed is None:
            raise NotConforming(f"{self.program}, {cell}: the resumed run failed; see above")
        if problems := differences(expected["returned"], resumed["returned"]):
            if not resumed["said"]:
                raise NotConforming(f"{self.program}, {cell}: differs silently: {problems[:10]}")
            return Outcome(WARNED, " ".join(dict.fromkeys(resumed["said"])))
        begun = expected["batches"] - resumed["batches"]
        whole = BATCH_OF[cell.place] - (
            cell.ending != "SIGTERM" and cell.place != "in a validation"
        )
        return Outcome(f"{_AGAIN}{whole - begun}" if begun < whole else EQUAL)

    def _whole(self, cell: Cell, directory: Path) -> Any:
        whole = self._read(cell, self._of(cell, directory / "uncut"))
        if whole is None:
            raise NotConforming(f"{self.program}, {cell.feature}: the uncut run failed; see above")
        if "returned" in whole and whole["batches"] != BATCHES * EPOCHS:
            raise NotConforming(
                f"{self.program}, {cell.feature}: the uncut run had {whole['batches']} batches"
            )
        return whole

    def _of(self, cell: Cell, directory: Path) -> ChildRun:
        return ChildRun(
            directory=str(directory),
            steps=0,
            result=f"{directory}.safetensors",
            feature=cell.feature,
        )

    def _read(self, cell: Cell, run: ChildRun) -> Any:
        """Carry out a run; return its result, or None where it failed or was killed."""
        result = Path(run.result)
        result.unlink(missing_ok=True)
        self._run(run)
        return load_state(result) if result.exists() else None

    def _check_ended(self, cell: Cell, ended: Any, expected: Any) -> None:
        is_stopped = ended is not None and ended["batches"] < expected["batches"]
        if is_stopped if cell.ending == "SIGTERM" else ended is None:
            return
        raise NotConforming(f"{self.program}, {cell}: the run did not end, or failed; see above")


def _answer(found: Mapping[str, Any]) -> Outcome | None:
    if "absent" in found:
        return Outcome(ABSENT, found["absent"])
    return Outcome(REFUSED, found["refused"]) if "refused" in found else None


def table(outcomes: Mapping[Cell, Outcome]) -> str:
    """Return the outcomes as a table: a row for each feature, the four places in each cell."""
    lines = [f"| | {' | '.join(ENDINGS)} |", f"|---|{'---|' * len(ENDINGS)}"]
    notes: list[str] = []
    for feature in FEATURES:
        cells = []
        for ending in ENDINGS:
            found = [outcomes.get(Cell(feature, ending, place), NOT_RUN) for place in PLACES]
            notes += [_shown(feature, one) for one in found if one.note]
            symbols = [one.symbol for one in found]
            cells.append(symbols[0] if len(set(symbols)) == 1 else " ".join(symbols))
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"* {one}" for one in dict.fromkeys(notes))]).rstrip() + "\n"


def _shown(feature: str, outcome: Outcome) -> str:
    if outcome.symbol == ABSENT:
        return f"{feature}, none: {outcome.note}"
    # Without directories and numbers, which are others in each cell.
    text = re.sub(r"\d+", "N", re.sub(r"\S*/", "", outcome.note))
    return f"{outcome.symbol}: {shorten(text, _WIDTH, placeholder=' ...')}"


def shown_in(page: str) -> dict[Cell, str]:
    """Return the symbols of the table in a page."""
    text = page.split(_BEGIN, 1)[1].split(_END, 1)[0]
    rows = [[one.strip() for one in line.split("|")[1:-1]] for line in text.splitlines()]
    return {
        Cell(row[0], ending, place): symbol
        for row in rows
        if row and row[0] in FEATURES
        for ending, symbols in zip(ENDINGS, row[1:], strict=True)
        for place, symbol in zip(PLACES, _four(symbols), strict=True)
    }


def _four(symbols: str) -> Sequence[str]:
    found = symbols.split()
    return found * len(PLACES) if len(found) == 1 else found


def _outcomes(grid: Grid, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
    for cell in cells:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="ckptmgr-grid-") as directory:
            try:
                found = grid.outcome(cell, directory)
            except NotConforming as error:
                found = Outcome(_FAILED, str(error))
        took = time.monotonic() - started
        print(f"{cell}: {found.symbol} {found.note} ({took:.1f} s)", flush=True)  # noqa: T201
        yield cell, found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cells, or those in which each pair occurs; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m ckptmgr.testing.grid", description=__doc__)
    parser.add_argument("program", help="file.py:function or module:function")
    parser.add_argument("page", nargs="?", type=Path, help="the page that gets the table")
    parser.add_argument("--fork", action="store_true", help="import the program once")
    parser.add_argument("--pairs", action="store_true", help="only cells in which each pair occurs")
    parser.add_argument("--only", default="", help="only cells whose name has this in it")
    given = parser.parse_args(arguments)
    cells = [one for one in (PAIRS if given.pairs else CELLS) if given.only in str(one)]
    outcomes: dict[Cell, Outcome] = {}
    with Grid(given.program, fork=given.fork) as grid:
        for cell, found in _outcomes(grid, cells):
            outcomes[cell] = found
            if given.page is not None:
                before, rest = given.page.read_text().split(_BEGIN, 1)
                after = rest.split(_END, 1)[1]
                text = f"{before}{_BEGIN}\n\n{table(outcomes)}\n{_END}{after}"
                given.page.write_text(text)
    return int(any(one.symbol == _FAILED for one in outcomes.values()))


if __name__ == "__main__":  # pragma: no cover
    sys.exit(main())
