# SPDX-License-Identifier: Apache-2.0
"""`--filter` and `--sort`: conditions on checkpoints and their order, by fields and metrics."""

from __future__ import annotations

import difflib
import fnmatch
import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import click

from ckptmgr.cli.durations import parse_time
from ckptmgr.cli.exits import UsageProblem
from ckptmgr.cli.options import Command
from ckptmgr.cli.sizes import parse_size
from ckptmgr.core.model import Checkpoint
from ckptmgr.maintenance.json_fields import has_known_step

_One = TypeVar("_One")
_TERM = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_./ -]*?)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*", re.DOTALL)
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
    "!=": operator.ne,
}
_NUMBERS: dict[str, Callable[[Checkpoint], float | None]] = {
    "step": lambda one: one.step if has_known_step(one) else None,
    "epoch": lambda one: one.epoch,
    "size": lambda one: one.size_bytes,
}
_TEXTS: dict[str, Callable[[Checkpoint], tuple[str, ...]]] = {
    "state": lambda one: (one.state.value,),
    "format": lambda one: (one.format,),
    "cipher": lambda one: (one.cipher or "none",),
    "series": lambda one: (one.series,),
    "run": lambda one: (one.run_id or "",),
    "why": lambda one: (one.why,),
    "name": lambda one: (one.name,),
    "tag": lambda one: (*one.tags, *(pin.name for pin in one.pins)),
}
FIELDS = (*_NUMBERS, "age", *_TEXTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """One condition, as it was typed and as it is tried."""

    text: str
    field: str
    holds: Callable[[Checkpoint], bool]

    @property
    def is_metric(self) -> bool:
        return self.field not in FIELDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """Conditions that all must hold, and the field to sort by."""

    terms: tuple[_Term, ...] = ()
    sort: str | None = None
    is_descending: bool = False

    @property
    def texts(self) -> list[str]:
        """The conditions as they were typed."""
        return [term.text for term in self.terms]

    def takes(self, checkpoint: Checkpoint) -> bool:
        """Return whether all conditions hold."""
        return all(term.holds(checkpoint) for term in self.terms)

    def apply(self, found: Iterable[_One], of: Callable[[_One], Checkpoint]) -> list[_One]:
        """Return the chosen ones, sorted if asked for; `of` gives the checkpoint of one.

        Raises:
            UsageProblem: A name is neither a field nor a metric of any of them.
        """
        listed = list(found)
        self.check_metrics([of(one) for one in listed])
        return self.in_order([one for one in listed if self.takes(of(one))], of)

    def in_order(self, found: Iterable[_One], of: Callable[[_One], Checkpoint]) -> list[_One]:
        """Return all of them, sorted if asked for; those without a number come last."""
        chosen = list(found)
        if self.sort is None:
            return chosen
        name, sign = self.sort, -1 if self.is_descending else 1
        if name in _TEXTS:
            chosen.sort(key=lambda one: _TEXTS[name](of(one)), reverse=self.is_descending)
            return chosen

        def key(one: _One) -> tuple[bool, float]:
            value = _number(of(one), name)
            return (math.isnan(value), 0.0 if math.isnan(value) else sign * value)

        return sorted(chosen, key=key)

    def check_metrics(self, found: Sequence[Checkpoint]) -> None:
        """Raise UsageProblem if a name is neither a field nor a metric of any checkpoint."""
        names = [term.field for term in self.terms if term.is_metric]
        names += [self.sort] if self.sort is not None and self.sort not in FIELDS else []
        known = {metric for one in found for metric in one.metrics} if names else set()
        for name in names if found else ():
            if name not in known:
                from ckptmgr.policy.retention import metrics_text

                close = difflib.get_close_matches(name, [*FIELDS, *known], n=1)
                listed = ", ".join([*FIELDS, *([metrics_text(found)] if known else [])])
                raise UsageProblem(
                    f"no checkpoint here has a field or metric {name[:40]!r}",
                    hint=f"did you mean {close[0]}?" if close else f"there are {listed}",
                )


ALL = Chosen()


def filter_option(function: Command) -> Command:
    """Add `--filter`, passed on as texts; `chosen_by` reads them."""
    return click.option(
        "--filter",
        "filters",
        metavar="EXPR",
        multiple=True,
        help="Only these, e.g. 'size>1g', 'step>=1000', 'age>7d', 'state=ok', 'tag=paper*', 'loss<0.5'. "
        "May be repeated: all must hold.",
    )(function)


def filter_options(function: Command) -> Command:
    """Add `--filter` and `--sort`, passed on as texts; `chosen_by` reads them."""
    function = click.option(
        "--sort",
        metavar="FIELD",
        help="Order by a field or metric; -FIELD from the largest on.",
    )(function)
    return filter_option(function)


def chosen_by(filters: Sequence[str], sort: str | None, now: datetime) -> Chosen:
    """Return what `--filter` and `--sort` choose at a time.

    Raises:
        UsageProblem: An expression is not one; names it.
    """
    field = None if sort is None else sort.removeprefix("-").strip()
    if field == "":
        raise UsageProblem("--sort is empty", hint=f"write one of {', '.join(FIELDS)}, or a metric")
    return Chosen(
        terms=tuple(_term(text, now) for text in filters),
        sort=field,
        # The newest has the smallest age, but the largest time.
        is_descending=(sort or "").startswith("-") != (field == "age"),
    )


def spared_by(chosen: Chosen) -> Callable[[Checkpoint], str | None]:
    """Return the function that says why a checkpoint that is not chosen stays."""
    if not chosen.terms:
        from ckptmgr.maintenance.prune_plan import nothing_spared

        return nothing_spared
    return lambda one: None if chosen.takes(one) else "left out by --filter"


def _term(text: str, now: datetime) -> _Term:
    match = _TERM.fullmatch(text)
    if match is None or not match[3]:
        raise UsageProblem(
            f"--filter: {text[:60]!r} is not a condition",
            hint="write NAME, one of = != < <= > >=, and a value, such as 'size>1g'",
        )
    name, sign, value = match.groups()
    if name in _TEXTS:
        if sign not in ("=", "!="):
            raise UsageProblem(
                f"--filter: {name} is a text", hint=f"write '{name}=...' or '{name}!=...'"
            )
        is_wanted = sign == "="

        def matches(one: Checkpoint) -> bool:
            return any(fnmatch.fnmatchcase(x, value) for x in _TEXTS[name](one)) is is_wanted

        return _Term(text=text, field=name, holds=matches)
    number, compare = _value(name, value), _COMPARE[sign]

    def compares(one: Checkpoint) -> bool:
        found = (now - one.saved_at).total_seconds() if name == "age" else _number(one, name)
        return not math.isnan(found) and compare(found, number)

    return _Term(text=text, field=name, holds=compares)


def _value(name: str, text: str) -> float:
    if name == "size":
        return parse_size(text, option="--filter")
    if name == "age":
        return parse_time(text).total_seconds()
    try:
        return float(text)
    except ValueError:
        raise UsageProblem(
            f"--filter: {text[:40]!r} is no number", hint=f"write a number behind {name[:40]}"
        ) from None


def _number(one: Checkpoint, name: str) -> float:
    """Return the number of a field or metric; NaN for none."""
    if name == "age":
        return one.saved_at.timestamp()
    value = _NUMBERS[name](one) if name in _NUMBERS else one.metrics.get(name)
    return math.nan if value is None else float(value)
