# SPDX-License-Identifier: Apache-2.0
"""Tables, errors and help fit the terminal, and no word is broken."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.cli import _COMMANDS, exits, layout, render
from tests.cli.running import run

HEADER = ["STEP", "SAVED", "METRIC", "CIPHER", "STATE"]
ROWS = [
    ["8000", "8 min ago", "accuracy=0.8875 loss=0.395", "-", "ok"],
    ["12000", "now", "accuracy=0.9 loss=0.25", "-", "damaged"],
]
RIGHT = {0, 1}


def shown(rows: Sequence[Sequence[str]], columns: int) -> list[str] | None:
    fitted = layout.fit([HEADER, *rows], RIGHT, columns)
    if fitted is None:
        return None
    return ["".join(one.text for one in line).rstrip() for row in fitted for line in row]


def test_table_that_fits_is_as_it_is_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [[render.Cell(text) for text in row] for row in ROWS]
    for columns in (None, 80):
        output = render.Output(command="ls", root=Path(), columns=columns)
        output.table(HEADER, cells, right="STEP SAVED")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == lines[3:]
    assert "CIPHER" in lines[0]


def test_column_that_says_nothing_is_left_out_first() -> None:
    assert shown(ROWS, 60) == [
        " STEP      SAVED  METRIC                      STATE",
        " 8000  8 min ago  accuracy=0.8875 loss=0.395  ok",
        "12000        now  accuracy=0.9 loss=0.25      damaged",
    ]


def test_cell_goes_on_below_itself() -> None:
    assert shown(ROWS, 45) == [
        " STEP      SAVED  METRIC           STATE",
        " 8000  8 min ago  accuracy=0.8875  ok",
        "                  loss=0.395",
        "12000        now  accuracy=0.9     damaged",
        "                  loss=0.25",
    ]


def test_figures_are_broken_last() -> None:
    lines = shown(ROWS, 38)
    assert lines is not None
    assert lines[1:4] == [
        " 8000  8 min  accuracy=0.8875  ok",
        "         ago  loss=0.395",
        "12000    now  accuracy=0.9     damaged",
    ]


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        (0, ["NAME", "  STEP  STATE", f"{'n' * 18}", "    10  ok"]),
        (2, ["  STEP  STATE", "    NAME", "    10  ok", f"    {'n' * 18}"]),
    ],
)
def test_longest_name_gets_a_line_of_its_own(at: int, expected: list[str]) -> None:
    lines = [["STEP", "STATE"], ["10", "ok"]]
    for line, name in zip(lines, ("NAME", "n" * 18), strict=True):
        line.insert(at, name)
    fitted = layout.fit(lines, {lines[0].index("STEP")}, 20)
    assert fitted is not None
    assert ["".join(one.text for one in line).rstrip() for row in fitted for line in row] == (
        expected
    )


def test_two_longest_names_get_lines_of_their_own_if_one_is_not_enough() -> None:
    lines = [["NAME", "STEP", "FILE", "STATE"], ["n" * 18, "10", "f" * 16, "ok"]]
    fitted = layout.fit(lines, {1}, 20)
    assert fitted is not None
    assert ["".join(one.text for one in line).rstrip() for line in fitted[1]] == [
        "n" * 18,
        "    10  ok",
        f"    {'f' * 16}",
    ]


def test_table_that_cannot_fit_is_broken_like_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(ROWS, 12) is None
    output = render.Output(command="ls", root=Path(), columns=12)
    output.table(HEADER, [[render.Cell(text) for text in row] for row in ROWS], right="STEP SAVED")
    assert capsys.readouterr().out.split() == " ".join([*HEADER, *map(" ".join, ROWS)]).split()
    assert layout.fit([["STEP"], ["-"]], (), 2) is None


@given(
    st.lists(st.lists(st.text("ab -", max_size=30), min_size=3, max_size=3), max_size=3),
    st.integers(1, 70),
)
def test_table_loses_no_word_and_only_a_cell_of_its_own_line_may_be_too_wide(
    rows: list[list[str]], columns: int
) -> None:
    lines = [["A", "B", "C"], *rows]
    fitted = layout.fit(lines, {1}, columns)
    for line, row in zip(lines, fitted or [], strict=bool(fitted)):
        texts = ["".join(one.text for one in part).rstrip() for part in row]
        words = sorted(word for cell in line for word in cell.split())
        kept = sorted(word for text in texts for word in text.split())
        assert [word for word in words if word not in "-ABC"] == [
            word for word in kept if word not in "-ABC"
        ]
        cells = [cell.strip() for cell in line]
        assert all(len(text) <= columns for text in texts if text.strip() not in cells)


class Screen(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_width_is_that_of_the_variable_then_of_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    assert layout.columns_of(Screen()) == 33
    assert layout.columns_of(io.StringIO()) is None
    for odd in ("", "0", "wide"):
        monkeypatch.setenv("COLUMNS", odd)
        assert layout.columns_of(Screen()) == 80


def test_error_at_a_terminal_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr("sys.stderr", stream := Screen())
    monkeypatch.setattr(exits, "to_stderr", stream.write)
    exits.note("five words that do not fit in a line\nand a second one")
    assert stream.getvalue().splitlines() == [
        "ckptmgr: note: five words that",
        "  do not fit in a line",
        "and a second one",
    ]


@pytest.mark.parametrize("command", [None, *_COMMANDS, "help"])
def test_help_of_every_command_fits_80_columns(command: str | None) -> None:
    shown = run(*([] if command is None else [command]), "--help")  # click's tests have 80 columns
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_example_goes_on_behind_a_backslash_and_an_exit_code_below_its_meaning() -> None:
    text = "  $ run 'a b' --first x --second\n  141  the reader has gone\nplain words, longer"
    assert layout.wrapped_help(text, 18).splitlines() == [
        "  $ run 'a b' \\",
        "      --first x \\",
        "      --second",
        "  141  the reader",
        "       has gone",
        "plain words, longer",
    ]
