# SPDX-License-Identifier: Apache-2.0
"""Carry out a decision about removals, at any place: into the trash, or for good.

Whatever removes checkpoints does it here: a run after a save, a mirror, `prune`, `rm` and `watch`.
The newest durable checkpoint because of which others go is looked at once more, at the place, just
before the first one goes (`needed`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.place import Place
from ckptmgr.observe.events import Facts


@dataclass(slots=True, kw_only=True)
class Applied:
    """Result of removals.

    Attributes:
        removed: The checkpoints that went.
        batch: Their folder in the trash, or None when they were removed for good.
        notes: Other actions, one sentence each.
        failures: The errors of removals that failed.
    """

    removed: list[Checkpoint] = field(default_factory=list)
    batch: Path | None = None
    notes: list[str] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)

    def facts(self, *, kept: int | None = None) -> Facts:
        """Return the fields of the event `prune`."""
        figures: dict[str, int | float] = {} if kept is None else {"kept": kept}
        figures |= {
            "dropped": len(self.removed),
            "freed_bytes": sum(one.size_bytes for one in self.removed),
        }
        verb = "removed" if kept is None else "dropped"
        facts: Facts = {
            "figures": figures,
            "notes": (*(f"{verb} {one.name}" for one in self.removed), *self.notes),
        }
        if self.failures:
            facts["error"] = "; ".join(map(str, self.failures))
            facts["error_type"] = type(self.failures[0]).__name__
        return facts


def carry_out(
    place: Place,
    going: Sequence[Checkpoint],
    done: Applied,
    *,
    series: Iterable[str] | None = None,
    needed: Sequence[Checkpoint] = (),
    into: Path | None = None,
    settle: Callable[[str], Iterable[str]] | None = None,
    check: Callable[[], None] | None = None,
) -> None:
    """Remove checkpoints under the leases of their series, all or none; add the result to `done`.

    Args:
        place: Where they are.
        going: The checkpoints, as listed.
        done: Gets the result.
        series: Whose leases are taken; by default those of the checkpoints.
        needed: The staying ones because of which these go.
        into: The new batch of the trash; None removes for good.
        settle: Is called for each series under its lease, and returns sentences.
        check: Is called under the leases; what it raises ends the removal.
    """
    chosen = {one.series for one in going} if series is None else set(series)
    try:
        with contextlib.ExitStack() as leases:
            for name in sorted(chosen):
                if place.can.locks:
                    leases.enter_context(place.lease(name))
                done.notes += () if settle is None else settle(name)
            if not going:
                return
            if check is not None:
                check()
            _remove(place, going, done, needed=needed, into=into)
    except (CkptmgrError, OSError) as error:
        done.failures.append(error)


def _remove(
    place: Place,
    going: Sequence[Checkpoint],
    done: Applied,
    *,
    needed: Sequence[Checkpoint],
    into: Path | None,
) -> None:
    trash = place.trash
    if into is None or trash is None:
        failed = place.remove(going, needed=needed)
    else:
        done.batch = into
        failed = trash.throw_away(going, into, needed=needed)
    done.failures += failed
    staying: Sequence[str] = ()
    if trash is not None:
        staying = trash.taken_names(going)
    elif failed:
        staying = [one.name for one in place.scan()]
    done.removed += [one for one in going if one.name not in staying]


def drop(
    place: Place,
    going: Sequence[Checkpoint],
    *,
    needed: Sequence[Checkpoint] = (),
    present: Sequence[Checkpoint] | None = None,
    held: Container[str] = (),
) -> list[Exception]:
    """Remove for good what a run's own policy drops, series by series; return what failed.

    A checkpoint may be of the series of an earlier run (`net`, `net_1`): a live writer keeps it.
    The leases of `held` are those of the caller. `present` as of `Place.remove`; where a lease has
    to be taken first, the place is listed again.
    """
    failures: list[Exception] = []
    by_series: dict[str, list[Checkpoint]] = {}
    for one in going:
        by_series.setdefault(one.series, []).append(one)
    for series, checkpoints in by_series.items():
        is_held = series in held or not place.can.locks
        try:
            with contextlib.nullcontext() if is_held else place.lease(series):
                known = present if is_held else None
                failures += place.remove(checkpoints, needed=needed, present=known)
        except CkptmgrError as error:
            failures.append(error)
    return failures
