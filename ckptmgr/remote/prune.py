# SPDX-License-Identifier: Apache-2.0
"""Carry out a plan of `prune` in an object store, where there is neither a lease nor a trash."""

from __future__ import annotations

from ckptmgr.core.errors import UnsafePrune
from ckptmgr.maintenance.prune import Proposal, PruneResult, check_unchanged
from ckptmgr.objects.directory import LEFTOVER_AGE, RemoteDirectory
from ckptmgr.observe.observers import REGISTERED
from ckptmgr.remote.leftovers import leftovers
from ckptmgr.store.store import Store


def prune_now(directory: RemoteDirectory, listing: Store, proposal: Proposal) -> PruneResult:
    """Remove the dropped checkpoints of a plan for good, and old data that no manifest names.

    A line that has changed since the plan, or fails, is left alone and named in `failures`.
    """
    outcome = PruneResult()
    with REGISTERED.timed("prune", path=listing.directory) as facts:
        for one in proposal.plans:
            if not one.plan.dropped:
                continue
            try:
                check_unchanged(listing, proposal, one)
                directory.remove(one.plan.dropped)
                outcome.removed += one.plan.dropped
            except (UnsafePrune, OSError) as error:
                outcome.failures.append(error)
        try:
            swept = directory.sweep()
        except OSError as error:
            outcome.failures.append(error)
        else:
            outcome.notes += [f"removed {one.key}: no manifest names it" for one in swept]
            left = leftovers(directory, listing.scan())
            if left:
                outcome.notes.append(
                    f"{len(left)} data files that no manifest names stay until they are {LEFTOVER_AGE.days} days old, "
                    "because an upload may be about to use them; ckptmgr ls --all lists them"
                )
        facts |= outcome.facts(kept=len(proposal.kept))
    return outcome
