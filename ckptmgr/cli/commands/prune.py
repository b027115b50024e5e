# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr prune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.durations import parse_time
from ckptmgr.cli.exits import Exit, UsageProblem, note, report_all
from ckptmgr.cli.filters import chosen_by, filter_options, spared_by
from ckptmgr.cli.options import Session
from ckptmgr.core.errors import CkptmgrError, UnsafePrune
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json
from ckptmgr.io.gc_pause import gc_paused

if TYPE_CHECKING:
    from ckptmgr.cli.prune_table import PlanView
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.core.place import Place
    from ckptmgr.maintenance.prune import Proposal
    from ckptmgr.maintenance.prune_plan import Planner, PolicyOf
    from ckptmgr.policy.rules import RetentionPolicy
    from ckptmgr.store.store import Store


@options.command(
    "prune",
    examples=(
        "prune runs/resnet50 --keep 'last(3) | best(2, loss, min)' --dry-run",
        "prune runs/resnet50 --undo",
    ),
)
@click.argument("directory", type=options.PLACE, default=Path())
@click.option("--keep", metavar="EXPR", help="What to keep, e.g. 'last(3) | every(1000) | pinned'.")
@options.series_option
@click.option("--by-series", is_flag=True, help="Count each series by itself, not each run.")
@click.option("-n", "--dry-run", is_flag=True, help="Show the plan; write nothing at all.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if anything would go.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--now", "at_once", is_flag=True, help="Remove at once instead of into the trash.")
@click.option(
    "--grace", metavar="TIME", default="24h", show_default=True, help="Life of the trash."
)
@click.option("--undo", is_flag=True, help="Bring back what the last prune dropped.")
@filter_options
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def prune_command(
    ctx: click.Context,
    directory: Path,
    keep: str | None,
    series: str | None,
    by_series: bool,
    dry_run: bool,
    check: bool,
    yes: bool,
    at_once: bool,
    grace: str,
    undo: bool,
    filters: tuple[str, ...],
    sort: str | None,
    given_trust: key_options.GivenTrust,
) -> int:
    """Remove the checkpoints that a policy does not keep.

    The policy is --keep, else the key keep of ckptmgr.toml in the directory, else the one that each
    run applied itself, which its newest checkpoint records; without one nothing is done. It is
    applied to each run by itself: a run counts together with the runs that it was resumed from, in
    whatever series they saved. With --by-series it is applied to each series. The newest of each
    run, pinned and damaged ones always stay; where anything would go, the newest that stays is
    verified first, with --key its header, too.
    Removed ones stay in .ckptmgr-trash for the grace time; the next prune after that removes them
    for good. Until then --undo brings the last batch back.

    With --filter only checkpoints for which all conditions hold may go; the rules count the others,
    too. --sort changes the order of the rows.

    Of the checkpoints of other tools (see ls) whole entries with a step in their name may go. What
    the notes of the tool point at stays, and so do incomplete ones, which count nowhere.
    -v lists the files that go.

    The directory may be the URL of an object store. There is no trash there: --now must be given.
    Of the recorded policies only those of runs that saved there themselves count.
    """
    from ckptmgr.cli.foreign import check_directory, place_to_prune, place_to_undo
    from ckptmgr.cli.policy_file import policy_in
    from ckptmgr.cli.prune_table import PlanView, report_refused
    from ckptmgr.maintenance.prune import propose

    session = ctx.ensure_object(Session)
    store = options.open_store(directory, trust=given_trust.load(), clock=session.clock)
    _check_options(ctx, store, only_shows=dry_run or check)
    if store.can.folders:
        check_directory(directory)
    ctx.with_resource(gc_paused())
    # The plan holds for this directory, even if another one gets its path meanwhile.
    ctx.with_resource(store.fs.hold_directory(store.directory))
    output = render.make_output(ctx, store.directory)
    if undo:
        if keep is not None or check or at_once or by_series or filters or sort is not None:
            raise UsageProblem(
                "--undo stands alone",
                hint="drop --keep, --check, --now, --by-series, --filter and --sort",
            )
        return _undo(place_to_undo(store), output, is_dry=dry_run)
    found, entries = store.scan_with_entries()
    place, planner_for = place_to_prune(store, found, entries)
    del entries
    found = found if place is store else place.scan()
    now = session.now()
    chosen = chosen_by(filters, sort, now)
    view = PlanView(
        output=output,
        directory=directory if store.can.folders else store.directory,
        series=series,
        verbose=output.is_verbose,
        chosen=chosen,
    )
    policy = policy_in(keep, store, found=found, series=series, by_series=by_series)
    planner = planner_for(spared_by(chosen))
    if not (dry_run or check or yes):
        _check_can_ask(planner, policy, found, series=series, by_series=by_series, now=now)
    with output.progress("the newest", 0):
        chosen.check_metrics(found)
        proposal = propose(
            place,
            policy,
            planner,
            found=found,
            now=now,
            series=series,
            by_series=by_series,
            grace=parse_time(grace),
        )
    if dry_run or check:
        view.plan(proposal)
        view.result(proposal, None)
        refused = report_refused(proposal, as_json=output.is_json)
        return refused or (Exit.NO if check and proposal.dropped else Exit.DONE)
    if not output.is_quiet:
        view.plan(proposal)
    if proposal.is_empty:
        for sentence in place.clean_up():
            note(sentence)
        view.result(proposal, None)
        return report_refused(proposal, as_json=output.is_json)
    if not (yes or _agreed(proposal, at_once=at_once)):
        note("nothing was changed")
        return Exit.NO
    return _act(place, proposal, planner, view, at_once=at_once)


