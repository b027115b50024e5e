# SPDX-License-Identifier: Apache-2.0
"""Lines and tables that fit a terminal: broken between words, never within one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from typing import NamedTuple, TextIO

HANGING = "  "
GAP = "  "
_USUAL_COLUMNS = 80
_EXAMPLE = re.compile(r" *\$ ")
_EXIT_CODE = re.compile(r" +[0-9]{1,3}  (?=\S)")
_SHELL_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")


class CellPiece(NamedTuple):
    """Text of a line of a table, and the column that it comes from; None for padding."""

    column: int | None
    text: str


def columns_of(stream: TextIO) -> int | None:
    """Return the width of the terminal behind a stream, or None if there is none."""
    if not stream.isatty():
        return None
    named = os.environ.get("COLUMNS", "")
    if named.isdecimal() and int(named):
        return int(named)
    try:
        return os.get_terminal_size(stream.fileno()).columns or _USUAL_COLUMNS
    except (OSError, ValueError):  # a stream that only claims to be a terminal
        return _USUAL_COLUMNS


def broken(line: str, columns: int, *, hanging: int = len(HANGING)) -> list[slice]:
    """Return the parts of a line that fit, broken between words; long words stay whole.

    Parts after the first are shorter by `hanging`, for the indent that the caller adds.
    """
    parts, start, indent = [], 0, 0
    while len(line) - start > columns - indent:
        end = line.rfind(" ", start + 1, start + columns - indent + 1)
        if not line[start : max(end, start)].strip():  # the first word is longer than a line
            rest = line[start:].lstrip()
            end = line.find(" ", len(line) - len(rest))
        if end < 0:
            break
        parts.append(slice(start, end))
        start = end + len(line[end:]) - len(line[end:].lstrip())
        indent = hanging
    return [*parts, slice(start, None)] if start < len(line) else parts


def wrapped(line: str, columns: int | None) -> list[str]:
    """Return the lines of a text that fit a terminal; the line itself where `columns` is None."""
    if columns is None:
        return [line]
    spans = broken(line, columns)
    return [f"{HANGING * (i > 0)}{line[span].rstrip()}" for i, span in enumerate(spans)] or [""]


def wrapped_help(text: str, columns: int | None) -> str:
    """Return a help text with the lines broken that click keeps as they are.

    An example goes on behind a backslash, as a shell reads it; an exit code, below its meaning.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if columns is None or len(line) <= columns:
            lines.append(line)
        elif match := _EXAMPLE.match(line):
            lines += _wrapped_example(line, match.end(), columns)
        elif match := _EXIT_CODE.match(line):
            spans = broken(line[match.end() :], columns - match.end(), hanging=0)
            parts = [line[match.end() :][span] for span in spans]
            lines += [line[: match.end()] + parts[0]]
            lines += [" " * match.end() + part for part in parts[1:]]
        else:
            lines.append(line)
    return "\n".join(lines)


def _wrapped_example(line: str, start: int, columns: int) -> Iterator[str]:
    indent, shown = " " * (start + 2), line[:start]
    is_first = True
    for word in _SHELL_WORD.findall(line[start:]):
        if not is_first and len(shown) + len(word) + 3 > columns:
            yield f"{shown} \\"
            shown, is_first = indent, True
        shown += word if is_first else f" {word}"
        is_first = False
    yield shown


def fit(
    lines: Sequence[Sequence[str]], right: Collection[int], columns: int
) -> list[list[list[CellPiece]]] | None:
    """Return the pieces of each line of each row of a table, or None where it cannot be made to fit.

    Columns without content are left out first, then cells are broken between words, those of
    figures last; at last the widest columns get lines of their own.

    Args:
        lines: The cells of the header and of each row.
        right: Columns that are aligned to the right, which hold figures.
        columns: Width of the terminal.
    """
    table = _Table(lines, right)
    shown = list(range(len(lines[0])))
    said = [i for i in shown if any(line[i] not in ("", "-") for line in lines[1:])] or shown
    if _width(table.widest) <= columns:
        return table.pieces(shown, table.widest)
    if widths := table.shrunk(said, columns):
        return table.pieces(said, widths)
    rest, alone = list(said), list[int]()
    while len(rest) > 2:
        alone.append(max(rest, key=table.least.__getitem__))
        rest.remove(alone[-1])
        if widths := table.shrunk(rest, columns - len(HANGING)):
            return table.pieces(rest, widths, alone=sorted(alone))
    return None


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _least(cell: str) -> int:
    """Return the length of the longest word; spaces before the first one belong to it."""
    words = cell.split()
    first = len(cell) - len(cell.lstrip()) + len(words[0]) if words else 0
    return max(first, *map(len, words), 0)


class _Table:
    """Cells of a table, and how wide each column must be."""

    def __init__(self, lines: Sequence[Sequence[str]], right: Collection[int]) -> None:
        self._lines = lines
        self._right = right
        self.widest = [max(map(len, column)) for column in zip(*lines, strict=True)]
        self.least = [max(_least(cell) for cell in column) for column in zip(*lines, strict=True)]

    def shrunk(self, chosen: Sequence[int], columns: int) -> list[int] | None:
        """Return widths of columns with which their cells fit when they are broken, or None."""
        widths = [self.widest[i] for i in chosen]
        for kinds in ((False,), (False, True)):
            while _width(widths) > columns:
                loose = [
                    at
                    for at, i in enumerate(chosen)
                    if widths[at] > self.least[i] and (i in self._right) in kinds
                ]
                if not loose:
                    break
                widths[max(loose, key=widths.__getitem__)] -= 1
        return widths if _width(widths) <= columns else None

    def pieces(
        self, chosen: Sequence[int], widths: Sequence[int], *, alone: Sequence[int] = ()
    ) -> list[list[list[CellPiece]]]:
        """Return the pieces of each line of each row; each column of `alone` has lines of its own."""
        broken_lines = [
            [
                [line[i][span].rstrip() for span in broken(line[i], width, hanging=0)]
                for i, width in zip(chosen, widths, strict=True)
            ]
            for line in self._lines
        ]
        tight = [
            max(len(part) for part in (*chain(*cells), ""))
            for cells in zip(*broken_lines, strict=True)
        ]
        rows = []
        for line, parts in zip(self._lines, broken_lines, strict=True):
            row = []
            for number in range(max(1, *map(len, parts))):
                row.append([CellPiece(None, HANGING)] if alone else [])
                for i, width, part in zip(chosen, tight, parts, strict=True):
                    text = part[number] if number < len(part) else ""
                    padding = CellPiece(None, " " * (width - len(text)))
                    piece = CellPiece(i, text)
                    row[-1] += [padding, piece] if i in self._right else [piece, padding]
                    row[-1].append(CellPiece(None, GAP))
            before = [[CellPiece(i, line[i])] for i in alone if i < chosen[0]]
            after = [
                [CellPiece(None, HANGING * 2), CellPiece(i, line[i])]
                for i in alone
                if i > chosen[0]
            ]
            rows.append([*before, *row, *after])
        return rows
