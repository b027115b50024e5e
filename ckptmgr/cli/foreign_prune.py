# SPDX-License-Identifier: Apache-2.0
"""`prune` and `prune --undo` in a directory of another tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note, report_all
from ckptmgr.cli.foreign import foreign_json, titles_of, why_none
from ckptmgr.cli.prune_table import PlanView
from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.model import Checkpoint
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.maintenance.foreign import trash
from ckptmgr.maintenance.foreign.prune import (
    ForeignProposal,
    carry_out_foreign,
    propose_foreign,
)
from ckptmgr.store import trash as own_trash
from ckptmgr.store.store import Store

if TYPE_CHECKING:
    from ckptmgr.io.filesystem import FileStatus
    from ckptmgr.maintenance.foreign.listing import ForeignListing
    from ckptmgr.policy.rules import RetentionPolicy


def foreign_to_prune(
    store: Store, found: Sequence[Checkpoint], entries: Mapping[str, FileStatus]
) -> ForeignListing | None:
    """Return the checkpoints of other tools, where `prune` is about them; None where it is not.

    `found` is the listing of the store, and `entries` those of the directory.

    Raises:
        UnsafePrune: The directory is one checkpoint of another tool.
        CkptmgrError: It holds no checkpoint itself, but folders below it do.
    """
    from ckptmgr.maintenance.foreign.listing import list_foreign

    listing = list_foreign(store.fs, store.directory, entries=entries)
    paths = listing.paths
    own = [one for one in found if one.path not in paths] if paths else found
    if listing.is_itself:
        raise UnsafePrune(
            f"is one checkpoint of {titles_of(listing)[0]}, not a directory of several",
            path=store.directory,
            hint=f"ckptmgr prune {store.directory.parent}",
        )
    if not listing.checkpoints:
        absence = None if own or own_trash.batches(store) else why_none(store.fs, store.directory)
        if absence is not None:
            raise absence
        return None
    if any(not one.is_bare for one in own):
        count = render.counted(len(listing.checkpoints), "checkpoint")
        note(
            f"{count} of {' and '.join(titles_of(listing))} stay as they are: in a directory with "
            "checkpoints of ckptmgr, prune applies to those alone"
        )
        return None
    if own:
        count = render.counted(len(own), "file")
        note(f"{count} without a manifest beside them stay: prune is about the other tool here")
    return listing


def prune_foreign(
    store: Store,
    listing: ForeignListing,
    view: PlanView,
    *,
    policy: RetentionPolicy,
    now: datetime,
    grace: timedelta,
    by_series: bool,
    dry_run: bool,
    check: bool,
    yes: bool,
    at_once: bool,
) -> int:
    """Plan and carry out a prune of checkpoints of other tools; return the exit code.

    Raises:
        UsageProblem: An option is for checkpoints of ours.
        UnsafePrune: Keys were given, which prove none of them; or see `propose_foreign`.
    """
    if by_series or view.series is not None:
        raise UsageProblem(
            f"--series and --by-series are not for checkpoints of {' and '.join(titles_of(listing))}",
            hint="drop them: each tool is counted by itself",
        )
    from ckptmgr.maintenance.foreign.check import needs_proof

    if needs_proof(store.trust):
        raise UnsafePrune(
            f"no key proves the checkpoints of {' and '.join(titles_of(listing))}, so none may go",
            path=store.directory,
            hint="leave the key out, or pass --allow-unencrypted if you trust who wrote them",
        )
    with view.output.progress("the newest", 0):
        proposal = propose_foreign(store, listing, policy, now=now, grace=grace)
    if not view.output.is_quiet or dry_run or check:
        _show(view, proposal)
    if dry_run or check:
        view.result(proposal.shown, None)
        return Exit.NO if check and proposal.shown.dropped else Exit.DONE
    if proposal.is_empty:
        view.result(proposal.shown, None)
        return Exit.DONE
    if not (yes or _agreed(proposal, at_once=at_once)):
        note("nothing was changed")
        return Exit.NO
    outcome = carry_out_foreign(store, proposal, at_once=at_once)
    for sentence in outcome.notes:
        note(sentence)
    view.result(proposal.shown, outcome)
    return report_all(
        outcome.failures, is_partial=bool(outcome.removed), as_json=view.output.is_json
    )


def _show(view: PlanView, proposal: ForeignProposal) -> None:
    view.plan(proposal.shown)
    if not view.output.is_text:
        return
    for one in proposal.untouched:
        view.output.line(f"{one.name}: stays, because its name has no step")
    for batch in (*proposal.expired, *proposal.spared):
        stored = render.counted(len(batch.checkpoints), "checkpoint")
        fate = "would be removed for good"
        if batch in proposal.spared:
            fate = "stays, because outside the trash nothing whole of its tool is left"
        view.output.line(
            f"trash {batch.path.name}: {stored}, {size_text(batch.size_bytes)}; {fate}"
        )


def _agreed(proposal: ForeignProposal, *, at_once: bool) -> bool:
    dropped = render.counted(len(proposal.shown.dropped), "checkpoint")
    question = f"Remove {dropped} for good?" if at_once else f"Move {dropped} to the trash?"
    chosen = question if proposal.shown.dropped else "Clean up?"
    return options.confirm(chosen, refusal=UnsafePrune)


def is_last_foreign(store: Store) -> bool:
    """Return whether the last batch in the trash is of another tool."""
    theirs = [batch.thrown_at for batch in trash.foreign_batches(store) if batch.checkpoints]
    ours = [batch.thrown_at for batch in own_trash.batches(store) if batch.checkpoints]
    return bool(theirs) and (not ours or max(theirs) > max(ours))


def undo_foreign(store: Store, output: render.Output, *, is_dry: bool) -> int:
    """Bring the last batch of another tool back; return the exit code."""
    batch = trash.last_batch(store)
    if is_dry:
        taken = trash.taken_names(store, batch)
        restored = [one for one in batch.checkpoints if one.checkpoint.name not in taken]
    else:
        restored, taken = trash.restore(store, batch)
    for name in taken:
        note(f"{name} stays in the trash: there is a new checkpoint of that name")
    paths = [_outside(store, one.checkpoint.path) for one in restored]
    if output.is_quiet:
        output.paths(paths)
    elif output.is_text:
        for one in restored:
            output.line(f"{one.checkpoint.name}  {size_text(one.checkpoint.size_bytes)}")
        total = size_text(sum(one.checkpoint.size_bytes for one in restored))
        verb = "would be restored" if is_dry else "restored"
        output.line(f"{render.counted(len(restored), 'checkpoint')} {verb}, {total}")
    if output.has_fields:
        summary: dict[str, Json] = {"is_done": not is_dry, "taken": list(taken)}
        items = [
            {**foreign_json(one), "path": str(path)}
            for one, path in zip(restored, paths, strict=True)
        ]
        replace(output, command="prune.undo").result(items, summary)
    return Exit.PARTLY if taken else Exit.DONE


def _outside(store: Store, path: Path) -> Path:
    return store.directory / path.name
