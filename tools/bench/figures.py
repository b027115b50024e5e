# SPDX-License-Identifier: Apache-2.0
"""Measured values: lists, and how to find them again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from statistics import median

OURS = "ckptmgr"


def cpu_of(what: str) -> str:
    """Return the name under which the processor seconds of an action, of all threads of its process, are noted."""
    return f"{what}, processor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The measured values.

    Attributes:
        section: Part of the benchmark: `files`, `slow files`, `background`, `loops`, `sizes`, `counts`, `lazy`,
            `compression`, `ranks`.
        who: Contestant.
        mode: Its mode.
        what: `save`, `load`, `load new`, `blocked` ... in seconds; `lost python` ... and `ratio` as a share.
        size_bytes: Of the model.
        tensors: How many it has.
    """

    section: str
    who: str
    mode: str
    what: str
    size_bytes: int
    tensors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The values of one subject, one for each round."""

    subject: Subject
    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return median(self.values)


class Figures:
    """All of them, in the order in which they were first measured."""

    def __init__(self, figures: Iterable[Figure] = ()) -> None:
        self._all = {figure.subject: figure for figure in figures}

    def __iter__(self) -> Iterator[Figure]:
        return iter(self._all.values())

    def add(self, subject: Subject, value: float) -> None:
        """Add the value of one round."""
        self._all.setdefault(subject, Figure(subject=subject)).values.append(value)

    def find(self, section: str, what: str, *, who: str = "", mode: str = "") -> list[Figure]:
        """Return those of a section; an empty name stands for any."""
        return [
            figure
            for figure in self
            if (figure.subject.section, figure.subject.what) == (section, what)
            and who in ("", figure.subject.who)
            and mode in ("", figure.subject.mode)
        ]

    def median(self, section: str, what: str, *, who: str, mode: str = "") -> float | None:
        """Return the median of the first of them, or None where nothing was measured."""
        found = self.find(section, what, who=who, mode=mode)
        return found[0].median if found else None

    def as_json(self) -> list[dict[str, object]]:
        """Return all values."""
        return [
            asdict(figure.subject) | {"median": figure.median, "values": figure.values}
            for figure in self
        ]
