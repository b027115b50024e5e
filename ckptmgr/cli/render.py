# SPDX-License-Identifier: Apache-2.0
"""Output of commands: one `Output` decides between text, JSON and bare paths.

The plain text is the reference. On a terminal the same text is coloured; no meaning is in the
colour alone.
"""

from __future__ import annotations

import codecs
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, TextIO

import click

from ckptmgr.cli import layout
from ckptmgr.cli.exits import cut, escape, note
from ckptmgr.cli.options import Session
from ckptmgr.core.model import Checkpoint
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.json_fields import checkpoint_json as checkpoint_json
from ckptmgr.maintenance.json_fields import finite as finite
from ckptmgr.maintenance.json_fields import has_known_step
from ckptmgr.maintenance.json_fields import timestamp as timestamp

IN_THE_TRASH = (
    "ckptmgr prune --undo brings the last batch back; the first prune after the grace time frees"
    " the space, --now at once"
)
"""Note after a removal into the trash."""

_SPELLED = {"\t": r"\t", "\n": r"\n", "\r": r"\r"}
_LINES_AT_ONCE = 1000  # each call of `echo` flushes
_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


class Cell(NamedTuple):
    """Text of a table, and its style."""

    text: str
    style: str = ""


STATE_STYLES: Mapping[str, str] = {
    "ok": "green",
    "complete": "yellow",
    "incomplete": "dim",
    "unverified": "yellow",
    "unproven": "yellow",
    "other-key": "yellow",
    "other-owner": "yellow",
    "partial": "yellow",
    "corrupt": "bold red",
    "unreadable": "bold red",
    "plain": "green",
    "damaged": "bold red",
    "missing": "bold red",
    "leftover": "dim",
    "writing": "cyan",
    "keep": "green",
    "drop": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Destination of the result of one command.

    Attributes:
        command: For the schema of the JSON.
        root: The directory or file it is about.
        is_json: One JSON object instead of text.
        is_quiet: Paths only.
        is_verbose: Every field, below the text.
        has_unicode: Whether glyphs outside ASCII may be used.
        is_terminal: Whether stdout is a terminal.
        has_nul: Whether a NUL, not a line feed, ends each bare path.
        columns: Width of the terminal, at which lines are broken between words; None elsewhere.
    """

    command: str
    root: Path
    is_json: bool = False
    is_quiet: bool = False
    is_verbose: bool = False
    has_color: bool = False
    has_unicode: bool = True
    is_terminal: bool = False
    has_nul: bool = False
    columns: int | None = None

    @property
    def is_text(self) -> bool:
        """Whether text is wanted."""
        return not (self.is_json or self.is_quiet)

    @property
    def has_fields(self) -> bool:
        """Whether `result` prints something: the JSON object, or every field below the text."""
        return self.is_json or self.is_verbose

    def progress(self, label: str, size_bytes: int) -> AbstractContextManager[object]:
        """Return a context that shows progress on a terminal while a file is read."""
        from ckptmgr.cli.progress import ProgressLine

        if not self.is_text:
            return nullcontext()
        return ProgressLine(escape(label), size_bytes, has_color=self.has_color)

    def line(self, *cells: Cell | str) -> None:
        """Print one line of text."""
        parts = [Cell(cell) if isinstance(cell, str) else cell for cell in cells]
        shown = [Cell(_spelled_out(cut(part.text), sys.stdout), part.style) for part in parts]
        if self.has_color:
            _print_styled(shown, sys.stdout, self.columns)
        else:
            self._print_plain(["".join(part.text for part in shown).rstrip()])

    def table(self, header: Sequence[str], rows: Sequence[Sequence[Cell]], *, right: str) -> None:
        """Print rows under a header; `right` holds the headings of right-aligned columns."""
        aligned_right = {i for i, name in enumerate(header) if name in right.split()}
        styled = [[Cell(name, "bold") for name in header], *rows]
        lines = [
            texts  # a large table has very many
            if (joined := "".join(texts := [cell.text for cell in line])).isascii()
            and joined.isprintable()
            else [_spelled_out(text, sys.stdout) for text in texts]
            for line in styled
        ]
        if self.columns is not None:
            fitted = layout.fit(lines, aligned_right, self.columns)
            if fitted is not None:
                self._print_fitted(styled, fitted)
                return
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        form = layout.GAP.join(
            f"{{:{'>' if i in aligned_right else '<'}{width}}}" for i, width in enumerate(widths)
        )
        if not self.has_color:
            self._print_plain([form.format(*line).rstrip() for line in lines])
            return
        for line, texts in zip(styled, lines, strict=True):
            cells: list[Cell | str] = []
            for i, (cell, text, width) in enumerate(zip(line, texts, widths, strict=True)):
                padding = " " * (width - len(text))
                cells += [padding, cell] if i in aligned_right else [cell, padding]
                cells.append(layout.GAP)
            self.line(*cells)

    def _print_fitted(
        self, rows: Sequence[Sequence[Cell]], fitted: Sequence[Sequence[Sequence[layout.CellPiece]]]
    ) -> None:
        for row, lines in zip(rows, fitted, strict=True):
            for line in lines:
                styles = ["" if at is None else row[at].style for at, _ in line]
                self.line(*(Cell(one.text, style) for one, style in zip(line, styles, strict=True)))

    def _print_plain(self, lines: Sequence[str]) -> None:
        if self.columns is not None:
            lines = [part for line in lines for part in layout.wrapped(line, self.columns)]
        _print_plain(lines, sys.stdout)

    def paths(self, paths: Sequence[Path]) -> None:
        """Print bare paths; see `names`."""
        self.names([os.fsencode(path) for path in paths])

    def names(self, names: Sequence[bytes]) -> None:
        """Print bare names, one a line: byte for byte, but quoted on a terminal."""
        if self.has_nul:
            click.echo(b"".join(name + b"\0" for name in names), nl=False)
            return
        for name in names:
            encoding = sys.stdout.encoding or "utf-8"
            click.echo(quoted_name(name, encoding) if self.is_terminal else name)
        if not self.is_terminal and any(b"\n" in name for name in names):
            note("a name contains a line feed, so it looks like two; -0 separates names by NUL")

    def result(self, items: Sequence[Mapping[str, Json]], summary: Mapping[str, Json]) -> None:
        """Print the JSON object of the command, or with `-v` the same fields one a line."""
        if not self.is_json:
            for item in (*items, summary):
                self.line()
                self.fields(item)
            return
        document: dict[str, Json] = {
            "schema": f"ckptmgr.{self.command}/1",
            "root": str(self.root),
            "items": items,
            "summary": summary,
        }
        click.echo(json.dumps(finite(document), allow_nan=False))

    def fields(self, item: Mapping[str, Json]) -> None:
        """Print the fields of an item that have a value, one a line."""
        shown = list(_shown_fields(item))
        width = max((len(name) for name, _ in shown), default=0)
        for name, text in shown:
            self.line(f"{layout.HANGING}{name.ljust(width)}  {text}")

    def json_line(self, fields: Mapping[str, Json]) -> None:
        """Print one object of a stream."""
        document: dict[str, Json] = {"schema": f"ckptmgr.{self.command}.line/1", **fields}
        click.echo(json.dumps(finite(document), allow_nan=False))


def make_output(ctx: click.Context, root: Path) -> Output:
    """Return the output that the options, the environment and the terminal ask for."""
    stream = sys.stdout
    session = ctx.ensure_object(Session)
    color = ctx.meta.get("ckptmgr.color", session.color)
    return Output(
        command=ctx.command.name or "",
        root=root,
        is_json="ckptmgr.json" in ctx.meta,
        is_quiet="ckptmgr.quiet" in ctx.meta,
        is_verbose="ckptmgr.verbose" in ctx.meta,
        has_color=wants_color(str(color), os.environ, is_terminal=stream.isatty()),
        has_unicode=_is_utf8(stream),
        is_terminal=stream.isatty(),
        has_nul="ckptmgr.null" in ctx.meta,
        columns=layout.columns_of(stream),
    )


def quoted_name(name: bytes, encoding: str = "utf-8") -> str:
    """Return a name as a shell reads it: bare, in quotes, or as `$'...'` if it cannot be shown."""
    text = name.decode("utf-8", "surrogateescape")
    if _can_show(text, encoding):
        return shlex.quote(text)
    return f"$'{''.join(_spelled(char, encoding) for char in text)}'"


def _can_show(text: str, encoding: str) -> bool:
    return text.isprintable() and text == text.encode(encoding, "ignore").decode(encoding)


def _spelled(char: str, encoding: str) -> str:
    if char in "\\'":
        return f"\\{char}"
    if _can_show(char, encoding):
        return char
    if char in _SPELLED:
        return _SPELLED[char]
    return "".join(f"\\{byte:03o}" for byte in char.encode("utf-8", "surrogateescape"))


def wants_color(option: str, environment: Mapping[str, str], *, is_terminal: bool) -> bool:
    """Return whether to colour: the option decides, else NO_COLOR, FORCE_COLOR, the terminal."""
    if option != "auto":
        return option == "always"
    if environment.get("NO_COLOR"):
        return False
    if environment.get("FORCE_COLOR"):
        return True
    return is_terminal and environment.get("TERM") != "dumb"


def _is_utf8(stream: TextIO) -> bool:
    try:
        return codecs.lookup(stream.encoding or "ascii").name == "utf-8"
    except LookupError:
        return False


def _spelled_out(text: str, stream: TextIO) -> str:
    """Return text that a stream can carry, and that cannot steer a terminal."""
    if text.isascii() and text.isprintable():  # a large table has very many
        return text
    shown = escape(text)
    encoding = stream.encoding or "utf-8"
    return shown.encode(encoding, "backslashreplace").decode(encoding)


def _print_plain(lines: Sequence[str], stream: TextIO) -> None:
    for start in range(0, len(lines), _LINES_AT_ONCE):
        click.echo("\n".join(lines[start : start + _LINES_AT_ONCE]), file=stream)


def _print_styled(cells: Sequence[Cell], stream: TextIO, columns: int | None) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(
        file=stream, force_terminal=True, no_color=False, color_system="standard", highlight=False
    )
    text = Text.assemble(*((cell.text, cell.style) for cell in cells))
    text.rstrip()
    spans = [slice(None)] if columns is None else layout.broken(text.plain, columns)
    for number, span in enumerate(spans):
        part = text[span]
        part.rstrip()
        console.print(Text.assemble(layout.HANGING * (number > 0), part), soft_wrap=True)


def _shown_fields(item: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the fields that say something; of objects the inner ones."""
    for name, value in item.items():
        if isinstance(value, Mapping):
            yield from _shown_fields(value, f"{prefix}{name}.")
        elif value is not None and value != "" and value != []:
            yield f"{prefix}{name}", _field_text(value)


def _field_text(value: Json) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return " ".join(f"{name}={text}" for name, text in _shown_fields(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(_field_text, value))
    return str(value)


def age(time: datetime, now: datetime) -> str:
    """Return e.g. `3 h ago`; a date for a time in the future."""
    seconds = int((now - time).total_seconds())
    if seconds < 0:
        return time.astimezone(UTC).strftime("%Y-%m-%d %H:%MZ")
    for length, unit in _AGES:
        if seconds >= length:
            return f"{seconds // length} {unit} ago"
    return "now"


def number(value: float | None) -> str:
    """Return a metric; `n/a` for a missing one and for NaN."""
    return "n/a" if value is None or math.isnan(value) else f"{value:.4g}"


def step(checkpoint: Checkpoint) -> str:
    """Return the step, or `-` where it is unknown."""
    return str(checkpoint.step) if has_known_step(checkpoint) else "-"


def state(word: str) -> Cell:
    """Return a state as a cell."""
    return Cell(word, STATE_STYLES.get(word, ""))


def counted(number: int, noun: str) -> str:
    """Return e.g. `1 checkpoint`, `3 checkpoints`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
