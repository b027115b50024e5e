# SPDX-License-Identifier: Apache-2.0
"""How time grows with the size of the model, and with the number of its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from tools.bench.figures import Figure, Figures
from tools.bench.sections import measure_files
from tools.bench.session import NewSession, Session
from tools.bench.team import Setup, Team
from tools.bench.workload import Workload, tiny

SIZES_BYTES = tuple(int(gib * (1 << 30)) for gib in (0.25, 0.5, 1, 2, 4, 8))
COUNTS = (10, 100, 1_000, 10_000, 100_000)
_PEERS_UNTIL_BYTES = 2 << 30
_ALWAYS = ("raw", "ckptmgr")
_TOO_SLOW_S = 1.0
_OF_SIZES = {
    ("raw O_DIRECT", "limit"): "raw",
    ("ckptmgr", "ckpt"): "ckptmgr",
    ("ckptmgr", "ckpt-gcm"): "ckptmgr",
    ("mindspore", "ckpt"): "mindspore",
    ("safetensors.numpy", "safetensors"): "safetensors",
    ("torch DCP, 2 threads", "plain"): "dcp",
}
_OF_COUNTS = {
    ("ckptmgr", "ckpt"): "ckptmgr",
    ("ckptmgr", "ckpt-gcm"): "ckptmgr",
    ("ckptmgr", "safetensors"): "ckptmgr",
    ("mindspore", "ckpt"): "mindspore",
    ("safetensors.numpy", "safetensors"): "safetensors",
    ("torch.save", "plain"): "torch",
    ("torch DCP, 2 threads", "plain"): "dcp",
    ("orbax, numpy", "plain"): "orbax",
    ("tensorizer", "plain"): "tensorizer",
}


def measure_sizes(setup: Setup, new_session: NewSession, sizes_bytes: Sequence[int]) -> None:
    """Save and load ever larger models; peers take part up to 2 GiB, and what does not fit into memory is left out.

    Ours and the bare disk, which needs no model, take turns; the others follow one by one: there is one model in memory.
    """
    for size_bytes in sizes_bytes:
        session = new_session("sizes", Workload(size_bytes=size_bytes))
        # The model, the arrays of a load, and room for the rest.
        needed_bytes, free_bytes = 2 * size_bytes + (1 << 30), _available_bytes()
        if needed_bytes > free_bytes:
            session.failures[f"sizes, {size_bytes / (1 << 30):g} GiB"] = (
                f"needs {needed_bytes / 1e9:.0f} GB of memory, {free_bytes / 1e9:.0f} are available"
            )
            continue
        is_small = size_bytes <= _PEERS_UNTIL_BYTES
        peers = sorted(set(_OF_SIZES.values()) - set(_ALWAYS)) if is_small else []
        for together in (_ALWAYS, *((peer,) for peer in peers)):
            chosen = {key: name for key, name in _OF_SIZES.items() if name in together}
            _measure(setup, session, chosen, reads=("load", "load new"))


def measure_counts(setup: Setup, new_session: NewSession, counts: Sequence[int]) -> None:
    """Save and load ever more tensors of 256 bytes; who takes longer than a second gets no more."""
    chosen = dict(_OF_COUNTS)
    for count in counts:
        session = new_session("counts", tiny(count))
        _measure(setup, session, chosen, reads=("load",))
        for what in ("save", "load"):
            for figure in session.figures.find("counts", what):
                if figure.median > _TOO_SLOW_S:
                    chosen.pop((figure.subject.who, figure.subject.mode), None)


def _measure(
    setup: Setup,
    session: Session,
    chosen: Mapping[tuple[str, str], str],
    *,
    reads: Sequence[str],
) -> None:
    """Save and read with the contestants in `chosen`, each with its library."""
    libraries = [name for name in setup.libraries if name in chosen.values()]
    with Team(replace(setup, libraries=libraries), session.workload) as team:
        players = [
            player for player in team.players("contestants") if (player.who, player.mode) in chosen
        ]
        measure_files(session, players, reads=reads)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell how much memory is available")


def curves(figures: Figures, section: str, what: str) -> dict[tuple[str, str], list[Figure]]:
    """Return the figures of everybody, by who and mode, from small to large."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures.find(section, what):
        found.setdefault((figure.subject.who, figure.subject.mode), []).append(figure)
    return {
        key: sorted(curve, key=lambda one: (one.subject.tensors, one.subject.size_bytes))
        for key, curve in found.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The line that comes closest to some points, by least squares.

    Attributes:
        slope: Seconds for one more byte or tensor.
        residual_s: How far the points lie from it: the root of the mean square.
    """

    slope: float
    residual_s: float


def line_over_bytes(curve: Sequence[Figure]) -> Line | None:
    """Return the line of seconds over bytes, or None for fewer than two sizes."""
    return _line([(figure.subject.size_bytes, figure.median) for figure in curve])


def seconds_per_tensor(curve: Sequence[Figure]) -> float | None:
    """Return the slope of seconds over the number of tensors between the two largest, or None for fewer than two."""
    last = list(pairwise((figure.subject.tensors, figure.median) for figure in curve))[-1:]
    line = _line(last[0]) if last else None
    return None if line is None else line.slope


def _line(points: Sequence[tuple[int, float]]) -> Line | None:
    if len({x for x, _ in points}) < 2:
        return None
    x, y = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
    constant, slope = np.polynomial.polynomial.polyfit(x, y, 1)
    residuals_s = y - constant - slope * x
    return Line(slope=float(slope), residual_s=float(np.sqrt(np.mean(residuals_s**2))))
