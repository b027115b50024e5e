# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr prune URL`: there is no trash in an object store, so `--now` must be said."""

from __future__ import annotations

import click

from ckptmgr.cli import options, render
from ckptmgr.cli.exits import Exit, UsageProblem, note, report_all
from ckptmgr.cli.options import Session
from ckptmgr.cli.policy_file import policy_in
from ckptmgr.cli.prune_table import PlanView, report_refused
from ckptmgr.core.errors import UnsafePrune
from ckptmgr.maintenance.prune import propose
from ckptmgr.objects.directory import RemoteDirectory
from ckptmgr.objects.requests import open_objects
from ckptmgr.remote.prune import prune_now
from ckptmgr.store.store import Store


def prune_remote(
    ctx: click.Context,
    store: Store,
    *,
    keep: str | None,
    series: str | None,
    by_series: bool,
    only_shows: bool,
    check: bool,
    yes: bool,
) -> int:
    """Remove the checkpoints below an address that a policy does not keep; see `prune`.

    Without `keep` it is that of the runs that saved there.
    """
    _check_options(ctx, only_shows=only_shows)
    found = store.scan()
    policy = policy_in(keep, store, found=found, series=series, by_series=by_series)
    session = ctx.ensure_object(Session)
    output = render.make_output(ctx, store.directory)
    view = PlanView(
        output=output, directory=store.directory, series=series, verbose=output.is_verbose
    )
    with output.progress("the newest", 0):
        proposal = propose(
            store, policy, found=found, now=session.now(), series=series, by_series=by_series
        )
    if only_shows or not output.is_quiet:
        view.plan(proposal)
    if only_shows:
        view.result(proposal, None)
        refused = report_refused(proposal, as_json=output.is_json)
        return refused or (Exit.NO if check and proposal.dropped else Exit.DONE)
    dropped = render.counted(len(proposal.dropped), "checkpoint")
    # Also without checkpoints to remove: there may be leftovers of an interrupted removal.
    is_empty = proposal.is_empty
    if not (is_empty or yes) and not options.confirm(
        f"Remove {dropped} for good?", refusal=UnsafePrune
    ):
        note("nothing was changed")
        return Exit.NO
    directory = RemoteDirectory(open_objects(str(store.directory)), clock=session.clock)
    outcome = prune_now(directory, store, proposal)
    for sentence in outcome.notes:
        note(sentence)
    view.result(proposal, None if is_empty else outcome)
    return report_all(
        [*proposal.refused, *outcome.failures],
        is_partial=bool(outcome.removed or (proposal.refused and not outcome.failures)),
        as_json=output.is_json,
    )


def _check_options(ctx: click.Context, *, only_shows: bool) -> None:
    given = {
        name
        for name in ("undo", "grace", "at_once", "filters", "sort")
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    for name in given & {"undo", "grace"}:
        raise UsageProblem(
            f"--{name} has no effect in an object store: there is no trash",
            hint="look at the plan with --dry-run before anything goes",
        )
    for name in given & {"filters", "sort"}:
        raise UsageProblem(
            f"--{name.removesuffix('s')} has no effect in an object store yet",
            hint="choose by the policy, or by --series",
        )
    if not (only_shows or "at_once" in given):
        raise UsageProblem(
            "an object store has no trash: what goes, goes for good",
            hint="look at the plan with --dry-run, then say --now",
        )
