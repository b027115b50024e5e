# SPDX-License-Identifier: Apache-2.0
"""A report as text: JSON, CSV, Markdown, and the short form for a terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import click

from ckptmgr.cli import render
from ckptmgr.cli.exits import escape, note
from ckptmgr.cli.render import Cell, Output
from ckptmgr.core.printable import printable
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.report.model import MOST_ROWS, Entry, Fate, RunReport
from ckptmgr.maintenance.report.page import space_sentences, step_text, verified
from ckptmgr.observe.events import Event

_SHOWN, _SHOWN_METRICS = 10, 6
_MOST_CELL, _MOST_NAME = 500, 40  # characters
_MARKUP = re.compile(
    r"[\\`*\[\]{}#!|>~$^]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=\])\(|^[-+](?=[ -])|(?<=^[0-9])[.)]"
)
_REFERENCES = re.compile(r"[@#!$%~^](?=\w)|&amp;(?=\w)|(?i:https?|ftp|mailto|xmpp|www|GH)(?=[:.-])")
_COLUMNS = ("step", "series", "run", "saved_at", "size_bytes", "state", "fate", "why", "verified_at", "path")  # fmt: skip

_FATES = {fate: fate.value for fate in Fate} | {
    Fate.GOES: "that the policy would drop",
    Fate.TRASH: "in the trash",
}


def print_json(output: Output, report: RunReport) -> None:
    """Print one object: a checkpoint each as items, all else as the summary."""
    space = report.space
    summary: dict[str, Json] = {
        "made_at": render.timestamp(report.made_at),
        "policy": report.policy,
        "counts": {fate.value: report.count(fate) for fate in Fate},
        "metrics": list(report.metrics),
        "saves": [_save_json(one) for one in report.saves],
        "failures": [_failure_json(one) for one in report.failures],
        "witness": [_witness_json(one) for one in report.witness],
        "used": [{"at": render.timestamp(at), "bytes": size} for at, size in report.used],
        "space": {
            "kept_bytes": space.kept_bytes,
            "trash_bytes": space.trash_bytes,
            "free_bytes": space.free_bytes,
            "save_bytes": space.save_bytes,
            "interval_s": space.interval_s,
            "most_bytes": space.most_bytes,
            "full_in_s": space.full_in_s,
        },
        "has_events": report.has_events,
        "unreadable_events": report.unreadable_event_count,
    }
    output.result([_entry_json(one) for one in report.entries], summary)


def print_csv(report: RunReport) -> None:
    """Print a line for each checkpoint, oldest first, under a header; RFC 4180."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    metrics = report.usual_metrics()
    writer.writerow([*_COLUMNS, *(f"metric:{printable(name, _MOST_CELL)}" for name in metrics)])
    for one in report.entries:
        fields = _entry_json(one)
        fields["why"] = "; ".join(one.why)
        cells = [fields[name] for name in _COLUMNS]
        cells += [one.metrics.get(name) for name in metrics]
        writer.writerow(["" if cell is None else _csv_cell(cell) for cell in cells])
    click.echo(text.getvalue().encode(), nl=False)
    more = report.more_metrics(metrics)
    if more is not None:
        note(more)


