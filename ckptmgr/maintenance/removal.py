# SPDX-License-Identifier: Apache-2.0
"""Removal of checkpoints that a user named: into the trash, or for good.

Protected checkpoints are refused by name: pinned ones, and the newest good one of each
line of runs, which a resume would take, and the newest whose floats are finite. Under the leases both are looked at once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.model import UNFINISHED, Checkpoint
from ckptmgr.core.place import Place
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.policy.lines import lines_of
from ckptmgr.store import applied
from ckptmgr.store.applied import Applied

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """A checkpoint that is removed with `force` only, and the reason."""

    checkpoint: Checkpoint
    reason: str


def objections(place: Place, chosen: Sequence[Checkpoint]) -> list[Objection]:
    """Return why checkpoints of a directory should stay, as it is now."""
    names = {one.name for one in chosen}
    found = []
    for line in lines_of([one for one in place.scan() if one.state not in UNFINISHED]):
        for one in line.checkpoints:
            if one.name not in names:
                continue
            for pin in one.pins:
                name = "" if pin.name == "pinned" else f" as {pin.name}"
                said = f": {pin.reason}" if pin.reason else name
                found.append(Objection(checkpoint=one, reason=f"pinned{said}"))
            if line.newest is one:
                found.append(Objection(checkpoint=one, reason=f"the newest good one of {line}"))
            elif line.newest_finite is one:
                found.append(Objection(checkpoint=one, reason=f"the newest finite one of {line}"))
    return found


def check_removable(place: Place, chosen: Sequence[Checkpoint], *, force: bool) -> None:
    """Raise unless checkpoints may be removed.

    Raises:
        UnsafePrune: There are objections, and no `force`; or no good one would be left.
    """
    place.check_not_all(chosen, place.scan())
    found = [] if force else objections(place, chosen)
    if found:
        named = "; ".join(f"{one.checkpoint.name} is {one.reason}" for one in found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UnsafePrune(
            f"{named}{more}; nothing was removed",
            path=place.directory,
            hint="pass --force to remove pinned and newest ones, too",
        )


def remove_chosen(
    place: Place, chosen: Sequence[Checkpoint], *, now: datetime, force: bool, at_once: bool
) -> Applied:
    """Remove checkpoints of one place, as listed, under the leases of their series.

    One that was saved again since the listing stays, and is named in `failures`; so is what another
    process holds.
    """
    done = Applied()
    with REGISTERED.timed("prune", path=place.directory) as facts:
        trash = place.trash
        into = None if at_once or trash is None else trash.new_batch_path(now)
        applied.carry_out(
            place,
            chosen,
            done,
            into=into,
            settle=place.finish_moves,
            check=partial(check_removable, place, chosen, force=force),
        )
        facts |= done.facts()
    return done
