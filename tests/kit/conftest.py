# SPDX-License-Identifier: Apache-2.0
"""`cuts`: one test for each cut of a program, and one for each pair of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmgr.testing import ForkServer, Kit
from ckptmgr.testing.grid import Cell, Grid, shown_in

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def server() -> Iterator[ForkServer]:
    """The process that imports the framework once, for all programs."""
    with ForkServer() as made:
        yield made


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest, server: ForkServer) -> Iterator[Kit]:
    """The kit for the program that `every_cut` names."""
    program, options = request.param
    if options.get("fork") and "environment" not in options:
        options = {**options, "fork": server}
    with Kit(f"{ROOT}/{program}", **options) as made:
        yield made


@pytest.fixture
def check(kit: Kit, tmp_path: Path) -> Callable[[str], None]:
    """Check a cut by its name."""

    def check_cut(name: str) -> None:
        (cut,) = (one for one in kit.cuts if one.name == name)
        kit.check(cut, tmp_path)

    return check_cut


@pytest.fixture(scope="module")
def grid(
    request: pytest.FixtureRequest, server: ForkServer
) -> Iterator[tuple[Grid, dict[Cell, str]]]:
    """The grid of the program that `every_pair` names, and what its page shows."""
    program, page = request.param
    with Grid(f"{ROOT}/{program}", fork=server) as made:
        yield made, shown_in((ROOT / page).read_text())


@pytest.fixture
def check_pair(grid: tuple[Grid, dict[Cell, str]], tmp_path: Path) -> Callable[[Cell], None]:
    """Check that a cell is as good as its page says."""
    of_program, shown = grid

    def check_cell(cell: Cell) -> None:
        found = of_program.outcome(cell, tmp_path)
        assert found.is_within(shown[cell]), f"{cell} is shown as {shown[cell]}, and {found}"

    return check_cell