def print_markdown(report: RunReport) -> None:
    """Print headings and tables of Markdown, for a merge request or a wiki."""
    lines = [f"# Checkpoints of {markdown_text(str(report.directory))}", ""]
    lines += [f"* {markdown_text(one)}" for one in _sentences(report)]
    metrics = report.usual_metrics()
    names = ("step", "saved", "size", *metrics, "state", "fate", "why")
    lines += ["", _row(names), f"|{' --- |' * len(names)}"]
    lines += [_row(_cells(one, metrics)) for one in report.entries[: -MOST_ROWS - 1 : -1]]
    left_out = _left_out("checkpoints", len(report.entries), MOST_ROWS, "--csv")
    lines += [f"\n{one}" for one in (*left_out, report.more_metrics(metrics)) if one]
    failures = list(_failures(report))
    if failures:
        lines += [
            "",
            "## Failures",
            "",
            *(f"* {markdown_text(one)}" for one in failures[-MOST_ROWS:]),
        ]
        lines += [f"\n{one}" for one in _left_out("failures", len(failures), MOST_ROWS, "--json")]
    click.echo(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"), nl=False)


def print_text(output: Output, report: RunReport) -> None:
    """Print the main findings, and the newest checkpoints."""
    output.line(Cell(str(report.directory), "bold"))
    for one in _sentences(report):
        output.line(one)
    metrics = report.usual_metrics(_SHOWN_METRICS)
    columns = [printable(name, _MOST_NAME).upper() for name in metrics]
    newest = report.entries[-_SHOWN:]
    if newest:
        rows = [[Cell(text) for text in _cells(one, metrics)] for one in reversed(newest)]
        names = ["STEP", "SAVED", "SIZE", *columns, "STATE", "FATE", "WHY"]
        right = " ".join(("STEP", "SIZE", *columns))
        output.table(names, rows, right=right)
    if len(report.entries) > _SHOWN:
        output.line(f"and {len(report.entries) - _SHOWN} older ones")
    if (more := report.more_metrics(metrics)) is not None:
        output.line(more)
    failures = list(_failures(report))
    for one in failures[-MOST_ROWS:]:
        output.line(Cell("failed  ", "red"), printable(one, _MOST_CELL))
    for one in _left_out("failures", len(failures), MOST_ROWS, "--json"):
        output.line(one)


def _left_out(what: str, count: int, most: int, where: str) -> list[str]:
    return [f"the newest {most:,} of {count:,} {what}; {where} has all"] if count > most else []


def _sentences(report: RunReport) -> Iterator[str]:
    here = [one for one in report.entries if one.fate not in (Fate.TRASH, Fate.GONE)]
    counts = [f"{report.count(fate)} {_FATES[fate]}" for fate in Fate if report.count(fate)]
    yield f"{render.counted(len(here), 'checkpoint')}: {', '.join(counts) or 'none'}"
    yield from report.policy_sentences()
    yield from report.witness_sentences()
    yield f"verified last: {verified(here, report.made_at)}"
    if report.saves:
        held_up = sum(one.figures.get("blocked_s", 0.0) for one in report.saves)
        seconds = sum(one.seconds for one in report.saves) / len(report.saves)
        yield (
            f"{render.counted(len(report.saves), 'noted save')}: {seconds:.3g} s each until durable,"
            f" training held up for {held_up:.3g} s in all"
        )
    yield from space_sentences(report.space)
    if report.unreadable_event_count:
        yield f"{render.counted(report.unreadable_event_count, 'line')} of the file of events not readable"


def _failures(report: RunReport) -> Iterator[str]:
    for one in report.damaged:
        yield f"{one.path.name}: {'; '.join(one.why) or one.state}"
    for event in report.failures:
        step = "" if event.step is None else f" step {event.step}"
        yield f"{event.name}{step}: {event.error_type}: {event.error}"


def _cells(one: Entry, metrics: Sequence[str]) -> list[str]:
    return [
        step_text(one.step),
        render.timestamp(one.saved_at),
        size_text(one.size_bytes),
        *(render.number(one.metrics.get(name)) for name in metrics),
        one.state,
        one.fate.value,
        "; ".join(one.why),
    ]


def _entry_json(one: Entry) -> dict[str, Json]:
    return {
        "path": str(one.path),
        "series": one.series,
        "run": one.run_id,
        "step": one.step,
        "saved_at": render.timestamp(one.saved_at),
        "size_bytes": one.size_bytes,
        "metrics": dict(one.metrics),
        "state": one.state,
        "fate": one.fate.value,
        "why": list(one.why),
        "verified_at": None if one.verified_at is None else render.timestamp(one.verified_at),
    }


def _save_json(event: Event) -> dict[str, Json]:
    return {
        "at": _at(event),
        "step": event.step,
        "size_bytes": event.size_bytes,
        "seconds": event.seconds,
        "blocked_s": event.figures.get("blocked_s", 0.0),
    }


def _at(event: Event) -> str:
    return render.timestamp(datetime.fromtimestamp(event.at, UTC))


def _failure_json(event: Event) -> dict[str, Json]:
    return {
        "at": _at(event),
        "event": event.name,
        "step": event.step,
        "error_type": event.error_type,
        "error": event.error,
    }


def _witness_json(event: Event) -> dict[str, Json]:
    return {
        "at": _at(event),
        "event": event.name,
        "step": event.step,
        "equal_steps": int(event.figures.get("equal_steps", 0)),
        "sentence": "; ".join(event.notes),
    }


def _csv_cell(cell: Json) -> str:
    """Return a cell; a text that a spreadsheet would calculate is quoted for it."""
    text = escape(str(cell))
    return f"'{text}" if isinstance(cell, str) and text[:1] in ("=", "+", "-", "@") else text


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(markdown_text, cells)) + " |"


def markdown_text(text: str) -> str:
    """Return a text that Markdown shows as it is, without links, pictures, references or HTML.

    Sites link `@name`, `#1`, `http://` and their like also where the signs are escaped: a space
    without width parts those.
    """
    plain = printable(text, _MOST_CELL).replace("&", "&amp;").replace("<", "&lt;")
    escaped = _MARKUP.sub(r"\\\g<0>", plain)
    return _REFERENCES.sub(r"\g<0>&#8203;", escaped)
