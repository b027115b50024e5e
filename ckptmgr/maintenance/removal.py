# SPDX-License-Identifier: Apache-2.0
"""Removal of checkpoints that a user named: into the trash, or for good.

Protected checkpoints are refused by name: pinned ones, and the newest good one of each
line of runs, which a resume would take. Under the leases both are looked at once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from ckptmgr.core.errors import StoreLocked, UnsafePrune
from ckptmgr.core.model import UNFINISHED, Checkpoint
from ckptmgr.maintenance.prune import PruneResult
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.policy.lines import lines_of
from ckptmgr.store import trash
from ckptmgr.store.store import Store

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Objection:
    """A checkpoint that is removed with `force` only, and the reason."""

    checkpoint: Checkpoint
    reason: str


def objections(store: Store, chosen: Sequence[Checkpoint]) -> list[Objection]:
    """Return why checkpoints of a directory should stay, as it is now."""
    names = {one.name for one in chosen}
    found = []
    for line in lines_of([one for one in store.scan() if one.state not in UNFINISHED]):
        for one in line.checkpoints:
            if one.name not in names:
                continue
            for pin in one.pins:
                name = "" if pin.name == "pinned" else f" as {pin.name}"
                said = f": {pin.reason}" if pin.reason else name
                found.append(Objection(checkpoint=one, reason=f"pinned{said}"))
            if line.newest is one:
                found.append(Objection(checkpoint=one, reason=f"the newest good one of {line}"))
    return found


def check_removable(store: Store, chosen: Sequence[Checkpoint], *, force: bool) -> None:
    """Raise unless checkpoints may be removed.

    Raises:
        UnsafePrune: There are objections, and no `force`; or no good one would be left.
    """
    store.check_not_all(chosen, store.scan())
    found = [] if force else objections(store, chosen)
    if found:
        named = "; ".join(f"{one.checkpoint.name} is {one.reason}" for one in found[:_SHOWN])
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise UnsafePrune(
            f"{named}{more}; nothing was removed",
            path=store.directory,
            hint="pass --force to remove pinned and newest ones, too",
        )


def remove_chosen(
    store: Store, chosen: Sequence[Checkpoint], *, now: datetime, force: bool, at_once: bool
) -> PruneResult:
    """Remove checkpoints of one directory, as listed, under the leases of their series.

    One that was saved again since the listing stays, and is named in `failures`; so is what another
    process holds.
    """
    outcome = PruneResult()
    with REGISTERED.timed("prune", path=store.directory) as facts:
        try:
            with contextlib.ExitStack() as leases:
                for series in sorted({one.series for one in chosen}):
                    leases.enter_context(store.lease(series))
                    trash.finish(store, series)
                check_removable(store, chosen, force=force)
                _remove(store, chosen, outcome, now=now, at_once=at_once)
        except (StoreLocked, UnsafePrune, OSError) as error:
            outcome.failures.append(error)
        facts["figures"] = {
            "dropped": len(outcome.removed),
            "freed_bytes": sum(one.size_bytes for one in outcome.removed),
        }
        facts["notes"] = tuple(f"removed {one.name}" for one in outcome.removed)
        if outcome.failures:
            facts["error"] = "; ".join(map(str, outcome.failures))
            facts["error_type"] = type(outcome.failures[0]).__name__
    return outcome


def _remove(
    store: Store,
    chosen: Sequence[Checkpoint],
    outcome: PruneResult,
    *,
    now: datetime,
    at_once: bool,
) -> None:
    if at_once:
        outcome.failures += store.remove(chosen)
    else:
        outcome.batch = trash.new_batch_path(store, now)
        outcome.failures += trash.throw_away(store, chosen, outcome.batch)
    staying = trash.taken_names(store, chosen)
    outcome.removed += [one for one in chosen if one.name not in staying]
