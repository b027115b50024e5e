# SPDX-License-Identifier: Apache-2.0
"""How time grows with the size of the model, and with the number of its tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from itertools import pairwise

import numpy as np

from tools.bench.figures import Figure, Figures
from tools.bench.sections import measure_files
from tools.bench.session import Session
from tools.bench.team import Setup, Team
from tools.bench.workload import Workload, tiny

SIZES_BYTES = tuple(int(gib * (1 << 30)) for gib in (0.25, 0.5, 1, 2, 4, 8))
COUNTS = (10, 100, 1_000, 10_000, 100_000)
_PEERS_UNTIL_BYTES = 2 << 30
_ALWAYS = ("raw", "ckptmgr")
_TOO_SLOW_S = 3.0
_OF_SIZES = {
    ("raw O_DIRECT", "limit"),
    ("ckptmgr", "ckpt"),
    ("ckptmgr", "ckpt-gcm"),
    ("mindspore", "ckpt"),
    ("safetensors.numpy", "safetensors"),
    ("torch DCP, 2 threads", "plain"),
}
_OF_COUNTS = {
    *_OF_SIZES,
    ("ckptmgr", "safetensors"),
    ("torch.save", "plain"),
    ("orbax, numpy", "plain"),
    ("tensorizer", "plain"),
}

NewSession = Callable[[str, Workload], Session]


def measure_sizes(setup: Setup, new_session: NewSession, sizes_bytes: Sequence[int]) -> None:
    """Save and load ever larger models; peers take part up to 2 GiB, and what does not fit into memory is left out."""
    for size_bytes in sizes_bytes:
        if size_bytes * 5 // 2 > _memory_bytes():
            continue
        libraries = setup.libraries if size_bytes <= _PEERS_UNTIL_BYTES else _ALWAYS
        session = new_session("sizes", Workload(size_bytes=size_bytes))
        _measure(setup, session, libraries, chosen=_OF_SIZES)


def measure_counts(setup: Setup, new_session: NewSession, counts: Sequence[int]) -> None:
    """Save and load ever more tensors of 256 bytes; who takes longer than three seconds gets no more."""
    libraries = [library for library in setup.libraries if library != "raw"]
    chosen = set(_OF_COUNTS)
    for count in counts:
        session = new_session("counts", tiny(count))
        _measure(setup, session, libraries, chosen=chosen)
        chosen -= {
            (figure.subject.who, figure.subject.mode)
            for figure in session.figures.find("counts", "save")
            + session.figures.find("counts", "load")
            if figure.median > _TOO_SLOW_S
        }


def _measure(
    setup: Setup, session: Session, libraries: Sequence[str], *, chosen: Set[tuple[str, str]]
) -> None:
    with Team(replace(setup, libraries=libraries), session.workload) as team:
        players = [
            player for player in team.players("contestants") if (player.who, player.mode) in chosen
        ]
        measure_files(session, players, reads=("load",))


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def curves(figures: Figures, section: str, what: str) -> dict[tuple[str, str], list[Figure]]:
    """Return the figures of everybody, by who and mode, from small to large."""
    found: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures.find(section, what):
        found.setdefault((figure.subject.who, figure.subject.mode), []).append(figure)
    return {
        key: sorted(curve, key=lambda one: (one.subject.tensors, one.subject.size_bytes))
        for key, curve in found.items()
    }


def seconds_per_byte(curve: Sequence[Figure]) -> float | None:
    """Return the slope of seconds over bytes by least squares, or None for fewer than two sizes."""
    return _slope([(figure.subject.size_bytes, figure.median) for figure in curve])


def seconds_per_tensor(curve: Sequence[Figure]) -> float | None:
    """Return the slope of seconds over the number of tensors between the two largest, or None for fewer than two."""
    last = list(pairwise((figure.subject.tensors, figure.median) for figure in curve))[-1:]
    return _slope(last[0]) if last else None


def _slope(points: Sequence[tuple[int, float]]) -> float | None:
    if len({x for x, _ in points}) < 2:
        return None
    x, y = (np.array(axis, dtype=np.float64) for axis in zip(*points, strict=True))
    return float(np.polynomial.polynomial.polyfit(x, y, 1)[1])
