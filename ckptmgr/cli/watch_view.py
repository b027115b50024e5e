# SPDX-License-Identifier: Apache-2.0
"""Views of a watch: one line for each report, a stream of JSON, paths, or a live table on a terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from ckptmgr.cli import render
from ckptmgr.cli.exits import cut, escape
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.watch.alarms import span
from ckptmgr.maintenance.watch.model import Report, SeriesRow

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

SCHEMA = "ckptmgr.watch/1"
TICK_S = 10.0
"""How often the live table is drawn again while nothing happens: it shows ages."""
_STYLES = {"alarm": "bold red", "cleared": "green", "note": "yellow", "quarantined": "yellow"}
_EVENT_WIDTH = len("quarantined")
_HEADER = ("SERIES", "STEP", "SAVED", "EVERY", "WRITE", "FREE", "FULL IN", "STATE")
_LEAST_NAME = 8
_GAP = "  "


class View(Protocol):
    """Shows reports as they come."""

    tick_s: float | None

    def show(self, report: Report) -> None:
        """Show a report."""
        ...

    def refresh(self) -> None:
        """Show what changed by the time."""
        ...

    def close(self) -> None:
        """End."""
        ...


def view_for(
    output: Output,
    rows: Callable[[], list[SeriesRow]],
    now: Callable[[], datetime],
    *,
    has_several: bool,
    is_once: bool,
) -> View:
    """Return the view that the options and the terminal ask for."""
    is_plain = not output.is_terminal or os.environ.get("TERM") == "dumb" or is_once
    if output.is_json:
        return JsonView()
    if output.is_quiet:
        return PathView(output)
    if is_plain or output.is_verbose:
        return LineView(output, has_several=has_several)
    return TableView(output, rows, now, has_several=has_several)


def report_json(report: Report) -> dict[str, Json]:
    """Return a report as the JSON object of one line; no key is ever left out."""
    one = report.checkpoint
    return {
        "schema": SCHEMA,
        "at": render.timestamp(datetime.fromtimestamp(report.at, UTC)),
        "event": report.event,
        "directory": None if report.directory is None else str(report.directory),
        "series": report.series,
        "alarm": report.alarm,
        "status": report.status,
        "message": report.message,
        "figures": dict(report.figures),
        "checkpoint": None if one is None else render.checkpoint_json(one),
    }


def cells_of(report: Report, *, has_several: bool) -> list[Cell]:
    """Return a report as one line of text."""
    at = datetime.fromtimestamp(report.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    place = f"{report.directory}: " if has_several and report.directory is not None else ""
    kind = f"{report.alarm}: " if report.alarm is not None else ""
    padding = " " * (_EVENT_WIDTH - len(report.event))
    return [
        Cell(f"{at}  "),
        Cell(report.event, _STYLES.get(report.event, "")),
        Cell(f"{padding}  {place}{kind}{report.message}"),
    ]


class LineView:
    """One line for each report."""

    tick_s: float | None = None

    def __init__(self, output: Output, *, has_several: bool) -> None:
        self._output = output
        self._has_several = has_several

    def show(self, report: Report) -> None:
        """Print the report."""
        self._output.line(*cells_of(report, has_several=self._has_several))
        if self._output.is_verbose:
            self._output.fields(report_json(report))
        sys.stdout.flush()

    def refresh(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class JsonView(LineView):
    """One JSON object a line."""

    def __init__(self) -> None:
        pass

    def show(self, report: Report) -> None:
        """Print the report."""
        click.echo(json.dumps(render.finite(report_json(report)), allow_nan=False))
        sys.stdout.flush()


class PathView(LineView):
    """Paths of the checkpoints that alarms are about."""

    def __init__(self, output: Output) -> None:
        super().__init__(output, has_several=False)

    def show(self, report: Report) -> None:
        """Print the path of an alarm."""
        if report.event == "alarm" and report.checkpoint is not None:
            self._output.paths([report.checkpoint.path])
            sys.stdout.flush()


class TableView:
    """Live table of the series on a terminal, below the lines of the reports."""

    tick_s: float | None = TICK_S

    def __init__(
        self,
        output: Output,
        rows: Callable[[], list[SeriesRow]],
        now: Callable[[], datetime],
        *,
        has_several: bool,
    ) -> None:
        self._output = output
        self._rows = rows
        self._now = now
        self._has_several = has_several
        self._live: Live | None = None
        self._is_stale = False

    def show(self, report: Report) -> None:
        """Print the report above the table."""
        live = self._started()
        cells = cells_of(report, has_several=self._has_several)
        live.console.print(self._text([cells]), soft_wrap=False)
        self._is_stale = True

    def refresh(self) -> None:
        """Draw the table."""
        live = self._started()
        width, height = live.console.size
        lines = table_lines(
            self._rows(),
            self._now(),
            width=width,
            height=height - 1,
            has_several=self._has_several,
        )
        live.update(self._text(lines), refresh=True)

    def close(self) -> None:
        """Leave the last table on the screen."""
        if self._live is not None:
            self._live.stop()

    def _started(self) -> Live:
        if self._live is None:
            from rich.live import Live

            live = self._live = Live(
                console=_console(self._output),
                vertical_overflow="crop",
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            live.start()
        return self._live

    def _text(self, lines: Sequence[Sequence[Cell]]) -> Text:
        from rich.text import Text

        encoding = sys.stdout.encoding or "utf-8"
        parts: list[tuple[str, str]] = []
        for number, line in enumerate(lines):
            parts += [("\n", "")] if number else []
            for cell in line:
                shown = escape(cut(cell.text)).encode(encoding, "backslashreplace").decode(encoding)
                parts.append((shown, cell.style))
        return Text.assemble(*parts)


def _console(output: Output) -> Console:
    from rich.console import Console

    return Console(
        file=sys.stdout,
        force_terminal=True,
        no_color=not output.has_color,
        color_system="standard" if output.has_color else None,
        highlight=False,
    )


def table_lines(
    rows: Sequence[SeriesRow], now: datetime, *, width: int, height: int, has_several: bool
) -> list[list[Cell]]:
    """Return the lines of the table, which fit the terminal; rows with alarms come first."""
    ordered = sorted(rows, key=lambda row: not row.alarms)
    room = max(1, height - 1)
    more = len(ordered) - room + 1 if len(ordered) > room else 0
    ordered = ordered[: len(ordered) - more]
    table = [[Cell(name, "bold") for name in _HEADER]]
    table += [_cells(row, now, has_several=has_several) for row in ordered]
    widths = [max(len(escape(line[i].text)) for line in table) for i in range(len(_HEADER))]
    others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
    widths[0] = min(widths[0], max(_LEAST_NAME, width - others))
    lines = []
    for line in table:
        name = _elided(escape(line[0].text), widths[0])
        cells = [Cell(name.ljust(widths[0]), line[0].style)]
        left = width - widths[0]
        for cell, size in zip(line[1:], widths[1:], strict=True):
            text = f"{_GAP}{escape(cell.text):>{size}}"[: max(0, left)]
            left -= len(text)
            cells.append(Cell(text, cell.style))
        lines.append(cells)
    return [*lines, [Cell(f"and {more} more"[:width])]] if more else lines


def _cells(row: SeriesRow, now: datetime, *, has_several: bool) -> list[Cell]:
    newest = row.newest
    series = row.series or ("-" if has_several else "no checkpoints")
    name = f"{Path(row.directory).name}/{series}" if has_several else series
    return [
        Cell(name),
        Cell("-" if newest is None else render.step(newest)),
        Cell("-" if newest is None else render.age(newest.saved_at, now)),
        Cell(_or_dash(row.every_s, span)),
        Cell(_or_dash(row.bytes_per_s, lambda rate: rate_text(rate))),
        Cell(_or_dash(row.free_bytes, size_text)),
        Cell(_or_dash(row.full_in_s, span)),
        _state(row),
    ]


def _state(row: SeriesRow) -> Cell:
    if row.alarms:
        return Cell(
            row.alarms[0] + (f" +{len(row.alarms) - 1}" if row.alarms[1:] else ""), "bold red"
        )
    if row.unverified:
        return Cell(f"{row.unverified} to do", "yellow")
    if row.holder is not None and row.holder.state != "dead":
        return Cell("live", "cyan")
    return Cell("ok", "green")


def _or_dash(value: float | None, shown: Callable[[float], str]) -> str:
    return "-" if value is None else shown(value)


def _elided(text: str, width: int) -> str:
    """Return a name of at most `width` characters; its end distinguishes series."""
    return text if len(text) <= width else f"...{text[len(text) - width + 3 :]}"
