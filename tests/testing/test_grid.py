# SPDX-License-Identifier: Apache-2.0
"""The grid of the kit: its pairs, its table, and what it finds of a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest

from ckptmgr.testing import ForkServer, NotConforming
from ckptmgr.testing.grid import CELLS, FEATURES, PAIRS, Cell, Grid, Outcome, main, shown_in, table

PROGRAM = """
import random, warnings
from ckptmgr import CheckpointConfig, CheckpointManager
from ckptmgr.testing.cell import BATCHES, EPOCHS, NoSuchFeature

def train(directory, feature, moments):
    if feature == "finder":
        raise NoSuchFeature("there is none")
    random.seed(0)
    state = {"drawn": []}
    with CheckpointManager(directory, CheckpointConfig(**moments.options)) as manager:
        start = manager.resume(state)
        step = start.step
        for epoch in range(start.next_epoch, EPOCHS):
            for batch in manager.batches(range(BATCHES)):
                moments.batch()
                state["drawn"].append((batch, random.random()))
                step += 1
                manager.step_end(step, state, epoch=epoch)
                if manager.should_stop:
                    return None
            moments.validation()
            if manager.should_stop:
                return None
    return state
"""
INSIDE = Cell("EMA", "SIGKILL", "inside an epoch")


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """The process that imports ckptmgr once, for all programs."""
    with ForkServer() as made:
        yield made


@pytest.fixture
def grid_of(tmp_path: Path, server: ForkServer) -> Callable[..., Grid]:
    """Make a grid of the program, with changes in its text."""

    def make(*changes: tuple[str, str]) -> Grid:
        text = PROGRAM
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "program.py").write_text(text)
        return Grid(f"{tmp_path}/program.py:train", fork=server)

    return make


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_pairs_hold_every_pair_of_a_feature_an_ending_and_a_place() -> None:
    def pairs_in(cells: object) -> set[object]:
        assert isinstance(cells, list)
        parts = [(one.feature, one.ending, one.place) for one in cells]
        return {pair for one in parts for pair in combinations(one, 2)}

    assert pairs_in(PAIRS) == pairs_in(CELLS)
    assert len(PAIRS) == 4 * len(FEATURES)


@pytest.mark.parametrize("cell", [one for one in PAIRS if one.feature == "EMA"], ids=str)
def test_program_that_goes_on_is_equal(
    cell: Cell, grid_of: Callable[..., Grid], directory: Path
) -> None:
    assert grid_of().outcome(cell, directory) == Outcome("=")


def test_batches_that_are_trained_again_are_counted(
    grid_of: Callable[..., Grid], directory: Path
) -> None:
    seldom = ("**moments.options", "**{**moments.options, 'save_checkpoint_steps': 5}")
    assert grid_of(seldom).outcome(INSIDE, directory) == Outcome("\N{MINUS SIGN}2")


def test_absent_feature_says_why(grid_of: Callable[..., Grid], directory: Path) -> None:
    cell = Cell("finder", "SIGKILL", "inside an epoch")
    assert grid_of().outcome(cell, directory) == Outcome("none", "there is none")


FORGETS = ('state = {"drawn": []}', 'state, lost = {"drawn": []}, random.Random(0)')
DRAWS = ("random.random()))", "lost.random()))")


def test_other_state_without_a_word_is_no_outcome(
    grid_of: Callable[..., Grid], directory: Path
) -> None:
    with pytest.raises(NotConforming, match="differs silently"):
        grid_of(FORGETS, DRAWS).outcome(INSIDE, directory)


def test_other_state_after_a_warning_is_told(grid_of: Callable[..., Grid], directory: Path) -> None:
    said = ("step = start.step", 'step = start.step; warnings.warn("a resumed run differs")')
    found = grid_of(FORGETS, DRAWS, said).outcome(INSIDE, directory)
    assert found == Outcome("warned", "a resumed run differs")


def test_refusal_names_its_error(grid_of: Callable[..., Grid], directory: Path) -> None:
    other = ('{"drawn": []}', '{"drawn": [], **({} if moments._place else {"more": 1})}')
    grid = grid_of(other)
    found = grid.outcome(INSIDE, directory)
    assert found.symbol == "refused"
    assert found.note.startswith("StateMismatch: the checkpoint does not fit this state")


def test_run_that_does_not_stop_is_no_outcome(
    grid_of: Callable[..., Grid], directory: Path
) -> None:
    grid = grid_of(
        ("random.seed(0)", "random.seed(0); import signal; signal.signal(15, lambda *_: None)"),
        ("options))", "options), stop=Stop(signals=False))"),
        ("import CheckpointConfig", "import Stop, CheckpointConfig"),
        ("manager.should_stop", "False"),
    )
    with pytest.raises(NotConforming, match="did not end"):
        grid.outcome(Cell("EMA", "SIGTERM", "inside an epoch"), directory)


def test_outcome_may_be_better_than_the_page_and_not_worse() -> None:
    assert Outcome("=").is_within("\N{MINUS SIGN}1")
    assert Outcome("refused").is_within("refused")
    assert Outcome("=").is_within("warned")
    assert not Outcome("\N{MINUS SIGN}1").is_within("=")
    assert not Outcome("warned").is_within("=")
    assert not Outcome("=").is_within("refused")


def test_command_writes_the_table_that_is_read_back(
    tmp_path: Path, grid_of: Callable[..., Grid], capsys: pytest.CaptureFixture[str]
) -> None:
    program = grid_of().program
    page = tmp_path / "page.md"
    page.write_text("A\n<!-- grid -->\n<!-- end of the grid -->\nB\n")
    assert main([program, str(page), "--fork", "--pairs", "--only", "finder"]) == 0
    assert "finder, SIGKILL at its last batch: none" in capsys.readouterr().out
    text = page.read_text()
    assert (text[:2], text[-2:], text.count("B")) == ("A\n", "B\n", 1)
    assert "* finder, none: there is none" in text
    shown = shown_in(page.read_text())
    assert set(shown) == set(CELLS)
    assert shown[Cell("finder", "SIGKILL", "at its last batch")] == "none"
    assert shown[INSIDE] == "·"


def test_table_has_the_places_of_a_cell_in_their_order() -> None:
    outcomes = {one: Outcome("=") for one in CELLS} | {
        INSIDE: Outcome("refused", "runs/x/ckpt-7.ckpt: no")
    }
    text = table(outcomes)
    assert "| EMA | refused = = = | = | = | = |" in text
    assert text.endswith("* refused: ckpt-N.ckpt: no\n")
