# SPDX-License-Identifier: Apache-2.0
"""`ckptmgr simulate`: checkpoints that a retention policy would have kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckptmgr.cli import key_options, options, render
from ckptmgr.cli.durations import parse_time
from ckptmgr.cli.exits import UsageProblem, note
from ckptmgr.cli.options import Session
from ckptmgr.cli.sizes import parse_size
from ckptmgr.core.errors import UnsafePrune
from ckptmgr.core.sizes import size_text
from ckptmgr.formats.strict_json import Json

if TYPE_CHECKING:
    from ckptmgr.core.model import Checkpoint
    from ckptmgr.maintenance.prune_plan import Counted
    from ckptmgr.policy.rules import RetentionPolicy
    from ckptmgr.policy.simulation import Simulation

_DEFAULT_STEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeUp:
    """Options of a history that is made up; None for those that were not given."""

    every: str | None
    span: str | None
    steps: int | None
    size: str | None

    @property
    def is_wanted(self) -> bool:
        """Whether any was given."""
        return any(one is not None for one in (self.every, self.span, self.steps, self.size))


@options.command(
    "simulate",
    examples=(
        "simulate 'last(3) | daily(7)' runs/resnet50",
        "simulate 'last(3) | hourly(24) | best(2, loss, min)' --every 10min --for 30d",
    ),
)
@click.argument("policy", metavar="POLICY")
@click.argument("directory", type=options.PATH, required=False, metavar="[DIR]")
@click.option("--every", metavar="TIME", help="Make up a history: one save every so often.")
@click.option("--for", "span", metavar="TIME", help="How long the made-up run saved.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help="Steps between two made-up saves.  [default: 1000]",
)
@click.option("--size", metavar="SIZE", help="Size of a made-up checkpoint.  [default: 1GiB]")
@options.series_option
@click.option("--by-series", is_flag=True, help="Count each series by itself, not each run.")
@key_options.trust_options(has_public_key=True)
@options.output_options
@click.pass_context
def simulate_command(
    ctx: click.Context,
    policy: str,
    directory: Path | None,
    every: str | None,
    span: str | None,
    steps: int | None,
    size: str | None,
    series: str | None,
    by_series: bool,
    given_trust: key_options.GivenTrust,
) -> int:
    """Show what a retention policy would have kept, as prune shows its plan; write nothing.

    POLICY is as for prune --keep. It is applied after each save, at the time of that save, as a run
    does: to the checkpoints that are in DIR now, or with --every and --for to a history that is
    made up, whose metrics improve with noise. The last line says how many checkpoints, and how many
    bytes, there were at most at once. Nothing is verified: damaged ones that ls does not know count.
    -q prints the paths that would be gone; -v lists them after the plan, and shows a row for each made-up
    one that goes.
    """
    from ckptmgr.policy.text import parse_policy

    rules = parse_policy(policy)
    made_up = _MadeUp(every=every, span=span, steps=steps, size=size)
    now = ctx.ensure_object(Session).now()
    if made_up.is_wanted:
        if directory is not None or series is not None or by_series:
            raise UsageProblem(
                "a history is made up, or that of a directory",
                hint="drop --every, --for, --steps and --size; or DIR, --series and --by-series",
            )
        found = _made_up(rules, made_up, now)
        output = render.make_output(ctx, Path("made-up"))
    else:
        from ckptmgr.cli.foreign import check_not_foreign, why_none
        from ckptmgr.cli.selectors import list_selected

        directory = Path() if directory is None else directory
        store = options.open_store(directory, trust=given_trust.load())
        found = list_selected(store, series=series)
        check_not_foreign(store.fs, store.directory)
        if not store.scan() and (absence := why_none(store.fs, store.directory)) is not None:
            raise absence
        output = render.make_output(ctx, store.directory)
    return _show(
        output,
        directory,
        found,
        rules,
        now=now,
        series=series,
        by_series=by_series,
    )


def _made_up(rules: RetentionPolicy, given: _MadeUp, now: datetime) -> list[Checkpoint]:
    from ckptmgr.policy.rules import Best
    from ckptmgr.policy.simulation import made_up_history

    if given.every is None or given.span is None:
        raise UsageProblem(
            "a made-up history needs --every and --for", hint="such as --every 10min --for 30d"
        )
    metrics = [rule.metric for rule in rules.rules if isinstance(rule, Best)]
    if metrics:
        note(f"made up: {', '.join(dict.fromkeys(metrics))}, which improves with noise")
    return made_up_history(
        rules,
        every=_time(given.every),
        span=_time(given.span),
        steps=_DEFAULT_STEPS if given.steps is None else given.steps,
        size_bytes=1 << 30 if given.size is None else parse_size(given.size, option="--size"),
        now=now,
    )


def _show(
    output: render.Output,
    directory: Path | None,
    found: Sequence[Checkpoint],
    rules: RetentionPolicy,
    *,
    now: datetime,
    series: str | None,
    by_series: bool,
) -> int:
    from ckptmgr.cli.prune_table import PlanView, plan_items, report_refused
    from ckptmgr.maintenance.prune import LinePlan, Proposal
    from ckptmgr.maintenance.prune_plan import Undecided, counted_together
    from ckptmgr.policy.simulation import simulate

    counted = counted_together(found, series=series, by_series=by_series)
    done: list[tuple[Counted, Simulation]] = []
    undecided: list[Undecided] = []
    for one in counted:
        try:
            history = [c for line in one.lines for c in line.checkpoints]
            done.append((one, simulate(history, rules, now)))
        except UnsafePrune as error:
            undecided.append(Undecided(counted=one, error=error))
    if undecided and not done:
        raise undecided[0].error or UnsafePrune("the policy is refused")
    proposal = Proposal(
        now=now,
        policy=str(rules),
        plans=tuple(
            LinePlan(counted=one, policy=rules, plan=simulated.plan) for one, simulated in done
        ),
        undecided=tuple(undecided),
        by_series=by_series,
        series=series,
    )
    peak_count = sum(one.peak_count for _, one in done)
    peak_bytes = sum(one.peak_bytes for _, one in done)
    if output.is_json:
        summary: dict[str, Json] = {
            "policy": str(rules),
            "is_made_up": directory is None,
            "saves": len(found),
            "kept": len(proposal.kept),
            "kept_bytes": sum(c.size_bytes for c in proposal.kept),
            "dropped": len(proposal.dropped),
            "dropped_bytes": sum(c.size_bytes for c in proposal.dropped),
            "peak_count": peak_count,
            "peak_bytes": peak_bytes,
        }
        output.result(plan_items(proposal), summary)
        return report_refused(proposal, as_json=True)
    view = PlanView(
        output=output,
        directory=output.root if directory is None else directory,
        series=series,
        verbose=output.is_verbose and directory is not None,
        shows_dropped=output.is_verbose or directory is not None,
    )
    view.plan(proposal)
    if output.is_text:
        output.line(
            f"at most {render.counted(peak_count, 'checkpoint')} at once after a save, "
            f"and {size_text(peak_bytes)} during one, in {render.counted(len(found), 'save')}"
        )
    return report_refused(proposal, as_json=False)


def _time(text: str) -> timedelta:
    value = parse_time(text)
    if value <= timedelta():
        raise UsageProblem(f"{text!r} is no time to wait", hint="write e.g. 10min, 1h or 30d")
    return value