def _check_options(ctx: click.Context, store: Store, *, only_shows: bool) -> None:
    """Raise UsageProblem for an option without effect at the place, or where `--now` must be said."""
    given = {
        name
        for name in ("undo", "grace", "at_once")
        if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT
    }
    for name in sorted(given & {"undo", "grace"}):
        hint = "look at the plan with --dry-run before anything goes"
        options.refuse_without_effect(f"--{name}", store.can, "trash", hint=hint)
    options.check_said_now(store.can, at_once="at_once" in given, only_shows=only_shows)


def _check_can_ask(
    planner: Planner,
    policy: RetentionPolicy | PolicyOf,
    found: Sequence[Checkpoint],
    *,
    series: str | None,
    by_series: bool,
    now: datetime,
) -> None:
    """Raise UnsafePrune if checkpoints would go and there is no terminal to ask at."""
    from ckptmgr.maintenance.prune_plan import policy_for

    if sys.stdin.isatty():
        return
    for counted in planner.counted(found, series=series, by_series=by_series):
        try:
            own = policy_for(counted, policy)
            decided = None if own is None else planner.plan_with(counted, {}, own, now)
        except (CkptmgrError, OSError):  # which the proposal names
            continue
        if decided is not None and decided.dropped:
            options.check_can_ask(UnsafePrune)


def _agreed(proposal: Proposal, *, at_once: bool) -> bool:
    dropped = render.counted(len(proposal.dropped), "checkpoint")
    question = f"Remove {dropped} for good?" if at_once else f"Move {dropped} to the trash?"
    return options.confirm(question if proposal.dropped else "Clean up?", refusal=UnsafePrune)


def _act(
    place: Place, proposal: Proposal, planner: Planner, view: PlanView, *, at_once: bool
) -> int:
    from ckptmgr.maintenance.prune import carry_out

    outcome = carry_out(place, proposal, planner, at_once=at_once)
    for sentence in outcome.notes:
        note(sentence)
    view.result(proposal, outcome)
    if outcome.batch is not None:
        note(render.IN_THE_TRASH)
    return report_all(
        [*proposal.refused, *outcome.failures],
        is_partial=bool(outcome.removed or (proposal.refused and not outcome.failures)),
        as_json=view.output.is_json,
    )


def _undo(place: Place, output: render.Output, *, is_dry: bool) -> int:
    from ckptmgr.cli.foreign import tool_of
    from ckptmgr.maintenance.prune import undo

    undone = undo(place, is_dry=is_dry)
    verb = "would be restored" if is_dry else "restored"
    for name in undone.taken:
        note(f"{name} stays in the trash: there is a new checkpoint of that name")
    if output.is_quiet:
        output.paths([c.path for c in undone.restored])
    elif output.is_text:
        for checkpoint in undone.restored:
            output.line(f"{checkpoint.name}  {size_text(checkpoint.size_bytes)}")
        total = sum(c.size_bytes for c in undone.restored)
        restored = render.counted(len(undone.restored), "checkpoint")
        output.line(f"{restored} {verb}, {size_text(total)}")
    if output.has_fields:
        summary: dict[str, Json] = {"is_done": not is_dry, "taken": list(undone.taken)}
        replace(output, command="prune.undo").result(
            [
                {**render.checkpoint_json(c), "tool": tool_of(c), "named_by": []}
                for c in undone.restored
            ],
            summary,
        )
    return Exit.PARTLY if undone.taken else Exit.DONE
