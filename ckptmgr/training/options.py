# SPDX-License-Identifier: Apache-2.0
"""The options of a run, joined from its arguments and from their names of the last release."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ckptmgr.config.subjects import Resume, Snapshots, Stop
from ckptmgr.core.trust import Trust
from ckptmgr.parallel.team import Ranks

if TYPE_CHECKING:
    from ckptmgr.io.filesystem import FileSystem
    from ckptmgr.io.leases import Processes

_LOG = logging.getLogger(__name__)
_VARIABLE = "CKPTMGR_RESUME"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The system below a run; tests replace it.

    Attributes:
        clock: Seconds since the epoch; stamps checkpoints and decides about seconds and ages.
        fs: The disk; None for the real one.
        processes: Distinguishes dead writers from live ones; None for those of this system.
    """

    clock: Callable[[], float] = time.time
    fs: FileSystem | None = None
    processes: Processes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run that are objects of their subject."""

    system: System
    trust: Trust
    ranks: Ranks
    stop: Stop
    snapshots: Snapshots


SUBJECTS: Mapping[str, type] = {
    "trust": Trust,
    "ranks": Ranks,
    "stop": Stop,
    "snapshots": Snapshots,
}
"""Argument to the class of its object."""


def run_options(
    owner: str, system: System, old: Mapping[str, Any], **given: object | None
) -> RunOptions:
    """Return the given objects, joined with `old`, the arguments under their names of last release.

    Raises:
        TypeError: One is of another type, unknown, or given under both names.
    """
    if old or isinstance(given.get("snapshots"), int):
        from ckptmgr.training.old_names import joined

        given, system = joined(owner, given, old, system)
    found: dict[str, Any] = {}
    for name, kind in SUBJECTS.items():
        value = given.get(name)
        found[name] = kind() if value is None else checked_kind(name, value, kind)
    return RunOptions(system=system, **found)


def resume_options(owner: str, given: Resume | None, old: Mapping[str, Any]) -> Resume:
    """Return how to resume; raises as `run_options` and `Resume`.

    For one start the environment variable CKPTMGR_RESUME has the ways out of an error, in place of
    the program: `may_differ=data,ema`, `only=healthy` and `at=1200`, with `;` between them.
    """
    if old:
        from ckptmgr.training.old_names import joined_resume

        given = joined_resume(owner, given, old)
    found = Resume() if given is None else checked_kind("resume", given, Resume)
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return found
    _warn_of(text)
    ways = _ways_out(text)
    chosen: dict[str, Any] = {"only": None, "allow_bare": False} if "at" in ways else {}
    return replace(found, **chosen, **ways)


@cache
def _warn_of(text: str) -> None:
    """Warn once: an adapter and its manager both ask."""
    _LOG.warning("%s=%s: how this start resumes; unset it for the next one", _VARIABLE, text)


def _ways_out(text: str) -> dict[str, Any]:
    """Return the fields of `Resume` that a text names."""
    ways: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(";"))):
        name, _, value = map(str.strip, part.partition("="))
        if name not in ("at", "may_differ", "only") or not value:
            raise ValueError(
                f"{_VARIABLE} has may_differ=NAME,NAME, only=healthy or at=SELECTOR, with ; between them, but got {part!r}"
            )
        names = tuple(one.strip() for one in value.split(","))
        ways[name] = names if name == "may_differ" else int(value) if value.isdigit() else value
    return ways


def checked_kind(name: str, value: object, kind: type[_T]) -> _T:
    """Return a value of a kind; raise TypeError for another one."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be a {kind.__name__}, but got {type(value).__name__}: {name}={kind.__name__}(...)"
        )
    return value
