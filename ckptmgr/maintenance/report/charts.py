# SPDX-License-Identifier: Apache-2.0
"""The charts of a report as SVG; colours come from the style sheet of the page. Pure.

Every text that a file or an event chose goes through `shown`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from html import escape

from ckptmgr.core.printable import printable
from ckptmgr.core.sizes import rate_text, size_text
from ckptmgr.maintenance.report.model import Entry, Fate
from ckptmgr.observe.events import Event

WIDTH, HEIGHT = 720, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 14, 26
_APART = 18
_MOST_BARS = 200
_MOST_MARKS = 1500  # more cannot be distinguished, and make the page slow
_MOST_POINTS = 2000
_MOST_TITLE = 300  # characters
_RADIUS = {Fate.KEPT: 5.5, Fate.GOES: 4.0, Fate.DAMAGED: 5.5, Fate.TRASH: 3.5, Fate.GONE: 3.0}


def shown(text: str, most: int | None = None) -> str:
    """Return a text for HTML: escaped, and what cannot be printed spelled out."""
    return escape(printable(text, most), quote=True)


def metric_chart(entries: Sequence[Entry], metric: str | None) -> str:
    """Return the checkpoints by step, on the curve of a metric; without one, on a line.

    At least one of them has a step; the others are left out.
    """
    chosen = _thinned([one for one in entries if one.step is not None], _MOST_MARKS)
    values = [(one.step or 0, _value(one, metric), one) for one in chosen]
    known = [value for _, value, _ in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    steps = [step for step, _, _ in values]
    x = _scale(min(steps), max(steps), _LEFT, WIDTH - _RIGHT)
    base = HEIGHT - _BOTTOM if known else HEIGHT / 2  # of those without the metric
    y = _scale(low, high, base - _APART, _TOP)
    points = [(x(step), y(value)) for step, value, _ in values if value is not None]
    parts = []
    if known:
        line = " ".join(f"{at:.1f},{up:.1f}" for at, up in sorted(points, key=lambda p: p[0]))
        parts += [_grid_line(y(one)) for one in {low, high}]
        parts.append(f'<polyline class="curve" points="{line}"/>')
        parts += [_label(_LEFT - 12, y(one) + 4, f"{one:.4g}", "end") for one in {low, high}]
    anchors = {max(steps): "end", min(steps): "start"}  # one place for both, if they are equal
    parts += [_label(x(one), HEIGHT - 4, f"{one:,}", anchor) for one, anchor in anchors.items()]
    parts += [
        _mark(x(step), base if value is None else y(value), one, metric)
        for step, value, one in values
    ]
    title = "checkpoints by step" if metric is None else f"{printable(metric, _MOST_TITLE)} by step"
    return _svg(title, parts)


def save_chart(saves: Sequence[Event]) -> str:
    """Return a bar for each of the last saves: seconds until durable, and the training held up."""
    last = saves[-_MOST_BARS:]
    highest = max(max(one.seconds, _blocked(one)) for one in last) or 1.0
    width = (WIDTH - _LEFT - _RIGHT) / len(last)
    y = _scale(0.0, highest, HEIGHT - _BOTTOM, _TOP)
    parts = [_label(_LEFT - 6, y(highest) + 4, f"{highest:.3g} s", "end"), _label(_LEFT - 6, y(0.0), "0", "end")]  # fmt: skip
    for number, one in enumerate(last):
        at = _LEFT + number * width
        rate = one.size_bytes / one.seconds if one.seconds else 0.0
        title = (
            f"step {one.step}: durable after {one.seconds:.3g} s, {rate_text(rate)},"
            f" training held up for {_blocked(one):.3g} s"
        )
        parts.append(f"<g><title>{shown(title)}</title>")
        for kind, seconds in (("durable", one.seconds), ("blocked", _blocked(one))):
            top = y(seconds)
            parts.append(
                f'<rect class="{kind}" x="{at:.1f}" y="{top:.1f}" width="{max(width * 0.8, 0.5):.1f}"'
                f' height="{HEIGHT - _BOTTOM - top:.1f}"/>'
            )
        parts.append("</g>")
    for number, one in {0: last[0], len(last) - 1: last[-1]}.items():
        anchor = "start" if number == 0 else "end"
        place = _LEFT if number == 0 else WIDTH - _RIGHT
        parts.append(_label(place, HEIGHT - 6, "" if one.step is None else f"{one.step:,}", anchor))
    return _svg("seconds of each save", parts)


def space_chart(used: Sequence[tuple[datetime, int]]) -> str:
    """Return the bytes of the directory by time, as steps."""
    used = [*used[:: math.ceil(len(used) / _MOST_POINTS)], used[-1]]
    times = [at.timestamp() for at, _ in used]
    highest = max(size for _, size in used) or 1
    x = _scale(times[0], times[-1], _LEFT, WIDTH - _RIGHT)
    y = _scale(0, highest, HEIGHT - _BOTTOM, _TOP)
    points = [f"{x(times[0]):.1f},{y(0):.1f}"]
    before = 0
    for at, (_, size) in zip(times, used, strict=True):
        points += [f"{x(at):.1f},{y(before):.1f}", f"{x(at):.1f},{y(size):.1f}"]
        before = size
    first, last = (used[place][0].strftime("%Y-%m-%d %H:%MZ") for place in (0, -1))
    parts = [
        f'<polyline class="curve" points="{" ".join(points)}"/>',
        _label(_LEFT - 6, y(highest) + 4, size_text(highest), "end"),
        _label(_LEFT - 6, y(0), "0", "end"),
        _label(_LEFT, HEIGHT - 6, first, "start"),
        _label(WIDTH - _RIGHT, HEIGHT - 6, last, "end"),
    ]
    return _svg("bytes of the directory by time", parts)


def _svg(title: str, parts: Sequence[str]) -> str:
    name = shown(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">'
        + "".join(parts)
        + "</svg>"
    )


def _grid_line(y: float) -> str:
    return f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>'


def _label(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{shown(text)}</text>'


def _mark(x: float, y: float, one: Entry, metric: str | None) -> str:
    value = "" if metric is None else f", {printable(metric, 40)} {_number(one, metric)}"
    why = f": {'; '.join(one.why)}" if one.why else ""
    title = shown(f"step {one.step}{value}, {one.fate.value}{why}", _MOST_TITLE)
    size = _RADIUS[one.fate]
    if one.fate is Fate.DAMAGED:  # a cross: the meaning is not in the colour alone
        d = f"M{x - size:.1f} {y - size:.1f}l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
        return f'<path class="damaged" d="{d}"><title>{title}</title></path>'
    return f'<circle class="{one.fate.value}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"><title>{title}</title></circle>'


def _thinned(entries: Sequence[Entry], most_marks: int) -> list[Entry]:
    """Return the entries; of too many every n-th, and all that are kept or damaged if those fit."""
    if len(entries) <= most_marks:
        return list(entries)
    every = math.ceil(len(entries) / most_marks)
    marked = [one for one in entries if one.fate in (Fate.KEPT, Fate.DAMAGED)]
    always = {one.path for one in marked} if len(marked) <= most_marks else set()
    return [one for place, one in enumerate(entries) if place % every == 0 or one.path in always]


def _value(one: Entry, metric: str | None) -> float | None:
    value = None if metric is None else one.metrics.get(metric)
    return value if value is not None and math.isfinite(value) else None


def _number(one: Entry, metric: str) -> str:
    value = _value(one, metric)
    return "n/a" if value is None else f"{value:.4g}"


def _blocked(save: Event) -> float:
    return save.figures.get("blocked_s", 0.0)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Return the map of a range of values to a range of pixels: the middle for a single value."""
    half_range = high / 2 - low / 2  # halves first: the difference of finite numbers may overflow
    if not half_range:
        return lambda _: (start + end) / 2
    return lambda value: start + (value / 2 - low / 2) / half_range * (end - start)
