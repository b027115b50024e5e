# SPDX-License-Identifier: Apache-2.0
"""Plain loops with torch go on bit for bit: `make kit FRAMEWORK=torch`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ckptmgr.testing.grid import Cell
from tests.kit.cuts import every_cut, every_pair

pytest.importorskip("torch")
pytest.importorskip("torchdata", reason="needs torchdata: make kit FRAMEWORK=torch")

pytestmark = pytest.mark.kit
LOADERS = (
    "stock",
    "workers",
    "stateful",
    "stateful_workers",
    "nodes",
    "threads",
    "process",
    "best_after_loop",
)
PROGRAMS = {
    "examples/torch_loop.py:main": {"steps_per_epoch": 10, "keep": 2, "fork": True},
    **{
        f"tests/kit/torch_programs.py:{name}": {"steps_per_epoch": 4, "fork": True}
        for name in LOADERS
    },
}


@every_cut(PROGRAMS)
@pytest.mark.usefixtures("kit")
def test_loop_goes_on_as_if_it_had_not_been_cut(cut: str, check: Callable[[str], None]) -> None:
    check(cut)


@every_pair("tests/kit/torch_grid_programs.py:train", "docs/testing.md")
def test_cell_of_the_grid_is_as_its_page_says(
    cell: Cell, check_pair: Callable[[Cell], None]
) -> None:
    check_pair(cell)
