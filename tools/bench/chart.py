# SPDX-License-Identifier: Apache-2.0
"""The chart: how long saves and loads take, how long the caller is held up, and how time grows with size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullFormatter

from tools.bench.figures import OURS, Figure, Figures
from tools.bench.scale import curves

NAME = "benchmark"
_INCHES = (12.0, 11.0)
_OURS_COLOUR = "#0072b2"
_PEER_COLOUR = "#b8bcc2"
_RAW_COLOUR = "#d55e00"
_PEER_COLOURS = ("#6b7078", "#009e73", "#cc79a7", "#a6761d", "#56b4e9")
_SETTINGS = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 16,
    "svg.hashsalt": "ckptmgr",
}
# The SM4 row would squeeze all others; the two CRC rows repeat those without.
_SHOWN_MODES = {
    "ckpt",
    "ckpt-gcm",
    "ckpt-cbc",
    "container-gcm",
    "safetensors",
    "plain",
    "encrypted",
}


def draw(figures: Figures, output: Path) -> list[Path]:
    """Write `benchmark.png` and `benchmark.svg` below `output`; sections without figures leave their place empty."""
    with mpl.rc_context(_SETTINGS):
        canvas = Canvas(figsize=_INCHES, layout="constrained")
        grid = canvas.subplots(2, 2, height_ratios=(3, 2))
        for axes, what in ((grid[0, 0], "save"), (grid[0, 1], "load")):
            _bars_of_files(axes, figures, what)
        _bars_of_blocked(grid[1, 0], figures)
        _lines_of_sizes(grid[1, 1], figures, "save")
        paths = [output / f"{NAME}.{kind}" for kind in ("png", "svg")]
        for path in paths:
            canvas.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    return paths


def _bars_of_files(axes: Axes, figures: Figures, what: str) -> None:
    found = [one for one in figures.find("files", what) if one.subject.mode in _SHOWN_MODES]
    name = "Durable save" if what == "save" else "Cold load into new arrays"
    axes.set_title(f"{name}, {_size(found)}")
    _bars(axes, {_label(one): one for one in found})
    raw = figures.find("files", what, mode="limit")
    if raw:
        axes.axvline(raw[0].median, color=_RAW_COLOUR, linewidth=1.2)
        axes.annotate(
            "bare disk",
            (raw[0].median, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 0),
            textcoords="offset points",
            color=_RAW_COLOUR,
            va="bottom",
            fontsize=8,
        )


def _bars_of_blocked(axes: Axes, figures: Figures) -> None:
    found = figures.find("background", "blocked")
    axes.set_title(f"Background save: the caller is blocked, {_size(found)}")
    _bars(axes, {_label(one): one for one in found})


def _bars(axes: Axes, bars: Mapping[str, Figure]) -> None:
    """Draw one bar each, the fastest at the top, with its seconds beside it."""
    ordered = sorted(bars.items(), key=lambda item: item[1].median, reverse=True)
    values = [one.median for _, one in ordered]
    drawn = axes.barh(
        [label for label, _ in ordered],
        values,
        color=[_OURS_COLOUR if one.subject.who == OURS else _PEER_COLOUR for _, one in ordered],
        height=0.72,
    )
    axes.bar_label(
        drawn,
        [f"{value:.2f}" if value >= 0.1 else f"{value:.3f}" for value in values],
        padding=3,
        fontsize=8,
    )
    axes.set_xlabel("seconds")
    axes.margins(x=0.1, y=0.01)
    axes.tick_params(axis="y", length=0)


def _lines_of_sizes(axes: Axes, figures: Figures, what: str) -> None:
    axes.set_title("Durable save by size of the model")
    peers = cycle(_PEER_COLOURS)
    for (who, mode), curve in curves(figures, "sizes", what).items():
        is_raw = mode == "limit"
        colour = _RAW_COLOUR if is_raw else _OURS_COLOUR if who == OURS else next(peers)
        axes.plot(
            [one.subject.size_bytes / (1 << 30) for one in curve],
            [one.median for one in curve],
            color=colour,
            linestyle="--" if mode == "ckpt-gcm" else "-",
            marker="o",
            markersize=3,
            linewidth=1.4,
            label="bare disk" if is_raw else f"{who} {mode}" if who == OURS else who,
        )
    if axes.lines:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(visible=True, linewidth=0.4, alpha=0.5)
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("GiB")
    axes.set_ylabel("seconds")


def _label(figure: Figure) -> str:
    who, mode = figure.subject.who, figure.subject.mode
    says_enough = mode in ("plain", "unit") or who.startswith("safetensors.")
    return who if says_enough else f"{who}, {mode}"


def _size(figures: Iterable[Figure]) -> str:
    for figure in figures:
        return f"{figure.subject.size_bytes / (1 << 20):.0f} MiB"
    return "not measured"
