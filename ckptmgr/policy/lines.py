# SPDX-License-Identifier: Apache-2.0
"""Lines of runs: a run and the runs that it was resumed from, and the checkpoints they saved. Pure.

A run that was not resumed begins a line of its own, although its checkpoints may be in the series
of another one. Retention and `prune` count each line by itself, so that a run that began again at
step 0, by mistake or on purpose, never makes an older run lose its newest checkpoints.

* Each run belongs to one line. Where two runs were resumed from the same one, that one belongs to
  the line of the run that committed last.
* A checkpoint that the keys do not prove joins no lines.
* Files of no run form one line for each series.

>>> from datetime import UTC, datetime
>>> from pathlib import Path
>>> saved_at = datetime(2026, 3, 1, tzinfo=UTC)
>>> present = [
...     Checkpoint(path=Path(f"net-{step}"), series="net", step=step, saved_at=saved_at, size_bytes=1,
...                run_id=run, sequence=number)
...     for number, (run, step) in enumerate([("old", 900), ("old", 1000), ("late", 100)], start=1)
... ]
>>> [(line.run_id, [c.step for c in line.checkpoints]) for line in lines_of(present)]
[('late', [100]), ('old', [900, 1000])]
>>> meant_line(lines_of(present)).newest.step  # the run "late" did not ask for a new start
1000
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain, pairwise

from ckptmgr.core.model import ORDER, Checkpoint

_SHOWN_DIGITS = 8
_SHOWN_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """Runs that descend from each other, and their checkpoints.

    Attributes:
        runs: Their ids, the one that committed last first; empty for files of no run.
        checkpoints: Those that they saved, in any series, oldest first.
    """

    runs: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]

    @property
    def run_id(self) -> str | None:
        """The run that committed last, which names the line; None for files of no run."""
        return self.runs[0] if self.runs else None

    @property
    def newest(self) -> Checkpoint | None:
        """The newest countable checkpoint, or None."""
        return next((c for c in reversed(self.checkpoints) if c.is_countable), None)

    @property
    def newest_finite(self) -> Checkpoint | None:
        """The newest countable checkpoint whose floats are finite, or None."""
        countable = (c for c in reversed(self.checkpoints) if c.is_countable)
        return next((c for c in countable if c.health is None), None)

    @property
    def series(self) -> tuple[str, ...]:
        """The series that it saved in, the oldest first."""
        return tuple(dict.fromkeys(c.series for c in self.checkpoints))

    def __str__(self) -> str:
        """Return e.g. `run 3f2a91c0`."""
        return "files of no run" if self.run_id is None else f"run {short_run(self.run_id)}"


def short_run(run_id: str) -> str:
    """Return the first digits of a run id, as people see them."""
    return run_id[:_SHOWN_DIGITS]


def lines_of(checkpoints: Iterable[Checkpoint]) -> list[RunLine]:
    """Return the lines of a directory, the one that committed last first, files of no run last."""
    by_run: dict[str, list[Checkpoint]] = {}
    others: dict[str, list[Checkpoint]] = {}
    for one in _in_order(checkpoints):
        if one.run_id and not one.is_unproven:
            by_run.setdefault(one.run_id, []).append(one)
        else:
            others.setdefault(one.series, []).append(one)
    lines = []
    for run in sorted(by_run, key=lambda run: by_run[run][-1].order, reverse=True):
        if run not in by_run:
            continue
        parents = (parent for one in by_run[run] for parent in one.parent_run_ids)
        runs = [one for one in dict.fromkeys([run, *parents]) if one in by_run]
        lines.append(_joined(tuple(runs), *[by_run.pop(each) for each in runs]))
    for series, found in others.items():
        at = next((i for i, line in enumerate(lines) if series in line.series), None)
        if at is None or any(one.is_countable for one in found):
            lines.append(_joined((), found))
        else:  # not counted anyway: shown with the rest of its series
            lines[at] = _joined(lines[at].runs, lines[at].checkpoints, found)
    return lines


def _joined(runs: tuple[str, ...], *parts: Sequence[Checkpoint]) -> RunLine:
    """Return the line of some runs; the checkpoints of each part are in order."""
    if len(parts) == 1:
        return RunLine(runs=runs, checkpoints=tuple(parts[0]))
    return RunLine(runs=runs, checkpoints=tuple(_in_order(chain(*parts))))


def _in_order(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return checkpoints by their order; names decide only where two have the same."""
    ordered = sorted(checkpoints, key=ORDER)
    if any(one == after for one, after in pairwise(map(ORDER, ordered))):
        ordered.sort(key=lambda one: (ORDER(one), one.name))
    return ordered


def meant_line(lines: Sequence[RunLine], own_runs: Set[str] = frozenset()) -> RunLine | None:
    """Return the line of which `latest` and `resume` mean the newest checkpoint, or None.

    That is the line of `own_runs`, the run that asks and its parents, if it has a checkpoint. Else
    the line that committed last; but a run that neither resumed nor asked for a new start does not
    take the place of a line of its series that reaches a later step.
    """
    known = [line for line in lines if line.runs and line.newest is not None]
    own = next((line for line in known if not own_runs.isdisjoint(line.runs)), None)
    if own is not None:
        return own
    leading: list[RunLine] = []  # the one that committed last comes first
    for line in reversed(known):
        before = next((one for one in leading if not set(one.series).isdisjoint(line.series)), None)
        if before is None or _was_asked_for(line) or _step(line) >= _step(before):
            leading.insert(0, line)
    return leading[0] if leading else None


def about_others(chosen: Checkpoint, lines: Sequence[RunLine]) -> str | None:
    """Return which run a checkpoint is of, if another line saved later or reaches a later step."""
    own = next((line for line in lines if chosen.run_id in line.runs), None)
    if own is None or own.newest is None:
        return None
    others = []
    for line in lines:
        newest = line.newest
        if line is own or not line.runs or newest is None:
            continue
        if newest.order > own.newest.order:
            others.append(f"{line} saved later, up to step {newest.step} ({newest.name})")
        elif newest.step > own.newest.step:
            others.append(f"{line} reaches step {newest.step} ({newest.name})")
    more = f"; and {len(others) - _SHOWN_LINES} more runs" if len(others) > _SHOWN_LINES else ""
    shown = "; ".join(others[:_SHOWN_LINES]) + more
    return f"{chosen.name} is of run {short_run(chosen.run_id or '')}; {shown}" if others else None


def _was_asked_for(line: RunLine) -> bool:
    newest = line.newest
    return newest is not None and (bool(newest.parent_run_ids) or newest.starts_anew)


def _step(line: RunLine) -> int:
    return -1 if line.newest is None else line.newest.step
