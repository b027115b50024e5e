# SPDX-License-Identifier: Apache-2.0
"""A report as one HTML page that loads nothing: no script, no font, no picture of elsewhere. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from ckptmgr.core.printable import printable
from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.maintenance.report.charts import (
    metric_chart,
    save_chart,
    shown,
    space_chart,
)
from ckptmgr.maintenance.report.model import MOST_ROWS, Entry, Fate, RunReport, Space

MARK = "<!-- ckptmgr report -->"
"""First line of every page, by which a later report knows that it may replace the file."""

_MOST_METRICS = 6
_MOST_CELL = 1000  # characters
_FORECAST_S = 10 * 365 * 86_400.0
"""Forecasts beyond this length are not spelled out, in seconds."""
_BAD = ("corrupt", "missing", "damaged")
_LEGEND = {
    Fate.KEPT: "● kept",
    Fate.GOES: "○ here, the policy would drop it",
    Fate.DAMAGED: "✕ damaged",
    Fate.TRASH: "• in the trash",
    Fate.GONE: "• gone",
}
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1f2328; --dim: #59636e; --line: #d1d9e0;
  --kept: #0969da; --goes: #9a6700; --bad: #d1242f; --trash: #afb8c1; --fill: #ddf4ff }
@media (prefers-color-scheme: dark) { :root { --back: #0d1117; --text: #e6edf3; --dim: #9198a1;
  --line: #3d444d; --kept: #4493f8; --goes: #d29922; --bad: #f85149; --trash: #59636e; --fill: #1f3a5f } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 70rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; margin: .2rem 0 }
h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem }
a { color: var(--kept) } p { margin: .3rem 0 } .dim, figcaption { color: var(--dim); font-size: .875rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .6rem; margin: 1rem 0 }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem }
dt { color: var(--dim); font-size: .875rem } dd { margin: 0; font-size: 1.15rem }
figure { margin: .5rem 0 } .scroll { overflow-x: auto }
svg { display: block; width: 100%; min-width: 34rem; height: auto; border: 1px solid var(--line); border-radius: .5rem }
svg text { font: 11px system-ui, sans-serif; fill: var(--dim) }
.curve { fill: none; stroke: var(--dim); stroke-width: 1.2 } .grid { stroke: var(--line); stroke-dasharray: 4 3 }
.kept { fill: var(--kept) } .goes { fill: var(--back); stroke: var(--goes); stroke-width: 2 }
.damaged { stroke: var(--bad); stroke-width: 2.5; fill: none } .trash, .gone { fill: var(--trash) }
.durable { fill: var(--fill) } .blocked { fill: var(--kept) }
table { border-collapse: collapse; width: 100%; font-size: .875rem }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top }
th, td { white-space: nowrap; font-variant-numeric: tabular-nums }
td.why { white-space: normal; min-width: 16rem; overflow-wrap: anywhere }
td.bad { color: var(--bad); font-weight: 600 }
"""


def page(report: RunReport, *, refresh_s: int | None = None) -> str:
    """Return the page; one that is served may ask to be fetched again after `refresh_s` seconds."""
    parts = [*_head(report), *_checkpoints(report), *_saves(report), *_space(report)]
    parts += [*_failures(report), *_table(report)]
    return _document(f"checkpoints of {report.directory.name}", parts, refresh_s)


def links(places: Mapping[str, Path]) -> str:
    """Return a page of links to the pages of directories."""
    items = [f'<li><a href="{shown(at)}">{shown(str(path))}</a>' for at, path in places.items()]
    return _document("checkpoints", ["<h1>Directories</h1><ul>", *items, "</ul>"], None)


def _document(title: str, parts: Iterable[str], refresh_s: int | None) -> str:
    refresh = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    head = (
        f'{MARK}\n<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{refresh}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline';"
        ' img-src data:"><link rel="icon" href="data:,">'
        f"<title>{shown(title)}</title><style>{_STYLE}</style></head><body>"
    )
    return head + "\n".join(parts) + "</body></html>\n"


