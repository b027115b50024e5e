# SPDX-License-Identifier: Apache-2.0
"""Selectors of checkpoints, the same in `manager.load` and on the command line. Pure.

| text | the checkpoints that it names |
|---|---|
| `latest` | the newest usable one, before those whose floats are not finite |
| `4000` | the newest attempt of the step, in each series |
| `1000..5000`, `..5000`, `1000..` | those of a range of steps |
| `best:loss:min`, `best:acc:max` | the one with the best finite value of a metric |
| `@pinned`, `@tag:NAME` | pinned ones; those with a tag, which may have `*` and `?` |
| `id:0f3a91c0` | those whose id begins so, with at least eight hex digits |
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from ckptmgr.core.model import Checkpoint
from ckptmgr.io.passing_errors import may_be_whole
from ckptmgr.series.candidates import newest_first

LATEST = "latest"
"""The newest checkpoint without known damage."""
FORMS = (
    "a step, latest, best:METRIC:min, best:METRIC:max, @pinned, @tag:NAME, id:DIGITS or 1000..5000"
)
_STEP = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{0,18})\.\.([0-9]{0,18})")
_ID = re.compile(r"id:([0-9a-f]{8,})", re.IGNORECASE)
_TAG = "@tag:"
_NO_RUNS: Set[str] = frozenset()
_Choose = Callable[[Sequence[Checkpoint], Set[str]], list[Checkpoint]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed selector.

    Attributes:
        choose: Returns the chosen ones of the finished checkpoints, given the oldest first, and the
            run that asks with its parents. Raises OSError where a manifest that may be intact
            cannot be read, so that it is not known which one is the newest.
        step: The step that it names alone, or None.
    """

    choose: _Choose
    step: int | None = None


def parse_selector(text: str) -> Selector | None:
    """Return the selector that a text is, or None for a name or a path.

    Raises:
        ValueError: It begins as one, and is not complete.
    """
    if text == LATEST:
        return Selector(choose=latest)
    if text == "@pinned":
        return _those(lambda c: bool(c.pins) and not c.is_unproven)
    if text.startswith(_TAG) and len(text) > len(_TAG):
        tag = text.removeprefix(_TAG)
        return _those(lambda c: bool(fnmatch.filter(c.tags, tag)) and not c.is_unproven)
    if text == "best" or text.startswith("best:"):
        metric, _, mode = text.removeprefix("best").removeprefix(":").rpartition(":")
        if not metric or mode not in ("min", "max"):
            raise ValueError(f"{text!r} is not complete: write best:loss:min or best:acc:max")
        return Selector(choose=lambda found, _: best(found, metric, mode))
    if text.startswith("id:"):
        digits = _ID.fullmatch(text)
        if digits is None:
            raise ValueError(f"{text!r} is not complete: write id: and at least eight hex digits")
        start = digits[1].lower()
        return _those(lambda c: c.id is not None and c.id.startswith(start))
    if _STEP.fullmatch(text):
        return of_step(int(text))
    match = _RANGE.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    low, high = int(match[1] or 0), int(match[2]) if match[2] else math.inf
    return _those(lambda c: low <= c.step <= high)


def latest(found: Sequence[Checkpoint], own_runs: Set[str] = _NO_RUNS) -> list[Checkpoint]:
    """Return the newest usable checkpoint of the line of runs that is meant; see `newest_first`.

    One whose floats are not finite only where the line has no other.
    """
    for one in found:
        if one.obstacle is not None and may_be_whole(one.obstacle):
            raise one.obstacle
    usable = [c for c in newest_first(found, own_runs) if c.is_countable]
    if not usable:
        return []
    line = (usable[0].run_id, *usable[0].parent_run_ids)
    finite = (c for c in usable if c.health is None and c.run_id in line)
    return [next(finite, usable[0])]


def best(found: Sequence[Checkpoint], metric: str, mode: str) -> list[Checkpoint]:
    """Return the usable checkpoint with the best finite value of a metric, the newest of equal ones.

    One whose own floats are not finite comes after all others. `mode` is `min` or `max`; `found` has the oldest first.
    """
    sign = 1 if mode == "min" else -1
    ranked = [c for c in found if c.is_countable and math.isfinite(c.metrics.get(metric, math.nan))]
    if not ranked:
        return []
    return [min(reversed(ranked), key=lambda c: (c.health is not None, sign * c.metrics[metric]))]


def of_step(step: int) -> Selector:
    """Return the selector of the newest checkpoint of a step in each series.

    Usable ones come before others, and those of the line of runs that is meant. Another file may
    claim the same step: an unproven one counts only where none is proven.
    """

    def choose(found: Sequence[Checkpoint], own_runs: Set[str]) -> list[Checkpoint]:
        oldest_first = [c for c in reversed(newest_first(found, own_runs)) if c.step == step]
        proven = [c for c in oldest_first if not c.is_unproven] or oldest_first
        return list({c.series: c for c in sorted(proven, key=lambda c: c.is_countable)}.values())

    return Selector(choose=choose, step=step)


def _those(is_chosen: Callable[[Checkpoint], bool]) -> Selector:
    return Selector(choose=lambda found, _: [one for one in found if is_chosen(one)])
