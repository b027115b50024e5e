# SPDX-License-Identifier: Apache-2.0
"""Take turns: A B C A B C, one round to warm up, fresh file names, a machine at rest, a cold cache before every load."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from statistics import median

from tools.bench.contestants import Contestant
from tools.bench.disk import drop_cache
from tools.bench.quiet import rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The seconds of one contestant, one value per round."""

    contestant: Contestant
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    @property
    def median_save_s(self) -> float:
        """Seconds of a durable save."""
        return median(self.save_s)

    @property
    def median_load_s(self) -> float:
        """Seconds of a cold load."""
        return median(self.load_s)


def measure(
    everybody: Sequence[Contestant],
    directory: Path,
    *,
    rounds: int,
    rest_s: float,
    report: Callable[[str], None],
) -> list[Figures]:
    """Return the figures of everybody, in their order.

    Args:
        everybody: Those of one mode side by side.
        directory: Where to write; removed files leave it as it was.
        rounds: Measured rounds, after one that is not.
        rest_s: Seconds of rest before every save and load.
        report: Takes a line of progress.
    """
    figures = [Figures(contestant=one) for one in everybody]
    for turn in range(-1, rounds):
        for mode, group in groupby(figures, key=lambda one: one.contestant.mode):
            report(f"round {turn + 1} of {rounds}: {mode}")
            _take_turns(list(group), directory, turn=turn, rest_s=rest_s)
    return figures


def _take_turns(group: Iterable[Figures], directory: Path, *, turn: int, rest_s: float) -> None:
    group = list(group)
    paths = {
        one.contestant.name: directory
        / f"{one.contestant.name.split()[0]}-{turn}{one.contestant.suffix}"
        for one in group
    }
    try:
        saves = [
            _seconds(one.contestant.save, paths[one.contestant.name], rest_s=rest_s)
            for one in group
        ]
        for path in paths.values():
            drop_cache(path)
        loads = [
            _seconds(one.contestant.load, paths[one.contestant.name], rest_s=rest_s)
            for one in group
        ]
    finally:
        for path in paths.values():
            remove(path)
    if turn >= 0:
        for one, save_s, load_s in zip(group, saves, loads, strict=True):
            one.save_s.append(save_s)
            one.load_s.append(load_s)


def _seconds(work: Callable[[Path], object], path: Path, *, rest_s: float) -> float:
    rest(rest_s)
    started = time.perf_counter()
    work(path)
    return time.perf_counter() - started


def remove(path: Path) -> None:
    """Remove a checkpoint and what lies beside it."""
    for each in (path, path.with_name(f"{path.name}.manifest.json")):
        with contextlib.suppress(FileNotFoundError):
            each.unlink()