def _head(report: RunReport) -> Iterable[str]:
    yield f"<h1>{shown(str(report.directory))}</h1>"
    yield f'<p class="dim">made {utc(report.made_at)} by ckptmgr report from manifests and results of verify</p>'
    yield from (f"<p>{shown(one)}</p>" for one in report.policy_sentences())
    yield from (f"<p>{shown(one)}</p>" for one in report.witness_sentences())
    here = [one for one in report.entries if one.fate not in (Fate.TRASH, Fate.GONE)]
    facts = {"checkpoints": f"{len(here):,}", "on disk": size_text(report.space.kept_bytes)}
    if here:
        newest = here[-1]
        facts["newest"] = newest.path.name if newest.step is None else f"step {newest.step:,}"
        facts["saved"] = age(newest.saved_at, report.made_at)
    if report.policy is not None:
        facts["the policy would drop"] = f"{report.count(Fate.GOES):,}"
    facts["damaged"] = f"{len(report.damaged):,}"
    facts["verified last"] = verified(here, report.made_at)
    yield "<dl>"
    for name, value in facts.items():
        yield f"<div><dt>{shown(name)}</dt><dd>{shown(value)}</dd></div>"
    yield "</dl>"


def _checkpoints(report: RunReport) -> Iterable[str]:
    if all(one.step is None for one in report.entries):
        return
    yield "<h2>Checkpoints</h2>"
    charted = report.usual_metrics(_MOST_METRICS)
    for metric in charted or (None,):
        legend = "; ".join(_LEGEND[fate] for fate in Fate if report.count(fate))
        what = "by step" if metric is None else f"{printable(metric, _MOST_CELL)} by step"
        yield _figure(metric_chart(report.entries, metric), f"{what}: {legend}")
    in_table = len(report.usual_metrics()) - len(charted)
    if in_table:
        yield f'<p class="dim">and {in_table} more metrics, which are in the table</p>'


def _saves(report: RunReport) -> Iterable[str]:
    yield "<h2>Saves</h2>"
    if not report.has_events:
        yield (
            '<p class="dim">no file of events: a run writes one with observe=JsonLinesObserver(...), and the'
            " report then shows what each save cost</p>"
        )
        return
    if report.unreadable_event_count:
        yield f'<p class="dim">{report.unreadable_event_count} lines of the file of events are not readable</p>'
    if not report.saves:
        yield '<p class="dim">no save is noted</p>'
        return
    held_s = sum(one.figures.get("blocked_s", 0.0) for one in report.saves)
    saved_bytes = sum(one.size_bytes for one in report.saves)
    seconds = sum(one.seconds for one in report.saves)
    rate = f", {rate_text(saved_bytes / seconds)}" if seconds else ""
    caption = (
        "seconds until durable (light), training held up (dark);"
        f" {held_s:.3g} s held up in {len(report.saves)} saves{rate}"
    )
    yield _figure(save_chart(report.saves), caption)


def _space(report: RunReport) -> Iterable[str]:
    yield "<h2>Space</h2>"
    for sentence in space_sentences(report.space):
        yield f"<p>{shown(sentence)}</p>"
    if len(report.used) > 1:
        yield _figure(
            space_chart(report.used), "bytes of the directory, from the noted saves and prunes"
        )


def _failures(report: RunReport) -> Iterable[str]:
    yield "<h2>Failures</h2>"
    rows = [
        (one.saved_at, "damaged", step_text(one.step), f"{one.path.name}: {'; '.join(one.why)}")
        for one in report.damaged
    ]
    rows += [
        (
            datetime.fromtimestamp(one.at, UTC),
            one.name,
            "" if one.step is None else str(one.step),
            f"{one.error_type}: {one.error}",
        )
        for one in report.failures
    ]
    if not rows:
        yield "<p>none known</p>"
        return
    newest_first = sorted(rows, reverse=True)[:MOST_ROWS]
    yield cells(
        ("when", "what", "step", "why"),
        [(utc(at), what, step, why) for at, what, step, why in newest_first],
    )
    if len(rows) > MOST_ROWS:
        yield f'<p class="dim">the newest {MOST_ROWS:,} of {len(rows):,}; --json has all</p>'


