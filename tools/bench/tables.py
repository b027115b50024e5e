# SPDX-License-Identifier: Apache-2.0
"""Measured values, as tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from tools.bench.figures import OURS, Figure, Figures, cpu_of
from tools.bench.lazy import CACHES
from tools.bench.loops import LOOPS
from tools.bench.memory import MIB, Peak
from tools.bench.scale import curves
from tools.bench.sections import LIMIT, READS
from tools.bench.targets import Verdict

_HEADINGS = {
    "files": "Files",
    "slow files": "SM4-CBC",
    "background": "Saves in the background",
    "loops": "Share of its steps that a training loop loses during a save",
    "sizes": "By size: seconds",
    "counts": "By number of tensors of 256 bytes: seconds",
    "lazy": "One tensor of 1 MiB: milliseconds, opening included and excluded, of a file of",
    "compression": "zstd, for each element type",
    "ranks": "Ranks on this machine that save one checkpoint together",
}
_MEMCPY = "one memcpy"
GIB = 1 << 30
_NAMES = {
    "load": "raw O_DIRECT",
    "load new": "raw O_DIRECT, into new memory",
    "touch": "new memory alone, touched",
    "load digested": "raw O_DIRECT, with BLAKE3",
    "load new digested": "raw O_DIRECT, with BLAKE3, into new memory",
    "into digested": "raw O_DIRECT, with BLAKE3, into memory of its size",
    "load warm digested": "raw readinto, with BLAKE3, into new memory",
    "load busy": "raw O_DIRECT beside a busy processor",
}
# Figures of the bare disk beside every action with a file.
_BESIDE = {
    "load": ("load new digested", "load new", "touch", "load digested", "load busy"),
    "load warm": ("load warm digested",),
    "into": ("load", "into digested", "load digested", "load busy"),
    "into own": ("into digested",),
    "verify": ("load", "load digested", "load busy"),
}


def report(
    figures: Figures, verdicts: Sequence[Verdict], peaks: Sequence[Peak], missing: Mapping[str, str]
) -> str:
    """Return everything, one table after the other; sections without figures are left out."""
    parts = [
        *(
            _files(figures, section, what)
            for section in ("files", "slow files")
            for what in ("save", *READS)
        ),
        _background(figures),
        _loops(figures),
        *(
            _curves(figures, section, what)
            for section in ("sizes", "counts")
            for what in ("save", "load")
        ),
        _lazy(figures),
        _compression(figures),
        _ranks(figures),
        _memory(peaks),
        _targets(verdicts),
        "\n".join(f"* Left out: {name}: {reason}" for name, reason in missing.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rows = list(rows)
    if not rows:
        return ""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join([f"## {title}", "", *(f"| {' | '.join(cells)} |" for cells in lines)])


def _files(figures: Figures, section: str, what: str) -> str:
    """Seconds, speed as a share of the bare disk's, and how often ours of the same mode is faster."""
    found = figures.find(section, what)
    if not found:
        return ""
    for floor in _BESIDE.get(what, ()):
        found += figures.find(section, floor, mode=LIMIT)
    rows = ([one.subject.mode, _name(one), *_compared(figures, one)] for one in found)
    title = f"{_HEADINGS[section]}: {what}, {found[0].subject.size_bytes / MIB:.0f} MiB"
    return _table(title, ["mode", "who", "s", "of raw", "ours is faster", "processor s/GiB"], rows)


def _name(figure: Figure) -> str:
    """Return the name of the contestant; of the bare disk, also its action."""
    subject = figure.subject
    return _NAMES.get(subject.what, subject.who) if subject.mode == LIMIT else subject.who


def _compared(figures: Figures, one: Figure) -> tuple[str, str, str, str]:
    section, what, mode = one.subject.section, one.subject.what, one.subject.mode
    raw = figures.find(section, "save" if what == "save" else "load", mode=LIMIT)
    ours = _ours(figures, section, what, mode)
    return (
        f"{one.median:.3f}",
        f"{raw[0].median / one.median:.2f}" if raw and one is not raw[0] else "",
        f"{one.median / ours:.1f}x" if ours is not None and one.subject.who != OURS else "",
        _seconds(_processor_s_per_gib(figures, one)),
    )


def _processor_s_per_gib(figures: Figures, one: Figure) -> float | None:
    subject = one.subject
    used = figures.find(subject.section, cpu_of(subject.what), who=subject.who, mode=subject.mode)
    return used[0].median / (subject.size_bytes / GIB) if used else None


def _ours(figures: Figures, section: str, what: str, mode: str) -> float | None:
    """Return the seconds of ours that a peer's are compared with; peers' own formats with the nearest of ours."""
    if mode == LIMIT:
        return None
    mine = {"plain": "safetensors", "encrypted": "container-gcm"}.get(mode, mode)
    return figures.median(section, what, who=OURS, mode=mine)


def _background(figures: Figures) -> str:
    unit = figures.median("background", "blocked", who=_MEMCPY)
    blocked = figures.find("background", "blocked")
    rows = (
        [
            one.subject.who,
            one.subject.mode,
            f"{one.median:.3f}",
            f"{one.median / unit:.2f}" if unit else "",
            _seconds(
                figures.median("background", "durable", who=one.subject.who, mode=one.subject.mode)
            ),
        ]
        for one in blocked
    )
    size_bytes = blocked[0].subject.size_bytes if blocked else 0
    columns = ["who", "mode", "blocked s", "of one memcpy", "until durable s"]
    return _table(f"{_HEADINGS['background']}: {size_bytes / MIB:.0f} MiB", columns, rows)


def _loops(figures: Figures) -> str:
    players = dict.fromkeys(
        (one.subject.who, one.subject.mode)
        for loop in LOOPS
        for one in figures.find("loops", f"lost {loop}")
    )
    rows = (
        [who, mode, *(_percent(figures, loop, who, mode) for loop in LOOPS)]
        for who, mode in players
    )
    return _table(_HEADINGS["loops"], ["who", "mode", *(f"{loop} %" for loop in LOOPS)], rows)


def _percent(figures: Figures, loop: str, who: str, mode: str) -> str:
    lost = figures.median("loops", f"lost {loop}", who=who, mode=mode)
    return "" if lost is None else f"{lost * 100:.1f}"


def _curves(figures: Figures, section: str, what: str) -> str:
    found = curves(figures, section, what)
    if what == "load":
        new = curves(figures, section, "load new").items()
        found |= {(_NAMES["load new"], mode): curve for (_, mode), curve in new}
    places = sorted({_place(one, section) for curve in found.values() for one in curve})
    rows = (
        [who, mode, *_along(curve, section, places)]
        for (who, mode), curve in sorted(found.items(), key=lambda item: item[0][0] != OURS)
    )
    names = [
        f"{place / (1 << 30):g} GiB" if section == "sizes" else f"{place:,}" for place in places
    ]
    return _table(f"{_HEADINGS[section]} of a {what}", ["who", "mode", *names], rows)


def _place(figure: Figure, section: str) -> int:
    subject = figure.subject
    if section == "counts":
        return subject.tensors
    return round(subject.size_bytes / (1 << 20)) << 20


def _along(curve: Sequence[Figure], section: str, places: Sequence[int]) -> Iterator[str]:
    by_place = {_place(figure, section): figure.median for figure in curve}
    for place in places:
        yield _seconds(by_place.get(place))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _lazy(figures: Figures) -> str:
    ways = [f"{cache}, {what}" for cache in CACHES for what in ("with opening", "alone")]
    found = figures.find("lazy", ways[0])
    rows = (
        [
            one.subject.mode,
            *(
                f"{each.median * 1e3:.1f}"
                for way in ways
                for each in figures.find("lazy", way, mode=one.subject.mode)
            ),
        ]
        for one in found
    )
    size_bytes = found[0].subject.size_bytes if found else 0
    return _table(f"{_HEADINGS['lazy']} {size_bytes / MIB:.0f} MiB", ["mode", *ways], rows)


def _compression(figures: Figures) -> str:
    """The file as a share of the tensors, and their bytes for each second of a durable save and a cold load."""
    found = figures.find("compression", "ratio")
    rows = (
        [
            one.subject.mode,
            f"{one.median:.3f}",
            *(_speed(figures, one, what) for what in ("save", "load", "save cpu", "load cpu")),
        ]
        for one in found
    )
    size_bytes = found[0].subject.size_bytes if found else 0
    title = f"{_HEADINGS['compression']}: {size_bytes / MIB:.0f} MiB"
    columns = ["save GB/s", "load GB/s", "save GB per CPU s", "load GB per CPU s"]
    return _table(title, ["elements", "ratio", *columns], rows)


def _speed(figures: Figures, ratio: Figure, what: str) -> str:
    seconds = figures.median("compression", what, who=OURS, mode=ratio.subject.mode)
    return "" if seconds is None else f"{ratio.subject.size_bytes / seconds / 1e9:.2f}"


def _ranks(figures: Figures) -> str:
    saves = figures.find("ranks", "save")
    rows = [
        [
            one.subject.mode,
            _seconds(one.median),
            _seconds(figures.median("ranks", "load", who=OURS, mode=one.subject.mode)),
        ]
        for one in saves
    ]
    rows += [
        [f"plan for {one.subject.mode}", _seconds(one.median), ""]
        for one in figures.find("ranks", "plan")
    ]
    size_bytes = saves[0].subject.size_bytes if saves else 0
    title = f"{_HEADINGS['ranks']}: {size_bytes / MIB:.0f} MiB, replicated {size_bytes / MIB / 2:.0f} MiB"
    return _table(title, ["ranks", "save s", "load s"], rows)


def _memory(peaks: Sequence[Peak]) -> str:
    rows = (
        [
            peak.mode,
            *(f"{value / MIB:.1f}" for value in (peak.save_bytes, peak.load_bytes)),
            f"{peak.limit_bytes / MIB:.0f}{'' if peak.is_within else ', passed'}",
        ]
        for peak in peaks
    )
    return _table("Peak extra memory", ["mode", "save MiB", "load MiB", "limit MiB"], rows)


def _targets(verdicts: Sequence[Verdict]) -> str:
    marks = {True: "met", False: "missed", None: "stated"}
    rows = (
        [
            one.target,
            one.what,
            ""
            if one.limit is None
            else f"{'<=' if one.is_ceiling else '>='} {one.limit:g}{one.unit}",
            _value(one),
            marks[one.is_met],
        ]
        for one in verdicts
    )
    return _table("Targets", ["#", "what", "target", "measured", ""], rows)


def _value(verdict: Verdict) -> str:
    if verdict.value is None:
        return ""
    detail = f" ({verdict.detail})" if verdict.detail else ""
    return f"{verdict.value:.2f}{verdict.unit}{detail}"