def _table(report: RunReport) -> Iterable[str]:
    yield "<h2>All checkpoints</h2>"
    metrics = report.usual_metrics()
    header = ("step", "saved", "size", *metrics, "state", "fate", "why", "verified", "file")
    newest_first = report.entries[::-1][:MOST_ROWS]
    rows = [
        (
            step_text(one.step),
            utc(one.saved_at),
            size_text(one.size_bytes),
            *(number(one.metrics.get(name)) for name in metrics),
            one.state,
            one.fate.value,
            "; ".join(one.why),
            "-" if one.verified_at is None else age(one.verified_at, report.made_at),
            one.path.name,
        )
        for one in newest_first
    ]
    yield cells(header, rows)
    if len(report.entries) > MOST_ROWS:
        yield f'<p class="dim">the newest {MOST_ROWS:,} of {len(report.entries):,}; --csv has all</p>'
    more = report.more_metrics(metrics)
    if more is not None:
        yield f'<p class="dim">{more}</p>'


def space_sentences(space: Space) -> list[str]:
    """Return the used space, the free space, and when the disk will be full."""
    used = f"{size_text(space.kept_bytes)} in checkpoints"
    if space.trash_bytes:
        used += f", {size_text(space.trash_bytes)} in the trash"
    free = "unknown" if space.free_bytes is None else size_text(space.free_bytes)
    sentences = [f"{used}; {free} free"]
    if space.most_bytes is not None and space.save_bytes is not None:
        sentences.append(
            f"the policy keeps {size_text(space.most_bytes)} at most, if all are as large as the newest"
        )
    elif space.full_in_s is not None and space.save_bytes and space.interval_s is not None:
        full_in_s = space.full_in_s
        # A pace of today says nothing of a far year.
        when = span(full_in_s) if full_in_s < _FORECAST_S else f"more than {span(_FORECAST_S)}"
        sentences.append(
            f"at one save of {size_text(space.save_bytes)} every {span(space.interval_s)} the disk is full in"
            f" {when}, if nothing is removed"
        )
    return sentences


def verified(entries: Sequence[Entry], now: datetime) -> str:
    """Return when the newest of these checkpoints that was ever verified was, or `no record`."""
    times = [one.verified_at for one in entries if one.verified_at is not None]
    return f"{age(max(times), now)} ({len(times)} of {len(entries)})" if times else "no record"


def age(time: datetime, now: datetime) -> str:
    """Return e.g. `3 h ago`."""
    return f"{span(max(0.0, (now - time).total_seconds()))} ago"


def span(seconds: float) -> str:
    """Return e.g. `3 h`."""
    for length, unit in ((86_400 * 365, "years"), (86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def step_text(step: int | None) -> str:
    """Return a step; `-` where it is not known."""
    return "-" if step is None else str(step)


def number(value: float | None) -> str:
    """Return a metric; `n/a` for a missing one and for NaN."""
    return "n/a" if value is None or math.isnan(value) else f"{value:.4g}"


def _figure(svg: str, caption: str) -> str:
    return (
        f'<figure><div class="scroll">{svg}</div><figcaption>{shown(caption)}</figcaption></figure>'
    )


def cells(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of escaped texts."""
    lines = ["<tr>" + "".join(f"<th>{shown(name, _MOST_CELL)}</th>" for name in header) + "</tr>"]
    lines += ["<tr>" + "".join(map(_cell, header, row)) + "</tr>" for row in rows]
    return '<div class="scroll"><table>' + "\n".join(lines) + "</table></div>"


def _cell(name: str, text: str) -> str:
    kind = ""
    if name == "why":
        kind = ' class="why"'
    elif name in ("state", "fate", "what") and text in _BAD:
        kind = ' class="bad"'
    return f"<td{kind}>{shown(text, _MOST_CELL)}</td>"


def utc(time: datetime) -> str:
    """Return a time, e.g. `2026-03-01 10:00:00Z`."""
    return time.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
